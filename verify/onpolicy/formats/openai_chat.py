"""OpenAI chat completions as JSON, of any server that speaks the protocol; one a line.

choices: index, message.content, finish_reason, logprobs.content [{token, logprob, top_logprobs}].
The protocol has no token ids: without them nothing can be paired. They are there with vLLM's
return_token_ids (prompt_token_ids, choices[].token_ids) and with its return_tokens_as_token_ids
(tokens "token_id:17"). Read as well: vLLM's /inference/v1/generate, completions of plain text
(logprobs.tokens, token_logprobs), lines of a batch result {custom_id, response: {body}}, routed
experts as vLLM (base64 of .npy) and SGLang (sgl_ext; base64 of int32, "routed_experts_shape":
[layers, k] has to be added) give them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.formats import experts, values
from verify.onpolicy.formats.heads import Head
from verify.onpolicy.formats.json_records import records
from verify.onpolicy.formats.plain import dump_of, real, token_id
from verify.onpolicy.formats.sglang import shape_of
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.formats.vllm import first_row
from verify.onpolicy.samples import ROLLOUT, Dump, Routing, Sample, Series

_AS_ID = "token_id:"
_Tops = tuple[Mapping[int, float] | None, ...]


def fits(head: Head) -> bool:
    """Whether the first object is a completion, or a batch result with one."""
    return isinstance(_body(head.first).get("choices"), list)


def read(path: Path, side: str) -> Dump:
    """The choices; their values are the sampler's, whatever `side` says."""
    problems = Problems()
    samples: list[Sample] = []
    for spot, record in values.objects(records(path), problems):
        body = _body(record)
        choices = body.get("choices")
        if not values.is_list(choices):
            spot.unreadable(f"is {values.described(choices)}; it is a list", "choices")
            continue
        given = next(
            (found for name in _KEYS if (found := record.get(name, body.get(name))) is not None),
            None,
        )
        name = values.key(given, spot, "id") or f"record {spot.number + 1}"
        for at, choice in enumerate(choices):
            field = f"choices[{at}]"
            if not isinstance(choice, Mapping):
                spot.bad(field, f"is {values.described(choice)}; it is an object")
                continue
            if not values.room(samples, spot):
                break
            index = values.described(choice.get("index", at))
            own = name if len(choices) == 1 else f"{name}:{index}"
            samples.append(_sample(body, choice, spot, field, own))
    notes = []
    if without := sum(sample.tokens is None for sample in samples):
        notes.append(
            f"{without} answers have no token ids, and text is never paired; ask vLLM for them: "
            "return_token_ids"
        )
    if without := sum(ROLLOUT not in sample.series for sample in samples):
        notes.append(f"{without} answers have no logprobs; ask for them: logprobs true")
    return dump_of("openai-chat", path, samples, problems, tuple(notes))


_KEYS = ("custom_id", "id", "request_id")


def _body(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The completion itself, of a line that may wrap it as results of a batch do."""
    response = record.get("response")
    if "choices" not in record and isinstance(response, Mapping):
        body = response.get("body", response)
        return body if isinstance(body, Mapping) else {}
    return record


@dataclass(frozen=True, eq=False)
class _Scored:
    """What logprobs of a choice say: of each token its name, value and alternatives."""

    tokens: NDArray[np.int64] | None = None
    series: Series | None = None
    tops: _Tops | None = None


def _sample(
    body: Mapping[str, Any], choice: Mapping[str, Any], spot: Spot, field: str, key: str
) -> Sample:
    scored = _scored(choice.get("logprobs"), spot, f"{field}.logprobs")
    tokens = values.ids(choice.get("token_ids"), spot, f"{field}.token_ids")
    if tokens is None:
        tokens = scored.tokens
    asked = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
    prompt = values.ids(asked, spot, "prompt_token_ids")
    message = choice.get("message")
    text = message.get("content") if isinstance(message, Mapping) else choice.get("text")
    metadata = body.get("metadata")
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    given = {
        "finish_reason": choice.get("finish_reason"),
        "cached_tokens": details.get("cached_tokens") if isinstance(details, Mapping) else None,
        "rollout_version": (
            metadata.get("weight_version") if isinstance(metadata, Mapping) else None
        ),
    }
    return Sample(
        key=key,
        place=spot.place,
        prompt=prompt,
        tokens=tokens,
        series={} if scored.series is None else {ROLLOUT: scored.series},
        routing=_routing(body, choice, spot, field, prompt, tokens),
        top={} if scored.tops is None else {ROLLOUT: scored.tops},
        text=text if isinstance(text, str) else None,
        meta=values.meta(given, spot, field),
    )


def _scored(value: Any, spot: Spot, field: str) -> _Scored:
    if value is None:
        return _Scored()
    if not isinstance(value, Mapping):
        spot.bad(field, f"is {values.described(value)}; it is an object")
        return _Scored()
    if "token_logprobs" in value:
        names = value.get("tokens")
        numbers = values.series(value["token_logprobs"], spot, f"{field}.token_logprobs")
        listed = names if values.is_list(names) else None
        return _Scored(None if listed is None else _ids(listed), numbers)
    content = value.get("content")
    if content is None:
        return _Scored()
    if not values.is_list(content) or not all(isinstance(item, Mapping) for item in content):
        spot.bad(f"{field}.content", f"is {values.described(content)}; it is a list of objects")
        return _Scored()
    numbers = values.series(
        [item.get("logprob") for item in content], spot, f"{field}.content[..].logprob"
    )
    tokens = _ids([item.get("token") for item in content])
    tops = None
    if tokens is not None and any(item.get("top_logprobs") for item in content):
        tops = tuple(
            _top(item.get("top_logprobs"), spot, f"{field}.content[{at}].top_logprobs")
            for at, item in enumerate(content)
        )
    return _Scored(tokens, numbers, tops)


def _ids(names: Sequence[Any]) -> NDArray[np.int64] | None:
    """Token ids where every token is written as its id, else None: text is never taken for one."""
    found = [
        token_id(name.removeprefix(_AS_ID))
        if isinstance(name, str) and name.startswith(_AS_ID)
        else None
        for name in names
    ]
    if not found or any(token is None for token in found):
        return None
    return np.array(found, dtype=np.int64)


def _top(value: Any, spot: Spot, field: str) -> Mapping[int, float] | None:
    if not value:
        return None
    if not values.is_list(value) or not all(isinstance(item, Mapping) for item in value):
        spot.bad(field, f"is {values.described(value)}; it is a list of objects")
        return None
    names = _ids([item.get("token") for item in value])
    numbers = [real(item.get("logprob")) for item in value]
    if names is None or any(number is None for number in numbers):
        spot.bad(field, "an alternative has no token id, or no number")
        return None
    pairs = zip(names.tolist(), numbers, strict=True)
    return {token: number for token, number in pairs if number is not None}


def _routing(
    body: Mapping[str, Any],
    choice: Mapping[str, Any],
    spot: Spot,
    field: str,
    prompt: NDArray[np.int64] | None,
    tokens: NDArray[np.int64] | None,
) -> dict[str, Routing]:
    extra = choice.get("sgl_ext")
    if isinstance(extra, Mapping) and isinstance(extra.get("routed_experts"), str):
        name = f"{field}.sgl_ext.routed_experts"
        start = values.integer(extra.get("routed_experts_start_len"), spot, f"{name}_start_len")
        rows = 0
        if prompt is not None and tokens is not None:
            rows = len(prompt) + len(tokens) - 1 - (start or 0)
        sizes = shape_of(body, {**choice, **extra}, spot)
        given: Any = experts.shaped(extra["routed_experts"], sizes, rows, spot, name)
        found = experts.routing(given, spot, name, start=start or 0)
        return {} if found is None else {ROLLOUT: found}
    given = choice.get("routed_experts")
    found = experts.routing(given, spot, f"{field}.routed_experts")
    if found is None:
        return {}
    start = first_row(given, len(found.experts), prompt, tokens)
    return {ROLLOUT: Routing(found.experts, start)}
