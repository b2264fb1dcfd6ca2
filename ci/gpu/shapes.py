"""The shapes of what evidence is made of, so that a malformed file is named and never a traceback.

A check takes a value and its place and returns what is wrong there, or None. Objects may hold more
than is asked for; a part that is measured in another version than this one still reads.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Check = Callable[[Any, str], str | None]
DEEPEST = 110  # levels: those of a step's document, which has at most 100, and of what is around it


def _is(told: str, *kinds: type, holds: Callable[[Any], bool] = lambda value: True) -> Check:
    def check(value: Any, place: str) -> str | None:
        wrong_bool = isinstance(value, bool) and bool not in kinds
        right = isinstance(value, kinds) and not wrong_bool and holds(value)
        return None if right else f"{place} is {_shown(value)}; it must be {told}"

    return check


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


TEXT = _is("a text", str)
NAME = _is("a text that is not empty", str, holds=bool)
TEXT_OR_NONE = _is("a text or null", str, type(None))
FLAG = _is("true or false", bool)
DIRTY = _is("true, false or null", bool, type(None))
COUNT = _is("0 or more, a whole number", int, holds=lambda value: value >= 0)
RANKS = _is("1 or more, a whole number", int, holds=lambda value: value >= 1)
EXIT = _is("a whole number or null", int, type(None))
NUMBER_OR_NONE = _is(
    "a finite number or null",
    *(int, float, type(None)),
    holds=lambda value: value is None or math.isfinite(value),
)
SECONDS = _is(
    "seconds, finite and not negative",
    *(int, float),
    holds=lambda value: math.isfinite(value) and value >= 0,
)
OBJECT = _is("an object", dict)
FILLED = _is("an object that is not empty", dict, holds=bool)


def anything(value: Any, place: str) -> str | None:
    return None


def some(check: Check) -> Check:
    """A list of such values, with at least one."""

    def checked(value: Any, place: str) -> str | None:
        if value == []:
            return f"{place} is empty"
        return each(check)(value, place)

    return checked


def each(check: Check) -> Check:
    """A list of such values."""

    def checked(value: Any, place: str) -> str | None:
        if not isinstance(value, list):
            return f"{place} is {_shown(value)}; it must be a list"
        told = (check(one, f"{place}[{at}]") for at, one in enumerate(value))
        return next((one for one in told if one), None)

    return checked


def by_name(check: Check) -> Check:
    """An object of such values."""

    def checked(value: Any, place: str) -> str | None:
        if not isinstance(value, dict):
            return f"{place} is {_shown(value)}; it must be an object"
        told = (check(one, f"{place}.{name}") for name, one in value.items())
        return next((one for one in told if one), None)

    return checked


def fields(needed: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """An object with these names, and those that are optional."""

    def checked(value: Any, place: str) -> str | None:
        if not isinstance(value, dict):
            return f"{place} is {_shown(value)}; it must be an object"
        for name, check in {**needed, **(optional or {})}.items():
            if name in value:
                told = check(value[name], f"{place}.{name}")
                if told:
                    return told
            elif name in needed:
                return f"{place}.{name} is missing"
        return None

    return checked


def or_none(check: Check) -> Check:
    return lambda value, place: None if value is None else check(value, place)


STEP = fields(
    {"name": NAME, "status": TEXT, "exit": EXIT, "seconds": SECONDS, "document": anything},
    {"said": TEXT},
)
PART = fields({"name": TEXT, "status": TEXT, "seconds": SECONDS, "steps": each(STEP)})
RUN = fields(
    {
        "commit": TEXT,
        "dirty": DIRTY,
        "started": TEXT,
        "ranks": RANKS,
        "environment": fields({"cuda": anything}, {"variables": or_none(by_name(TEXT))}),
        "parts": some(PART),
    },
    {"sources": by_name(TEXT)},
)
EVIDENCE = fields(
    {
        "format": TEXT,
        "part": TEXT,
        "status": TEXT,
        "commit": TEXT,
        "dirty": DIRTY,
        "sources": by_name(TEXT),
        "measured": TEXT,
        "ranks": RANKS,
        "seconds": SECONDS,
        "command": TEXT,
        "environment": fields({}, {"variables": by_name(TEXT)}),
        "results": by_name(fields({"status": TEXT, "exit": EXIT, "seconds": SECONDS})),
    }
)
DEVICES = some(fields({"name": NAME}))
CUDA = fields(
    {"devices": DEVICES, "driver": NAME},
    {"links": or_none(by_name(TEXT)), "visible": or_none(COUNT), "nccl": TEXT_OR_NONE},
)

_DIFFERENCE = fields({}, {"lines": each(TEXT), "suggests": each(TEXT)})
_FINDING = fields(
    {"reason": TEXT, "detail": TEXT},
    {"tensor": TEXT_OR_NONE, "variant": TEXT_OR_NONE, "difference": or_none(_DIFFERENCE)},
)
_CLAIM = {
    "claim": TEXT,
    "verdict": TEXT,
    "executions": COUNT,
    "differing": COUNT,
    "findings": each(_FINDING),
}
_CASE = {"case": TEXT, "description": TEXT, "verdict": TEXT, "ranks": RANKS}


def _verify(claim: Check) -> Check:
    case = fields({**_CASE, "claims": each(claim)}, {"device": TEXT})
    head = {"command": TEXT, "verdict": TEXT, "ranks": RANKS, "totals": OBJECT}
    return fields({**head, "cases": some(case)})


_TALLY = fields(
    {"executions": COUNT, "differing": COUNT},
    {
        "interval_95": lambda value, place: (
            each(SECONDS)(value, place)
            or (None if len(value) == 2 else f"{place} holds {len(value)} numbers, not two")
        )
    },
)
_FAULT = fields(
    {
        "fault": TEXT,
        "claim": TEXT,
        "caught": FLAG,
        "claims": by_name(_TALLY),
        "plain_check": fields({"noticed": COUNT, "trials": COUNT}),
        "twin": fields({"executions": COUNT, "differing": COUNT, "not_verified": each(TEXT)}),
    }
)
_FAULTS = fields({"faults": some(_FAULT)})
_GOALS = {"of the read": NUMBER_OR_NONE, "of hash_tensor": NUMBER_OR_NONE}
_HOST_TIMES = {"plan_replay_us": NUMBER_OR_NONE, "plan_build_us": NUMBER_OR_NONE}
_DIGEST = fields(
    {"rows": some(fields({"dtype": TEXT}, _GOALS))},
    {"unit": TEXT, "protocol": TEXT, **_HOST_TIMES},
)

_DEGREE = {
    "degree": COUNT,
    "segments": TEXT,
    "ctas": RANKS,
    "equal": FLAG,
    "tokens": some(COUNT),
    "lacking": each(TEXT),
    **dict.fromkeys(("blocks", "tails", "empty_experts", "crossing"), COUNT),
}
_LOGGED = dict.fromkeys(("wraps_x", "wraps_h", "records", "broken"), COUNT)
_DEGREES = fields({"rows": some(fields({**_DEGREE, **_LOGGED, "findings": each(TEXT)}))})
_BACKWARD_DEGREES = fields(
    {"rows": some(fields({**_DEGREE, "wraps": COUNT, "parts": COUNT, "wrong": each(TEXT)}))}
)
_ENDURED = fields({"load": TEXT, "forwards": COUNT, "under_load": COUNT, "ms": SECONDS})
_MANY = {
    "shape": NAME,
    "ms_alone": SECONDS,
    "per_second": SECONDS,
    **dict.fromkeys(("wanted", "forwards", "under_load"), COUNT),
    **dict.fromkeys(("distinct", "differing"), COUNT),
    "loads": each(_ENDURED),
}
_ENDURANCE = fields({"rows": some(fields(_MANY))})
_BACKWARD_ENDURANCE = fields({"rows": some(fields({**_MANY, "outputs": by_name(COUNT)}))})
_TRAINING = fields(
    {
        "rows": some(
            fields(
                {
                    **dict.fromkeys(("ranks", "steps", "times"), RANKS),
                    **dict.fromkeys(("shared", "recompute", "equal"), FLAG),
                    **dict.fromkeys(("losses", "weights"), NAME),
                    **dict.fromkeys(("first", "last", "seconds"), SECONDS),
                    **dict.fromkeys(("kernels", "wanted"), COUNT),
                }
            )
        )
    }
)


_RECORDING = fields(
    {
        "rows": some(
            fields(
                {
                    "name": NAME,
                    "rounds": RANKS,
                    **dict.fromkeys(("ms", "ratio", "spread"), SECONDS),
                    "same": FLAG,
                },
                dict.fromkeys(("events", "bytes", "recorded_steps"), COUNT),
            )
        )
    },
    {"device": _is("'cuda'", str, holds=lambda value: value == "cuda"), "steps": RANKS},
)


def _bench(value: Any, place: str) -> str | None:
    """The benchmark draws its own document; one that it cannot draw is none."""
    from mok.bench import tables

    try:
        tables.markdown(value)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return f"{place} is no document of the benchmark: {type(error).__name__}: {error}"
    return None


def _junit(value: Any, place: str) -> str | None:
    try:
        ElementTree.fromstring(value)
    except (ElementTree.ParseError, TypeError, ValueError) as error:
        return f"{place} is no JUnit XML: {error}"
    return None


_WHOLE = {
    "digest": _DIGEST,
    "faults": _FAULTS,
    "degrees": _DEGREES,
    "backward-degrees": _BACKWARD_DEGREES,
    "training": _TRAINING,
    **dict.fromkeys(("forward", "backward", "bench"), _bench),
    "endurance": _ENDURANCE,
    "backward-endurance": _BACKWARD_ENDURANCE,
    "recording": _RECORDING,
}
DOCUMENTS: Mapping[str, Check] = {
    "tests": _junit,
    "verify": _verify(fields({**_CLAIM, "measurements": OBJECT})),
    "peers": _verify(fields({**_CLAIM, "measurements": OBJECT})),
    **_WHOLE,
}
"""By part, what its steps leave; `sanitize` leaves none."""
RESULTS: Mapping[str, Check] = {
    "tests": fields({"passed": COUNT, "failed": each(TEXT), "skipped": COUNT}),
    "verify": _verify(fields(_CLAIM)),
    "peers": _verify(fields(_CLAIM)),
    "sanitize": fields({"said": NAME}),
    **{name: fields({"document": check}) for name, check in _WHOLE.items()},
}
"""By part, what evidence holds of a step that passed."""


def too_deep(value: Any, levels: int = DEEPEST) -> bool:
    """Whether lists and objects are nested deeper, so that reading on could overflow the stack."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(too_deep(one, levels - 1) for one in inner)


def read_json(path: Path, *, strict: bool = True) -> Any:
    """A file's JSON value; strict: without NaN and infinities.

    Raises ValueError that says why it cannot be read.
    """

    def refused(name: str) -> Any:
        raise ValueError(f"it holds {name}")

    try:
        text = path.read_bytes().decode("utf-8")
        found = json.loads(text, parse_constant=refused if strict else None)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if too_deep(found):
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return found
