"""vLLM: RequestOutput as JSON, as `dataclasses.asdict` and `vars` make of it; one a line.

request_id, prompt, prompt_token_ids, num_cached_tokens and outputs: index, text, token_ids,
cumulative_logprob, finish_reason, routed_experts [rows, layers, k], and logprobs: for each token
{token id: {logprob, rank, decoded_token}}, or the flat lists of FlatLogprobs. The sampled token's
value is that of its own id; where the alternatives do not have it, it is absent: the first of them
is not the sampled one. "sampling_params" of the request is read where it was put beside the output.
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

_Tops = tuple[Mapping[int, float] | None, ...]
_FLAT = ("start_indices", "end_indices", "token_ids", "logprobs")


def fits(head: Head) -> bool:
    """Whether the first object is a RequestOutput."""
    return head.has("request_id", "outputs") or head.has("prompt_token_ids", "outputs")


def read(path: Path, side: str) -> Dump:
    """The outputs; their values are the sampler's, whatever `side` says."""
    problems = Problems()
    samples: list[Sample] = []
    for spot, record in values.objects(records(path), problems):
        outputs = record.get("outputs")
        if not values.is_list(outputs):
            spot.unreadable(f"is {values.described(outputs)}; it is a list", "outputs")
            continue
        key = values.key(record.get("request_id"), spot, "request_id")
        name = key or f"record {spot.number + 1}"
        prompt = values.ids(record.get("prompt_token_ids"), spot, "prompt_token_ids")
        for at, output in enumerate(outputs):
            field = f"outputs[{at}]"
            if not isinstance(output, Mapping):
                spot.bad(field, f"is {values.described(output)}; it is an object")
                continue
            if not values.room(samples, spot):
                break
            index = output.get("index", at)
            own = name if len(outputs) == 1 else f"{name}:{values.described(index)}"
            samples.append(_sample(record, output, spot, field, own, prompt))
    without = sum(ROLLOUT not in sample.series for sample in samples)
    notes = (f"{without} outputs have no logprobs; ask for them: logprobs=0",) if without else ()
    return dump_of("vllm", path, samples, problems, notes)


def _sample(
    record: Mapping[str, Any],
    output: Mapping[str, Any],
    spot: Spot,
    field: str,
    key: str,
    prompt: NDArray[np.int64] | None,
) -> Sample:
    tokens = values.ids(output.get("token_ids"), spot, f"{field}.token_ids")
    tops = _tops(output.get("logprobs"), spot, f"{field}.logprobs")
    series = None if tops is None else _chosen(tops, tokens, spot, f"{field}.logprobs")
    given = {
        "finish_reason": output.get("finish_reason"),
        "cumulative_logprob": output.get("cumulative_logprob"),
        "cached_tokens": record.get("num_cached_tokens"),
    }
    asked = record.get("sampling_params")
    meta = values.meta(asked, spot, "sampling_params") if isinstance(asked, Mapping) else {}
    return Sample(
        key=key,
        place=spot.place,
        prompt=prompt,
        tokens=tokens,
        series={} if series is None else {ROLLOUT: series},
        routing=_routing(record, output, spot, field, prompt, tokens),
        top={ROLLOUT: tops} if tops is not None and any(len(top or ()) > 1 for top in tops) else {},
        text=values.text(output.get("text"), spot, f"{field}.text"),
        meta=meta | values.meta(given, spot, field),
    )


def _tops(value: Any, spot: Spot, field: str) -> _Tops | None:
    """Per position {token id: log-probability}, of either of vLLM's two layouts."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return _flat(value, spot, field)
    if not values.is_list(value):
        spot.bad(field, f"is {values.described(value)}; it is a list of objects")
        return None
    return tuple(_top(item, spot, f"{field}[{at}]") for at, item in enumerate(value))


def _top(value: Any, spot: Spot, field: str) -> Mapping[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        spot.bad(field, f"is {values.described(value)}; it is an object keyed by token ids")
        return None
    found: dict[int, float] = {}
    for name, item in value.items():
        token = token_id(name)
        if token is None:
            spot.bad(field, f"has the name {values.described(name)}; it is a token id")
            return None
        given = item.get("logprob") if isinstance(item, Mapping) else item
        if given is None:
            continue
        number = real(given)
        if number is None:
            spot.bad(field, f"token {token} has {values.described(given)}; it is a number")
            return None
        found[token] = number
    return found


def _flat(value: Mapping[str, Any], spot: Spot, field: str) -> _Tops | None:
    starts, ends, tokens = (
        values.ids(value.get(name), spot, f"{field}.{name}") for name in _FLAT[:3]
    )
    numbers = values.series(value.get("logprobs"), spot, f"{field}.logprobs")
    if starts is None or ends is None or tokens is None or numbers is None:
        missing = ", ".join(name for name in _FLAT if value.get(name) is None)
        spot.bad(field, f"is no FlatLogprobs: {missing or 'see above'}")
        return None
    length = len(tokens)
    if len(starts) != len(ends) or len(numbers.values) != length:
        spot.bad(field, "its lists have lengths that do not belong together")
        return None
    if np.any(starts > ends) or np.any(ends > length) or np.any(starts[1:] < ends[:-1]):
        spot.bad(field, f"its indices do not ascend within {length} entries")
        return None
    pairs = list(zip(tokens.tolist(), numbers.values.tolist(), strict=True))
    kept = numbers.absent.tolist()
    return tuple(
        {pairs[at][0]: pairs[at][1] for at in range(start, end) if not kept[at]}
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def _chosen(tops: _Tops, tokens: NDArray[np.int64] | None, spot: Spot, field: str) -> Series | None:
    """The values of the tokens that were sampled, absent where the alternatives lack them."""
    if tokens is None:
        spot.bad(field, "without token_ids nobody knows which of them was sampled")
        return None
    numbers = np.full(len(tops), np.nan)
    absent = np.ones(len(tops), dtype=np.bool_)
    lacking = [
        at
        for at, (token, top) in enumerate(zip(tokens.tolist(), tops, strict=False))
        if top and token not in top
    ]
    for at, (token, top) in enumerate(zip(tokens.tolist(), tops, strict=False)):
        if top and token in top:
            numbers[at], absent[at] = top[token], False
    if lacking:
        at = lacking[0]
        more = f", nor at {len(lacking) - 1} more positions" if len(lacking) > 1 else ""
        what = f"the sampled id {int(tokens[at])} is not among the alternatives at {at}{more}"
        spot.bad(field, f"{what}; its value cannot be told from theirs and is absent")
    return Series(numbers, absent)


def _routing(
    record: Mapping[str, Any],
    output: Mapping[str, Any],
    spot: Spot,
    field: str,
    prompt: NDArray[np.int64] | None,
    tokens: NDArray[np.int64] | None,
) -> dict[str, Routing]:
    given = output.get("routed_experts")
    if given is None:
        return {}
    found = experts.routing(given, spot, f"{field}.routed_experts")
    before = experts.routing(record.get("prompt_routed_experts"), spot, "prompt_routed_experts")
    if found is None:
        return {}
    if before is not None:
        if before.experts.shape[1:] != found.experts.shape[1:]:
            spot.bad("prompt_routed_experts", "has other layers or k than the output's")
        else:
            both = np.concatenate([before.experts, found.experts])
            return {ROLLOUT: Routing(both, 0)}
    start = first_row(given, len(found.experts), prompt, tokens)
    return {ROLLOUT: Routing(found.experts, start)}


def first_row(
    given: Any, rows: int, prompt: NDArray[np.int64] | None, tokens: NDArray[np.int64] | None
) -> int:
    """Where row 0 stands: as the file says, 0 where the rows fit all tokens, else unknown (-1).

    vLLM has a row for each token that went through the model: all, or all but the last one.
    """
    if isinstance(given, Mapping) and type(given.get("start")) is int and given["start"] >= 0:
        return int(given["start"])
    if prompt is None or tokens is None:
        return -1
    return 0 if 0 <= len(prompt) + len(tokens) - rows <= 1 else -1
