"""One execution of a case: fresh inputs, forward, gradients, and what it left behind.

Everything that an execution may depend on is put in place before it (inputs, module state, global
generators) and looked at after it. Nothing is discarded as warm-up: the first call counts.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verify import inputs as generated
from verify import randomness
from verify.captures import (
    Layout,
    as_integers,
    digest_at,
    flatten,
    fresh_copy,
    same_bits,
    uncomparable,
)
from verify.cases import Case, accepts
from verify.errors import CaseError
from verify.evidence import Failure
from verify.placements import batch_dim_of, lookup, placement_of, split

MAX_TRACEBACK = 4000


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


@dataclass
class Capture:
    """What one execution left behind, still alive."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    layouts: dict[str, Layout | None] = field(default_factory=dict)
    upstream: dict[str, Tensor] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    mutated: list[str] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    overhead: float = 0.0


def prepare(case: Case, rank: int = 0, world: int = 1, group: Any = None) -> Stage:
    """Runs the case's setup, with the global generators seeded, and takes snapshots.

    Raises CaseError when setup does not return a mapping or clashes with `inputs`.
    """
    randomness.seed_all(case.seed)
    tensors = {
        name: generated.materialise(spec, name, case.seed) for name, spec in case.inputs.items()
    }
    returned = case.setup() if case.setup is not None else {}
    if returned is not None and not isinstance(returned, Mapping):
        raise CaseError(
            f"case {case.name!r}: setup returned {type(returned).__name__}; it must return a "
            "mapping of argument names to tensors, modules or other values"
        )
    made = dict(returned or {})
    clash = sorted(set(made) & set(tensors))
    if clash:
        raise CaseError(f"case {case.name!r}: both inputs and setup give {clash[0]!r}")
    modules = {n: m for n, m in made.items() if isinstance(m, torch.nn.Module)}
    others = {n: v for n, v in made.items() if not isinstance(v, Tensor | torch.nn.Module)}
    for name, value in made.items():
        if isinstance(value, Tensor):
            tensors[name] = fresh_copy(value).requires_grad_(value.requires_grad)
    state = {name: _state_of(module) for name, module in modules.items()}
    own = {n: v.get_state().clone() for n, v in others.items() if isinstance(v, torch.Generator)}
    stage = Stage(
        case, rank, world, group, tensors, modules, state, others, own, randomness.snapshot()
    )
    batch_size(stage)  # raises for a wrong declaration, here where it is a failed setup
    return stage


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
            value = generated.materialise(case.inputs[name], name, seed)
        if refill is not None and batch_dim is not None and name in case.inputs:
            other = generated.materialise(case.inputs[name], name, case.seed + 1)
            value = value.detach().clone()
            picks = refill.nonzero().flatten()
            chosen = as_integers(other).index_select(batch_dim, picks)
            as_integers(value).index_copy_(batch_dim, picks, chosen)
        if rows is not None and batch_dim is not None:
            chosen = as_integers(value.detach()).index_select(batch_dim, rows)
            value = chosen.view(value.dtype)
        if own_rows_of is not None:
            own = batch_dim is not None
            value = own_rows_of.tensors[name] if own else whole
            tensors[name], layouts[name] = value, own_rows_of.layouts[name] if own else None
            continue
        tensors[name], layouts[name] = _shard(case, name, value, parts, index)
        tensors[name].requires_grad_(whole.requires_grad)
    return Given(tensors, layouts, rows)


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


def execute(
    stage: Stage,
    given: Given,
    *,
    group: Any = None,
    arm: str = "restored",
    kwargs: Mapping[str, Any] | None = None,
    upstream: Mapping[str, Tensor] | None = None,
    seed: int | None = None,
) -> Capture:
    """Executes the case once. An exception of the user's code is captured, not raised.

    group: the torch.distributed group of this execution, None for one rank. arm: "restored" or
    "free" for the global generators. upstream: gradients of outputs to use instead of generated
    ones. seed: of the generated upstream gradients, the case's by default.
    """
    case, capture, started = stage.case, Capture(), time.perf_counter()
    copies = {
        name: fresh_copy(tensor).requires_grad_(tensor.requires_grad)
        for name, tensor in given.tensors.items()
    }
    for name, module in stage.modules.items():
        _restore(module, stage.module_state[name])
    for name, generator_state in stage.own_generators.items():
        stage.others[name].set_state(generator_state)
    if arm == "free":
        randomness.scatter()
    else:
        randomness.restore(stage.generators)
    capture.before = randomness.fingerprints(randomness.snapshot())
    arguments: dict[str, Any] = {**copies, **stage.modules, **stage.others, **(kwargs or {})}
    wanted = accepts(case.execute, "group", named=group is None)
    if wanted and (group is not None or "group" not in arguments):
        arguments["group"] = group
    ready = time.perf_counter()
    try:
        returned = case.execute(**arguments)
        capture.outputs, capture.ignored = flatten(returned)
        own = time.perf_counter() - ready
        capture.layouts = _layouts(stage, capture.outputs, group)
        heads = {n: t for n, t in capture.outputs.items() if t.requires_grad}
        if not case.gradients or _has_gradients(stage, copies):
            heads = {}  # not wanted, or the function has called backward itself
        for name, tensor in heads.items():
            known = (upstream or {}).get(name)
            if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
                capture.upstream[name] = known
            else:
                capture.upstream[name] = _upstream(
                    stage, name, tensor, capture.layouts[name], given.rows, seed
                )
        resumed = time.perf_counter()
        if heads:
            torch.autograd.backward(list(heads.values()), [capture.upstream[n] for n in heads])
        capture.seconds = own + time.perf_counter() - resumed
    except (Exception, SystemExit) as error:
        capture.seconds = time.perf_counter() - ready
        capture.failure = Failure(
            type(error).__name__,
            str(error)[:MAX_TRACEBACK],
            traceback.format_exc()[-MAX_TRACEBACK:],
        )
        capture.outputs = {}
    capture.after = randomness.fingerprints(randomness.snapshot())
    if capture.failure is None:
        _collect_after(stage, given, copies, capture)
    capture.outputs = {name: tensor.detach() for name, tensor in capture.outputs.items()}
    capture.overhead = time.perf_counter() - started - capture.seconds
    return capture


def restore_modules(stage: Stage) -> None:
    """Leaves the caller's modules as they were given, gradients included."""
    for name, module in stage.modules.items():
        _restore(module, stage.module_state[name])
        for kept in stage.module_state[name].values():
            kept.live.grad = kept.grad


def _has_gradients(stage: Stage, copies: Mapping[str, Tensor]) -> bool:
    parameters = (p for module in stage.modules.values() for p in module.parameters())
    return any(leaf.grad is not None for leaf in (*copies.values(), *parameters))


def _restore(module: torch.nn.Module, state: Mapping[str, Kept]) -> None:
    """The module as it was: where a forward bound another tensor, the first one comes back.

    Buffers that a forward registered stay, as any other attribute that it sets does.
    """
    with torch.no_grad():
        for name, kept in state.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            held = owner._parameters if leaf in owner._parameters else owner._buffers
            held[leaf] = kept.live  # type: ignore[assignment]
            kept.live.grad = None
            if not same_bits(kept.live, kept.content):
                kept.live.copy_(kept.content)


def _collect_after(
    stage: Stage, given: Given, copies: Mapping[str, Tensor], capture: Capture
) -> None:
    """Gradients, changed inputs and changed module state, as outputs or as mutations."""
    case = stage.case

    def changed(name: str, tensor: Tensor, layout: Layout | None, *, is_state: bool) -> None:
        declared = any(lookup({pattern: True}, name) for pattern in case.mutates)
        if declared or is_state:
            key = f"{'state' if is_state else 'after'}.{name}"
            # a copy, since restoring the module must not look like a workspace used again
            capture.outputs[key], capture.layouts[key] = tensor.detach().clone(), layout
        else:
            capture.mutated.append(name)

    def gradient(name: str, tensor: Tensor, layout: Layout | None) -> None:
        if tensor.grad is not None and (kind := uncomparable(tensor.grad)):
            capture.ignored.append(f"grad.{name} ({kind} tensor)")
        elif tensor.grad is not None:
            key = f"grad.{name}"
            capture.outputs[key], capture.layouts[key] = tensor.grad, layout

    for name, tensor in copies.items():
        gradient(name, tensor, given.layouts[name])
        if not same_bits(tensor, given.tensors[name]):
            changed(name, tensor, given.layouts[name], is_state=False)
    for module_name, module in stage.modules.items():
        state = stage.module_state[module_name]
        for name, parameter in module.named_parameters():
            gradient(f"{module_name}.{name}", parameter, None)
            if name in state and not same_bits(parameter, state[name].content):
                changed(f"{module_name}.{name}", parameter, None, is_state=False)
        for name, buffer in module.named_buffers():
            if name in state and not same_bits(buffer, state[name].content):
                changed(f"{module_name}.{name}", buffer, None, is_state=True)


def _layouts(stage: Stage, outputs: Mapping[str, Tensor], group: Any) -> dict[str, Layout | None]:
    """Where each sharded output lies in the whole: the ranks of the group tell each other sizes."""
    size = dist.get_world_size(group) if group is not None else 1
    if size == 1 or not any(p.kind == "sharded" for p in stage.case.placement.values()):
        return dict.fromkeys(outputs)  # no collective where none is needed
    shapes = {name: tuple(tensor.shape) for name, tensor in outputs.items()}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, shapes, group=group)
    index = dist.get_rank(group)
    found: dict[str, Layout | None] = {}
    for name, shape in shapes.items():
        placement = placement_of(stage.case.placement, name)
        found[name] = None
        if placement is not None and placement.kind == "sharded":
            sizes = [other[name][placement.dim] for other in gathered if name in other]
            full = list(shape)
            full[placement.dim] = sum(sizes)
            found[name] = Layout(placement.dim, sum(sizes[:index]), tuple(full))
    return found


def _upstream(
    stage: Stage,
    name: str,
    tensor: Tensor,
    layout: Layout | None,
    rows: Tensor | None,
    seed: int | None,
) -> Tensor:
    """The random upstream gradient of an output: the rank's part of one made for the whole.

    With chosen batch entries each keeps the gradient that it has in the whole batch.
    """
    case = stage.case
    shape = list(layout.full_shape if layout is not None else tensor.shape)
    batch_dim = batch_dim_of(case.batch, name)
    if rows is not None and batch_dim is not None:
        shape[batch_dim] = batch_size(stage) or 0
    whole = generated.generate(
        f"upstream.{name}", tuple(shape), tensor.dtype, seed=case.seed if seed is None else seed
    )
    if rows is not None and batch_dim is not None:
        whole = whole.index_select(batch_dim, rows)
    if layout is not None:
        whole = whole.narrow(layout.dim, layout.start, tensor.shape[layout.dim])
    return whole.to(tensor.device).reshape(tensor.shape).contiguous()
