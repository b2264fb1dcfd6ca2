"""One execution of a case: fresh inputs, forward, gradients, and what it left behind.

Everything that an execution may depend on is put in place before it (inputs, module state, global
generators) and looked at after it. Nothing is discarded as warm-up: the first call counts.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verify import inputs as generated
from verify import randomness
from verify.captures import (
    Layout,
    flatten,
    fresh_copy,
    same_bits,
    uncomparable,
)
from verify.cases import accepts
from verify.evidence import Failure
from verify.gradients import differentiate, reached_leaves
from verify.nesting import arguments_of
from verify.placements import batch_dim_of, lookup, placement_of
from verify.staging import Given, Kept, Stage, batch_size, other_content

MAX_TRACEBACK = 4000


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


def execute(
    stage: Stage,
    given: Given,
    *,
    group: Any = None,
    arm: str = "restored",
    kwargs: Mapping[str, Any] | None = None,
    upstream: Mapping[str, Tensor] | None = None,
    seed: int | None = None,
    other_modules: bool = False,
) -> Capture:
    """Executes the case once. An exception of the user's code is captured, not raised.

    group: the torch.distributed group of this execution, None for one rank. arm: "restored" or
    "free" for the global generators. upstream: gradients of outputs to use instead of generated
    ones. seed: of the generated upstream gradients, the case's by default. other_modules: give the
    modules other parameters and buffers for this execution.
    """
    case, capture, started = stage.case, Capture(), time.perf_counter()
    copies = {
        name: fresh_copy(tensor).requires_grad_(tensor.requires_grad)
        for name, tensor in given.tensors.items()
    }
    for name, module in stage.modules.items():
        _restore(module, stage.module_state[name])
        if other_modules:
            _disturb(stage.module_state[name])
    for name, generator_state in stage.own_generators.items():
        stage.others[name].set_state(generator_state)
    if arm == "free":
        randomness.scatter()
    else:
        randomness.restore(stage.generators)
    capture.before = randomness.fingerprints(randomness.snapshot())
    values = {**copies, **stage.modules, **stage.others}
    arguments: dict[str, Any] = {**arguments_of(values, stage.nests), **(kwargs or {})}
    wanted = accepts(case.execute, "group", named=group is None)
    if wanted and (group is not None or "group" not in arguments):
        arguments["group"] = group
    owned = [kept.live for state in stage.module_state.values() for kept in state.values()]
    given_tensors = [*copies.values(), *owned]
    _finish(given_tensors)
    ready, made = time.perf_counter(), 0.0
    try:
        returned = case.execute(**arguments)
        capture.outputs, capture.ignored = flatten(returned)
        heads = {n: t for n, t in capture.outputs.items() if t.requires_grad}
        heads = heads if case.gradients else {}
        capture.upstream = _known(heads, upstream or {})
        missing = [name for name in heads if name not in capture.upstream]
        if missing:  # making them waits, so that the time until here is the case's
            _finish([*given_tensors, *capture.outputs.values()])
        # else nothing waits here: a race of backward with what forward left running must show
        own = time.perf_counter() - ready
        capture.layouts = _layouts(stage, capture.outputs, group)
        making = time.perf_counter()
        for name in missing:
            capture.upstream[name] = _upstream(
                stage, name, heads[name], capture.layouts[name], given.rows, seed
            )
        capture.upstream = {name: capture.upstream[name] for name in heads}
        made = time.perf_counter() - making
        resumed = time.perf_counter()
        found: dict[str, Tensor] = {}
        left_out: list[str] = []
        if heads:
            reached = reached_leaves(list(heads.values()), _leaves(stage, copies))
            found, left_out = differentiate(heads, capture.upstream, reached)
        _finish([*given_tensors, *capture.outputs.values(), *found.values()])
        capture.seconds = own + time.perf_counter() - resumed
        capture.ignored += [f"gradients of {n} (the function used its graph)" for n in left_out]
        for name, gradient in found.items():
            capture.outputs[f"grad.{name}"], capture.layouts[f"grad.{name}"] = gradient, None
    except (Exception, SystemExit) as error:
        capture.seconds = time.perf_counter() - ready
        capture.failure = Failure(
            type(error).__name__,
            _text_of(error) + _place_of(error),
            _traceback(),
        )
        capture.outputs = {}
    capture.after = randomness.fingerprints(randomness.snapshot())
    for name, state in capture.after.items():
        capture.before.setdefault(name, state)  # of a GPU that this execution was the first to use
    if capture.failure is None:
        _collect_after(stage, given, copies, capture)
    if other_modules:
        prefixes = tuple(f"{name}." for name in stage.modules)
        capture.mutated = [name for name in capture.mutated if not name.startswith(prefixes)]
    capture.outputs = {name: tensor.detach() for name, tensor in capture.outputs.items()}
    # making upstream gradients is making inputs: neither the case's time nor bookkeeping
    capture.overhead = time.perf_counter() - started - capture.seconds - made
    return capture


def restore_modules(stage: Stage) -> None:
    """Leaves the caller's modules as they were given, gradients included."""
    for name, module in stage.modules.items():
        _restore(module, stage.module_state[name])
        for kept in stage.module_state[name].values():
            kept.live.grad = kept.grad


def _finish(tensors: Iterable[Tensor]) -> None:
    """Waits for what the current streams of these tensors' GPUs and of the current one were given,
    so that a failure of the case's kernels is the case's, and its time its own. Other streams may
    hold a load that ends only later."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    for index in sorted(devices | {torch.cuda.current_device()}):
        torch.cuda.current_stream(index).synchronize()


def _known(heads: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The upstream gradients that are there already and fit their outputs."""
    return {
        name: upstream[name]
        for name, tensor in heads.items()
        if name in upstream
        and upstream[name].shape == tensor.shape
        and upstream[name].dtype == tensor.dtype
    }


def _leaves(stage: Stage, copies: Mapping[str, Tensor]) -> list[Tensor]:
    parameters = (p for module in stage.modules.values() for p in module.parameters())
    return [*copies.values(), *parameters]


def _text_of(error: BaseException) -> str:
    """The message of an exception; one that cannot say it must not end the tool."""
    try:
        return str(error)[:MAX_TRACEBACK]
    except Exception as second:
        return f"(its message raised {type(second).__name__})"


def _place_of(error: BaseException) -> str:
    """File and line of the frame that raised, in the user's code where there is one."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [f for f in frames if "/site-packages/" not in f.filename and f.filename != __file__]
    if not own:
        return ""
    return f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})"


def _traceback() -> str:
    try:
        return traceback.format_exc()[-MAX_TRACEBACK:]
    except Exception as second:
        return f"(its traceback raised {type(second).__name__})"


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


def _disturb(state: Mapping[str, Kept]) -> None:
    with torch.no_grad():
        for kept in state.values():
            kept.live.copy_(other_content(kept.content))


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
