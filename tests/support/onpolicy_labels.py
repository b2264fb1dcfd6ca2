"""Whether a pair's causes can be told, and its label, by the rules of onpolicy_generator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from onpolicy_faults import Fault, Hows, Values, Written
from onpolicy_odd import ODD
from onpolicy_world import Batch, Floats, How, Scored, World, score

EQUAL, DRIFT = "equal", "numeric-drift"
TOUCHED = 1e-6
CAP = 50.0


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of one batch; each way of computing is computed once."""

    world: World
    batch: Batch
    kept: dict[tuple[object, ...], list[Scored]] = field(default_factory=dict)

    def of(self, how: How, top: int = 0) -> list[Scored]:
        parts = (how.noise, how.kept, how.routed, how.change, how.pads)
        key = (how.sampling, how.low, how.bits, *map(id, parts))
        if (*key, top) not in self.kept:
            found = self.kept.get((*key, 0)) if not top else None
            self.kept[*key, top] = found or score(self.world, self.batch, how, top)
            self.kept.setdefault((*key, 0), self.kept[*key, top])
        return self.kept[*key, top]


def edited(
    faults: list[Fault], rollout: list[Scored], trainer: list[Scored], batch: Batch
) -> Written:
    """What is written of both sides: values of the responses, after what was done to the lists."""
    before = Written([one.values[:1] for one in rollout], [one.values[:1] for one in trainer])
    written = Written([one.values[1:] for one in rollout], [one.values[1:] for one in trainer])
    for fault in faults:
        if fault.edit is not None:
            written = fault.edit(written, batch, before)
    return written


def judge(
    kind: str,
    faults: list[Fault],
    hows: Hows,
    scores: Scores,
    error: Floats | None,
    written: Written,
    scored: tuple[list[Scored], list[Scored]],
) -> tuple[dict[str, float], str, frozenset[str | None]] | None:
    """What each cause carries, the label and the right first names; None: to be drawn again."""
    batch = scores.batch
    counted = np.concatenate(batch.drawn)
    clean = _joined(edited([], scores.of(hows.rollout), scores.of(hows.rollout), batch).trainer)
    noisy = scores.of(replace(hows.trainer, noise=error))
    drift = np.abs(_joined([one.values[1:] for one in noisy]) - clean)[counted]
    carried: dict[str, float] = {}
    for fault in faults:
        if fault.retoken is not None:
            carried[fault.name] = float("inf")
            continue
        alone = fault.hows(hows._replace(trainer=replace(hows.trainer, routed=None)))
        pair = edited([fault], scores.of(alone.rollout), scores.of(alone.trainer), batch)
        effect = np.minimum(np.abs(_joined(pair.trainer) - _joined(pair.rollout)), CAP)[counted]
        touched = effect > TOUCHED
        if touched.sum() < fault.least:
            return None
        if _rms(effect[touched]) < fault.factor * _rms(drift[touched]):
            return None
        carried[fault.name] = float(effect.sum())
    if kind == EQUAL:
        return carried, EQUAL, frozenset([None])
    if kind == DRIFT:
        flipped = _flipped_share(written, batch, scored)
        if not drift.any() or (flipped is not None and flipped > 0.25):
            return None
        return carried, DRIFT, frozenset([None, DRIFT])
    if kind in ODD:
        also = {"stale-weights"} if kind == "another model" else set()
        return carried, kind, frozenset({None, "cannot-tell"} | also)
    if kind == "routing-flips" and len(faults) == 1:
        flipped = _flipped_share(written, batch, scored)
        if flipped is None or flipped < 0.5:
            return None
    if any(fault.retoken is not None for fault in faults):
        return carried, kind, frozenset(carried)
    label = max(carried, key=lambda name: carried[name])
    right = {name for name, sum_ in carried.items() if sum_ >= carried[label] / 3}
    return carried, label, frozenset(right)


def _flipped_share(
    written: Written, batch: Batch, scored: tuple[list[Scored], list[Scored]]
) -> float | None:
    """The part of all counted |d| on tokens whose context was served by other experts."""
    all_, flipped = 0.0, 0.0
    for index, (one, two) in enumerate(zip(*scored, strict=True)):
        if one.experts is None or two.experts is None:
            return None
        sets = np.sort(one.experts, axis=2) != np.sort(two.experts, axis=2)
        moved = sets.any(axis=(1, 2))[len(batch.prompts[index]) - 1 :]
        sizes = np.abs(written.trainer[index] - written.rollout[index])
        sizes = np.minimum(sizes, CAP) * batch.drawn[index]
        all_ += float(sizes.sum())
        flipped += float(sizes[moved].sum())
    return flipped / all_ if all_ else None


def _joined(values: Values) -> Floats:
    return np.concatenate(values)


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values**2))) if len(values) else 0.0
