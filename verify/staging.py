"""A case set up on one rank, and the inputs of one execution: private snapshots, never handed out.

An execution gets copies. Which part of the whole problem they are depends on the degree, on the
batch entries chosen, and on the seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verify import devices, randomness
from verify import inputs as generated
from verify.captures import Layout, as_integers, digest_at, fresh_copy, uncomparable
from verify.cases import Case, accepts
from verify.errors import CaseError
from verify.nesting import Nest, unnest
from verify.placements import lookup, placement_of, split


@dataclass(frozen=True)
class Kept:
    """A parameter or buffer: the object that the module holds, and the content it had."""

    live: Tensor
    content: Tensor
    grad: Tensor | None


@dataclass
class Stage:
    """A case set up in this process on this rank: private snapshots, never handed out."""

    case: Case
    rank: int
    world: int
    group: Any
    tensors: dict[str, Tensor]
    modules: dict[str, torch.nn.Module]
    module_state: dict[str, dict[str, Kept]]
    others: dict[str, Any]
    nests: dict[str, Nest]
    own_generators: dict[str, Tensor]
    generators: randomness.GeneratorState


@dataclass
class Given:
    """The inputs of an execution on this rank, as snapshots, with where they lie in the whole."""

    tensors: dict[str, Tensor]
    layouts: dict[str, Layout | None]
    rows: Tensor | None = None  # the global batch entries chosen, None for all
    _digests: dict[str, str] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        if not self._digests:
            self._digests = {
                name: str(digest_at(tensor, self.layouts[name]))
                for name, tensor in self.tensors.items()
            }
        return self._digests


def prepare(case: Case, rank: int = 0, world: int = 1, group: Any = None) -> Stage:
    """Runs the case's setup, with the global generators seeded, and takes snapshots.

    Everything is put on the case's device, if it names one. Raises CaseError when setup does not
    return a mapping or clashes with `inputs`.
    """
    device = devices.enter(case.device, rank, world)
    randomness.seed_all(case.seed)
    tensors = {
        name: generated.materialise(spec, name, case.seed, device or "cpu")
        for name, spec in case.inputs.items()
    }
    returned = _set_up(case, device)
    if returned is not None and not isinstance(returned, Mapping):
        raise CaseError(
            f"case {case.name!r}: setup returned {type(returned).__name__}; it must return a "
            "mapping of argument names to tensors, modules or other values"
        )
    made, nests = unnest(dict(returned or {}))
    clash = sorted(set(made) & set(tensors))
    if clash:
        raise CaseError(f"case {case.name!r}: both inputs and setup give {clash[0]!r}")
    modules = {n: m for n, m in made.items() if isinstance(m, torch.nn.Module)}
    if device is not None:
        for module in modules.values():
            module.to(device)
    others = {n: v for n, v in made.items() if not isinstance(v, Tensor | torch.nn.Module)}
    for name, value in made.items():
        if isinstance(value, Tensor):
            if (kind := uncomparable(value)) is not None:
                raise CaseError(
                    f"case {case.name!r}: argument {name!r} is a {kind} tensor, which cannot be"
                    " copied and compared; make it inside the function from its parts"
                )
            there = value.detach().to(value.device if device is None else device)
            tensors[name] = fresh_copy(there).requires_grad_(value.requires_grad)
    state = {name: _state_of(module) for name, module in modules.items()}
    own = {n: v.get_state().clone() for n, v in others.items() if isinstance(v, torch.Generator)}
    stage = Stage(
        case, rank, world, group, tensors, modules, state, others, nests, own, randomness.snapshot()
    )
    batch_size(stage)  # raises for a wrong declaration, here where it is a failed setup
    return stage


def _set_up(case: Case, device: torch.device | None) -> Any:
    if case.setup is None:
        return {}
    if accepts(case.setup, "device", named=True):
        return case.setup(device=device or torch.device("cpu"))
    return case.setup()


def _state_of(module: torch.nn.Module) -> dict[str, Kept]:
    """Parameters and buffers, non-persistent ones included, copied."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: Kept(tensor, fresh_copy(tensor), tensor.grad) for name, tensor in named}


def batch_size(stage: Stage) -> int | None:
    """The number of batch entries of the whole problem, or None without batch dimensions."""
    sizes = {
        name: stage.tensors[name].shape[dim]
        for name in stage.tensors
        if (dim := lookup(stage.case.batch, name)) is not None
    }
    if len(set(sizes.values())) > 1:
        raise CaseError(f"case {stage.case.name!r}: batch sizes differ between inputs: {sizes}")
    return next(iter(sizes.values()), None)


def give(
    stage: Stage,
    parts: int,
    index: int,
    *,
    rows: Tensor | None = None,
    seed: int | None = None,
    refill: Tensor | None = None,
    own_rows_of: Given | None = None,
) -> Given:
    """This rank's inputs when the problem is split over `parts` ranks and this is number `index`.

    rows: batch entries to keep, in that order. seed: other inputs of the same specs. refill: batch
    entries (a mask over the batch) whose content is replaced. own_rows_of: keep the batch entries
    that this rank has there, and everything else whole.
    """
    case, tensors, layouts = stage.case, {}, {}
    for name, whole in stage.tensors.items():
        value = whole
        batch_dim = lookup(case.batch, name)
        if seed is not None and name in case.inputs:
            value = generated.materialise(case.inputs[name], name, seed, whole.device)
        elif seed is not None:
            value = other_content(value)
        if refill is not None and batch_dim is not None and name in case.inputs:
            other = generated.materialise(case.inputs[name], name, case.seed + 1, whole.device)
            value = value.detach().clone()
            picks = refill.nonzero().flatten().to(whole.device)
            chosen = as_integers(other).index_select(batch_dim, picks)
            as_integers(value).index_copy_(batch_dim, picks, chosen)
        if rows is not None and batch_dim is not None:
            value = _entries(value.detach(), batch_dim, rows)
        if own_rows_of is not None:
            own = batch_dim is not None
            value = own_rows_of.tensors[name] if own else whole
            tensors[name], layouts[name] = value, own_rows_of.layouts[name] if own else None
            continue
        tensors[name], layouts[name] = _shard(case, name, value, parts, index)
        tensors[name].requires_grad_(whole.requires_grad)
    return Given(tensors, layouts, rows)


def _entries(value: Tensor, dim: int, rows: Tensor) -> Tensor:
    """These entries of a dimension, with the dimensions in memory in the order of `value`.

    A transposed input stays one: other strides may well mean another order of accumulation, which
    is no dependence on the batch.
    """
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    rows = rows.to(value.device)
    chosen = as_integers(value).permute(order).index_select(order.index(dim % value.dim()), rows)
    return chosen.permute([order.index(d) for d in range(value.dim())]).view(value.dtype)


def other_content(value: Tensor) -> Tensor:
    """Other content for a tensor of unknown meaning: floating-point values reversed and scaled."""
    if (value.is_floating_point() and value.element_size() > 1) or value.is_complex():
        return value.detach().flip(list(range(value.dim()))) * 0.75
    return value


def _shard(
    case: Case, name: str, value: Tensor, parts: int, index: int
) -> tuple[Tensor, Layout | None]:
    placement = placement_of(case.placement, name)
    value = value.detach()
    if placement is None or placement.kind != "sharded" or parts == 1:
        return value, None
    sizes = split(placement, value.shape[placement.dim], parts)
    start = sum(sizes[:index])
    piece = value.narrow(placement.dim, start, sizes[index]).clone()
    return piece, Layout(placement.dim, start, tuple(value.shape))
