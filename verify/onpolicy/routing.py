"""Routing records of two sides: whether they can be replayed, and where they choose other experts.

A record has one row per forwarded token, all tokens of prompt and response but the last. The row at
absolute position a gives the logits of the token at a + 1, so that is the token that a flip there
concerns. Experts of a row are compared as sets: their order is no choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.causes.facts import prompt_of
from verify.onpolicy.pairing import Paired, Pairs
from verify.onpolicy.samples import ROLLOUT, TRAINER, Routing

SAMPLED_ROWS = 4096
"""Rows that the search for displaced layers looks at."""
CLEAR = 0.3
"""By how much the overlap must be larger elsewhere before a record counts as displaced."""
SHOWN = 6


@dataclass(frozen=True)
class Fault:
    """A record that cannot be replayed as it is. kind: a name of FAULTS. what: in numbers."""

    kind: str
    where: str
    what: str


FAULTS: dict[str, str] = {
    "layer-offset": "index routers by the model's layer number; dense and extra layers count",
    "filler-rows": "rows that this request did not forward were never filled: record -1",
    "foreign-rows": "cached rows belong to another request: store routes with the cache",
    "filler-layers": "layers without a router hold a constant: leave them out, or name layers",
    "missing-rows": "record one row per forwarded token, n - 1 of n tokens",
    "missing-layers": "record the number of each layer, so that both sides name the same routers",
    "other-k": "set the number of experts per token to the same value on both sides",
    "repeated-experts": "a top-k choice has distinct experts; read the record with its own layout",
}

WRONG = frozenset(FAULTS) - {"filler-layers", "missing-layers"}
"""Faults of a record that would be replayed wrongly; the others only say too little."""


@dataclass(frozen=True)
class LayerFlips:
    """One layer of the trainer. overlap: mean share of equal experts. margins: medians, or None."""

    layer: int
    rows: int
    flipped: int
    overlap: float
    margin_flipped: float | None
    margin_kept: float | None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document of the report."""
        return {
            "layer": self.layer,
            "rows": self.rows,
            "flipped": self.flipped,
            "overlap": self.overlap,
            "margin_flipped": self.margin_flipped,
            "margin_kept": self.margin_kept,
        }


@dataclass(frozen=True, eq=False)
class RoutingCheck:
    """flips: int32 [N], layers in which the token's row chose other experts, -1 where unknown.

    chance: mean overlap of unrelated rows. share: what tokens with a flip carry of the sum of |d|,
    among tokens whose routing is known; None without such tokens.
    """

    samples: int
    layers: tuple[LayerFlips, ...]
    faults: tuple[Fault, ...]
    flips: NDArray[np.int32]
    chance: float
    share: float | None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document of the report; without the column."""
        return {
            "samples": self.samples,
            "layers": [one.to_json() for one in self.layers],
            "faults": [vars(one) | {"remedy": FAULTS[one.kind]} for one in self.faults],
            "tokens": int(np.count_nonzero(self.flips >= 0)),
            "flipped": int(np.count_nonzero(self.flips > 0)),
            "chance": self.chance,
            "share": self.share,
        }


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows that both sides recorded, at absolute positions `place`.

    names, others: layer numbers of trainer and rollout. own: for each of the trainer's layers the
    rollout's entry of the same number. margins: float32 [rows, layers of the trainer], or None.
    """

    one: Paired
    place: NDArray[np.int64]
    trainer: NDArray[np.integer[Any]]
    rollout: NDArray[np.integer[Any]]
    names: tuple[int, ...]
    others: tuple[int, ...]
    own: NDArray[np.int64]
    margins: NDArray[np.float32] | None

    @property
    def partner(self) -> NDArray[np.integer[Any]]:
        """The rollout's choices in the trainer's layers."""
        return self.rollout[:, self.own]


def check(pairs: Pairs) -> RoutingCheck | None:
    """What the routing records say; None where no sample has one."""
    faults: list[Fault] = []
    common: list[_Rows] = []
    for one in pairs.samples:
        faults += _lint(one)
        rows = _common(one, faults)
        if rows is not None:
            common.append(rows)
    if not common:
        return RoutingCheck(0, (), _few(faults), _unknown(pairs), 0.0, None) if faults else None
    chance = _chance(common)
    faults += _displaced(common, chance)
    faults += _foreign(common, chance)
    flips, layers = _flips(pairs, common)
    share = None
    known = (flips >= 0) & pairs.finite
    if known.any():
        size = np.abs(pairs.difference[known])
        total = float(size.sum())
        share = float(size[flips[known] > 0].sum()) / total if total > 0.0 else 0.0
    return RoutingCheck(len(common), layers, _few(faults), flips, chance, share)


def start_of(routing: Routing, prompt: int, response: int) -> int:
    """The absolute position of row 0: as recorded, else as the number of rows tells.

    As many rows as prompt and response, or one less, begin with the prompt; as many as the
    response begin with the token that predicts its first one.
    """
    if routing.start >= 0:
        return routing.start
    rows = len(routing.experts)
    whole = prompt + response
    if prompt == 0 or rows in (whole, whole - 1):
        return 0
    return max(0, whole - 1 - rows)


def _lengths(one: Paired) -> tuple[int, int]:
    tokens = one.tokens
    response = len(tokens) if tokens is not None else one.stop - one.start
    return len(prompt_of(one)), response


def _lint(one: Paired) -> list[Fault]:
    """What one side's record alone shows."""
    found = []
    prompt, response = _lengths(one)
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
                        f"layers {_spans(layers)} of the record hold one number throughout",
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
                        f"rows {_spans(rows)} are constant ({shown}): no distinct experts, so no "
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


def _common(one: Paired, faults: list[Fault]) -> _Rows | None:
    """The rows that both sides have, cut to the same positions and, by number, layers."""
    a, b = one.trainer.routing.get(TRAINER), one.rollout.routing.get(ROLLOUT)
    if a is None or b is None or a.experts.ndim != 3 or b.experts.ndim != 3:
        return None
    if not a.experts.size or not b.experts.size:
        return None
    where = f"sample {one.key}"
    prompt, response = _lengths(one)
    first, second = start_of(a, prompt, response), start_of(b, prompt, response)
    begin = max(first, second)
    end = min(first + len(a.experts), second + len(b.experts))
    if end <= begin:
        faults.append(
            Fault(
                "missing-rows",
                where,
                f"trainer has rows {first}..{first + len(a.experts) - 1}, rollout "
                f"{second}..{second + len(b.experts) - 1}: none in common",
            )
        )
        return None
    left, right = a.experts[begin - first : end - first], b.experts[begin - second : end - second]
    names, others = _numbers(a, b)
    kept = [at for at, number in enumerate(names) if number in others]
    if len(kept) < len(names):
        faults.append(
            Fault(
                "missing-layers",
                where,
                f"trainer has layers {_spans(np.array(names))}, rollout {_spans(np.array(others))}",
            )
        )
        if not kept:
            return None
        left, names = left[:, kept], tuple(names[at] for at in kept)
    if left.shape[2] != right.shape[2]:
        faults.append(
            Fault(
                "other-k",
                where,
                f"trainer chooses {left.shape[2]} experts, rollout {right.shape[2]}",
            )
        )
    own = np.array([others.index(number) for number in names], dtype=np.int64)
    margins = None
    if b.margins is not None and b.margins.shape == b.experts.shape[:2]:
        margins = b.margins[begin - second : end - second][:, own]
    elif a.margins is not None and a.margins.shape == a.experts.shape[:2]:
        margins = a.margins[begin - first : end - first][:, kept]
    place = np.arange(begin, end, dtype=np.int64)
    return _Rows(one, place, left, right, names, others, own, margins)


def _numbers(a: Routing, b: Routing) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layer numbers of both; a side that names none has all from 0, or those of the other."""
    mine, their = a.experts.shape[1], b.experts.shape[1]
    names = a.layers if a.layers is not None and len(a.layers) == mine else None
    others = b.layers if b.layers is not None and len(b.layers) == their else None
    if names is None:
        names = others if others is not None and mine == their else tuple(range(mine))
    if others is None:
        others = names if mine == their else tuple(range(their))
    return names, others


def overlap(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """float64 [...]: the share of b's experts (or a's, if fewer) that are in a's; -1 never is."""
    fewer, more = (a, b) if a.shape[-1] <= b.shape[-1] else (b, a)
    hit = np.zeros(fewer.shape, dtype=bool)
    for place in range(more.shape[-1]):
        hit |= (fewer == more[..., place : place + 1]) & (fewer >= 0)
    return np.asarray(hit.mean(axis=-1), dtype=np.float64)


def _real(experts: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """bool [rows, layers]: recorded, and not one number throughout (which is filler)."""
    recorded = np.asarray((experts >= 0).all(axis=2), dtype=np.bool_)
    if experts.shape[2] > 1:
        recorded &= (experts != experts[:, :, :1]).any(axis=2)
    return recorded


def _chance(common: Sequence[_Rows]) -> float:
    """Mean overlap of rows of the same layer that belong to other tokens."""
    sums, count = 0.0, 0
    for rows in common[:32]:
        if len(rows.place) < 4:
            continue
        moved = np.roll(rows.rollout, len(rows.place) // 2, axis=0)
        real = _real(rows.rollout) & _real(moved)
        values = overlap(rows.rollout, moved)[real]
        sums += float(values.sum())
        count += len(values)
    return sums / count if count else 0.0


def _displaced(common: Sequence[_Rows], chance: float) -> list[Fault]:
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
    real_a, real_b = _real(a), _real(b)
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
    which = "all layers" if len(moved) == shape[0] else f"layers {_spans(np.array(names)[moved])}"
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


def _foreign(common: Sequence[_Rows], chance: float) -> list[Fault]:
    """Rows of the prompt whose overlap is that of unrelated rows, while the rest agrees."""
    found = []
    for rows in common:
        prompt = len(prompt_of(rows.one))
        a, b = rows.trainer, rows.partner
        real = _real(a) & _real(b)
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


def _flips(
    pairs: Pairs, common: Sequence[_Rows]
) -> tuple[NDArray[np.int32], tuple[LayerFlips, ...]]:
    flips = _unknown(pairs)
    names = sorted({number for rows in common for number in rows.names})
    layers = len(names)
    rows_of, flipped_of = np.zeros(layers, np.int64), np.zeros(layers, np.int64)
    overlap_of = np.zeros(layers)
    margins: list[tuple[list[Any], list[Any]]] = [([], []) for _ in range(layers)]
    for rows in common:
        at = np.searchsorted(names, rows.names)
        a, b = rows.trainer, rows.partner
        real = _real(a) & _real(b)
        agreed = overlap(a, b)
        other = real & (agreed < 1.0)
        np.add.at(rows_of, at, real.sum(axis=0))
        np.add.at(flipped_of, at, other.sum(axis=0))
        np.add.at(overlap_of, at, np.where(real, agreed, 0.0).sum(axis=0))
        if rows.margins is not None:
            for column, layer in enumerate(at):
                margins[layer][0].append(rows.margins[:, column][other[:, column]])
                kept = real[:, column] & ~other[:, column]
                margins[layer][1].append(rows.margins[:, column][kept])
        prompt, response = _lengths(rows.one)
        token = rows.place + 1 - prompt  # the token that this row's logits give
        inside = (token >= 0) & (token < min(response, rows.one.stop - rows.one.start))
        inside &= real.any(axis=1)
        flips[rows.one.start + token[inside]] = other[inside].sum(axis=1)
    found = tuple(
        LayerFlips(
            layer=int(names[at]),
            rows=int(rows_of[at]),
            flipped=int(flipped_of[at]),
            overlap=float(overlap_of[at] / rows_of[at]),
            margin_flipped=_median(margins[at][0]),
            margin_kept=_median(margins[at][1]),
        )
        for at in range(layers)
        if rows_of[at]
    )
    return flips, found


def _median(parts: Sequence[NDArray[np.float32]]) -> float | None:
    whole = np.concatenate(parts) if parts else np.empty(0)
    whole = whole[np.isfinite(whole)]
    return float(np.median(whole)) if len(whole) else None


def _unknown(pairs: Pairs) -> NDArray[np.int32]:
    return np.full(len(pairs.sample), -1, dtype=np.int32)


def _few(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """At most SHOWN of each kind, and one line that counts the others."""
    kept: list[Fault] = []
    for kind in FAULTS:
        of = [fault for fault in faults if fault.kind == kind]
        kept += of[:SHOWN]
        if len(of) > SHOWN:
            kept.append(Fault(kind, "", f"and {len(of) - SHOWN} more samples"))
    return tuple(kept)


def _spans(numbers: NDArray[np.integer[Any]]) -> str:
    """`0..3, 7`."""
    values = [int(value) for value in numbers]
    spans: list[list[int]] = []
    for value in values:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    shown = [f"{a}..{b}" if a != b else str(a) for a, b in spans[:SHOWN]]
    return ", ".join(shown) + (" ..." if len(spans) > SHOWN else "")
