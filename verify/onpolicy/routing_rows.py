"""Rows of experts that both sides recorded, at the same positions and, by number, layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.causes.facts import prompt_of
from verify.onpolicy.pairing import Paired
from verify.onpolicy.routing_table import Fault, spans
from verify.onpolicy.samples import ROLLOUT, TRAINER, Routing


@dataclass(frozen=True, eq=False)
class Rows:
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


def lengths(one: Paired) -> tuple[int, int]:
    tokens = one.tokens
    response = len(tokens) if tokens is not None else one.stop - one.start
    return len(prompt_of(one)), response


def common_rows(one: Paired, faults: list[Fault]) -> Rows | None:
    """The rows that both sides have, cut to the same positions and, by number, layers."""
    a, b = one.trainer.routing.get(TRAINER), one.rollout.routing.get(ROLLOUT)
    if a is None or b is None or a.experts.ndim != 3 or b.experts.ndim != 3:
        return None
    if not a.experts.size or not b.experts.size:
        return None
    where = f"sample {one.key}"
    prompt, response = lengths(one)
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
                f"trainer has layers {spans(np.array(names))}, rollout {spans(np.array(others))}",
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
    return Rows(one, place, left, right, names, others, own, margins)


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


def chosen(experts: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """bool [rows, layers]: recorded, and not one number throughout (which is filler)."""
    recorded = np.asarray((experts >= 0).all(axis=2), dtype=np.bool_)
    if experts.shape[2] > 1:
        recorded &= (experts != experts[:, :, :1]).any(axis=2)
    return recorded
