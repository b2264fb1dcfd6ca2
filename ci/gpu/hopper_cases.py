"""The Hopper kernels for `verify run`: the bundled layer at widths that they take.

The built-in cases have odd widths, for which `backend="auto"` takes the portable backend. These
insist on the kernel where there is a CUDA device, so that nothing is shown of another backend by
mistake: elsewhere than on a GPU of compute capability 9.0, or with ranks that share one, they fail
by name. On a CPU they run the portable backend, which is how tests know that the cases are right.

    verify run ci/gpu/hopper_cases.py --device cuda --ranks 1
    verify run ci/gpu/hopper_cases.py --device cuda --ranks 2

Gradients come from the kernels too, with a group if MOK_HOPPER_BACKWARD=1. Where they come from the
portable backend, the cases called `backward` fail by name on a GPU. `hopper/backward` takes
all gradients in its execution, so that a CUDA graph can record both directions, and grids and
segments are varied for every gradient.

`hopper/degrees` and `hopper/backward-degrees` run several ranks on one GPU in one launch, for
degrees that there are no GPUs for, and need a GPU of one rank; their claims `vary` and `schedule`
say that no degree, no grid and no size of segments changes a bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import backward_degrees  # all three beside this file
import degree_problem as problem
import degrees
import torch
import torch.distributed as dist
from torch import Tensor

from mok.hopper import local_group
from mok.hopper.layout import Segments
from mok.hopper.packing import Problem
from mok.hopper.support import BACKWARD_VARIABLE, backward_wanted
from verify import inputs as generated
from verify.builtin import covered, exact, layer, moe
from verify.cases import Case
from verify.errors import UnsupportedError

# Each width ends in a tail: of 64 in tiles of 256 (H), and of 64 in tiles of 128 (I and S).
T, H, I, E, K, I_SHARED = 384, 320, 192, 8, 4, 64  # noqa: E741 - the field's names
SCHEDULE = tuple({"minibatch_size": size} for size in (128, 1024, 8192)) + tuple(
    {"num_sms": sms} for sms in (1, 7)
)
"""1024 rows are the least that the kernel's segments take; with one CTA every wait is in turn."""


def backend(x: Tensor) -> str:
    """The kernel or an error on a GPU."""
    return "hopper" if x.is_cuda else "auto"


def insist_on_backward(x: Tensor) -> None:
    """UnsupportedError on a GPU unless backwards run on the kernels."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if x.is_cuda and not backward_wanted(ranks):
        raise UnsupportedError(
            f"its gradients would be the portable backend's; set {BACKWARD_VARIABLE}=1"
        )


def execute(**arguments: Any) -> Tensor:
    """The layer; its backward is the kernels' unless the environment says otherwise."""
    return layer.execute(**arguments, backend=backend(arguments["x"]))


def execute_clamped(**arguments: Any) -> Tensor:
    """The layer with a clamped SwiGLU."""
    return layer.execute_clamped(**arguments, backend=backend(arguments["x"]))


def execute_forward(**arguments: Any) -> Tensor:
    """The forward alone, which a CUDA graph can record."""
    with torch.no_grad():
        return execute(**arguments)


def execute_backward(d_out: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """Output and all gradients for the given upstream gradient."""
    insist_on_backward(arguments["x"])
    out = execute(**arguments)
    leaves = {
        name: one for name, one in arguments.items() if name in (*layer.ROUTED, *layer.SHARED)
    }
    gradients = torch.autograd.grad(out, list(leaves.values()), d_out)
    found = {f"d_{name}": one for name, one in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), **found}


def execute_exact(**arguments: Any) -> dict[str, Tensor]:
    """Output and gradients of an exact case."""
    return exact.execute(**arguments, backend=backend(arguments["x"]))


def _inputs(gradients: bool) -> Mapping[str, Any]:
    made = {
        "x": generated.normal(T, H, dtype=torch.bfloat16, requires_grad=True),
        "router_weights": generated.uniform(T, K, requires_grad=True),
        "w_gate": layer.weights(E, I, H),
        "w_up": layer.weights(E, I, H),
        "w_down": layer.weights(E, H, I),
        "w_shared_gate": layer.weights(I_SHARED, H),
        "w_shared_up": layer.weights(I_SHARED, H),
        "w_shared_down": layer.weights(H, I_SHARED),
    }
    return {name: replace(one, requires_grad=gradients) for name, one in made.items()}


LAYER = replace(
    moe.MOE,
    name="hopper/layer",
    description="mixture of experts on the Hopper backend",
    execute=execute,
    inputs=_inputs(True),
    schedule=SCHEDULE,
    sources=(*moe.MOE.sources, *covered.ON_GPU),
    shares_gpu=False,
    ranks=1,
)
CLAMPED = replace(
    LAYER,
    name="hopper/clamped",
    description="the same with a clamped SwiGLU",
    execute=execute_clamped,
    reference=moe.CLAMPED.reference,
    claims=moe.CLAMPED.claims,
)
BACKWARD = replace(
    LAYER,
    name="hopper/backward",
    description="both directions of the Hopper backend in one execution",
    execute=execute_backward,
    inputs={**_inputs(True), "d_out": generated.normal(T, H, dtype=torch.bfloat16)},
    claims=(
        *("repeat", "process", "memory", "history", "contention", "stream", "sms", "graph"),
        *("schedule", "ep", "rank"),
    ),
    placement=exact.PLACEMENT,
    batch=dict.fromkeys(exact.TOKENS, 0),
    reference=None,
    gradients=False,
)
FORWARD = replace(
    LAYER,
    name="hopper/forward",
    description="the Hopper forward alone, without gradients",
    execute=execute_forward,
    inputs=_inputs(False),
    claims=(
        *("repeat", "process", "memory", "history", "contention", "stream", "sms", "graph"),
        *("batch", "schedule", "ep", "rank"),
    ),
    reference=None,
    gradients=False,
)


def _exact(variant: str) -> Case:
    made = exact.case_of(variant)
    return replace(
        made,
        name=f"hopper/{made.name.partition('/')[2]}",
        execute=execute_exact,
        golden="",
        claims=("repeat", "ep", "rank", "exact"),
        sources=(*made.sources, *covered.ON_GPU),
        shares_gpu=False,
        ranks=1,
    )


DEGREE = 4
"""Of the executions that change nothing else: with unequal shares and a rank without tokens, and
few enough that every rank has a CTA where a load leaves four multiprocessors."""
_RANKS: dict[Any, degrees.Ranks] = {}


def execute_degrees(
    degree: int = DEGREE,
    num_sms: int = 0,
    segments: tuple[int, int] | None = degrees.SEGMENTS[0],
    **arguments: Any,
) -> Tensor:
    """out of all ranks of one degree in the order of the tokens; 0: the layer as it is called.

    segments: least and most blocks; None: what the layer takes. Raises RuntimeError when with the
    smallest ones something did not occur that the problem is made for.
    """
    with torch.no_grad():
        if not arguments["x"].is_cuda:
            raise UnsupportedError(
                "ranks share a launch on a GPU only; run it with --device cuda, or see the emulated"
                " launches of tests/mok/hopper/test_emulated.py"
            )
        if degree == 0:
            return execute(**arguments, num_sms=num_sms)
        whole = whole_problem(**arguments)
        tokens = problem.shares(whole, degree)
        parts = problem.split(whole, tokens)
        ranks = _open(degree, parts, None if segments is None else Segments(*segments))
        out = degrees.run(ranks, parts, num_sms)
        ranks.wait()
        facts = degrees.facts_of(ranks.workspaces, tokens)
        lacking = degrees.lacking(facts) if segments == degrees.SEGMENTS[0] else []
        if lacking:
            raise RuntimeError(f"degree {degree} ran without {', '.join(lacking)}: {facts}")
        return out


def execute_backward_degrees(
    d_out: Tensor,
    degree: int = DEGREE,
    num_sms: int = 0,
    segments: tuple[int, int] | None = degrees.SEGMENTS[0],
    **arguments: Any,
) -> dict[str, Tensor]:
    """out and the gradients that no degree may change, of all ranks in order; 0: the layer's.

    The shared expert's are a rank's own sums, which backward_degrees.py compares. Otherwise as
    execute_degrees.
    """
    if not arguments["x"].is_cuda:
        return execute_degrees(degree, num_sms, segments, **arguments)  # says why not
    if degree == 0:
        found = execute_backward(d_out, **arguments, num_sms=num_sms)
        return {name: one for name, one in found.items() if "shared" not in name}
    with torch.no_grad():
        whole = whole_problem(**{name: one.detach() for name, one in arguments.items()})
        tokens = problem.shares(whole, degree)
        parts, d_outs = problem.split(whole, tokens), list(d_out.detach().split(tokens))
        chosen = None if segments is None else Segments(*segments)
        ranks = _open(degree, parts, chosen, backward=True)
        kept = backward_degrees.forward(ranks, parts, num_sms)
        gradients = backward_degrees.backward(ranks, parts, d_outs, kept, num_sms=num_sms)
        ranks.wait()
        facts = backward_degrees.facts_of(ranks.workspaces, tokens)
        lacking = backward_degrees.lacking(facts) if segments == degrees.SEGMENTS[0] else []
        if lacking:
            raise RuntimeError(f"degree {degree} ran without {', '.join(lacking)}: {facts}")
        joined = backward_degrees.joined(gradients)
        named = {_NAMES[name]: joined[name] for name in backward_degrees.ROUTED}
        return {"out": torch.cat([one.out for one in kept]), **named}


_NAMES = {
    "d_x": "d_x",
    "d_router": "d_router_weights",
    **{f"d_{name}": f"d_w_{name}" for name in ("gate", "up", "down")},
}
"""The layer's names of gradients by those of launches."""


def _open(
    degree: int, parts: list[Problem], segments: Segments | None, backward: bool = False
) -> degrees.Ranks:
    """Used again and again, as those of the layer are: their epochs go on."""
    device, sizes = parts[0].x.device, problem.sizes_of(parts)
    key = (degree, device, sizes, segments, backward)
    if key not in _RANKS:
        _RANKS[key] = (
            backward_degrees.open_ranks(degree, parts, segments)
            if backward
            else degrees.open_ranks(degree, sizes, device, segments)
        )
    return _RANKS[key]


def whole_problem(**given: Tensor) -> Problem:
    """The arguments of the layer as one problem."""
    shared = tuple(given[name] for name in layer.SHARED)
    names = ("x", "topk_experts", "router_weights", "w_gate", "w_up", "w_down")
    return Problem(*(given[name].contiguous() for name in names), shared)  # type: ignore[arg-type]


def _routing() -> dict[str, Tensor]:
    return {"topk_experts": problem.routing(problem.T, problem.E, problem.K)}


def _degree_inputs() -> Mapping[str, Any]:
    tokens, hidden, width, shared = problem.T, problem.H, problem.I, problem.I_SHARED
    made = {
        "x": generated.normal(tokens, hidden, dtype=torch.bfloat16),
        "router_weights": generated.uniform(tokens, problem.K),
        "w_gate": layer.weights(problem.E, width, hidden),
        "w_up": layer.weights(problem.E, width, hidden),
        "w_down": layer.weights(problem.E, hidden, width),
        "w_shared_gate": layer.weights(shared, hidden),
        "w_shared_up": layer.weights(shared, hidden),
        "w_shared_down": layer.weights(hidden, shared),
    }
    return {name: replace(one, requires_grad=False) for name, one in made.items()}


DEGREES = Case(
    name="hopper/degrees",
    description="the Hopper forward at every degree of expert parallelism on one GPU",
    execute=execute_degrees,
    inputs=_degree_inputs(),
    setup=_routing,
    claims=(
        *("repeat", "process", "memory", "history", "contention", "stream"),
        *("schedule", "vary"),
    ),
    vary={"degree": tuple(one for one in degrees.DEGREES if one != DEGREE)},
    schedule=(
        *({"degree": n, "num_sms": sms} for n in (1, 2, 8) for sms in (1, 2, 7, 132)),
        *(
            {"degree": n, "segments": some}
            for n in (1, DEGREE, 64)
            for some in (*degrees.SEGMENTS[1:], None)
        ),
    ),
    gradients=False,
    sources=(
        *(__file__, problem.__file__, degrees.__file__, local_group.__file__),
        *(*covered.LAYER, *covered.ON_GPU),
    ),
    ranks=1,
)
BACKWARD_DEGREES = replace(
    DEGREES,
    name="hopper/backward-degrees",
    description="the Hopper backward at every degree of expert parallelism on one GPU",
    execute=execute_backward_degrees,
    inputs={
        **{name: replace(one, requires_grad=True) for name, one in _degree_inputs().items()},
        "d_out": generated.normal(problem.T, problem.H, dtype=torch.bfloat16),
    },
    sources=(*DEGREES.sources, backward_degrees.__file__),
)
EXACT = tuple(_exact(variant) for variant in exact.TILED)
