"""`mok bench tune`: which knobs of the Hopper forward beat the defaults at a shape, and how far.

Every candidate alternates with the defaults in one tight loop, so that clock and heat are the same
for both; its ratio is the median of the defaults' calls over the median of its own. What counts as
noise is measured too, by the defaults against themselves in a second workspace. A candidate is
better only if it gains LEAST_GAIN beyond what equal code showed, and if the 10th percentile of its
ratios over PARTS parts of the run lies above the 90th of theirs; the best of the better ones has to
repeat it in a run of its own, since the best of several is partly luck. The ratio that is written
is the smaller one of the two.

Knobs are varied one at a time: lengths of segments around one and two waves of tiles, and a few
multiprocessors fewer. Refuses to judge speed where bits differ: that is the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from mok.bench.instruments import Instruments
from mok.bench.protocols import loop, quantile
from mok.bench.ranks import Together
from mok.bench.shapes import Shape
from mok.hopper.layout import BLOCK, Segments, Sizes, ceil_div, choose_segments, up_columns
from mok.hopper.tuned import MOST_BLOCKS, Choice

LEAST_GAIN = 0.01
PARTS = 10
LEAST_TURNS = 3 * PARTS
"""Fewer calls than this say nothing about spread."""
_SHORTEST = 8  # blocks; the longest segment of a candidate is not shorter
_FEWER_SMS = (4, 12)
_DEFAULTS, _OTHER = "defaults", "candidate"


@dataclass(frozen=True)
class Comparison:
    """Two that alternated. ratio: of medians, above 1 if the other is faster; low, high: its 10th
    and 90th percentile over PARTS consecutive parts. turns: calls of each. first_ms, other_ms:
    medians."""

    ratio: float
    low: float
    high: float
    turns: int
    first_ms: float
    other_ms: float


@dataclass(frozen=True)
class Opened:
    """A layer with knobs in place. call() launches it; bits() -> what it computes, finished."""

    call: Callable[[], object]
    bits: Callable[[], Sequence[torch.Tensor]]
    close: Callable[[], None]


@dataclass(frozen=True)
class Tried:
    """One candidate against the defaults."""

    choice: Choice
    found: Comparison
    better: bool


@dataclass(frozen=True)
class Outcome:
    """What tuning a shape found. noise: the defaults against themselves. repeated: the best
    candidate's second run, where there was one. chosen, ratio: None to keep the defaults. decided:
    whether the run says anything about this shape. why: in a sentence."""

    shape: Shape
    noise: Comparison
    tried: tuple[Tried, ...]
    repeated: Comparison | None
    chosen: Choice | None
    ratio: float | None
    decided: bool
    why: str


class BitsDiffer(Exception):
    """Knobs changed what the layer computes, which nothing may."""


def default_choice(width: int) -> Choice:
    """What the backend does without a table."""
    return Choice(choose_segments(width))


def candidates(shape: Shape, sms: int, earlier: Choice | None = None) -> list[Choice]:
    """Knobs to try beside the defaults, in a fixed order, each once. sms: of the device. earlier:
    what a table has for this shape, which has to show itself again."""
    default = default_choice(shape.I).segments
    wave = ceil_div(sms, up_columns(shape.I))  # blocks whose tiles of gate and up fill every SM
    expert = ceil_div(shape.T * shape.K, shape.E * BLOCK)
    whole = ceil_div(wave, expert) * expert  # a wave of experts that are not cut
    lengths = (
        (wave, ceil_div(3 * wave, 2)),
        (wave, whole + 2 * expert),
        (2 * wave, 3 * wave),
        (default.least, 2 * default.most),
        (default.most, 2 * default.most),
    )
    found = [] if earlier is None else [earlier]
    for least, most in lengths:
        longest = min(max(_SHORTEST, most), MOST_BLOCKS)
        found.append(Choice(Segments(min(least, longest), longest)))
    found += [Choice(default, sms - fewer) for fewer in _FEWER_SMS if sms > 4 * fewer]
    return [one for one in dict.fromkeys(found) if one != Choice(default)]


def compare(first: Sequence[float], other: Sequence[float]) -> Comparison:
    """From the seconds of calls that alternated; as many of each, at least one."""
    turns = len(first)
    if turns != len(other) or turns == 0:
        raise ValueError(f"{turns} and {len(other)} calls; allowed: as many of each, 1 or more")
    parts = min(PARTS, turns)
    borders = [turns * part // parts for part in range(parts + 1)]
    ratios = [
        quantile(first[begin:end], 0.5) / quantile(other[begin:end], 0.5)
        for begin, end in pairwise(borders)
    ]
    before, after = quantile(first, 0.5), quantile(other, 0.5)
    low, high = quantile(ratios, 0.1), quantile(ratios, 0.9)
    return Comparison(before / after, low, high, turns, before * 1e3, after * 1e3)


def better(found: Comparison, noise: Comparison) -> bool:
    """Whether a candidate beats the defaults by more than equal code differs from itself."""
    return (
        min(found.turns, noise.turns) >= LEAST_TURNS
        and found.ratio >= (1 + LEAST_GAIN) * max(1.0, noise.ratio)
        and found.low > max(1.0, noise.high)
    )


def best(tried: Sequence[Tried]) -> Tried | None:
    """The fastest of the better ones, the first of equals; None if none is better."""
    return max((one for one in tried if one.better), key=lambda one: one.found.ratio, default=None)


def tune(
    shape: Shape,
    instruments: Instruments,
    opener: Callable[[Choice], Opened],
    *,
    sms: int,
    seconds: float,
    earlier: Choice | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Measures one shape. seconds: of each loop. Raises BitsDiffer, and what a launch raises."""
    default = default_choice(shape.I)
    first = opener(default)
    try:
        right = first.bits()

        def against(choice: Choice) -> Comparison:
            found = _measure(instruments, first, right, opener, choice, seconds)
            say(f"{shape.name}: {choice}: {found.ratio:.4f} ({found.low:.4f} to {found.high:.4f})")
            return found

        noise = against(default)
        if noise.turns < LEAST_TURNS:
            enough = 1.2 * seconds * LEAST_TURNS / noise.turns
            why = f"{noise.turns} calls, too few of {LEAST_TURNS}: give --seconds {enough:.1f}"
            return Outcome(shape, noise, (), None, None, None, False, why)
        tried = []
        for choice in candidates(shape, sms, earlier):
            found = against(choice)
            tried.append(Tried(choice, found, better(found, noise)))
        winner = best(tried)
        if winner is None:
            why = "nothing beats the defaults by more than the spread"
            return Outcome(shape, noise, tuple(tried), None, None, None, True, why)
        repeated = against(winner.choice)
    finally:
        first.close()
        instruments.release()
    if not better(repeated, noise):
        why = f"{winner.choice} was faster once and not again"
        return Outcome(shape, noise, tuple(tried), repeated, None, None, True, why)
    ratio = min(winner.found.ratio, repeated.ratio)
    why = f"{ratio:.3f} x the defaults"
    return Outcome(shape, noise, tuple(tried), repeated, winner.choice, ratio, True, why)


def _measure(
    instruments: Instruments,
    first: Opened,
    right: Sequence[torch.Tensor],
    opener: Callable[[Choice], Opened],
    choice: Choice,
    seconds: float,
) -> Comparison:
    """The defaults and a choice in turn; its bits before and after."""
    other = opener(choice)
    try:
        _require_bits(choice, right, other.bits(), "in its first call")
        calls = {_DEFAULTS: first.call, _OTHER: other.call}
        timings = loop(instruments, Together(), calls, seconds)
        _require_bits(choice, right, other.bits(), "after the timed calls")
    finally:
        other.close()
    return compare(timings[_DEFAULTS].seconds, timings[_OTHER].seconds)


def _require_bits(
    choice: Choice, right: Sequence[torch.Tensor], got: Sequence[torch.Tensor], when: str
) -> None:
    for name, one, other in zip(("out", "g", "u"), right, got, strict=True):
        if one.shape != other.shape:
            raise BitsDiffer(f"{choice}: {name} has another shape than the defaults' {when}")
        differs = one.view(torch.int16) != other.view(torch.int16)
        count = int(differs.sum())
        if count:
            row, column = (int(i) for i in differs.nonzero()[0])
            raise BitsDiffer(
                f"{choice}: {name} differs from the defaults' {when}, in {count} of "
                f"{differs.numel()} elements, first in [{row}, {column}]"
            )


def hopper_opener(shape: Shape, device: torch.device) -> Callable[[Choice], Opened]:
    """Opens the Hopper forward of a shape, with g and u saved as in training; inputs are random.

    Raises InputError for sizes that the kernel does not take.
    """
    from mok.bench.layer_inputs import make_inputs
    from mok.hopper.forward import launch
    from mok.hopper.layout import saved_rows
    from mok.hopper.packing import Problem
    from mok.hopper.saved import without_padding
    from mok.hopper.workspace import open_workspace

    sizes = sizes_of(shape)
    inputs = make_inputs(shape, "gaussian", device)
    gate, up = (half.contiguous() for half in inputs.w_gate_up.chunk(2, 1))
    topk, router = inputs.topk_experts, inputs.router_weights
    problem = Problem(inputs.x, topk, router, gate, up, inputs.w_down, None, None)
    rows_E = torch.bincount(topk.flatten(), minlength=shape.E).tolist()
    rows = saved_rows(shape.T, sizes)

    def opened(choice: Choice) -> Opened:
        workspace = open_workspace(sizes, device, segments=choice.segments)

        def call() -> Any:
            return launch(workspace, problem, saved=rows, num_sms=choice.num_sms)

        def bits() -> Sequence[torch.Tensor]:
            found = call()
            workspace.check()
            kept = without_padding(found.gate, found.up, rows_E)
            return found.out, kept.gate, kept.up

        def close() -> None:
            try:
                workspace.check()
            finally:
                workspace.close()

        return Opened(call, bits, close)

    return opened


def sizes_of(shape: Shape) -> Sizes:
    """Of one rank that holds the whole shape. Raises InputError where the kernel cannot run it."""
    return Sizes(shape.T, shape.K, shape.E, shape.H, shape.I)


def described(outcome: Outcome) -> Mapping[str, Any]:
    """JSON-ready."""

    def knobs(choice: Choice) -> dict[str, int]:
        return {**asdict(choice.segments), "num_sms": choice.num_sms}

    return {
        "shape": outcome.shape.name,
        "defaults": knobs(default_choice(outcome.shape.I)),
        "noise": asdict(outcome.noise),
        "tried": [
            {**knobs(one.choice), **asdict(one.found), "better": one.better}
            for one in outcome.tried
        ],
        "repeated": None if outcome.repeated is None else asdict(outcome.repeated),
        "chosen": None if outcome.chosen is None else knobs(outcome.chosen),
        "ratio": outcome.ratio,
        "decided": outcome.decided,
        "why": outcome.why,
    }
