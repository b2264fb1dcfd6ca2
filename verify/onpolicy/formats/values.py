"""Strict parsing of what files give for ids, masks, log-probabilities and settings.

One rule for every format: what is no number is never taken for one (True is not 1, "0.5" is not
0.5), what is absent stays absent, and whatever is left out is reported with file, record, field,
what was given and what is allowed. It refuses to pad, cut, round or guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.formats.json_records import Refused
from verify.onpolicy.formats.problems import MOST_SAMPLES, Problems, Spot, described, objects, room
from verify.onpolicy.samples import META, Series

__all__ = [  # with what every reader needs beside it
    "MOST_SAMPLES",
    "Problems",
    "Spot",
    "described",
    "objects",
    "room",
    "DTYPES",
    "LARGEST_ID",
    "NOT_FINITE",
    "ids",
    "integer",
    "integers",
    "is_list",
    "key",
    "mask",
    "meta",
    "number",
    "series",
    "text",
]

LARGEST_ID = 2**31 - 1  # of tokens and experts
LONGEST_KEY = 1000  # characters
_LONGEST_NAME = 300

NOT_FINITE: Mapping[str, float] = {  # text that stands for a number, as servers write it
    "nan": math.nan,
    "-nan": math.nan,
    "inf": math.inf,
    "+inf": math.inf,
    "infinity": math.inf,
    "+infinity": math.inf,
    "-inf": -math.inf,
    "-infinity": -math.inf,
}
DTYPES = ("float64", "float32", "bfloat16", "float16")  # that log-probabilities are stored in


def ids(value: Any, spot: Spot, field: str) -> NDArray[np.int64] | None:
    """Token ids as int64 [n], or None with a problem; None without one where value is None."""
    if value is None:
        return None
    found = integers(value)
    if isinstance(found, str):
        spot.bad(field, f"{found}; token ids are integers from 0 to {LARGEST_ID}")
        return None
    if found.size and (int(found.min()) < 0 or int(found.max()) > LARGEST_ID):
        at = int(np.flatnonzero((found < 0) | (found > LARGEST_ID))[0])
        given = f"entry {at} is {int(found[at])}"
        spot.bad(field, f"{given}; token ids are integers from 0 to {LARGEST_ID}")
        return None
    return found


def mask(value: Any, spot: Spot, field: str) -> NDArray[np.bool_] | None:
    """bool [n] from true and false, 0 and 1, or None with a problem."""
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.ndim == 1:
        numbers = value
    elif is_list(value):
        kinds = set(map(type, value))
        if kinds - {bool, int, float}:
            other = next(item for item in value if type(item) not in (bool, int, float))
            spot.bad(field, f"holds {described(other)}; a mask holds true, false, 0 and 1")
            return None
        if wrong := [item for item in set(value) if item not in (0, 1)]:
            spot.bad(field, f"holds {described(wrong[0])}; a mask holds true, false, 0 and 1")
            return None
        numbers = np.array(value, dtype=np.float64)
    else:
        spot.bad(field, f"is {described(value)}; a mask is a list of true, false, 0 and 1")
        return None
    ones = numbers != 0
    if not bool(np.all((numbers == 0) | (numbers == 1))):
        given = numbers[ones & (numbers != 1)][0].item()
        spot.bad(field, f"holds {described(given)}; a mask holds true, false, 0 and 1")
        return None
    return np.asarray(ones, dtype=np.bool_)


def series(value: Any, spot: Spot, field: str, stored: str = "") -> Series | None:
    """Log-probabilities as they stand: null is absent, NaN and infinities are kept.

    Text that stands for no finite number ("NaN", "-inf") is taken for it, with no word. An entry
    that is no number becomes absent, with a problem; a list of which no entry is a number is left
    out. value: a list, or an array of one dimension whose dtype is then what was stored.
    """
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "fiu":
            spot.bad(field, f"is {described(value)}; log-probabilities are one list of numbers")
            return None
        numbers = value.astype(np.float64)
        return Series(numbers, np.zeros(len(value), dtype=np.bool_), stored or _stored(value))
    if not is_list(value):
        spot.bad(field, f"is {described(value)}; log-probabilities are a list of numbers and null")
        return None
    kinds = set(map(type, value))
    if kinds <= {float, int, type(None)}:
        try:
            numbers = np.array(value, dtype=np.float64)
        except OverflowError:  # an integer beyond float64
            return _series_slowly(value, spot, field, stored)
        if type(None) in kinds:
            absent = np.fromiter((item is None for item in value), np.bool_, len(value))
        else:
            absent = np.zeros(len(value), dtype=np.bool_)
        return Series(numbers, absent, stored)
    return _series_slowly(value, spot, field, stored)


def number(
    value: Any, spot: Spot, field: str, low: float = -math.inf, high: float = math.inf
) -> float | None:
    """A finite number within bounds, or None: with a problem unless value is None."""
    if value is None:
        return None
    if type(value) not in (int, float) and not isinstance(value, np.floating | np.integer):
        spot.bad(field, f"is {described(value)}; it is a number")
        return None
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not (math.isfinite(found) and low <= found <= high):
        spot.bad(field, f"is {described(value)}; it is a number {_range(low, high)}")
        return None
    return found


def integer(value: Any, spot: Spot, field: str, low: int = 0, high: int = 2**62) -> int | None:
    """An integer within bounds, or None: with a problem unless value is None."""
    if value is None:
        return None
    if type(value) is not int and not isinstance(value, np.integer):
        spot.bad(field, f"is {described(value)}; it is an integer")
        return None
    if not low <= value <= high:
        spot.bad(field, f"is {described(value)}; it is an integer {_range(low, high)}")
        return None
    return int(value)


def text(value: Any, spot: Spot, field: str, longest: int | None = None) -> str | None:
    """Text, or None: with a problem unless value is None."""
    if value is None:
        return None
    if not isinstance(value, str) or isinstance(value, Refused):
        spot.bad(field, f"is {described(value)}; it is text")
        return None
    if longest is not None and len(value) > longest:
        spot.bad(field, f"is {described(value)}; at most {longest} are allowed")
        return None
    return value


def key(value: Any, spot: Spot, field: str) -> str | None:
    """What a sample is paired by: text or an integer, as text."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if -(2**63) <= value < 2**64:
            return str(int(value))
        spot.bad(field, f"is {described(value)}; an id is text or an integer of 64 bits")
        return None
    if value is not None and not isinstance(value, str):
        spot.bad(field, f"is {described(value)}; an id is text or an integer")
        return None
    if value == "":
        spot.bad(field, "is empty; an id is text or an integer")
        return None
    return text(value, spot, field, LONGEST_KEY)


def meta(given: Any, spot: Spot, field: str = "meta") -> dict[str, Any]:
    """What of an object belongs to META, each value checked; other names are left out."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        spot.bad(field, f"is {described(given)}; it is an object")
        return {}
    found: dict[str, Any] = {}
    for name in META:
        if (value := given.get(name)) is None:
            continue
        checked = _META[name](value, spot, f"{field}.{name}" if field else name)
        if checked is not None:
            found[name] = checked
    return found


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _stored(value: NDArray[Any]) -> str:
    name = value.dtype.name
    return name if name in DTYPES else ""


def _range(low: float, high: float) -> str:
    if high == math.inf or high >= 2**62:
        return "" if low == -math.inf else f"of at least {low}"
    return f"from {low} to {high}"


def integers(value: Any) -> NDArray[np.int64] | str:
    """int64 [n], or what is wrong."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or (value.dtype.kind not in "iu" and value.size):
            return f"is {described(value)}"
        if value.dtype == np.uint64 and value.size and int(value.max()) > 2**63 - 1:
            return f"holds {int(value.max())}"
        return value.astype(np.int64)
    if not is_list(value):
        return f"is {described(value)}"
    if set(map(type, value)) - {int}:
        at, other = next((n, item) for n, item in enumerate(value) if type(item) is not int)
        return f"entry {at} is {described(other)}"
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        at, other = next((n, item) for n, item in enumerate(value) if abs(item) >= 2**63)
        return f"entry {at} is {described(other)}"


def _series_slowly(value: Any, spot: Spot, field: str, stored: str) -> Series | None:
    numbers = np.full(len(value), np.nan)
    absent = np.zeros(len(value), dtype=np.bool_)
    wrong = 0
    first = ""
    for at, item in enumerate(value):
        real = isinstance(item, float | np.floating | np.integer)
        if real or (type(item) is int and item.bit_length() < 1000):
            numbers[at] = item
        elif isinstance(item, str) and item.lower() in NOT_FINITE:
            numbers[at] = NOT_FINITE[item.lower()]
        else:
            absent[at] = True
            if item is not None:
                wrong += 1
                first = first or f"entry {at} is {described(item)}"
    if wrong:
        allowed = 'a log-probability is a number, null, "NaN", "inf" or "-inf"'
        more = f" ({wrong} of {len(value)} entries are no numbers)" if wrong > 1 else ""
        spot.bad(field, f"{first}{more}; {allowed}; it counts as absent")
    if wrong == len(value):
        return None
    return Series(numbers, absent, stored)


def _flag(value: Any, spot: Spot, field: str) -> bool | None:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    spot.bad(field, f"is {described(value)}; it is true or false")
    return None


def _whole(low: int) -> Callable[[Any, Spot, str], Any]:
    return lambda value, spot, field: integer(value, spot, field, low)


def _real(low: float, high: float = math.inf) -> Callable[[Any, Spot, str], Any]:
    return lambda value, spot, field: number(value, spot, field, low, high)


def _name(value: Any, spot: Spot, field: str) -> str | None:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return key(value, spot, field)
    return text(value, spot, field, _LONGEST_NAME)


def _names(value: Any, spot: Spot, field: str) -> str | list[str] | None:
    if not is_list(value):
        return _name(value, spot, field)
    found = []
    for at, item in enumerate(value):
        name = _name(item, spot, f"{field}[{at}]") if item is not None else ""
        if name is None:
            return None
        found.append(name)
    return found


def _tokens(value: Any, spot: Spot, field: str) -> list[int] | None:
    found = ids([value] if type(value) is int else value, spot, field)
    return None if found is None else [int(token) for token in found]


_META: Mapping[str, Callable[[Any, Spot, str], Any]] = {
    "temperature": _real(0),
    "top_p": _real(0, 1),
    "top_k": _whole(-1),
    "min_p": _real(0, 1),
    "repetition_penalty": _real(0),
    "presence_penalty": _real(-math.inf),
    "frequency_penalty": _real(-math.inf),
    "trainer_temperature": _real(0),
    "processed": _flag,
    "rollout_version": _names,
    "trainer_version": _name,
    "finish_reason": _name,
    "eos_token_ids": _tokens,
    "vocab_size": _whole(1),
    "logits_width": _whole(1),
    "step": _whole(-1),
    "rank": _whole(0),
    "rollout_rank": _whole(0),
    "batch_position": _whole(0),
    "padding": _whole(0),
    "group": _name,
    "cached_tokens": _whole(0),
    "cumulative_logprob": _real(-math.inf),
    "response_length": _whole(0),
    "prompt_length": _whole(0),
}
