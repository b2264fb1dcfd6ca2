"""What makes a record of experts unfit for a replay, in itself or against the other side's.

Layers that are displaced, rows that were never filled or belong to another request, other K.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verify.onpolicy.causes.facts import prompt_of
from verify.onpolicy.pairing import Paired
from verify.onpolicy.routing_rows import Rows, chosen, lengths, overlap
from verify.onpolicy.routing_table import SHOWN, Fault, spans
from verify.onpolicy.samples import ROLLOUT, TRAINER

SAMPLED_ROWS = 4096
"""Rows that the search for displaced layers looks at."""
CLEAR = 0.3
"""By how much the overlap must be larger elsewhere before a record counts as displaced."""


def faults_of_record(one: Paired) -> list[Fault]:
    """What one side's record alone shows."""
    found = []
    prompt, response = lengths(one)
    sides = ((TRAINER, one.trainer), (ROLLOUT, one.rollout))
    for side, sample in sides:
        routing = sample.routing.get(side)
        if routing is None or routing.experts.ndim != 3 or routing.experts.size == 0:
            continue
        where = f"sample {one.key}, {side}"
        experts = routing.experts
        constant = (experts == experts[:, :, :1]).all(axis=2)  # [rows, layers]
        if experts.shape[2] > 1:
            layers = np.flatnonzero(constant.all(axis=0))
            if len(layers) and len(layers) < experts.shape[1]:
                found.append(
                    Fault(
                        "filler-layers",
                        where,
                        f"layers {spans(layers)} of the record hold one number throughout",
                    )
                )
            kept = np.setdiff1d(np.arange(experts.shape[1]), layers)
            filler = constant[:, kept].all(axis=1) & (experts[:, 0, 0] >= 0)
            if len(kept) and filler.any():
                rows = np.flatnonzero(filler)
                first = experts[rows[0], kept[0]]
                shown = ", ".join(str(int(value)) for value in first[:SHOWN])
                found.append(
                    Fault(
                        "filler-rows",
                        where,
                        f"rows {spans(rows)} are constant ({shown}): no distinct experts, so no "
                        "choice of a router",
                    )
                )
            ordered = np.sort(experts, axis=2)
            again = ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(2)
            again &= ~constant
            if again.any():
                found.append(
                    Fault(
                        "repeated-experts",
                        where,
                        f"{int(again.sum())} of {again.size} choices name an expert twice",
                    )
                )
        expected = prompt + response - 1
        if routing.start < 0 and prompt and len(experts) < expected and len(experts) > response:
            found.append(
                Fault("missing-rows", where, f"expected n-1 = {expected} rows, got {len(experts)}")
            )
    return found


def chance_overlap(common: Sequence[Rows]) -> float:
    """Mean overlap of rows of the same layer that belong to other tokens."""
    sums, count = 0.0, 0
    for rows in common[:32]:
        if len(rows.place) < 4:
            continue
        moved = np.roll(rows.rollout, len(rows.place) // 2, axis=0)
        real = chosen(rows.rollout) & chosen(moved)
        values = overlap(rows.rollout, moved)[real]
        sums += float(values.sum())
        count += len(values)
    return sums / count if count else 0.0


def displaced_layers(common: Sequence[Rows], chance: float) -> list[Fault]:
    """Layers of the trainer whose choices are those of another layer of the record."""
    left, right, rows = [], [], 0
    names, others, own_entry = common[0].names, common[0].others, common[0].own
    shape = (len(names), len(others))
    for one in common:
        if (one.names, one.others) == (names, others):
            left.append(one.trainer)
            right.append(one.rollout)
            rows += len(one.place)
        if rows >= SAMPLED_ROWS:
            break
    if len({part.shape[2] for part in left}) > 1 or len({part.shape[2] for part in right}) > 1:
        return []
    a, b = np.concatenate(left)[:SAMPLED_ROWS], np.concatenate(right)[:SAMPLED_ROWS]
    found = np.zeros(shape)
    real_a, real_b = chosen(a), chosen(b)
    for mine in range(shape[0]):
        for other in range(shape[1]):
            real = real_a[:, mine] & real_b[:, other]
            if real.any():
                found[mine, other] = overlap(a[real, mine], b[real, other]).mean()
    own = found[np.arange(shape[0]), own_entry]
    best = found.argmax(axis=1)
    gained = found[np.arange(shape[0]), best]
    moved = np.flatnonzero((gained > own + CLEAR) & (gained > chance + CLEAR))
    if len(moved) == 0:
        return []
    offsets = sorted({int(best[at]) - int(own_entry[at]) for at in moved})
    before, after = float(own[moved].mean()), float(gained[moved].mean())
    which = "all layers" if len(moved) == shape[0] else f"layers {spans(np.array(names)[moved])}"
    if len(offsets) == 1:
        said = f"shifting the layer index by {offsets[0]:+d} gives {after:.1%}"
    else:
        listed = ", ".join(f"{names[at]} has those of {others[best[at]]}" for at in moved[:SHOWN])
        said = f"layer {listed} gives {after:.1%}"
    return [
        Fault(
            "layer-offset",
            which,
            f"overlap {before:.1%} (chance {chance:.1%}) on {which} of the trainer; {said}",
        )
    ]


def foreign_rows(common: Sequence[Rows], chance: float) -> list[Fault]:
    """Rows of the prompt whose overlap is that of unrelated rows, while the rest agrees."""
    found = []
    for rows in common:
        prompt = len(prompt_of(rows.one))
        a, b = rows.trainer, rows.partner
        real = chosen(a) & chosen(b)
        cached = rows.one.rollout.meta.get("cached_tokens")
        edge = cached if isinstance(cached, int) and 0 < cached < prompt else prompt
        early = rows.place < edge
        if not (real[early].any() and real[~early].any()):
            continue
        agreed = overlap(a, b)
        before, after = (
            float(agreed[early][real[early]].mean()),
            float(agreed[~early][real[~early]].mean()),
        )
        if after > before + CLEAR and before < (chance + after) / 2.0:
            found.append(
                Fault(
                    "foreign-rows",
                    f"sample {rows.one.key}",
                    f"rows {int(rows.place[early][0])}..{int(rows.place[early][-1])} overlap "
                    f"{before:.1%} (chance {chance:.1%}), the rest {after:.1%}",
                )
            )
    return found
