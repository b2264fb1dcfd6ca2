"""Exact cases for the emulated backward: what each rank is asked, and the bits it must give.

It exists so that emulated runs are judged by mok.exact, which shares no code with the kernels. The
shared expert's gradients are a rank's own sums; they are taken from one rank's tokens by the
element-wise formulas of mok.activations. Refuses nothing; shapes are small.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import torch
from emulation import Emulator, Knobs
from emulation_backward import (
    EVERYTHING,
    Asked,
    BackKnobs,
    BackOutcome,
    Passed,
    run_passes,
)
from emulation_cases import Shape, draw_knobs, draw_shapes, split
from torch import Tensor

from mok.activations import swiglu_backward
from mok.errors import InputError
from mok.exact import exact_case, integers, same_bits
from mok.hopper.backward_problem import WEIGHTS
from mok.hopper.layout import Segments, Sizes, bound_blocks
from mok.hopper.packing import Problem, Results
from mok.hopper.records import BLOCK, PADDING, ROUTE_BITS
from mok.hopper.schedule_model import plan_ranks

ALL = -1
"""As kept blocks: all that there can be."""


@dataclass(frozen=True)
class Pass:
    """A forward and a backward. kept: blocks of g and u, of each rank; None: no forward.

    given: there is no forward, and g and u are made here, NaN in rows of padding. wants, main: bits
    WANT_*, gradients that are wanted and those that are added to fp32. wide: the others are fp32
    too.
    """

    shape: Shape
    kept: int | None = ALL
    wants: int = EVERYTHING
    main: int = 0
    wide: bool = False
    given: bool = False


@dataclass(frozen=True)
class BackExample:
    """Passes under one workspace, each of other data (seeds 0, 1, ...) and perhaps other T."""

    passes: tuple[Pass, ...]
    knobs: BackKnobs

    @property
    def sizes(self) -> Sizes:
        """Of the workspace that all passes share."""
        return max((p.shape.sizes for p in self.passes), key=lambda s: s.max_tokens)


@dataclass(frozen=True)
class Wanted:
    """What each rank must give: d_x, d_router, and fp32 gradients of WEIGHTS in their order."""

    d_x: Tensor
    d_router: Tensor
    weights: tuple[Tensor, ...]


@functools.cache
def exact_backward(shape: Shape, seed: int) -> tuple[list[Problem], list[Tensor], list[Wanted]]:
    """By rank: the problem, d_out, and what must come of them bit for bit."""
    case = exact_case(
        *(sum(shape.tokens), shape.hidden, shape.width, shape.experts * len(shape.tokens)),
        *(shape.slots, shape.routing),
        shared_width=shape.shared,
        clamped=shape.clamped,
        seed=seed,
    )
    problems, expected = split(case.inputs, shape.tokens), case.expected
    d_outs = [part.clone() for part in case.d_out.split(shape.tokens)]
    wanted = []
    rows = [expected[name].split(shape.tokens) for name in ("d_x", "d_router_weights")]
    for rank, (problem, d_out) in enumerate(zip(problems, d_outs, strict=True)):
        local = slice(rank * shape.experts, (rank + 1) * shape.experts)
        weights = tuple(expected[f"d_w_{name}"][local] for name in ("gate", "up", "down"))
        weights += _shared_gradients(problem, d_out)
        wanted.append(Wanted(rows[0][rank], rows[1][rank], weights))
    if shape.shared:  # both ways of getting at them agree
        for place, name in enumerate(("gate", "up", "down")):
            total = sum(w.weights[3 + place] for w in wanted)
            assert torch.equal(total, expected[f"d_w_shared_{name}"]), name  # type: ignore[arg-type]
    return problems, d_outs, wanted


def _shared_gradients(problem: Problem, d_out: Tensor) -> tuple[Tensor, ...]:
    """Of gate, up and down over one rank's tokens, fp32; exact cases only, so order is nothing."""
    if problem.shared is None:
        return ()
    gate, up, down = (weight.double() for weight in problem.shared)
    x, upstream = problem.x.double(), d_out.double()
    g, u = ((x @ w.t()).bfloat16() for w in (gate, up))
    ones = torch.ones(len(x))
    made = swiglu_backward((upstream @ down).float(), g, u, ones, problem.limit)
    sums = (
        made.d_gate.double().t() @ x,
        made.d_up.double().t() @ x,
        upstream.t() @ made.weighted_hidden.double(),
    )
    return tuple(total.float() + 0.0 for total in sums)


def asked_of(one: Pass, seed: int, sizes: Sizes) -> list[Asked]:
    """What each rank is asked in a pass."""
    problems, d_outs, wanted = exact_backward(one.shape, seed)
    kept = one.kept
    if kept == ALL:
        kept = max(1, bound_blocks(sizes.max_rows, sizes.experts))
    found = []
    for rank, (problem, d_out) in enumerate(zip(problems, d_outs, strict=True)):
        weights = wanted[rank].weights
        there = (1 << len(weights)) - 1
        main = {
            name: _given(name, weight, seed + rank)
            for number, (name, weight) in enumerate(zip(WEIGHTS, weights, strict=False))
            if (one.main & one.wants) >> number & 1
        }
        dtype = torch.float32 if one.wide else torch.bfloat16
        rest = (one.wants & there, main, dtype)
        if one.given:
            kept_here = kept_rows(problems, rank, kept or 1, sizes)
            found.append(Asked(problem, d_out, None, *rest, kept_here))
        else:
            found.append(Asked(problem, d_out, kept, *rest))
    return found


def kept_rows(problems: list[Problem], rank: int, blocks: int, sizes: Sizes) -> Results:
    """What a forward may keep of exact cases: so many blocks, with NaN in rows of padding."""
    own = problems[rank]
    plan = plan_ranks([p.topk.numpy() for p in problems], sizes, Segments(1, 1))[rank]
    gate, up = (torch.full((blocks * BLOCK, sizes.width), torch.nan).bfloat16() for _ in range(2))
    for row, route in enumerate(plan.routes[: blocks * BLOCK].tolist()):
        if route == PADDING:
            continue
        token = (route & ((1 << ROUTE_BITS) - 1)) // sizes.slots
        x = problems[route >> ROUTE_BITS].x[token].float()  # exact in fp32
        expert = int(plan.blocks[row // BLOCK]) >> 16
        gate[row], up[row] = own.gate[expert].float() @ x, own.up[expert].float() @ x
    if own.shared is None:
        return Results(own.x, gate, up)
    shared = (own.x.float() @ weight.float().t() for weight in own.shared[:2])
    return Results(own.x, gate, up, *(rows.bfloat16() for rows in shared))


def _given(name: str, like: Tensor, seed: int) -> Tensor:
    """What lies in a main gradient before: sevenths, so that adding twice or late would show."""
    drawn = integers(f"main {name}", tuple(like.shape), seed) % 1024
    return torch.from_numpy(drawn.astype("float32")) / 7


def run_example(example: BackExample, emulator: Emulator) -> BackOutcome:
    """All passes of an example."""
    asked = [asked_of(p, seed, example.sizes) for seed, p in enumerate(example.passes)]
    return run_passes(emulator, asked, example.sizes, example.knobs)


def problems_of_backward(example: BackExample, emulator: Emulator) -> list[str]:
    """Runs it; what went wrong, in words."""
    outcome = run_example(example, emulator)
    if outcome.failure:
        return [outcome.failure]
    found = outcome.fences.broken()
    for number, (one, made) in enumerate(zip(example.passes, outcome.passes, strict=True)):
        _, _, wanted = exact_backward(one.shape, number)
        asked = asked_of(one, number, example.sizes)
        for rank, passed in enumerate(made):
            for name in _wrong(passed, asked[rank], wanted[rank]):
                found.append(f"pass {number} rank {rank}: wrong {name}")
    return found


def _wrong(passed: Passed, asked: Asked, wanted: Wanted) -> list[str]:
    gradients = passed.gradients
    found = []
    for name in ("d_x", "d_router"):
        found += _differs(name, getattr(gradients, name), getattr(wanted, name))
    for number, weight in enumerate(wanted.weights):
        name = WEIGHTS[number]
        own, main = getattr(gradients, f"d_{name}"), getattr(passed.main, name)
        if name in asked.main:
            found += _differs(f"main {name}", main, asked.main[name] + weight)
        elif asked.wants >> number & 1:
            found += _differs(f"d_{name}", own, weight.to(asked.dtype))
        elif own is not None or main is not None:
            found.append(f"d_{name}, which nobody wants")
    return found


def _differs(name: str, got: Tensor, wanted: Tensor) -> list[str]:
    if same_bits(got, wanted):
        return []
    unlike = (got != wanted) | got.isnan()
    if not bool(unlike.any()):
        return [f"{name}: signs of zeros"]
    at = unlike.nonzero()[0].tolist()
    values = f"{got[tuple(at)].item()} instead of {wanted[tuple(at)].item()}"
    return [f"{name}: {int(unlike.sum())} of {got.numel()}, first at {at}: {values}"]


def draw_backward(rng: random.Random) -> BackExample:
    """Any shape, routing, ring, parts, ranks, CTAs, passes and gradients that the kernels allow."""
    while True:
        example = _draw(rng)
        try:
            for seed, one in enumerate(example.passes):
                exact_backward(one.shape, seed)
        except InputError:  # not an exact case
            continue
        return example


def _draw(rng: random.Random) -> BackExample:
    shapes = draw_shapes(rng, (64, 128, 192, 320), (1, 2, 3, 5, 5, 12))
    passes = []
    for shape in shapes:
        blocks = bound_blocks(shape.sizes.max_rows, shape.experts)
        kept = rng.choice([ALL, ALL, None, 0, rng.randint(0, max(1, blocks))])
        wants = rng.choice([EVERYTHING, EVERYTHING, rng.randrange(64)])
        main = rng.choice([0, 0, EVERYTHING, rng.randrange(64)])
        wide, given = rng.random() < 0.15, kept is not None and rng.random() < 0.2
        passes.append(Pass(shape, kept, wants, main & wants, wide, given))
    most = rng.choice([1, 1, 2, 3, 5])
    segments = Segments(rng.randint(1, most), most)
    run: Knobs = draw_knobs(rng, len(shapes[0].tokens))
    uncut = rng.choice([None, most, most, most + 1])
    knobs = BackKnobs(run, segments, uncut, rng.random() < 0.6)
    sizes = max((s.sizes for s in shapes), key=lambda s: s.max_tokens)
    if uncut is not None and not _fits(sizes, segments, uncut):
        knobs = BackKnobs(run, segments, None, knobs.tight)
    return BackExample(tuple(passes), knobs)


def _fits(sizes: Sizes, segments: Segments, uncut: int) -> bool:
    """Whether the ring that the host takes without being asked has room for such parts."""
    blocks = max(1, bound_blocks(sizes.max_rows, min(sizes.experts, max(1, sizes.max_rows))))
    return 2 * uncut <= min(3 * segments.most, blocks) or 3 * segments.most >= blocks
