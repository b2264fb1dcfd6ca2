"""slime's debug dumps: --save-debug-rollout-data and --save-debug-train-data, files of torch.save.

Fields as of slime 0.3.1 (commit 624b824a). Both hold `samples`, a list of dicts. A rollout's has
index, tokens (prompt and response), response_length, response, loss_mask, rollout_log_probs,
rollout_routed_experts [len(tokens) - 1, layers, k], weight_versions, status; a trainer's has
sample_index, tokens, response_lengths, loss_masks, log_probs, rollout_log_probs and
data_parallel_rank. miles writes its rollouts in the same way. Samples are paired by index, or by
their place in the rollout where indices are missing or occur twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.errors import InputFileError
from verify.onpolicy.formats import experts, torch_files, values
from verify.onpolicy.formats.heads import PICKLE, TORCH, Head
from verify.onpolicy.formats.torch_files import Content
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Place, Routing, Sample, Series

_INDEX = ("index", "sample_index")
_LENGTH = ("response_length", "response_lengths")
_MASK = ("loss_mask", "loss_masks")
_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort"}
_EXPERTS = "rollout_routed_experts"


def fits(head: Head) -> bool:
    """A torch.save file whose outer dict has `samples` and `rollout_id`."""
    if head.container not in (TORCH, PICKLE):
        return False
    names = torch_files.names_in(head.path)
    return {"rollout_id", "samples"} <= set(names) and "rollout_data" not in names


def read(path: Path, side: str) -> Dump:
    """The samples of one file. Its names say whose the values are; `side` plays no part.

    Raises InputFileError where the file cannot be read, or holds no list of samples.
    """
    content = torch_files.opened(path)
    outer = content.value
    samples = outer.get("samples") if isinstance(outer, Mapping) else None
    if not isinstance(samples, list):
        raise InputFileError(
            f"{path}: holds {names_of(outer)}; slime's dumps are a dict with a list `samples`"
        )
    problems = Problems()
    whole = Spot(Place(str(path)), problems)
    step = values.integer(outer.get("rollout_id"), whole, "rollout_id", -1)
    records = list(
        values.objects(
            ((Place(str(path), f"samples[{at}]"), each) for at, each in enumerate(samples)),
            problems,
        )
    )
    keys, notes = _keys(records, step)
    found = [
        sample
        for (spot, record), key in zip(records, keys, strict=True)
        if (sample := sample_of(content, record, spot, key)) is not None
    ]
    if any(record.get("rollout_top_p_token_offsets") is not None for _, record in records):
        notes.append(
            "the samples keep the token ids that top-p left over: the sampler's top_p was below 1"
        )
    return Dump(
        "slime",
        (str(path),),
        tuple(found),
        problems.listed(),
        tuple(notes),
        {} if step is None else {"step": step},
    )


def sample_of(content: Content, record: Mapping[str, Any], spot: Spot, key: str) -> Sample | None:
    """One sample from a dict of slime's names, or None with a problem where it has no tokens."""
    field = named(record, _LENGTH)
    given = torch_files.plain(content, first(record, _LENGTH), spot, field)
    length = values.integer(given, spot, field)
    tokens = values.ids(
        torch_files.plain(content, record.get("tokens"), spot, "tokens"), spot, "tokens"
    )
    prompt, response = split(tokens, length, spot, field)
    series: dict[str, Series] = {}
    for side, name in ((ROLLOUT, "rollout_log_probs"), (TRAINER, "log_probs")):
        one = series_of(content, record, spot, name)
        if one is not None:
            series[side] = one
    if response is None and not series:
        spot.unreadable("holds neither tokens nor log-probabilities that can be read")
        return None
    routing: dict[str, Routing] = {}
    chosen = experts.routing(
        torch_files.plain(content, record.get(_EXPERTS), spot, _EXPERTS), spot, _EXPERTS, start=0
    )
    if chosen is not None:
        routing[ROLLOUT] = chosen
    name = named(record, _MASK)
    return Sample(
        key=key,
        place=spot.place,
        prompt=prompt,
        tokens=response,
        mask=values.mask(torch_files.plain(content, first(record, _MASK), spot, name), spot, name),
        series=series,
        routing=routing,
        text=values.text(record.get("response"), spot, "response"),
        meta=_meta(record, spot, length),
    )


def series_of(content: Content, record: Mapping[str, Any], spot: Spot, name: str) -> Series | None:
    """The log-probabilities under a name, with the dtype in which the file has them."""
    value = record.get(name)
    return values.series(
        torch_files.plain(content, value, spot, name), spot, name, torch_files.stored_as(value)
    )


def split(
    tokens: NDArray[np.int64] | None, length: int | None, spot: Spot, field: str
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Prompt and response of tokens that hold both; (None, None) with a problem where they do not
    say where the response begins."""
    if tokens is None:
        return None, None
    if length is None:
        spot.bad(field, "is missing; without it nobody knows where the response begins")
        return None, None
    if length > len(tokens):
        spot.bad(field, f"is {length}, and prompt and response have {len(tokens)} tokens together")
        return None, None
    border = len(tokens) - length
    return tokens[:border], tokens[border:]


def named(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Which of several names a record has; the first where it has none."""
    return next((name for name in names if record.get(name) is not None), names[0])


def first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value under the first of several names that a record has."""
    return record.get(named(record, names))


def _keys(
    records: Sequence[tuple[Spot, Mapping[str, Any]]], step: int | None
) -> tuple[list[str], list[str]]:
    """A key for each record, and notes. Indices count on over steps, places do not."""
    given = [first(record, _INDEX) for _, record in records]
    if all(map(_is_index, given)) and len(set(given)) == len(given):
        return [str(index) for index in given], []
    places = [record.get("rollout_position") for _, record in records]
    if not all(map(_is_index, places)) or len(set(places)) != len(places):
        places = list(range(len(records)))
    before = "" if step is None else f"step {step}, "
    why = "missing" if any(index is None for index in given) else "not one of its own each"
    note = f"the samples' indices are {why}; they are paired by their place in the rollout"
    return [f"{before}place {place}" for place in places], [note]


def _is_index(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _meta(record: Mapping[str, Any], spot: Spot, length: int | None) -> dict[str, Any]:
    given: dict[str, Any] = {
        "group": record.get("group_index"),
        "rank": record.get("data_parallel_rank"),
        "finish_reason": _finish(record),
        "response_length": length,
        "rollout_version": _version(record, spot, length),
    }
    cache = record.get("prefix_cache_info")
    if isinstance(cache, Mapping):
        given["cached_tokens"] = cache.get("cached_tokens")
    return values.meta(given, spot, "")


def _finish(record: Mapping[str, Any]) -> Any:
    status = record.get("status")
    if isinstance(status, str):
        return _FINISH.get(status, status)
    truncated = record.get("truncated")
    return "length" if isinstance(truncated, int) and truncated else None


def _version(record: Mapping[str, Any], spot: Spot, length: int | None) -> Any:
    """One version, or one for each token; a list of another length says of no token which."""
    given = record.get("weight_versions")
    if not isinstance(given, list) or not given:
        return None
    if len(given) == length and len(given) > 1:
        return given
    kinds = {values.key(item, spot, "weight_versions") for item in given} - {None}
    if len(kinds) == 1:
        return kinds.pop()
    spot.note(
        "weight_versions",
        f"has {len(kinds)} versions for a response of {length} tokens; which tokens are of which "
        "is not written",
    )
    return None


def names_of(outer: Any) -> str:
    """What a file holds in place of what it should, in a few words."""
    if not isinstance(outer, Mapping):
        return values.described(outer)
    names = [values.described(name) for name in list(outer)[:12]]
    return f"a dict with {', '.join(names)}" if names else "an empty dict"
