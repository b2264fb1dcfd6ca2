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

from verify.onpolicy.pairing import Pairs
from verify.onpolicy.routing_faults import (
    chance_overlap,
    displaced_layers,
    faults_of_record,
    foreign_rows,
)
from verify.onpolicy.routing_rows import Rows, chosen, common_rows, lengths, overlap
from verify.onpolicy.routing_table import FAULTS, Fault, few


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


def check(pairs: Pairs) -> RoutingCheck | None:
    """What the routing records say; None where no sample has one."""
    faults: list[Fault] = []
    common: list[Rows] = []
    for one in pairs.samples:
        faults += faults_of_record(one)
        rows = common_rows(one, faults)
        if rows is not None:
            common.append(rows)
    if not common:
        return RoutingCheck(0, (), few(faults), _unknown(pairs), 0.0, None) if faults else None
    chance = chance_overlap(common)
    faults += displaced_layers(common, chance)
    faults += foreign_rows(common, chance)
    flips, layers = _flips(pairs, common)
    share = None
    known = (flips >= 0) & pairs.finite
    if known.any():
        size = np.abs(pairs.difference[known])
        total = float(size.sum())
        share = float(size[flips[known] > 0].sum()) / total if total > 0.0 else 0.0
    return RoutingCheck(len(common), layers, few(faults), flips, chance, share)


def _flips(
    pairs: Pairs, common: Sequence[Rows]
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
        real = chosen(a) & chosen(b)
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
        prompt, response = lengths(rows.one)
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
