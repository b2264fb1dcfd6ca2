"""Analyses to draw and to print: small ones made by hand, hostile ones, and one of many tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from onpolicy_records import dump, sample

from verify.onpolicy.analysing import Analysis, analyse_dumps
from verify.onpolicy.gates import parse_gate
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Place, Problem, Routing, Sample, Series

NASTY = "\"><script>alert(1)</script><b onclick='x'>&\x1b[2J\u202e\n##[group]::error::"
NAN, INF = float("nan"), float("inf")


def analysed(*samples: Sample, gates: Sequence[str] = (), problems: int = 0) -> Analysis:
    """Of one file with both sides."""
    bad = [Problem(Place("a.jsonl", f"line {at}"), "mask", f"bad {at}") for at in range(problems)]
    return analyse_dumps(dump(*samples, problems=bad), gates=[parse_gate(one) for one in gates])


@functools.cache
def dumps(cause: str) -> tuple[Dump, Dump]:
    """12 samples of 50 tokens drawn from logits: what the trainer and what the sampler dumped, the
    trainer with noise and one fault. cause: "" for neither, "numeric-drift" for noise alone,
    "temperature", "shift", "sentinel" or "other-tokens". The sampler's dump is always the same."""
    rng, noise = np.random.default_rng(17), np.random.default_rng(18)
    sides: tuple[list[Sample], list[Sample]] = ([], [])
    for at in range(12):
        logits = rng.normal(0.0, 2.5, (50, 64))
        theirs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        ids = np.array([rng.choice(64, p=np.exp(row)) for row in theirs])
        noisy = logits + (noise.normal(0.0, 1e-3, logits.shape) if cause else 0.0)
        noisy /= 0.7 if cause == "temperature" else 1.0
        ours = noisy - np.log(np.exp(noisy).sum(axis=1, keepdims=True))
        values = [one[np.arange(50), ids] for one in (ours, theirs)]
        if cause == "shift":
            values[0] = np.roll(values[0], 1)
        if cause == "sentinel":
            values[0][at + 5] = -9999.0
        for place, (side, one) in enumerate(zip((TRAINER, ROLLOUT), values, strict=True)):
            said = ids if place or cause != "other-tokens" else np.roll(ids, 3)
            made = sample(f"s{at}", said.tolist(), prompt=[3, at], **{side: one.tolist()})
            sides[place].append(made)
    return dump(*sides[0], file="trainer.jsonl"), dump(*sides[1], file="rollout.jsonl")


@functools.cache
def faulty(cause: str) -> Analysis:
    """The analysis of both dumps."""
    return analyse_dumps(*dumps(cause))


def drift(count: int = 3, tokens: int = 8, size: float = 0.01, seed: int = 1) -> list[Sample]:
    """Samples with noise between both sides; a mask leaves the last token of each out."""
    rng = np.random.default_rng(seed)
    found = []
    for at in range(count):
        theirs = -rng.exponential(1.0, tokens) - 1e-3
        ours = theirs + rng.normal(0.0, size, tokens)
        found.append(
            sample(
                f"s{at}",
                [int(one) for one in rng.integers(0, 99, tokens)],
                trainer=ours.tolist(),
                rollout=theirs.tolist(),
                mask=[1] * (tokens - 1) + [0],
                text=f"response {at}",
                rank=at % 2,
                step=4,
            )
        )
    return found


def odd() -> list[Sample]:
    """NaN, infinities, absent values, equal values and values that differ by a factor."""
    return [
        sample(
            "odd",
            [5, 6, 7, 8, 9, 10],
            trainer=[-1.0, NAN, -INF, None, -0.5, -3.0],
            rollout=[-1.0, -0.25, -0.5, -0.75, INF, -0.5],
        ),
        sample("even", [1, 2], trainer=[-0.5, -1.5], rollout=[-0.5, -1.5]),
    ]


def routed(flips: Sequence[int], layers: int = 3) -> Sample:
    """One sample of 6 tokens; the rows of `flips` chose other experts in layer 1."""
    record = np.tile(np.array([0, 1]), (6, layers, 1)) + np.arange(6)[:, None, None]
    ours = record.copy()
    ours[list(flips), 1, 0] += 50
    margins = np.full((6, layers), 0.5, np.float32)
    margins[list(flips), 1] = 0.001
    rollout = -np.arange(1.0, 7.0)
    trainer = rollout.copy()
    trainer[[at for at in flips if at < 6]] += 0.25
    return sample(
        "r",
        range(6),
        prompt=[7],
        trainer=trainer.tolist(),
        rollout=rollout.tolist(),
        routing={TRAINER: Routing(ours), ROLLOUT: Routing(record, margins=margins)},
    )


def hostile() -> Analysis:
    """Every text that a file can hold tries to be more than text."""
    rng = np.random.default_rng(3)
    values = -rng.exponential(1.0, 40)
    samples = [
        sample(
            NASTY + str(at),
            range(40),
            trainer=(values + 0.5 * at).tolist(),
            rollout=values.tolist(),
            text=NASTY,
            place=NASTY,
            finish_reason=NASTY + str(at),
            rollout_version=NASTY + str(at),
        )
        for at in range(3)
    ]
    samples.append(sample(NASTY + "short", [1, 2], trainer=[-1.0], rollout=[-1.0, -2.0]))
    held = Dump(
        "plain",
        (NASTY,),
        tuple(samples),
        (Problem(Place(NASTY, NASTY), NASTY, NASTY),),
        (NASTY,),
    )
    return analyse_dumps(held, gates=[parse_gate("abs_max>0.1")])


@functools.cache
def large(count: int, tokens: int) -> Analysis:
    """The analysis of many tokens."""
    return analyse_dumps(many(count, tokens))


def many(count: int, tokens: int) -> Dump:
    """Many tokens with noise, of which one is far off."""
    rng = np.random.default_rng(5)
    samples = []
    for at in range(count):
        theirs = np.asarray(-rng.exponential(1.0, tokens), np.float64)
        ours = theirs + rng.normal(0.0, 0.003, tokens)
        if at == count // 2:
            ours[tokens // 3] = -1e4
        held = {
            side: Series(values, np.zeros(tokens, bool))
            for side, values in ((TRAINER, ours), (ROLLOUT, theirs))
        }
        ids = rng.integers(0, 50_000, tokens)
        samples.append(
            Sample(str(at), Place("a.jsonl", f"line {at}"), None, ids, None, held, meta={"rank": 0})
        )
    return dump(*samples)
