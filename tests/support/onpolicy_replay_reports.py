"""Reports about routing replay, tokens, positions and masks (BUG-43 to BUG-47, and a control).

As in onpolicy_reports: `FAULTS` must be found with the right cause first, `TWINS` stay silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onpolicy_cases import (
    RAW,
    Files,
    Line,
    Toy,
    drawn,
    lines,
    noisy,
    two,
)
from onpolicy_tables import TURNS, Report, Twin, masked

Experts = NDArray[np.int64]


def routes(seed: int, rows: int, layers: int) -> Experts:
    """[rows, layers, 4] of 36 experts, distinct within a layer."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((rows, layers, 36)), axis=2)[:, :, :4]


def replayed(
    change: Callable[[Experts, int, int], tuple[Experts, Experts]],
    layers: tuple[list[int] | None, list[int] | None] = (None, None),
    level: float = 0.3,
) -> Files:
    """change: from live routes [n - 1, 6, 4], prompt's length and sample to (trainer, sampler)."""
    samples = drawn(43, RAW, count=8, length=30)
    theirs = samples.values(RAW)
    both: list[tuple[Experts, Experts]] = []
    for at, (prompt, response) in enumerate(zip(samples.prompts, samples.responses, strict=True)):
        live = routes(100 + at, len(prompt) + len(response) - 1, 6)
        both.append(change(live, len(prompt), at))

    def record(side: int) -> Callable[[int], Line]:
        return lambda at: {
            "experts": both[at][side].tolist(),
            "start": 0,
            **({} if layers[side] is None else {"layers": layers[side]}),
        }

    return Files(
        lines(samples, None, noisy(theirs, level), routing=record(0)),
        lines(samples, theirs, None, routing=record(1)),
    )


def dense_first(live: Experts, prompt: int, at: int) -> tuple[Experts, Experts]:
    """Layers 0 and 1 are dense; the j-th router replays entry j in place of j + 2."""
    engine = live.copy()
    engine[:, :2] = 0
    return engine[:, :4], engine


def live_only(live: Experts, prompt: int, at: int) -> tuple[Experts, Experts]:
    """What the trainer's four routers chose themselves, beside the engine's six entries."""
    engine = live.copy()
    engine[:, :2] = 0
    return live[:, 2:], engine


def indexed_well(live: Experts, prompt: int, at: int) -> tuple[Experts, Experts]:
    engine = live.copy()
    engine[:, :2] = 0
    return engine[:, 2:], engine


def second_stage(live: Experts, prompt: int, at: int) -> tuple[Experts, Experts]:
    """The second pipeline stage begins to count at 0."""
    return np.concatenate([live[:, :3], live[:, :3]], axis=1), live


def zero_prompt(live: Experts, prompt: int, at: int) -> tuple[Experts, Experts]:
    engine = live.copy()
    engine[:prompt] = 0
    return live, engine


def foreign_prompt(live: Experts, prompt: int, at: int) -> tuple[Experts, Experts]:
    engine = live.copy()
    engine[:prompt] = routes(900 + at, prompt, 6)
    return live, engine


def three_short(live: Experts, prompt: int, at: int) -> tuple[Experts, Experts]:
    return live, live[:-3]


WORDS = ["he", "llo", "hello", " ", "wor", "ld", "world"]


def retokenised(sampled: list[int], again: list[int]) -> Files:
    def line(name: str, ids: list[int]) -> Line:
        values = [-0.5 - 0.25 * at for at in range(len(ids))]
        text = "".join(WORDS[one] for one in ids)
        return {"id": "a", "prompt_ids": [3], "response_ids": ids, name: values, "text": text}

    return Files([line("trainer_logprobs", again)], [line("sampler_logprobs", sampled)])


def left_padded(kind: str, fault: bool = True, prompt: int = 5) -> Files:
    """Nine samples of 0, 1 and 3 pads, which the trainer's positions or window do not leave out."""
    toy = Toy(kind)
    rng = np.random.default_rng(46)
    pads = [0, 1, 3] * 3
    prompts = [[int(x) for x in rng.integers(0, 64, prompt)] for _ in pads]
    samples = toy.draw(prompts, 24)
    ours = [
        toy.score(p, r, n if fault else 0)
        for p, r, n in zip(prompts, samples.responses, pads, strict=True)
    ]

    def meta(at: int) -> dict[str, Any]:
        return {"padding": pads[at]}

    return two(samples, samples.values(RAW), ours, meta=meta)


def span_for_length(stated: int) -> Files:
    mask = [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]
    samples = drawn(47, RAW, length=15, count=4)
    values = samples.values(RAW)
    return two(samples, values, values, mask=mask, meta={"response_length": stated})


NAMED = list(range(2, 6))


FAULTS = (
    Report(
        "BUG-43",
        "dense layers first",
        lambda: replayed(live_only),
        first=("routing-flips",),
        replay=("layer-offset", "filler-layers"),
        says=(r"by \+2\b",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-43",
        "dense layers first, layers named",
        lambda: replayed(dense_first, (NAMED, None)),
        first=("routing-flips",),
        replay=("layer-offset",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-43",
        "a pipeline stage that counts from 0",
        lambda: replayed(second_stage),
        first=("routing-flips",),
        replay=("layer-offset",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-44",
        "zeros for the prompt",
        lambda: replayed(zero_prompt, level=1e-4),
        replay=("filler-rows",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-44",
        "another request's prefix",
        lambda: replayed(foreign_prompt, level=1e-4),
        replay=("foreign-rows",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-44",
        "three rows short",
        lambda: replayed(three_short, level=1e-4),
        misaligned=("routing-rows",),
    ),
    Report(
        "BUG-45",
        "4 tokens come back as 3",
        lambda: retokenised([0, 1, 3, 6], [2, 3, 6]),
        first=("other-tokens",),
        misaligned=("other-tokens",),
        says=(r"position 0", r"encoded again"),
    ),
    Report(
        "BUG-45",
        "as many, but others",
        lambda: retokenised([0, 1, 3, 6], [2, 3, 4, 5]),
        first=("other-tokens",),
        misaligned=("other-tokens",),
    ),
    Report("BUG-46", "absolute positions", lambda: left_padded("absolute"), first=("positions",)),
    Report(
        "BUG-46",
        "a convolution over padding",
        lambda: left_padded("convolution", prompt=1),
        first=("positions",),
        says=(r"only the first 3 tokens",),
    ),
    Report(
        "BUG-47",
        "a span for the length",
        lambda: span_for_length(12),
        first=("mask",),
        misaligned=("response-length",),
        says=(r"\b12\b", r"\b9\b"),
    ),
    Report(
        "BUG-47",
        "tool tokens counted",
        lambda: masked(np.ones(40, dtype=int), None),
        first=("mask",),
        says=(r"0\.0", r"observation tokens"),
    ),
)
TWINS = (
    Twin("BUG-43", "indexed well", lambda: replayed(indexed_well, (NAMED, None), level=1e-4)),
    Twin("BUG-44", "recorded well", lambda: replayed(lambda live, p, at: (live, live), level=1e-4)),
    Twin("BUG-45", "the same ids", lambda: retokenised([0, 1, 3, 6], [0, 1, 3, 6])),
    Twin("BUG-46", "positions given", lambda: left_padded("absolute", fault=False)),
    Twin("control-3", "rotary model", lambda: left_padded("relative")),
    Twin("BUG-47", "length is the mask's sum", lambda: span_for_length(9)),
    Twin("BUG-47", "tool tokens left out", lambda: masked(TURNS, TURNS)),
)
