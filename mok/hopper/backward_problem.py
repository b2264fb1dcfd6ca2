"""What a backward gets beside its forward's inputs, what it writes, and whether that fits together.

It exists so that the tensors of a call are checked and made before any address is taken. Refuses
tensors of another shape, dtype or place than the forward had. What the forward did not keep is
computed again, so it may have kept anything.

Legend: T tokens, K slots, E experts of this rank, H hidden size, I width, S shared width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mok.errors import InputError
from mok.hopper import gradient_records, maps
from mok.hopper.layout import BLOCK
from mok.hopper.packing import Problem, Results
from mok.main_gradients import NAMES as WEIGHTS
from mok.main_gradients import MainGradients


@dataclass(frozen=True)
class BackwardProblem:
    """What a backward gets beside the forward's inputs.

    d_out: bf16 [T, H], contiguous. kept: what the forward returned; None, or None in it, is
    computed again. wants: WANT_* of gradient_records, which gradients of weights. main: those that
    are added to what is there. dtype: of the others, bfloat16 or float32.
    """

    d_out: Tensor
    kept: Results | None = None
    wants: int = gradient_records.WANT_ROUTED
    main: MainGradients = field(default_factory=MainGradients)
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Gradients:
    """What a backward writes; all are this rank's own.

    d_x bf16 [T, H], d_router fp32 [T, K]. d_gate, d_up [E, I, H], d_down [E, H, I], d_shared_gate,
    d_shared_up [S, H], d_shared_down [H, S] in the problem's dtype; None where a gradient was not
    wanted, or was added to a main gradient.
    """

    d_x: Tensor
    d_router: Tensor
    d_gate: Tensor | None = None
    d_up: Tensor | None = None
    d_down: Tensor | None = None
    d_shared_gate: Tensor | None = None
    d_shared_up: Tensor | None = None
    d_shared_down: Tensor | None = None

    def weights(self) -> tuple[Tensor | None, ...]:
        """The six of weights, in the order of WEIGHTS, whose bits WANT_* follow."""
        return tuple(getattr(self, f"d_{name}") for name in WEIGHTS)


def wants_of(
    *,
    gate: bool = False,
    up: bool = False,
    down: bool = False,
    shared_gate: bool = False,
    shared_up: bool = False,
    shared_down: bool = False,
) -> int:
    """The bits WANT_* of the gradients that are asked for."""
    asked = (gate, up, down, shared_gate, shared_up, shared_down)
    return sum(1 << number for number, one in enumerate(asked) if one)


def _weights(problem: Problem) -> dict[str, Tensor]:
    """The weights that there are, by the names of WEIGHTS."""
    own = problem.shared or ()
    return dict(zip(WEIGHTS, (problem.gate, problem.up, problem.down, *own), strict=False))


def wanted_weights(problem: Problem, backward: BackwardProblem) -> Iterator[tuple[str, Tensor]]:
    """Names, as in WEIGHTS, and weights whose gradients are wanted."""
    weights = _weights(problem)
    for number, name in enumerate(WEIGHTS):
        if backward.wants >> number & 1:
            yield name, weights[name]


def aligned(backward: BackwardProblem) -> BackwardProblem:
    """The same with rows that begin at multiples of 16 bytes; clones those that do not."""

    def fix(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.data_ptr() % maps.ALIGNMENT == 0:
            return tensor
        return tensor.clone()

    d_out, kept = fix(backward.d_out), backward.kept
    assert d_out is not None
    if kept is not None:
        rows = (kept.gate, kept.up, kept.shared_gate, kept.shared_up)
        kept = Results(kept.out, *map(fix, rows))
    return dataclasses.replace(backward, d_out=d_out, kept=kept)


def check_backward(problem: Problem, backward: BackwardProblem) -> None:
    """Raises InputError unless the tensors of a backward fit those of its forward.

    packing.check_fits of the forward's comes before.
    """
    x, bf16 = problem.x, torch.bfloat16
    _check("d_out", backward.d_out, tuple(x.shape), bf16, x.device)
    if backward.dtype not in (bf16, torch.float32):
        raise InputError(
            f"gradients of {backward.dtype}; allowed: torch.bfloat16 or torch.float32. Cast them "
            "afterwards."
        )
    weights = _weights(problem)
    most = (1 << len(weights)) - 1
    if backward.wants & ~most:
        raise InputError(
            f"wants = {backward.wants:#x}; allowed: bits of {most:#x}, the weights that there are "
            "(WANT_* of mok.hopper.gradient_records). Use wants_of."
        )
    for number, name in enumerate(WEIGHTS):
        main = getattr(backward.main, name)
        if main is None:
            continue
        if not backward.wants >> number & 1:
            raise InputError(
                f"a main gradient of {name}, whose gradient is not wanted; allowed: of those in "
                "wants. Leave it out, or ask for the gradient."
            )
        _check(f"main.{name}", main, tuple(weights[name].shape), torch.float32, x.device)
    if backward.kept is not None:
        _check_kept(problem, backward.kept)


def _check_kept(problem: Problem, kept: Results) -> None:
    x, bf16 = problem.x, torch.bfloat16
    for first, second in (("gate", "up"), ("shared_gate", "shared_up")):
        if (getattr(kept, first) is None) != (getattr(kept, second) is None):
            raise InputError(
                f"one of kept.{first} and kept.{second} is None; allowed: both or neither. "
                "Pass what the forward returned."
            )
    if kept.gate is not None and kept.up is not None:
        rows = kept.gate.shape[0]
        if rows % BLOCK:
            raise InputError(
                f"kept.gate has {rows} rows; allowed: multiples of {BLOCK}. Pass what the "
                "forward returned."
            )
        for name, tensor in (("gate", kept.gate), ("up", kept.up)):
            _check(f"kept.{name}", tensor, (rows, problem.gate.shape[1]), bf16, x.device)
    if kept.shared_gate is not None and kept.shared_up is not None:
        width = 0 if problem.shared is None else problem.shared[0].shape[0]
        for name, tensor in (("gate", kept.shared_gate), ("up", kept.shared_up)):
            _check(f"kept.shared_{name}", tensor, (x.shape[0], width), bf16, x.device)


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    given = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.is_contiguous())
    if given == (shape, dtype, device, True):
        return
    order = "contiguous" if given[3] else "not contiguous"
    raise InputError(
        f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, {order}; allowed: "
        f"{dtype} {list(shape)} on {device}, contiguous. Convert it."
    )


def make_gradients(problem: Problem, backward: BackwardProblem) -> Gradients:
    """Fresh tensors for a call, which the kernels write to the last element."""
    x = problem.x
    found: dict[str, Tensor] = {}
    for name, weight in wanted_weights(problem, backward):
        if getattr(backward.main, name) is not None:
            continue
        found[f"d_{name}"] = torch.empty(weight.shape, dtype=backward.dtype, device=x.device)
    d_router = torch.empty_like(problem.router, dtype=torch.float32)
    return Gradients(torch.empty_like(x), d_router, **found)


def without_rows(problem: Problem, backward: BackwardProblem) -> Gradients:
    """The gradients of a rank alone that has no tokens: zeros; main gradients stay as they are."""
    made = make_gradients(problem, backward)
    for one in dataclasses.fields(made):
        tensor = getattr(made, one.name)
        if tensor is not None:
            tensor.zero_()
    return made
