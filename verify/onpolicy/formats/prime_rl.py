"""prime-rl: TrainingSample as JSON, one a line: what its orchestrator hands to its trainer.

token_ids, mask, logprobs, temperatures, all of one length, env_name, ref_logprobs, routed_experts
(data, shape, dtype). msgspec writes the class as a list in the order of its fields, `asdict` as an
object; both are read, and so are samples of its older versions: prompt_ids, completion_ids,
completion_mask, completion_logprobs, completion_temperatures. The response begins at the first
token of the mask. ref_logprobs are another model's and left out. Its traces.jsonl are read by
`prime_traces`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.formats import experts, prime_traces, values
from verify.onpolicy.formats.heads import Head
from verify.onpolicy.formats.json_records import BadRecord, records
from verify.onpolicy.formats.plain import dump_of
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import ROLLOUT, Dump, Place, Routing, Sample, Series

_ORDER = (  # of the fields of TrainingSample
    *("token_ids", "mask", "logprobs", "temperatures", "env_name", "ref_logprobs"),
    *("mm_kwargs", "routed_experts"),
)
_LEAST = 5  # fields without a default
_ROUTED = ("data", "shape", "dtype")  # of the fields of RoutedExperts


def fits(head: Head) -> bool:
    """Whether the first record is a TrainingSample, as an object or as a list."""
    if head.row:
        lists = all(isinstance(part, list) for part in head.row[:4])
        return len(head.row) >= _LEAST and lists and isinstance(head.row[4], str)
    flat = head.has("token_ids", "mask", "logprobs", "temperatures")
    traces = prime_traces.holds(head.first) and (head.has("traces") or head.has("nodes", "task"))
    return flat or traces or head.has("completion_ids", "completion_mask", "completion_logprobs")


def read(path: Path, side: str) -> Dump:
    """The samples; their values are the sampler's, whatever `side` says."""
    problems = Problems()
    samples: list[Sample] = []
    named = re.findall(r"step_(\d{1,18})", str(path))
    step = int(named[-1]) if named else None
    traced = False
    for spot, record in values.objects(_named(records(path)), problems):
        key = str(spot.number) if step is None else f"{step}:{spot.number}"
        if prime_traces.holds(record):
            traced = True
            for one in prime_traces.samples_of(record, spot, key, step):
                if not values.room(samples, spot):
                    break
                samples.append(one)
            continue
        sample = _sample(record, spot, key, step)
        if sample is not None:
            samples.append(sample)
    notes = () if traced else ("the samples carry no id; their order in the file is their key",)
    return dump_of("prime-rl", path, samples, problems, notes)


def _named(given: Iterable[tuple[Place, Any]]) -> Iterable[tuple[Place, Any]]:
    """Records that are lists as objects."""
    for place, record in given:
        if not isinstance(record, list):
            yield place, record
        elif len(record) < _LEAST:
            yield place, BadRecord(f"is a list of {len(record)}; a TrainingSample has {_LEAST}")
        else:
            yield place, dict(zip(_ORDER, record, strict=False))


def _sample(record: Mapping[str, Any], spot: Spot, key: str, step: int | None) -> Sample | None:
    parts = _flat(record, spot) if "token_ids" in record else _parted(record, spot)
    if parts is None:
        spot.unreadable("has no token ids", "token_ids")
        return None
    prompt, tokens, mask, series, heat = parts
    meta = values.meta({"step": step}, spot)
    if heat is not None:
        meta["temperature"] = heat
    return Sample(
        key=key,
        place=spot.place,
        prompt=prompt,
        tokens=tokens,
        mask=mask,
        series={} if series is None else {ROLLOUT: series},
        routing=_routing(record.get("routed_experts"), spot),
        meta=meta,
    )


_Ids = NDArray[np.int64]
_Mask = NDArray[np.bool_]
_Parts = tuple[_Ids | None, _Ids, _Mask | None, Series | None, float | None]


def _flat(record: Mapping[str, Any], spot: Spot) -> _Parts | None:
    """Of one list for prompt and response: cut where the mask begins."""
    tokens = values.ids(record.get("token_ids"), spot, "token_ids")
    if tokens is None:
        return None
    mask = values.mask(record.get("mask"), spot, "mask")
    series = values.series(record.get("logprobs"), spot, "logprobs")
    begin = 0
    if mask is not None:
        if len(mask) != len(tokens):
            spot.note("mask", f"has {len(mask)} entries for {len(tokens)} tokens")
        begin = int(np.flatnonzero(mask)[0]) if mask.any() else len(tokens)
        begin = min(begin, len(tokens))
    if series is not None:
        if len(series.values) == len(tokens):
            series = Series(series.values[begin:], series.absent[begin:])
        else:
            spot.note("logprobs", f"has {len(series.values)} entries for {len(tokens)} tokens")
    heat = _temperature(record.get("temperatures"), mask, spot, "temperatures")
    counted = None if mask is None else mask[begin:]
    return tokens[:begin], tokens[begin:], counted, series, heat


def _parted(record: Mapping[str, Any], spot: Spot) -> _Parts | None:
    """Of older versions, which keep prompt and completion apart."""
    tokens = values.ids(record.get("completion_ids"), spot, "completion_ids")
    if tokens is None:
        return None
    mask = values.mask(record.get("completion_mask"), spot, "completion_mask")
    name = "completion_temperatures"
    return (
        values.ids(record.get("prompt_ids"), spot, "prompt_ids"),
        tokens,
        mask,
        values.series(record.get("completion_logprobs"), spot, "completion_logprobs"),
        _temperature(record.get(name), mask, spot, name),
    )


def _temperature(value: Any, mask: _Mask | None, spot: Spot, field: str) -> float | None:
    """The temperature of the sampled tokens where they have one, else None with a note."""
    given = values.series(value, spot, field)
    if given is None:
        return None
    numbers = given.values
    if mask is not None and len(mask) == len(numbers):
        numbers = numbers[mask]
    different = np.unique(numbers[np.isfinite(numbers)])
    if len(different) > 1:
        spot.note(field, f"{len(different)} temperatures in one sample; none is taken for it")
        return None
    return values.number(float(different[0]), spot, field, 0) if len(different) else None


def _routing(value: Any, spot: Spot) -> dict[str, Routing]:
    """Experts of all tokens, from an object or from the list of its fields."""
    if value is None:
        return {}
    start = 0
    if values.is_list(value) and len(value) == len(_ROUTED) and isinstance(value[0], str):
        value = dict(zip(_ROUTED, value, strict=True))
    if isinstance(value, Mapping) and value.get("start") is not None:
        start = values.integer(value["start"], spot, "routed_experts.start") or 0
    found = experts.routing(value, spot, "routed_experts", start=start)
    return {} if found is None else {ROLLOUT: found}
