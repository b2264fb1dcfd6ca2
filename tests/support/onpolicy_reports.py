"""Reports in which a side processed its logits otherwise, or moved a list (BUG-27, BUG-33 to 37).

`FAULTS` must be found, with the right cause first; of `TWINS` nothing may be claimed but drift.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from onpolicy_cases import (
    RAW,
    Files,
    Process,
    best,
    bfloat16,
    both,
    drawn,
    heated,
    lines,
    min_p,
    noisy,
    padded,
    repetition,
    single,
    top_k,
    top_p,
    two,
)
from onpolicy_tables import TURNS, Report, Twin, masked

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def sides(
    sampler: Process, trainer: Process, level: float = 0.0, draw: Process | None = None, **more: Any
) -> Files:
    """Both sides' functions of the same logits, with noise between them."""
    samples = drawn(11, draw or sampler)
    theirs = samples.values(sampler)
    ours = samples.values(trainer)
    return two(samples, theirs, noisy(ours, level) if level else ours, **more)


def bias_in_bf16(fault: bool) -> Files:
    samples = drawn(27, RAW, count=8)
    bias = np.linspace(6.817, 7.063, 238)
    rng = np.random.default_rng(27)
    theirs = samples.values(RAW)
    calm = noisy(theirs, 1e-4)
    ours, trainer_rows, sampler_rows = [], [], []
    for at, (prompt, response) in enumerate(zip(samples.prompts, samples.responses, strict=True)):
        scores = 1 / (1 + np.exp(-rng.normal(size=(len(prompt) + len(response) - 1, 238))))
        sound, broken = (np.argsort(-(scores + b), axis=1)[:, :8] for b in (bias, bfloat16(bias)))
        broken = broken if fault else sound
        flipped = (np.sort(sound) != np.sort(broken)).any(axis=1)[len(prompt) - 1 :]
        error = np.where(flipped, 0.1 * rng.normal(size=len(response)), 0.0)
        ours.append(single(np.minimum(np.asarray(calm[at]) + error, 0.0)))
        trainer_rows.append(sound[:, None].tolist())
        sampler_rows.append(broken[:, None].tolist())
    trainer = lines(
        samples, None, ours, routing=lambda at: {"experts": trainer_rows[at], "start": 0}
    )
    sampler = lines(
        samples, theirs, None, routing=lambda at: {"experts": sampler_rows[at], "start": 0}
    )
    return Files(trainer, sampler)


def with_logits(files: Files) -> Files:
    logits = {
        str(at): np.asarray(one, dtype=np.float32)
        for at, one in enumerate(drawn(11, top_p(0.9)).logits)
    }
    return replace(files, evidence={"logits": {"trainer": logits}})


def temperature(sampler: Process, trainer: Process, level: float = 0.0) -> Files:
    return sides(sampler, trainer, level, draw=heated(0.6), meta={"temperature": 0.6})


FOLDER = {"top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}


def from_the_folder(
    process: Process, folder: dict[str, Any] | None = None, alternatives: int = 0
) -> Files:
    """The run's config is neutral; the engine took the model folder's values.

    folder: its generation_config, where somebody shows it. alternatives: of the trainer, recorded.
    """
    samples = drawn(35, process, count=32, length=60)
    found: dict[str, Any] = {"run_config": NEUTRAL}
    more: dict[str, Any] = {}
    if folder:
        found["generation_config"] = folder
    if alternatives:
        more["trainer_top"] = lambda at: [best(row, alternatives) for row in samples.logits[at]]
    return Files(
        lines(samples, None, samples.values(RAW), meta=NEUTRAL, **more),
        lines(samples, samples.values(process), None, meta=NEUTRAL),
        found,
    )


ALL_OF_FOLDER = both(repetition(1.1), top_k(20), top_p(0.95))


def rolled(by: int, length: int = 40, count: int = 16) -> Files:
    samples = drawn(37, RAW, length=length, count=count)
    values = samples.values(RAW)
    return two(samples, values, [[float(x) for x in np.roll(one, by)] for one in values])


def one_short() -> Files:
    samples = drawn(37, RAW)
    values = samples.values(RAW)
    return two(samples, values, [one[1:] for one in values])


def constant() -> Files:
    samples = drawn(37, RAW)
    values = [[-0.5] * len(one) for one in samples.responses]
    return two(samples, values, values)


TRUNCATED = ("truncated-support",)


FAULTS = (
    Report(
        "BUG-27",
        "selection bias in bf16",
        lambda: bias_in_bf16(True),
        first=("routing-flips",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-33",
        "top-p, recorded",
        lambda: sides(top_p(0.9), RAW, meta={"top_p": 0.9}),
        first=TRUNCATED,
        says=(r"'top_p': 0\.90", r"record|force"),
    ),
    Report("BUG-33", "top-p, not recorded", lambda: sides(top_p(0.9), RAW), first=TRUNCATED),
    Report("BUG-33", "top-p and noise", lambda: sides(top_p(0.9), RAW, 3e-3), first=TRUNCATED),
    Report("BUG-33", "top-k", lambda: sides(top_k(8), RAW), first=TRUNCATED),
    Report("BUG-33", "min-p", lambda: sides(min_p(0.1), RAW), first=TRUNCATED),
    Report("BUG-33", "with logits", lambda: with_logits(sides(top_p(0.9), RAW)), first=TRUNCATED),
    Report(
        "BUG-34",
        "raw against divided",
        lambda: temperature(RAW, heated(0.6)),
        first=("temperature",),
        says=(r"T of the rollout / T of the trainer is about 1\.[67]", r"temperature 0\.6"),
    ),
    Report(
        "BUG-34",
        "once against twice",
        lambda: temperature(heated(0.6), heated(0.36)),
        first=("temperature",),
    ),
    Report(
        "BUG-34",
        "once against twice, and noise",
        lambda: temperature(heated(0.6), heated(0.36), 1e-3),
        first=("temperature",),
    ),
    Report(
        "BUG-34",
        "nothing recorded",
        lambda: sides(heated(0.6), RAW),
        first=("temperature",),
    ),
    Report(
        "BUG-35",
        "all of the folder's",
        lambda: from_the_folder(ALL_OF_FOLDER, FOLDER),
        first=("truncated-support", "penalties"),
        also=("truncated-support", "penalties"),
        says=(r"penalt", r"generation_config"),
    ),
    Report(
        "BUG-35",
        "top-k 20, the folder shown",
        lambda: from_the_folder(top_k(20), {"top_k": 20}),
        first=TRUNCATED,
        says=(r"top_k=20\b",),
    ),
    Report(
        "BUG-35",
        "top-k 20, the trainer's ranks known",
        lambda: from_the_folder(top_k(20), alternatives=30),
        first=TRUNCATED,
        says=(r"\b20\b",),
    ),
    Report(
        "BUG-35",
        "top-k 20 and no more to go by",
        lambda: from_the_folder(top_k(20)),
        first=("truncated-support", "cannot-tell"),
    ),
    Report(
        "BUG-35",
        "repetition penalty alone",
        lambda: from_the_folder(repetition(1.1)),
        first=("penalties",),
    ),
    Report(
        "BUG-36",
        "28 rows of zeros",
        lambda: sides(RAW, padded(28)),
        first=("padded-vocabulary",),
    ),
    Report(
        "BUG-36",
        "28 rows of zeros, widths recorded",
        lambda: sides(RAW, padded(28), meta={"vocab_size": 100, "logits_width": 128}),
        first=("padded-vocabulary",),
        says=(r"\b128\b",),
    ),
    Report(
        "BUG-36",
        "156 rows and noise",
        lambda: sides(RAW, padded(156), 3e-3),
        first=("padded-vocabulary",),
    ),
    Report(
        "BUG-37", "by +1", lambda: rolled(1), first=("shift",), says=(r"rollout\[i-1\].* to 0 ",)
    ),
    Report("BUG-37", "by -1", lambda: rolled(-1), first=("shift",), says=(r"rollout\[i\+1\]",)),
    Report("BUG-37", "20 tokens", lambda: rolled(1, length=20, count=1), first=("shift",)),
    Report(
        "BUG-37",
        "first token dropped",
        one_short,
        misaligned=("length",),
        says=(r"1 too few", r"without its first leaves mean"),
    ),
    Report(
        "BUG-37",
        "only the mask, both recorded",
        lambda: masked(np.roll(TURNS, 1), TURNS),
        first=("mask",),
        misaligned=("other-mask",),
    ),
    Report(
        "BUG-37",
        "only the mask",
        lambda: masked(np.roll(TURNS, 1), None),
        first=("mask",),
    ),
)
TWINS = (
    Twin("BUG-27", "bias in fp32", lambda: bias_in_bf16(False)),
    Twin("BUG-33", "both truncated", lambda: sides(top_p(0.9), top_p(0.9), meta={"top_p": 0.9})),
    Twin("BUG-33", "both truncated, noise", lambda: sides(top_p(0.9), top_p(0.9), 3e-3)),
    Twin(
        "BUG-33",
        "raw values of truncated sampling",
        lambda: sides(RAW, RAW, 3e-3, draw=top_p(0.9), meta={"top_p": 0.9}),
    ),
    Twin("BUG-34", "both divided, noise", lambda: temperature(heated(0.6), heated(0.6), 1e-3)),
    Twin("BUG-34", "both divided", lambda: temperature(heated(0.6), heated(0.6))),
    Twin("BUG-34", "T=1", lambda: sides(RAW, RAW, 3e-3, meta={"temperature": 1.0})),
    Twin("BUG-35", "folder overruled", lambda: from_the_folder(RAW, FOLDER)),
    Twin(
        "BUG-36",
        "padding at -1e9",
        lambda: sides(RAW, padded(28, -1e9), meta={"vocab_size": 100, "logits_width": 128}),
    ),
    Twin("BUG-37", "by 0", lambda: rolled(0)),
    Twin(
        "BUG-37",
        "three tokens are too few",
        lambda: rolled(1, length=3, count=1),
        claims=("cannot-tell",),
    ),
    Twin("BUG-37", "constant sequences", constant),
    Twin("BUG-37", "masks in place", lambda: masked(TURNS, TURNS)),
    Twin("control-8", "noise of 0.02", lambda: sides(RAW, RAW, 0.02)),
)
