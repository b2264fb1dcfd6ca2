"""Tables of measured knobs: what `mok bench tune` writes and the Hopper backend reads.

Knobs change speed and never bits, so a table may be missing, old or wrong without any harm but
speed: what cannot be used costs one line of log and the defaults. MOK_TUNED names the user's table
("off": no table at all); without it that is `mok/tuned.json` in XDG_CONFIG_HOME or ~/.config. Where
it has no entry the packaged table is asked, tuned.json beside this file. A table is read once in a
process. Refuses to speak for several ranks: entries are measured on one, and ranks that chose
differently would not make their workspaces together.

An entry holds for a GPU's name, E, H, I, K, and T rounded up to a power of two; with a shared
expert too, whose tiles come before the first segment and depend on no segment.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mok.errors import InputError
from mok.hopper.layout import Segments, Sizes

VARIABLE = "MOK_TUNED"
OFF = "off"
FORMAT = 1
MOST_BLOCKS = 1024
"""Blocks of the longest segment of a table: 131,072 rows, where the rings take gigabytes."""
_PACKAGED = Path(__file__).with_name("tuned.json")
_LARGEST_FILE = 1 << 20
_KEY = ("E", "H", "I", "K", "T")
_CHOICE = ("least", "most", "num_sms")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Knobs of a launch. num_sms: CTAs, 0 for one on every multiprocessor."""

    segments: Segments
    num_sms: int = 0

    def __str__(self) -> str:
        """As tables and lines of log have it."""
        sms = f"{self.num_sms} SMs" if self.num_sms else "all SMs"
        return f"segments of {self.segments.least} to {self.segments.most} blocks, {sms}"


@dataclass(frozen=True, order=True)
class Key:
    """What an entry holds for. gpu: its name. T: tokens, a power of two."""

    gpu: str
    E: int
    H: int
    I: int  # noqa: E741 - the letter that every table of such shapes uses
    K: int
    T: int


@dataclass(frozen=True)
class Entry:
    """One line of a table. ratio: time of the defaults over the time of these knobs, in one run.

    version, commit: of the package that measured it; commit None outside of a checkout. date: ISO.
    """

    key: Key
    choice: Choice
    ratio: float
    version: str
    commit: str | None
    date: str


def rounded_tokens(tokens: int) -> int:
    """The next power of two that is not below; 1 for no tokens."""
    return 1 << max(0, tokens - 1).bit_length()


def key_of(gpu: str, sizes: Sizes) -> Key:
    """The key of a call of sizes.max_tokens tokens."""
    tokens = rounded_tokens(sizes.max_tokens)
    return Key(gpu, sizes.experts, sizes.hidden, sizes.width, sizes.slots, tokens)


def knobs_for(gpu: str, sizes: Sizes) -> Choice | None:
    """Knobs of the tables in use for a layer; None where they say nothing. Never raises.

    gpu: its name. Ask once for each layer and keep the answer: segments belong to a workspace, and
    another answer for another number of tokens would make a second one beside it.
    """
    if sizes.ranks != 1:
        return None
    key = key_of(gpu, sizes)
    for path, must_exist in _places():
        entry = _known(path, must_exist).get(key)
        if entry is not None:
            return entry.choice
    return None


def user_table() -> Path | None:
    """Where the user's own table is, whether or not there is one; None where there is no home.

    MOK_TUNED, unless that is "off". A relative XDG_CONFIG_HOME does not count, as its specification
    says: the table would be another one in every working directory.
    """
    given = os.environ.get(VARIABLE, "")
    if given not in ("", OFF):
        return Path(os.path.expanduser(given))  # stays as it is where there is no such home
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".config") / "mok" / "tuned.json"
    except RuntimeError:
        return None


def describe() -> str:
    """The tables in use, for `mok env`, with the number of their entries or what is wrong.

    A table without entries and one that is not there are the same: "none".
    """
    places = _places()
    if not places:
        return f"none: {VARIABLE}={OFF}"
    found = []
    for path, must_exist in places:
        try:
            entries = read_table(path, must_exist=must_exist)
            found.append(f"{path}: {len(entries)} entries" if entries else f"{path}: none")
        except InputError as error:
            found.append(f"not usable, defaults instead: {error}")
    return "; ".join(found)


def read_table(path: Path, *, must_exist: bool = True) -> Mapping[Key, Entry]:
    """The entries of a file, strictly; empty if it need not exist and does not.

    Raises InputError with path and reason.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise _wrong(path, "it is not a regular file")  # a pipe would keep the reader waiting
        if about.st_size > _LARGEST_FILE:
            raise _wrong(path, f"it has {about.st_size} bytes, more than {_LARGEST_FILE}")
        text = path.read_text(encoding="utf-8")
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not must_exist:
            return {}
        raise _wrong(path, "there is no such file") from error
    except OSError as error:
        raise _wrong(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise _wrong(path, f"it is no JSON of ours: {error}") from error
    return _entries(path, document)


def table_text(entries: Iterable[Entry]) -> str:
    """A table as JSON, one line an entry, in the order of the keys."""
    lines = [
        json.dumps(
            {
                "gpu": entry.key.gpu,
                **{name: getattr(entry.key, name) for name in _KEY},
                "least": entry.choice.segments.least,
                "most": entry.choice.segments.most,
                "num_sms": entry.choice.num_sms,
                "ratio": round(entry.ratio, 4),
                "version": entry.version,
                "commit": entry.commit,
                "date": entry.date,
            }
        )
        for entry in sorted(entries, key=lambda entry: entry.key)
    ]
    body = "[\n  " + ",\n  ".join(lines) + "\n ]" if lines else "[]"
    return f'{{\n "format": {FORMAT},\n "entries": {body}\n}}\n'


def _places() -> list[tuple[Path, bool]]:
    """(path, whether it has to exist) of the tables in use, in the order of asking."""
    given = os.environ.get(VARIABLE, "")
    if given == OFF:
        return []
    user = user_table()
    return [*([] if user is None else [(user, given != "")]), (_PACKAGED, True)]


@functools.cache
def _known(path: Path, must_exist: bool) -> Mapping[Key, Entry]:
    """read_table once a process; a log line instead of an error, since that may stop a training
    run, and so may a warning."""
    try:
        return read_table(path, must_exist=must_exist)
    except InputError as error:
        _logger.warning("%s The defaults are used.", error)
        return MappingProxyType({})


def _wrong(path: Path, reason: str) -> InputError:
    return InputError(
        f"table of knobs {path}: {reason}; allowed: what `mok bench tune` writes. Move it away and "
        f"run that again, or set {VARIABLE} to another file, or to {OFF} for none."
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _entries(path: Path, document: Any) -> Mapping[Key, Entry]:
    if not isinstance(document, dict) or set(document) != {"format", "entries"}:
        raise _wrong(path, "it is not an object of format and entries")
    number, listed = document["format"], document["entries"]
    if number != FORMAT or isinstance(number, bool):
        raise _wrong(path, f"format {number!r}, and this version reads {FORMAT}")
    if not isinstance(listed, list):
        raise _wrong(path, "entries are not a list")
    entries: dict[Key, Entry] = {}
    for place, given in enumerate(listed):
        problem = _entry_problem(given)
        if problem is not None:
            raise _wrong(path, f"entry {place}: {problem}")
        entry = _entry(given)
        if entry.key in entries:
            raise _wrong(path, f"entry {place}: the second one for {entry.key}")
        entries[entry.key] = entry
    return MappingProxyType(entries)


def _entry_problem(given: Any) -> str | None:
    """What is wrong with one entry; None if nothing is."""
    texts = ("gpu", "version", "date")
    names = {*texts, *_KEY, *_CHOICE, "ratio", "commit"}
    if not isinstance(given, dict) or set(given) != names:
        return f"it has not exactly the names {', '.join(sorted(names))}"
    for name in texts:
        if not isinstance(given[name], str) or not given[name]:
            return f"{name} = {given[name]!r} is no text"
    if given["commit"] is not None and not isinstance(given["commit"], str):
        return f"commit = {given['commit']!r} is neither text nor null"
    for name in (*_KEY, *_CHOICE):
        least = 0 if name == "num_sms" else 1
        if type(given[name]) is not int or given[name] < least:
            return f"{name} = {given[name]!r} is no whole number of {least} or more"
    if rounded_tokens(given["T"]) != given["T"]:
        return f"T = {given['T']} is no power of two"
    if not given["least"] <= given["most"] <= MOST_BLOCKS:
        return (
            f"segments of {given['least']} to {given['most']} blocks, not least <= most <= "
            f"{MOST_BLOCKS}"
        )
    ratio = given["ratio"]
    if type(ratio) not in (int, float) or not 0 < ratio < 1000:
        return f"ratio = {ratio!r} is no ratio of times"
    return None


def _entry(given: Mapping[str, Any]) -> Entry:
    return Entry(
        Key(given["gpu"], *(given[name] for name in _KEY)),
        Choice(Segments(given["least"], given["most"]), given["num_sms"]),
        float(given["ratio"]),
        given["version"],
        given["commit"],
        given["date"],
    )
