"""The sum of `verify.lanes` by compiled code: 0.3 ns a word where numpy takes 2.4, the same bits.

There is no compiler of C on every machine, so nothing needs this: where none is found, or what it
made is not right, digests are numpy's, which takes longer and gives the same. `host_kernel.c` is
compiled once for a machine's user, in half a second, into the folder of compiled kernels
(`MOK_CACHE_DIR`); CC names the compiler, else it is cc, gcc or clang.

Refuses what it found in that folder if another user may have written it, and any code that does not
give numpy's sums of a few texts.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from mok.compile_cache import cache_folder
from verify.lanes import BLOCK, DEFAULT_SEED, LaneSum, key_seeds

SOURCE = Path(__file__).with_name("host_kernel.c")
VARIANTS = 2  # for any processor, and for AVX2
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC")
# Some compilers take newer processors for granted, and so may an option in CC: the last one counts.
_OLDEST = {"x86_64": ("-march=x86-64", "-mtune=generic")}
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT = 20.0  # seconds; a compiler takes half of one
_TRIAL = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_logger = logging.getLogger("verify")
Lanes = tuple[int, int, int, int]


class HostKernel:
    """The compiled sum with the default seed; for any number of threads at a time.

    variant: the fastest that may be taken, counted from 0. OSError for a file that is no library,
    AttributeError for one without the functions.
    """

    def __init__(self, path: Path, variant: int = VARIANTS - 1) -> None:
        library = ctypes.CDLL(os.fspath(path))
        library.lanes_table_bytes.restype = ctypes.c_size_t
        self._table = ctypes.create_string_buffer(library.lanes_table_bytes())
        self._at = ctypes.addressof(self._table)
        fill = library.lanes_fill_table
        fill.argtypes, fill.restype = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64], None
        fill(self._at, *key_seeds(DEFAULT_SEED))
        library.lanes_variant.argtypes = [ctypes.c_int]
        self.variant = int(library.lanes_variant(variant))
        self._add = library.lanes_add
        number, place = ctypes.c_uint64, ctypes.c_void_p
        self._add.argtypes = [ctypes.c_int, place, place, number, number, place]
        self._add.restype = None

    def sum(self, address: int, size: int, offset: int = 0) -> Lanes:
        """The lanes of `size` bytes at an address, which lie at byte `offset` of their tensor."""
        lanes = (ctypes.c_uint64 * 4)()
        self._add(self.variant, self._at, address, size, offset, lanes)
        a, b, c, d = lanes
        return a, b, c, d

    def packed(self, address: int, size: int) -> bytes:
        """The lanes of a whole tensor's bytes, little-endian as a recording has them."""
        lanes = (ctypes.c_uint64 * 4)()
        self._add(self.variant, self._at, address, size, 0, lanes)
        return bytes(lanes)


@functools.cache
def kept_kernel() -> HostKernel | None:
    """The kernel, if it was compiled before. Starts no process."""
    prefix = _kept_path()
    for path in [] if prefix is None else sorted(prefix.parent.glob(f"{prefix.name}-*.so")):
        found = _loaded(path) if _is_whole(path) else None
        if found is not None:
            return found
    return None


@functools.cache
def host_kernel() -> HostKernel | None:
    """The kernel, compiled if need be; None where that cannot be, and digests are numpy's."""
    found = kept_kernel()
    compiler = None if found is not None else _compiler()
    if compiler is None:
        return found
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "host_kernel.so"
            _compile(compiler, made)
            _try(made)
            found = _loaded(made)  # it stays loaded when its file goes
            path = _kept_path()
            of_machine = any(word.startswith("-m") for word in compiler)  # of CC, as in -mavx512f
            if found is not None and path is not None and not of_machine:
                _keep(made, path)
    except (OSError, subprocess.SubprocessError) as error:
        _logger.warning("digests on the CPU are numpy's, since %s failed: %s", compiler[0], error)
    return found


def _compiler() -> list[str] | None:
    """The words that start a compiler of C, or None."""
    if sys.byteorder != "little" or os.name != "posix":
        return None  # the code reads words as they lie in memory
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError:  # a quote that does not end
        return None
    for words in [given] if given else [[name] for name in _COMPILERS]:
        if shutil.which(words[0]) is not None:
            return words
    return None


def _flags() -> tuple[str, ...]:
    return _FLAGS + _OLDEST.get(os.uname().machine, ())


def _compile(compiler: list[str], made: Path) -> None:
    command = [*compiler, *_flags(), "-o", os.fspath(made), os.fspath(SOURCE)]
    done = subprocess.run(
        command, check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT
    )
    if done.returncode:
        told = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OSError(told[0] if told else f"exit code {done.returncode}")
    made.chmod(0o600)


def _try(made: Path) -> None:
    """Loads a library in a process of its own: one made with a sanitizer ends who loads it."""
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, os.fspath(made)]
    if subprocess.run(command, check=False, capture_output=True, timeout=_TIMEOUT).returncode:
        raise OSError("what it made cannot be loaded")


def _kept_path() -> Path | None:
    """Where the library is kept: by what it is made of, and for which processors. What is in the
    file follows in its name, so that a damaged one, which could end who loads it, is not loaded."""
    if os.name != "posix":
        return None
    try:
        folder = cache_folder()
    except RuntimeError:  # there is no home folder
        return None
    text = SOURCE.read_bytes() + repr((_flags(), sys.platform, os.uname().machine)).encode()
    return folder / "host" / _digest(text)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _is_whole(path: Path) -> bool:
    try:
        return path.stem.rpartition("-")[2] == _digest(path.read_bytes())
    except OSError:
        return False


def _keep(made: Path, prefix: Path) -> None:
    """Puts a library where the next process finds it; whether that works does not matter."""
    with suppress(OSError):
        data = made.read_bytes()
        path = prefix.with_name(f"{prefix.name}-{_digest(data)}.so")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of this process alone: others in containers, or on machines that share the folder, may
        # have its number.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
            try:
                partial.write(data)
                partial.flush()
                os.fsync(partial.fileno())  # a file that a crash cut short could end who loads it
                os.replace(partial.name, path)
            except BaseException:
                os.unlink(partial.name)
                raise


def _loaded(path: Path) -> HostKernel | None:
    """The kernel of a file that is this user's own and gives numpy's sums."""
    try:
        facts = path.stat()
        if facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS_WRITE:
            return None
        kernel = HostKernel(path)
    except (OSError, AttributeError):
        return None
    return kernel if agrees(kernel) else None


def agrees(kernel: HostKernel) -> bool:
    """Whether a kernel gives numpy's sums of texts that reach over blocks and cut words."""
    data = (np.arange(9 * BLOCK, dtype=np.uint64) ** np.uint64(3) >> np.uint64(5)).astype(np.uint8)
    address = data.ctypes.data
    for first, size, offset in ((0, data.size, 0), (1, 6 * BLOCK + 2, 7), (3, 2, 4 * BLOCK - 1)):
        total = LaneSum(DEFAULT_SEED)
        total.add(data[first : first + size], offset)
        if kernel.sum(address + first, size, offset) != total.lanes():
            return False
    return True
