"""NeMo-RL: `train_data_step{N}.jsonl`, which its logger writes each step of GRPO and PPO.

One sample a line, each field with a batch dimension of one: token_ids [1][S] padded to the longest
of the batch, input_lengths [1], token_loss_mask, generation_logprobs, prev_logprobs [1][S] with the
value of a token at its own place (0 at the first), sample_loss_mask [1], content, idx. The response
begins at the first token of the loss mask; what follows in the mask's gaps are tokens of tools and
users. Under force_on_policy_ratio the trainer scores nothing and prev_logprobs are zeros: such a
file has no side of the trainer. Routing is not in these files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.formats import values
from verify.onpolicy.formats.heads import Head
from verify.onpolicy.formats.json_records import records
from verify.onpolicy.formats.plain import dump_of
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Sample, Series

_USED = (
    *("token_ids", "input_lengths", "token_loss_mask", "sample_loss_mask", "content", "idx"),
    *("generation_logprobs", "prev_logprobs"),
)
_COLUMNS = {"generation_logprobs": ROLLOUT, "prev_logprobs": TRAINER}


def fits(head: Head) -> bool:
    """Whether the first object has the logger's names."""
    return head.has("token_ids", "token_loss_mask") and any(map(head.has, _COLUMNS))


def read(path: Path, side: str) -> Dump:
    """The samples of a step; both sides are in the file, whatever `side` says."""
    problems = Problems()
    samples: list[Sample] = []
    named = re.search(r"step_?(\d{1,18})", path.stem)
    step = int(named.group(1)) if named else None
    dropped = 0
    for spot, record in values.objects(records(path), problems):
        for one in _unbatched(record, spot):
            if not values.room(samples, spot):
                break
            sample = _sample(one, spot, step, len(samples))
            if sample is not None:
                samples.append(sample)
                dropped += sample.mask is not None and not sample.mask.any()
    notes = [f"{dropped} samples count no token: their loss masks are zero"] if dropped else []
    scored = [sample.series[TRAINER] for sample in samples if TRAINER in sample.series]
    if scored and not any(bool(series.values.any()) for series in scored):
        notes.append(
            "prev_logprobs are zero everywhere, as NeMo-RL writes where it skips them "
            "(force_on_policy_ratio): they are no log-probabilities and left out"
        )
        samples = [_without_trainer(sample) for sample in samples]
    return dump_of("nemo-rl", path, samples, problems, tuple(notes))


def _without_trainer(sample: Sample) -> Sample:
    kept = {side: series for side, series in sample.series.items() if side != TRAINER}
    return replace(sample, series=kept)


def _unbatched(record: Mapping[str, Any], spot: Spot) -> Iterator[Mapping[str, Any]]:
    """The samples of a line: its fields have a batch dimension, which is one in all versions."""
    tokens = record.get("token_ids")
    if not (values.is_list(tokens) and tokens and all(map(values.is_list, tokens))):
        yield record
        return
    if len(tokens) > 1:
        spot.note("token_ids", f"holds {len(tokens)} samples; each is read")
    given = {name: record[name] for name in _USED if name in record}
    batched = {
        name for name, value in given.items() if values.is_list(value) and len(value) == len(tokens)
    }
    for row in range(len(tokens)):
        yield {name: value[row] if name in batched else value for name, value in given.items()}


def _sample(record: Mapping[str, Any], spot: Spot, step: int | None, count: int) -> Sample | None:
    tokens = values.ids(record.get("token_ids"), spot, "token_ids")
    if tokens is None:
        spot.unreadable("has no token ids", "token_ids")
        return None
    key = values.key(record.get("idx"), spot, "idx") or str(count)
    length = values.integer(record.get("input_lengths"), spot, "input_lengths", 0, len(tokens))
    end = len(tokens) if length is None else length
    mask = values.mask(record.get("token_loss_mask"), spot, "token_loss_mask")
    begin = end
    if mask is not None and mask[:end].any():
        begin = int(np.flatnonzero(mask[:end])[0])
    elif mask is None:
        begin = 0
    counted = None if mask is None else _counted(mask[begin:end], record, spot)
    series = {}
    for field, side in _COLUMNS.items():
        if (one := values.series(record.get(field), spot, field)) is not None:
            series[side] = _part(one, len(tokens), begin, end, spot, field)
    return Sample(
        key=key if step is None else f"{step}:{key}",
        place=spot.place,
        prompt=tokens[:begin],
        tokens=tokens[begin:end],
        mask=counted,
        series=series,
        text=_text(record.get("content")),
        meta={} if step is None else {"step": step},
    )


def _counted(mask: NDArray[np.bool_], record: Mapping[str, Any], spot: Spot) -> NDArray[np.bool_]:
    """The tokens that the loss counts: none where the sample itself is masked."""
    weight = values.number(record.get("sample_loss_mask"), spot, "sample_loss_mask", 0)
    return np.zeros_like(mask) if weight == 0 else mask


def _part(series: Series, length: int, begin: int, end: int, spot: Spot, field: str) -> Series:
    """The response's part of a list as long as all tokens; a list of another length as it is."""
    if len(series.values) != length:
        given = f"has {len(series.values)} entries for {length} tokens"
        spot.note(field, f"{given}: taken for the response as it stands")
        return series
    return Series(series.values[begin:end], series.absent[begin:end], series.stored)


def _text(content: Any) -> str | None:
    return content if isinstance(content, str) else None
