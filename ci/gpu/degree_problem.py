"""The problem of ci/gpu/degrees.py, and how it is shared out among ranks.

Its routing brings about what is hard: an expert that every token uses, which crosses borders of
segments and ends in a tail of 64 rows, so many blocks that rings begin anew, an expert without any
row, unequal numbers of tokens with none on the first rank. Values are random, since those of exact
cases add up to the same bits in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from mok.hopper.layout import Sizes
from mok.hopper.packing import Problem
from verify.builtin.layer import uneven
from verify.inputs import generate

T, H, I, E, K, I_SHARED = 1088, 320, 192, 64, 4, 64  # noqa: E741 - the field's names
CROWDED = 5


def routing(tokens: int, experts: int, slots: int) -> Tensor:
    """int64 [tokens, slots]: the expert CROWDED in every token, the last one in none.

    The others are distinct and random, and every 16th slot is unused unless it is CROWDED's.
    """
    scores = generate("degrees.scores", (tokens, experts), torch.float32)
    scores[:, CROWDED % (experts - 1)] = scores.abs().max() + 1.0
    scores[:, experts - 1] = -scores.abs().max() - 1.0
    chosen = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :slots]
    turned = [row.roll(token % slots) for token, row in enumerate(chosen)]
    found = torch.stack(turned).contiguous()
    flat = found.view(-1)
    unused = torch.zeros(flat.shape, dtype=torch.bool)
    unused[::16] = True
    flat[unused & (flat != CROWDED % (experts - 1))] = -1
    return found


def whole_problem(
    tokens: int = T,
    hidden: int = H,
    width: int = I,
    experts: int = E,
    slots: int = K,
    shared: int = I_SHARED,
) -> Problem:
    """All tokens and experts of random values, on the CPU."""

    def made(name: str, *shape: int, scale: float = 1.0) -> Tensor:
        return generate(f"degrees.{name}", shape, torch.bfloat16, scale=scale)

    inner, outer = 2.0 ** -round(hidden.bit_length() / 2), 2.0 ** -round(width.bit_length() / 2)
    return Problem(
        x=made("x", tokens, hidden),
        topk=routing(tokens, experts, slots),
        router=generate("degrees.router", (tokens, slots), torch.float32, kind="uniform"),
        gate=made("gate", experts, width, hidden, scale=inner),
        up=made("up", experts, width, hidden, scale=inner),
        down=made("down", experts, hidden, width, scale=outer),
        shared=(
            made("shared gate", shared, hidden, scale=inner),
            made("shared up", shared, hidden, scale=inner),
            made("shared down", hidden, shared, scale=outer),
        ),
    )


def to_device(problem: Problem, device: torch.device) -> Problem:
    """The same there."""
    tensors = {
        field.name: value.to(device)
        for field in dataclasses.fields(problem)
        if isinstance(value := getattr(problem, field.name), Tensor)
    }
    if problem.shared is not None:
        gate, up, down = problem.shared
        tensors["shared"] = (gate.to(device), up.to(device), down.to(device))
    return dataclasses.replace(problem, **tensors)


def shares(problem: Problem, degree: int) -> list[int]:
    """Tokens of each rank: unequal, and none on the first of several."""
    return uneven(problem.x.shape[0], max(1, degree))


def split(problem: Problem, tokens: Sequence[int]) -> list[Problem]:
    """Tokens, and equal shares of the experts, of each rank; in rank order."""
    experts = problem.gate.shape[0] // len(tokens)
    parts, first = [], 0
    for rank, count in enumerate(tokens):
        own, local = slice(first, first + count), slice(rank * experts, (rank + 1) * experts)
        first += count
        rows = {name: getattr(problem, name)[own].contiguous() for name in ("x", "topk", "router")}
        held = {name: getattr(problem, name)[local].contiguous() for name in ("gate", "up", "down")}
        parts.append(dataclasses.replace(problem, **rows, **held))
    return parts


def sizes_of(parts: Sequence[Problem]) -> Sizes:
    """Of workspaces for ranks with these problems."""
    first = parts[0]
    experts, width, hidden = first.gate.shape
    shared = 0 if first.shared is None else first.shared[0].shape[0]
    most = max(part.x.shape[0] for part in parts)
    return Sizes(most, first.topk.shape[1], experts, hidden, width, shared, ranks=len(parts))
