"""verl: `{step}.jsonl` of `trainer.rollout_data_dir`, which holds decoded text only.

input, output, gts, score, step, and whatever the reward function returned beside its score. There
are no token ids and no log-probabilities in it, so that nothing can be scored; the reader says what
is missing. Since extras of the reward function are written too, a line that carries tensors of
verl's batch under their own names (prompts, responses, response_mask, rollout_log_probs,
old_log_probs) or any name of `plain` is read with them; verify.onpolicy.recorder writes these
from inside the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verify.onpolicy.formats import plain, values
from verify.onpolicy.formats.heads import Head
from verify.onpolicy.formats.json_records import records
from verify.onpolicy.formats.plain import dump_of
from verify.onpolicy.formats.values import Problems
from verify.onpolicy.samples import Dump, Sample

_RENAMED = {  # verl's name: ours
    "prompts": "prompt_ids",
    "responses": "response_ids",
    "response_mask": "mask",
    "rollout_log_probs": "sampler_logprobs",
    "old_log_probs": "trainer_logprobs",
    "output": "text",
}
MISSING = (
    "verl's dump holds decoded text: no token ids, no log-probabilities, no mask; nothing can be "
    "scored. Record them inside the trainer: verify.onpolicy.recorder"
)


def fits(head: Head) -> bool:
    """Whether the first object has the names that every line of a verl dump has."""
    return head.has("input", "output") and (head.has("score") or head.has("step"))


def read(path: Path, side: str) -> Dump:
    """The responses of a step, as text where the file has no more."""
    problems = Problems()
    samples: list[Sample] = []
    for spot, record in values.objects(records(path), problems):
        if "output" not in record:
            spot.unreadable("has no output")
            continue
        step = values.integer(record.get("step"), spot, "step")
        count = str(spot.number)
        fallback = count if step is None else f"{step}:{count}"
        sample = plain.sample_of(_renamed(record, step), spot, side, fallback)
        if sample is not None:
            samples.append(sample)
    scored = any(sample.tokens is not None for sample in samples)
    return dump_of("verl", path, samples, problems, () if scored else (MISSING,))


def _renamed(record: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    found = {ours: record[theirs] for theirs, ours in _RENAMED.items() if theirs in record}
    found |= {name: record[name] for name in _PLAIN if name in record}
    name = next((record[name] for name in ("id", "request_id", "uid") if record.get(name)), None)
    group = record.get("uid")
    meta = record.get("meta")
    found["id"] = name
    found["meta"] = {
        **(meta if isinstance(meta, Mapping) else {}),
        **({} if step is None else {"step": step}),
        **({"group": group} if isinstance(group, str) and name != group else {}),
    }
    return found


_PLAIN = (
    *("prompt_ids", "response_ids", "mask", "routing", "sampler_top", "trainer_top"),
    *("sampler_logprobs", "rollout_logprobs", "trainer_logprobs", "logprobs"),
    *("sampler_dtype", "trainer_dtype", "dtype"),
)
