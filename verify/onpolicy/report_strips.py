"""Token by token: the worst samples of an analysis and its first one, as far as a page has room.

Of a long sample the surroundings of its worst token and of its first difference are kept, and what
lies between is folded and counted; an overview has all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.pairing import Pairs

WORST = 5  # samples, and the first one
TOKENS = 320  # of one sample
OVERVIEW = 240  # columns
LEVELS = (1e-5, 1e-3, 1e-2, 1e-1, float(np.log(2.0)))
"""Upper ends of the classes of |d| 1, 2, ...; 0 is equality and the last one has no end."""


@dataclass(frozen=True)
class Token:
    """state: "equal", "above" (trainer higher), "below", "odd" (NaN or infinite), or "absent" (a
    side has no value). level: 0 to 6, of LEVELS. flips: layers with other experts, -1 unknown."""

    position: int
    token: int
    trainer: float
    rollout: float
    state: str
    level: int
    counted: bool
    flips: int


@dataclass(frozen=True)
class Fold:
    """Tokens from low to high that are not shown. largest: of |d|, nan without a finite one."""

    low: int
    high: int
    differing: int
    largest: float


@dataclass(frozen=True)
class Column:
    """Tokens from low to high: the largest d above 0, and the largest -d, 0 where there is none."""

    low: int
    high: int
    above: float
    below: float


@dataclass(frozen=True, eq=False)
class Strip:
    """One sample. why: "first" or "worst". parts: tokens and folds in order. worst: position of the
    largest |d|, or of the first odd value. overview: empty where all tokens are shown."""

    index: int
    key: str
    why: str
    tokens: int
    masked: int
    differing: int
    parts: tuple[Token | Fold, ...]
    worst: int
    overview: tuple[Column, ...]
    text: str | None


def strips(pairs: Pairs, flips: NDArray[np.int32] | None, limit: int = TOKENS) -> tuple[Strip, ...]:
    """The worst samples, the worst first, then the first one. limit: tokens of each.

    Worst is what has most values that are not finite, then what has the largest sum of |d|.
    """
    if not pairs.samples or limit < 1:
        return ()
    count = len(pairs.samples)
    finite = pairs.finite
    sums = np.bincount(
        pairs.sample[finite], weights=np.abs(pairs.difference[finite]), minlength=count
    )
    odd = np.bincount(pairs.sample[pairs.scored & ~finite], minlength=count)
    order = np.lexsort((np.arange(count), -sums, -odd))[:WORST]
    chosen = [int(at) for at in order if sums[at] > 0.0 or odd[at]]
    found = [_strip(pairs, flips, at, "worst", limit) for at in chosen]
    if 0 not in chosen:
        found.append(_strip(pairs, flips, 0, "first", limit))
    return tuple(one for one in found if one.tokens)


def level(size: float) -> int:
    """The class of |d|."""
    return 0 if size == 0.0 else 1 + int(np.searchsorted(LEVELS, size, side="left"))


def _strip(
    pairs: Pairs, flips: NDArray[np.int32] | None, index: int, why: str, limit: int
) -> Strip:
    one = pairs.samples[index]
    rows = slice(one.start, one.stop)
    length = one.stop - one.start
    d, scored = pairs.difference[rows], pairs.scored[rows]
    size = np.where(pairs.finite[rows], np.abs(d), 0.0)
    odd = scored & ~pairs.finite[rows]
    unequal = odd | (size > 0.0)
    worst = int(np.argmax(odd) if odd.any() else np.argmax(size)) if length else 0
    shown = _shown(length, worst, int(np.argmax(unequal)) if unequal.any() else 0, limit)
    parts: list[Token | Fold] = []
    for kept, places in groupby(range(length), key=lambda at: bool(shown[at])):
        run = list(places)
        if kept:
            parts += [_token(pairs, flips, one.start + at) for at in run]
        else:
            parts.append(_fold(run[0], run[-1], unequal, np.where(scored, np.abs(d), np.nan)))
    return Strip(
        index,
        one.key,
        why,
        length,
        int(np.count_nonzero(~pairs.counted[rows])),
        int(np.count_nonzero(unequal)),
        tuple(parts),
        worst,
        () if shown.all() else _overview(np.where(pairs.finite[rows], d, 0.0)),
        one.rollout.text if one.rollout.text is not None else one.trainer.text,
    )


def _shown(length: int, worst: int, first: int, limit: int) -> NDArray[np.bool_]:
    """Three quarters of the room around the worst token, the rest from the first difference on."""
    shown = np.zeros(length, bool)
    if length <= limit:
        shown[:] = True
        return shown
    lead = limit // 4
    around = limit - lead
    start = min(max(0, worst - around // 2), length - around)
    shown[start : start + around] = True
    begin = max(0, first - lead // 4)
    shown[begin : begin + lead] = True
    return shown


def _fold(low: int, high: int, unequal: NDArray[np.bool_], size: NDArray[np.float64]) -> Fold:
    inside = size[low : high + 1]
    inside = inside[np.isfinite(inside)]
    return Fold(
        low,
        high,
        int(np.count_nonzero(unequal[low : high + 1])),
        float(inside.max()) if len(inside) else float("nan"),
    )


def _token(pairs: Pairs, flips: NDArray[np.int32] | None, row: int) -> Token:
    trainer, rollout = float(pairs.trainer[row]), float(pairs.rollout[row])
    d = trainer - rollout
    if not pairs.present[row]:
        state = "absent"
    elif not (np.isfinite(trainer) and np.isfinite(rollout)):
        state = "odd"
    elif d == 0.0:
        state = "equal"
    else:
        state = "above" if d > 0.0 else "below"
    return Token(
        int(pairs.position[row]),
        int(pairs.token[row]),
        trainer,
        rollout,
        state,
        level(abs(d)) if state in ("above", "below") else 0,
        bool(pairs.counted[row]),
        -1 if flips is None else int(flips[row]),
    )


def _overview(d: NDArray[np.float64]) -> tuple[Column, ...]:
    width = -(-len(d) // OVERVIEW)
    return tuple(
        Column(
            low,
            min(low + width, len(d)) - 1,
            max(0.0, float(d[low : low + width].max())),
            max(0.0, -float(d[low : low + width].min())),
        )
        for low in range(0, len(d), width)
    )
