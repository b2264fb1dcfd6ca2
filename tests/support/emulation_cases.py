"""Problems for the emulated layer, and what it must give: bits of exact cases, g and u row by row.

It exists so that emulated runs are judged by the float64 reference and by the schedule's model,
which share no code with the kernels. Refuses nothing; shapes are small.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from emulation import Emulator, Knobs, Outcome, run
from torch import Tensor

from mok.errors import InputError
from mok.exact import Routing, exact_case, same_bits
from mok.hopper.layout import Segments, Sizes
from mok.hopper.packing import Problem
from mok.hopper.records import BLOCK, PADDING, ROUTE_BITS
from mok.hopper.schedule_model import plan_ranks
from mok.reference import MoEInputs

_ROUTINGS: tuple[Routing, ...] = (
    *("balanced", "skewed", "one-expert", "unused-slots", "empty-experts"),
)


@dataclass(frozen=True)
class Shape:
    """One layer over several ranks. tokens: of each rank. experts: of one rank."""

    tokens: tuple[int, ...]
    hidden: int
    width: int
    experts: int
    slots: int
    routing: Routing = "balanced"
    shared: int | None = None
    clamped: bool = False
    max_tokens: int = 0

    @property
    def sizes(self) -> Sizes:
        """Of a workspace for it."""
        most = max(self.max_tokens, *self.tokens)
        ranks = len(self.tokens)
        return Sizes(
            most, self.slots, self.experts, self.hidden, self.width, self.shared or 0, ranks
        )


@dataclass(frozen=True)
class Example:
    """Launches under one workspace, each of other data (seeds 0, 1, ...) and perhaps other T."""

    launches: tuple[Shape, ...]
    knobs: Knobs

    @property
    def sizes(self) -> Sizes:
        """Of the workspace that all launches share."""
        return max((shape.sizes for shape in self.launches), key=lambda s: s.max_tokens)


def problems_of(example: Example, emulator: Emulator) -> list[str]:
    """Runs it; what went wrong, in words."""
    made = [exact(shape, seed) for seed, shape in enumerate(example.launches)]
    outcome = run(emulator, [given for given, _ in made], example.sizes, example.knobs)
    if outcome.failure:
        return [outcome.failure]
    found = []
    for launch, (problems, wanted) in enumerate(made):
        if not same_bits(joined(outcome, launch), wanted):
            found.append(f"launch {launch}: wrong out")
        if example.knobs.save:
            assert example.knobs.segments is not None
            found += saved_differences(
                outcome, launch, problems, example.sizes, example.knobs.segments
            )
    return found


def draw_example(rng: random.Random) -> Example:
    """Any shape, routing, rings, number of ranks, CTAs and launches that the kernels allow."""
    while True:
        example = _draw(rng)
        try:
            for seed, shape in enumerate(example.launches):
                exact(shape, seed)
        except InputError:  # not an exact case
            continue
        return example


def _draw(rng: random.Random) -> Example:
    shapes = draw_shapes(rng)
    return Example(shapes, draw_knobs(rng, len(shapes[0].tokens)))


def draw_shapes(
    rng: random.Random,
    widths: Sequence[int] = (64, 128, 192),
    every_experts: Sequence[int] = (1, 2, 3, 5),
) -> tuple[Shape, ...]:
    """One layer over several ranks, with tokens and a routing for each launch."""
    ranks, experts = rng.choice([1, 1, 2, 2, 3, 4]), rng.choice(every_experts)
    hidden, width = rng.choice([64, 128, 192, 320]), rng.choice(widths)
    slots = rng.randint(1, min(4, (ranks * experts + 1) // 2))
    shared, clamped = rng.choice([None, None, 64, 192]), rng.random() < 0.3
    room = rng.choice([0, 0, 350])
    launches = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        counts = [rng.choice([0, 1, 5, 40, 64, 65, 127, 128, 129, 200, 300]) for _ in range(ranks)]
        if sum(counts) == 0:
            counts[0] = 3
        routing = rng.choice(_ROUTINGS)
        launches.append(
            Shape(tuple(counts), hidden, width, experts, slots, routing, shared, clamped, room)
        )
    return tuple(launches)


def draw_knobs(rng: random.Random, ranks: int) -> Knobs:
    """CTAs, segments, rings and the seed of a schedule."""
    most = rng.choice([1, 2, 3, 5])
    return Knobs(
        ctas=rng.choice([1, 2, 3, 7]),
        seed=rng.randrange(10**6),
        segments=Segments(rng.randint(1, most), most),
        together=rng.random() < 0.5,
        save=rng.random() < 0.7,
        resident=1 if ranks == 1 and rng.random() < 0.3 else 1000,
        tight=rng.random() < 0.5,
    )


@functools.cache
def exact(shape: Shape, seed: int = 0) -> tuple[list[Problem], Tensor]:
    """A problem for every rank, and out [all tokens, H] as it must be bit for bit."""
    case = exact_case(
        *(sum(shape.tokens), shape.hidden, shape.width, shape.experts * len(shape.tokens)),
        *(shape.slots, shape.routing),
        shared_width=shape.shared,
        clamped=shape.clamped,
        seed=seed,
    )
    return split(case.inputs, shape.tokens), case.expected["out"]


def split(inputs: MoEInputs, tokens: Sequence[int]) -> list[Problem]:
    """Tokens and experts shared out among ranks, in rank order."""
    experts = inputs.w_gate.shape[0] // len(tokens)
    problems, first = [], 0
    for rank, count in enumerate(tokens):
        own = slice(first, first + count)
        local = slice(rank * experts, (rank + 1) * experts)
        first += count
        problems.append(
            Problem(
                *(inputs.x[own].clone(), inputs.topk_experts[own].clone()),
                inputs.router_weights[own].float().clone(),
                *(w[local].clone() for w in (inputs.w_gate, inputs.w_up, inputs.w_down)),
                inputs.shared,
                inputs.swiglu_limit,
            )
        )
    return problems


def joined(outcome: Outcome, launch: int) -> Tensor:
    """out of all ranks, in rank order."""
    return torch.cat([result.out for result in outcome.results[launch]])


def saved_differences(
    outcome: Outcome, launch: int, problems: Sequence[Problem], sizes: Sizes, segments: Segments
) -> list[str]:
    """Rows of g and u that are not bf16(x w^T) of their route, by rank; exact cases only."""
    topk = [problem.topk.numpy() for problem in problems]
    found = []
    for rank, plan in enumerate(plan_ranks(topk, sizes, segments)):
        result, own = outcome.results[launch][rank], problems[rank]
        assert result.gate is not None
        assert result.up is not None
        for row, route in enumerate(plan.routes.tolist()):
            if route == PADDING or row >= result.gate.shape[0]:
                continue
            token = (route & ((1 << ROUTE_BITS) - 1)) // sizes.slots
            x = problems[route >> ROUTE_BITS].x[token].double()
            expert = int(plan.blocks[row // BLOCK]) >> 16
            for name, saved, weight in (("g", result.gate, own.gate), ("u", result.up, own.up)):
                wanted = (weight[expert].double() @ x).bfloat16()
                if not torch.equal(saved[row], wanted):
                    found.append(f"rank {rank} {name} row {row}")
        found += _shared_differences(rank, own, result.shared_gate, result.shared_up)
    return found


def _shared_differences(
    rank: int, problem: Problem, gate: Tensor | None, up: Tensor | None
) -> list[str]:
    if problem.shared is None:
        return []
    found = []
    for name, saved, weight in (("g", gate, problem.shared[0]), ("u", up, problem.shared[1])):
        wanted = (problem.x.double() @ weight.double().t()).bfloat16()
        if saved is None or not torch.equal(saved, wanted):
            found.append(f"rank {rank} shared {name}")
    return found
