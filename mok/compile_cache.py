"""Compiled kernels on disk, so that a second process compiles nothing.

The store is cuda-core's: one file per entry, written aside and moved into place, so any number of
processes may use it at once. An entry here is two: the cubin, and beside it the compiler's log with
the cubin's digest, since the log is where registers and spills are known from. A cache that cannot
be written or read, or whose entry is damaged, costs a compilation and one line of warning; it never
breaks anything.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok.toolchain import cuda_module

LARGEST = 512 * 1024 * 1024  # bytes; beyond it the entries that were read longest ago go

_logger = logging.getLogger("mok")


@dataclass(frozen=True)
class Entry:
    """One compilation: the cubin, what the compiler said, and how long it took (s)."""

    cubin: bytes
    log: str
    seconds: float


def cache_folder() -> Path:
    """MOK_CACHE_DIR, else `mok/kernels` in XDG_CACHE_HOME or ~/.cache. Nothing is created.

    A relative XDG_CACHE_HOME does not count, as its specification says: the cache would be another
    one in each working directory.
    Raises RuntimeError where there is no home folder.
    """
    given = os.environ.get("MOK_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "mok" / "kernels"


def fetch(key: bytes) -> Entry | None:
    """The entry under `key`, or None if there is none that is whole."""
    try:
        store = _store()
        if store is None:
            return None
        try:
            cubin = bytes(store[key])
            record = json.loads(bytes(store[_log_key(key)]))
        except KeyError:
            return None
        if record["cubin"] != hashlib.sha256(cubin).hexdigest():
            raise ValueError("the cubin is not the one that was written")
        return Entry(cubin=cubin, log=str(record["log"]), seconds=float(record["seconds"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        _complain(f"an entry of the kernel cache is damaged and is compiled again ({error})")
        return None


def keep(key: bytes, entry: Entry) -> None:
    """Stores `entry` under `key`, or says once why not."""
    record = {
        "cubin": hashlib.sha256(entry.cubin).hexdigest(),
        "log": entry.log,
        "seconds": entry.seconds,
    }
    try:
        store = _store()
        if store is None:
            return
        # The log first: a reader that finds a cubin then finds its log as well.
        store[_log_key(key)] = json.dumps(record).encode()
        store[key] = entry.cubin
    except OSError as error:
        _complain(f"the kernel cache cannot be written ({error}); kernels are compiled every time")


def open_cache() -> bool:
    """Whether the cache can be used; if not, says so once."""
    return _store() is not None


def _log_key(key: bytes) -> bytes:
    return key + b" log"


def _store() -> Any:
    """cuda-core's store in the folder of now, or None if it cannot be opened."""
    try:
        folder = cache_folder()
    except RuntimeError as error:
        _complain(f"no folder for the kernel cache ({error}); set MOK_CACHE_DIR")
        return None
    return _open(str(folder))


@functools.cache
def _open(folder: str) -> Any:
    store = cuda_module("cuda.core.utils").FileStreamProgramCache
    try:
        return store(folder, max_size_bytes=LARGEST)
    except OSError as error:
        _complain(
            f"the kernel cache {folder} cannot be used ({error}); kernels are compiled every time. "
            "Set MOK_CACHE_DIR to a folder that can be written"
        )
        return None


@functools.cache
def _complain(message: str) -> None:
    """Once per message and process. A log line, since a warning may be turned into an error."""
    _logger.warning(message)
