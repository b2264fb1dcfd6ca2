"""SGLang: answers of /generate with return_logprob, one a line or a list of them.

text, output_ids and meta_info: id, output_token_logprobs [[log-probability, token id, text]],
input_token_logprobs likewise with null first, output_top_logprobs, finish_reason, prompt_tokens,
completion_tokens, cached_tokens, weight_version, weight_versions [{version, start, end}],
routed_experts: base64 of int32 [rows, layers, k] from routed_experts_start_len up to but without
the last token. The answer does not say layers and k: add "routed_experts_shape": [layers, k] to it.
"sampling_params" and "input_ids" of the request are read where somebody put them beside the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.formats import experts, values
from verify.onpolicy.formats.heads import Head
from verify.onpolicy.formats.json_records import records
from verify.onpolicy.formats.plain import dump_of, real, token_id
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import ROLLOUT, Dump, Routing, Sample, Series

_TRIPLES = "output_token_logprobs"


def fits(head: Head) -> bool:
    """Whether the first object is an answer of /generate."""
    return isinstance(head.first.get("meta_info"), Mapping)


def read(path: Path, side: str) -> Dump:
    """The answers; their values are the sampler's, whatever `side` says."""
    problems = Problems()
    samples: list[Sample] = []
    without = 0
    for spot, record in values.objects(records(path), problems):
        info = record.get("meta_info")
        if not isinstance(info, Mapping):
            spot.unreadable(f"its meta_info is {values.described(info)}; it is an object")
            continue
        samples.append(_sample(record, info, spot, f"record {spot.number + 1}"))
        without += ROLLOUT not in samples[-1].series
    notes: tuple[str, ...] = ()
    if without:
        notes = (f"{without} answers have no {_TRIPLES}; ask for them: return_logprob",)
    return dump_of("sglang", path, samples, problems, notes)


def _sample(record: Mapping[str, Any], info: Mapping[str, Any], spot: Spot, count: str) -> Sample:
    tokens, series = _triples(info.get(_TRIPLES), spot, f"meta_info.{_TRIPLES}")
    if tokens is None:
        tokens = values.ids(record.get("output_ids"), spot, "output_ids")
    prompt = _prompt(record, info, spot)
    return Sample(
        key=values.key(info.get("id"), spot, "meta_info.id") or count,
        place=spot.place,
        prompt=prompt,
        tokens=tokens,
        series={} if series is None else {ROLLOUT: series},
        routing=_routing(record, info, spot, prompt, tokens),
        top=_tops(info.get("output_top_logprobs"), spot),
        text=values.text(record.get("text"), spot, "text"),
        meta=_meta(record, info, spot, tokens),
    )


def _triples(value: Any, spot: Spot, field: str) -> tuple[NDArray[np.int64] | None, Series | None]:
    """Token ids and log-probabilities of [[log-probability, token id, text], ...]."""
    if value is None:
        return None, None
    if not values.is_list(value):
        spot.bad(field, f"is {values.described(value)}; it is a list of [logprob, token id, text]")
        return None, None
    for at, item in enumerate(value):
        if not values.is_list(item) or len(item) < 2:
            given = values.described(item)
            spot.bad(field, f"entry {at} is {given}; it is [logprob, token id, text]")
            return None, None
    tokens = values.ids([item[1] for item in value], spot, f"{field}[..][1]")
    return tokens, values.series([item[0] for item in value], spot, f"{field}[..][0]")


def _prompt(
    record: Mapping[str, Any], info: Mapping[str, Any], spot: Spot
) -> NDArray[np.int64] | None:
    """The prompt's ids where the answer, or what was put beside it, has them all."""
    field = "meta_info.input_token_logprobs"
    asked = record.get("input_ids")
    if values.is_list(asked):
        return values.ids(asked, spot, "input_ids")
    given = info.get("input_token_logprobs")
    count = info.get("prompt_tokens")
    if not values.is_list(given) or not given:
        return None
    if type(count) is int and len(given) != count:
        what = f"holds {len(given)} of {count} prompt tokens (logprob_start_len): prompt left out"
        spot.note(field, what)
        return None
    return _triples(given, spot, field)[0]


def _routing(
    record: Mapping[str, Any],
    info: Mapping[str, Any],
    spot: Spot,
    prompt: NDArray[np.int64] | None,
    tokens: NDArray[np.int64] | None,
) -> dict[str, Routing]:
    field = "meta_info.routed_experts"
    given = info.get("routed_experts")
    if given is None:
        return {}
    start = values.integer(info.get("routed_experts_start_len"), spot, f"{field}_start_len") or 0
    if isinstance(given, str) and not given.startswith("nrlre1:"):
        length = info.get("prompt_tokens") if prompt is None else len(prompt)
        rows = 0
        if type(length) is int and tokens is not None:
            rows = length + len(tokens) - 1 - start
        sizes = shape_of(record, info, spot)
        given = experts.shaped(given, sizes, rows, spot, field)
    found = experts.routing(given, spot, field, start=start)
    return {} if found is None else {ROLLOUT: found}


def shape_of(
    record: Mapping[str, Any], info: Mapping[str, Any], spot: Spot
) -> tuple[int, int] | None:
    """(layers, k) from "routed_experts_shape", [layers, k] or with the rows before them."""
    field = "routed_experts_shape"
    given = info.get(field, record.get(field))
    if given is None:
        return None
    wrong = not values.is_list(given) or len(given) not in (2, 3)
    if wrong or not all(type(size) is int and 0 < size <= 4096 for size in given[-2:]):
        spot.bad(field, f"is {values.described(given)}; it is [layers, experts a token]")
        return None
    return given[-2], given[-1]


def _tops(value: Any, spot: Spot) -> dict[str, tuple[Mapping[int, float] | None, ...]]:
    field = "meta_info.output_top_logprobs"
    if value is None:
        return {}
    if not values.is_list(value):
        spot.bad(field, f"is {values.described(value)}; it is a list of lists and null")
        return {}
    return {ROLLOUT: tuple(_top(item, spot, f"{field}[{at}]") for at, item in enumerate(value))}


def _top(value: Any, spot: Spot, field: str) -> Mapping[int, float] | None:
    if value is None:
        return None
    found: dict[int, float] = {}
    for item in value if values.is_list(value) else [value]:
        triple = values.is_list(item) and len(item) >= 2
        number, token = (real(item[0]), token_id(item[1])) if triple else (None, None)
        if number is None or token is None:
            given = values.described(item)
            spot.bad(field, f"holds {given}; it is a list of [logprob, token id, text]")
            return None
        found[token] = number
    return found


def _meta(
    record: Mapping[str, Any],
    info: Mapping[str, Any],
    spot: Spot,
    tokens: NDArray[np.int64] | None,
) -> dict[str, Any]:
    asked = record.get("sampling_params")
    found = values.meta(asked, spot, "sampling_params") if isinstance(asked, Mapping) else {}
    reason = info.get("finish_reason")
    given = {
        "finish_reason": reason.get("type") if isinstance(reason, Mapping) else reason,
        "cached_tokens": info.get("cached_tokens"),
        "response_length": info.get("completion_tokens"),
        "prompt_length": info.get("prompt_tokens"),
        "rollout_rank": info.get("dp_rank"),
        "rollout_version": _versions(info, 0 if tokens is None else len(tokens)),
    }
    return found | values.meta(given, spot, "meta_info")


def _versions(info: Mapping[str, Any], length: int) -> Any:
    """The weights of each token where they changed within the answer, else of all of it."""
    spans = info.get("weight_versions")
    if not values.is_list(spans) or len(spans) < 2 or not length:
        return info.get("weight_version")
    found: list[Any] = []
    for span in spans:
        if not isinstance(span, Mapping) or span.get("start") != len(found):
            return info.get("weight_version")
        end = span.get("end")
        if type(end) is not int or not len(found) <= end <= length:
            return info.get("weight_version")
        found += [span.get("version")] * (end - len(found))
    return found if len(found) == length else info.get("weight_version")
