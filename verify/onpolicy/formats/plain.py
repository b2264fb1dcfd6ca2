"""Our own JSON lines: one response a line, with what sampler and trainer say of each token.

    {"id": "7", "prompt_ids": [1, 5], "response_ids": [9, 2], "sampler_logprobs": [-0.25, -1.5],
     "trainer_logprobs": [-0.25, -1.5], "mask": [1, 1], "meta": {"temperature": 1.0}}

| name | meaning |
|---|---|
| id | text or integer; by it the lines of two files are paired; without it, by their order |
| prompt_ids, response_ids | token ids |
| sampler_logprobs, trainer_logprobs | natural logarithm, one a token of the response; null where there is none; NaN and infinities as Python writes them or as text |
| logprobs | the same, of the side that the file is given for on the command line |
| mask | 1 or true where a token is the policy's and counts, one a token of the response |
| sampler_top, trainer_top | per token null, or the alternatives: {"token id": log-probability} |
| routing | {"sampler": ROUTES, "trainer": ROUTES}, or ROUTES of the file's own side |
| sampler_dtype, trainer_dtype, dtype | what the values were before they became text: float32, bfloat16, float16, float64 |
| text | the decoded response, shown and never compared |
| meta | settings, by the names of samples.META; policy_version is taken for rollout_version |

ROUTES is {"experts": [row][layer][k], "start": position in prompt and response of row 0,
"weights": likewise, "margins": [row][layer], "layers": numbers of the layers}; experts and weights
may be packed: {"data": base64, "dtype": "uint8", "shape": [rows, layers, k]}.

A first line {"onpolicy": 1, "config": {...}} holds what is true of the whole file. rollout_logprobs,
rollout_top and "rollout" are taken for sampler_logprobs, sampler_top and "sampler". Other names
are left out; of settings each is noted once.
"""  # noqa: E501

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verify.errors import InputFileError
from verify.onpolicy.formats import experts, values
from verify.onpolicy.formats.heads import Head
from verify.onpolicy.formats.json_records import records
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import META, ROLLOUT, TRAINER, Dump, Routing, Sample, Series

VERSION = 1
_SIDES = {"sampler": ROLLOUT, "rollout": ROLLOUT, "trainer": TRAINER}
_OWN = ("response_ids", "sampler_logprobs", "rollout_logprobs", "trainer_logprobs")
_RENAMED = {"policy_version": "rollout_version"}
_MOST_UNKNOWN = 20  # names of settings that are told of


def fits(head: Head) -> bool:
    """Whether the first object is a header or a line of ours."""
    bare = head.has("prompt_ids", "logprobs")  # without ids of the response, which is said later
    return bare or head.has("onpolicy") or any(head.has(name) for name in _OWN)


def read(path: Path, side: str) -> Dump:
    """The lines of a file. InputFileError where none can be read."""
    problems = Problems()
    samples: list[Sample] = []
    config: dict[str, Any] = {}
    unknown: set[str] = set()
    unnamed = headers = 0
    for spot, record in values.objects(records(path), problems):
        if "onpolicy" in record:
            config.update(_header(record, spot))
            _tell_unknown(record.get("config"), spot, "config", unknown)
            headers += 1
            continue
        sample = sample_of(record, spot, side, f"record {spot.number + 1 - headers}")
        if sample is None:
            continue
        _tell_unknown(record.get("meta"), spot, "meta", unknown)
        unnamed += record.get("id") is None
        samples.append(sample)
    notes = (f"{unnamed} records have no id and are paired by their order",) if unnamed else ()
    return dump_of("plain", path, samples, problems, notes, config)


def sample_of(record: Mapping[str, Any], spot: Spot, side: str, fallback: str) -> Sample | None:
    """One record, or None with a problem where it holds nothing of a response.

    fallback: the key of a record without an id.
    """
    if not any(name in record for name in (*_OWN, "logprobs", "text")):
        spot.unreadable(f"has none of {', '.join(_OWN)}, logprobs and text")
        return None
    key = values.key(record.get("id"), spot, "id")
    meta = record.get("meta")
    settings = values.meta(meta, spot)
    if isinstance(meta, Mapping) and "rollout_version" not in settings:
        renamed = {name: meta.get(old) for old, name in _RENAMED.items()}
        settings |= values.meta(renamed, spot)
    return Sample(
        key=key or fallback,
        place=spot.place,
        prompt=values.ids(record.get("prompt_ids"), spot, "prompt_ids"),
        tokens=values.ids(record.get("response_ids"), spot, "response_ids"),
        mask=values.mask(record.get("mask"), spot, "mask"),
        series=_series(record, spot, side),
        routing=_routing(record.get("routing"), spot, side),
        top={
            _SIDES[name]: found
            for name in _SIDES
            if (found := _top(record.get(f"{name}_top"), spot, f"{name}_top")) is not None
        },
        text=values.text(record.get("text"), spot, "text"),
        meta=settings,
    )


def dump_of(
    form: str,
    path: Path,
    samples: list[Sample],
    problems: Problems,
    notes: tuple[str, ...] = (),
    config: Mapping[str, Any] | None = None,
) -> Dump:
    """The dump of a file, or InputFileError with its first problem where no sample was read."""
    listed = problems.listed()
    if not samples:
        why = "it holds no record"
        if listed:
            where = f"{listed[0].place.record}: " if listed[0].place.record else ""
            field = f"{listed[0].field}: " if listed[0].field else ""
            why = (
                f"no record could be read ({len(listed)} problems); {where}{field}{listed[0].what}"
            )
        raise InputFileError(f"{path}: not a file of {form}: {why}")
    return Dump(form, (str(path),), tuple(samples), listed, notes, config or {})


def _tell_unknown(given: Any, spot: Spot, field: str, told: set[str]) -> None:
    """Notes each name that is no setting once for the file; a misspelt one would say nothing."""
    if not isinstance(given, Mapping):
        return
    for name in given:
        if name in META or name in _RENAMED or name in told or len(told) == _MOST_UNKNOWN:
            continue
        told.add(name)
        close = difflib.get_close_matches(name, META, n=1)
        hint = f"did you mean {close[0]}?" if close else "known are those of samples.META"
        spot.note(f"{field}.{name[:60]}", f"is no setting that is known and is left out; {hint}")


def _header(record: Mapping[str, Any], spot: Spot) -> dict[str, Any]:
    version = record["onpolicy"]
    if version != VERSION:
        given = values.described(version)
        spot.note("onpolicy", f"is {given}; version {VERSION} is known, the rest is read as that")
    return values.meta(record.get("config"), spot, "config")


def _series(record: Mapping[str, Any], spot: Spot, side: str) -> dict[str, Series]:
    found: dict[str, Series] = {}
    names = [(f"{name}_logprobs", f"{name}_dtype", whose) for name, whose in _SIDES.items()]
    for name, kind, whose in [*names, ("logprobs", "dtype", side)]:
        if whose in found:
            if record.get(name) is not None:
                spot.bad(name, "the record has these log-probabilities under another name, too")
            continue
        one = values.series(record.get(name), spot, name, _dtype(record.get(kind), spot, kind))
        if one is not None:
            found[whose] = one
    return found


def _dtype(value: Any, spot: Spot, field: str) -> str:
    if value is None:
        return ""
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in values.DTYPES:
        allowed = ", ".join(values.DTYPES)
        spot.bad(field, f"is {values.described(value)}; allowed are {allowed}")
        return ""
    return str(name)


def _routing(value: Any, spot: Spot, side: str) -> dict[str, Routing]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        spot.bad("routing", f"is {values.described(value)}; it is an object")
        return {}
    if "experts" in value:
        parts = [("routing", side, value)]
    else:
        parts = [(f"routing.{name}", _SIDES[name], value[name]) for name in _SIDES if name in value]
    found: dict[str, Routing] = {}
    for field, whose, part in parts:
        if part is None:
            continue
        if not isinstance(part, Mapping):
            spot.bad(field, f"is {values.described(part)}; it is an object")
            continue
        start = values.integer(part.get("start"), spot, f"{field}.start", -1)
        one = experts.routing(
            part.get("experts"),
            spot,
            f"{field}.experts",
            start=-1 if start is None else start,
            weights=part.get("weights"),
            margins=part.get("margins"),
            layers=part.get("layers"),
        )
        if one is not None:
            found[whose] = one
    return found


def _top(value: Any, spot: Spot, field: str) -> tuple[Mapping[int, float] | None, ...] | None:
    if value is None:
        return None
    if not values.is_list(value):
        spot.bad(field, f"is {values.described(value)}; it is a list of objects and null")
        return None
    return tuple(alternatives(item, spot, f"{field}[{at}]") for at, item in enumerate(value))


def alternatives(value: Any, spot: Spot, field: str) -> Mapping[int, float] | None:
    """{token id: log-probability} of one position, from an object keyed by token ids."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        spot.bad(field, f"is {values.described(value)}; it is an object keyed by token ids")
        return None
    found: dict[int, float] = {}
    for name, item in value.items():
        token = token_id(name)
        number = real(item)
        if token is None:
            given = values.described(name)
            spot.bad(field, f"has the name {given}; a token id is needed, text can be of several")
            return None
        if number is None:
            spot.bad(field, f"token {token} has {values.described(item)}; it is a number")
            return None
        found[token] = number
    return found


def token_id(name: Any) -> int | None:
    """The token id that a name of an object stands for, or None."""
    if type(name) is int:
        return name if 0 <= name <= values.LARGEST_ID else None
    if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) <= 10:
        return token_id(int(name))
    return None


def real(item: Any) -> float | None:
    """A log-probability that stands alone, by the rules of values.series; None for no number."""
    if isinstance(item, str):
        return values.NOT_FINITE.get(item.lower())
    if type(item) is float or (type(item) is int and item.bit_length() < 1000):
        return float(item)
    return None
