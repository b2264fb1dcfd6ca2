"""Reports in which a side had another head, other weights or another prompt (BUG-38 to BUG-42).

As in onpolicy_reports: `FAULTS` must be found with the right cause first, `TWINS` stay silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onpolicy_cases import (
    RAW,
    Drawn,
    Files,
    Floats,
    Line,
    Toy,
    best,
    bfloat16,
    chosen,
    lines,
    noisy,
    picked,
    single,
)
from onpolicy_reports import sides
from onpolicy_tables import Report, Twin


@dataclass(frozen=True, eq=False)
class Head:
    """hidden: [S, R, D]; weights: [V, D]. Responses are drawn from `sampler`'s logits."""

    hidden: Floats
    weights: Floats
    responses: tuple[list[int], ...]

    def score(self, logits: Callable[[int], Floats]) -> list[list[float]]:
        """Values of all samples from [R, V] logits by sample."""
        return [chosen(logits(at), response) for at, response in enumerate(self.responses)]

    def lines(self, side: str, values: Sequence[Sequence[float]], **more: Any) -> list[Line]:
        samples = Drawn(tuple([[1, 2]] * len(values)), self.responses, ())
        given = (values, None) if side == "sampler" else (None, values)
        return lines(samples, *given, **more)


def head(
    logits: Callable[[int, Floats, Floats], Floats], count: int = 12, length: int = 40
) -> Head:
    """logits: of the sampler, from the sample's number, its hidden states and the weights."""
    rng = np.random.default_rng(38)
    hidden = rng.normal(size=(count, length, 64))
    weights = rng.normal(size=(256, 64)) * 0.35
    responses = tuple(picked(logits(at, hidden[at], weights), rng) for at in range(count))
    return Head(hidden, weights, responses)


def exact(at: int, hidden: Floats, weights: Floats) -> Floats:
    return hidden @ weights.T


def rounded(at: int, hidden: Floats, weights: Floats) -> Floats:
    return bfloat16(bfloat16(hidden) @ bfloat16(weights).T)


def low_precision(what: str) -> Files:
    """logits, softmax or stored: what of the sampler is bf16. alternatives: logits, and top 8."""
    made = head(exact if what == "stored" else rounded)
    trainer = made.score(lambda at: exact(at, made.hidden[at], made.weights))
    sampler_logits = [rounded(at, made.hidden[at], made.weights) for at in range(len(trainer))]
    more: dict[str, Any] = {}
    if what == "stored":
        sampler = [single(bfloat16(one)) for one in trainer]
    elif what == "softmax":
        sampler = []
        for logits, response in zip(sampler_logits, made.responses, strict=True):
            peak = logits.max(axis=1)
            total = bfloat16(np.log(bfloat16(np.exp(bfloat16(logits - peak[:, None]))).sum(axis=1)))
            own = logits[np.arange(len(response)), response]
            sampler.append(single(bfloat16(bfloat16(own - peak) - total)))
    else:
        sampler = made.score(lambda at: sampler_logits[at])
    if what == "alternatives":
        tops = [[best(row, 8) for row in logits] for logits in sampler_logits]
        more["sampler_top"] = lambda at: tops[at]
    return Files(made.lines("trainer", trainer), made.lines("sampler", sampler, **more))


def dropped(rate: float, again: int) -> Files:
    made = head(exact)
    sampler = made.score(lambda at: exact(at, made.hidden[at], made.weights))

    def trainer(seed: int) -> list[list[float]]:
        kept = np.random.default_rng(seed).random(made.hidden.shape) >= rate
        hidden = made.hidden * kept / (1 - rate)
        return made.score(lambda at: exact(at, hidden[at], made.weights))

    return Files(
        made.lines("trainer", trainer(1)),
        made.lines("sampler", sampler),
        {"trainer_again": made.lines("trainer", trainer(again))},
    )


def steps(fault: bool, *, versions: bool = False, scored: bool = False) -> Files:
    """Six steps of four samples; from step 3 on the sampler is one step behind."""
    rng = np.random.default_rng(40)
    move = 0.02 * rng.normal(size=(256, 64))

    def behind(at: int) -> int:
        step = at // 4
        return step - 1 if fault and step >= 3 else step

    made = head(
        lambda at, hidden, weights: exact(at, hidden, weights + behind(at) * move), count=24
    )

    def by(version: Callable[[int], int]) -> list[list[float]]:
        return made.score(lambda at: exact(at, made.hidden[at], made.weights + version(at) * move))

    def meta(at: int) -> dict[str, Any]:
        told = {"rollout_version": str(behind(at)), "trainer_version": str(at // 4)}
        return {"step": at // 4, **(told if versions else {})}

    def always(version: int) -> Callable[[int], int]:
        return lambda at: version

    every = {str(v): made.lines("trainer", by(always(v))) for v in range(6)} if scored else {}
    evidence = {"steps": every} if scored else {}
    return Files(
        made.lines("trainer", noisy(by(lambda at: at // 4), 0.01), meta=meta),
        made.lines("sampler", by(behind), meta=meta),
        evidence,
    )


def lora(fault: bool) -> Files:
    """The update is below half an ulp of the sampler's bf16 weights, and is lost in the merge."""
    rng = np.random.default_rng(41)
    update = 0.1 * rng.normal(size=(256, 4)) @ rng.normal(size=(4, 64))
    sampled = 0.005 * update if fault else update
    made = head(lambda at, hidden, weights: exact(at, hidden, weights + sampled))

    def by(added: Floats | float) -> list[list[float]]:
        return made.score(lambda at: exact(at, made.hidden[at], made.weights + added))

    told = {"rollout_version": "7", "trainer_version": "7"}
    after = noisy(by(update), 1e-3)
    before = noisy(by(0.0), 1e-3, seed=2)
    scored = {"6": made.lines("trainer", before), "7": made.lines("trainer", after)}
    evidence = {"steps": scored}
    return Files(
        made.lines("trainer", after, meta=told),
        made.lines("sampler", by(sampled), meta=told),
        evidence,
    )


def permuted(what: str) -> Files:
    """8 prompts with 2 responses each; inside rank 1's block the trainer takes the next prompt.

    what: "lists" permutes its log-probabilities there instead; or other faults of joining.
    """
    toy = Toy()
    rng = np.random.default_rng(42)
    prompts = [[int(x) for x in rng.integers(0, 64, 6)] for _ in range(8) for _ in range(2)]
    samples = toy.draw(prompts, 24)
    used = [at if at < 8 else 8 + (at - 8 + 2) % 8 for at in range(16)]
    if what not in ("scored", "prompts told"):
        used = list(range(16))
    behind = [prompts[one] for one in used]
    ours = [toy.score(p, r) for p, r in zip(behind, samples.responses, strict=True)]
    if what == "lists":
        ours = [ours[one] for one in [*range(8), *range(9, 16), 8]]
    ours = noisy(ours, 1e-3)
    theirs = samples.values(RAW)

    def meta(at: int) -> dict[str, Any]:
        return {"rank": at // 8, "group": str(at // 2)}

    trainer = lines(samples, None, ours, meta=meta)
    sampler = lines(samples, theirs, None, meta=meta)
    if what == "prompts told":
        trainer = [
            {**line, "prompt_ids": prompt} for line, prompt in zip(trainer, behind, strict=True)
        ]
    if what == "by id":
        sampler = sampler[3:] + sampler[:3]
    if what == "twice":
        trainer = [*trainer, trainer[3]]
    if what == "missing":
        sampler = sampler[:-1]
    return Files(trainer, sampler)


FAULTS = (
    Report(
        "BUG-38",
        "stored in bf16",
        lambda: low_precision("stored"),
        says=(r"exact bfloat16 numbers",),
        first=("low-precision-head",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-38",
        "softmax in bf16",
        lambda: low_precision("softmax"),
        first=("low-precision-head",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-38",
        "logits in bf16, alternatives recorded",
        lambda: low_precision("alternatives"),
        first=("low-precision-head",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-38",
        "logits in bf16",
        lambda: low_precision("logits"),
        first=("low-precision-head", "numeric-drift"),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-39",
        "other seed",
        lambda: dropped(0.1, 2),
        first=("dropout",),
        says=(r"trainer against trainer",),
    ),
    Report(
        "BUG-40", "steps", lambda: steps(True), first=("stale-weights",), says=(r"from step 3 on",)
    ),
    Report("BUG-40", "versions", lambda: steps(True, versions=True), first=("stale-weights",)),
    Report(
        "BUG-40",
        "scored by every version",
        lambda: steps(True, scored=True),
        first=("stale-weights",),
        says=(r"step 3", r"behind|agrees with the trainer"),
    ),
    Report(
        "BUG-41",
        "scored without the update",
        lambda: lora(True),
        first=("stale-weights",),
        says=(r"agrees with the trainer of 6",),
    ),
    Report(
        "BUG-42",
        "in rank 1",
        lambda: permuted("scored"),
        first=("wrong-prompt",),
        says=(r"samples 8, 9", r"rank 1"),
    ),
    Report(
        "BUG-42",
        "prompts told",
        lambda: permuted("prompts told"),
        first=("wrong-prompt",),
        misaligned=("other-prompt",),
    ),
    Report("BUG-42", "an id twice", lambda: permuted("twice"), misaligned=("duplicate-key",)),
    Report(
        "BUG-42",
        "an id missing",
        lambda: permuted("missing"),
        misaligned=("missing-sample",),
        verdict="UNVERIFIED",
    ),
)
TWINS = (
    Twin("BUG-38", "both fp32", lambda: sides(RAW, RAW, 2e-6)),
    Twin("BUG-39", "no dropout", lambda: dropped(0.0, 2)),
    Twin("BUG-40", "weights arrive", lambda: steps(False)),
    Twin("BUG-40", "weights arrive, versions", lambda: steps(False, versions=True)),
    Twin("BUG-40", "weights arrive, scored", lambda: steps(False, scored=True)),
    Twin("BUG-41", "update kept", lambda: lora(False)),
    Twin("BUG-42", "right prompts", lambda: permuted("right")),
    Twin("BUG-42", "other order, joined by id", lambda: permuted("by id")),
)
