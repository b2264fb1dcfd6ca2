"""Every operation that torch dispatches, as events: what to turn to when a module is too coarse.

An operation is named `module/aten.add.Tensor`, after the module that is running; those of a
backward pass after the backward operation, `(backward MmBackward0)/aten.mm.default`. Its outputs
are events, and so are arguments that it changes. Views and memory that nothing was written to yet
are left out: a view has the values of its base, and fresh memory has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

from verify.tracing.tensors import Found, tensors_in

_OPAQUE = {  # operations with outputs for their backward alone, from this one on: memory that their
    # kernels may leave unwritten, such as a workspace, or the seed of a dropout that is off
    "mkldnn_rnn_layer": 3,
    "cudnn_rnn": 3,
    "cudnn_batch_norm": 3,
    "scaled_dot_product_flash_attention": 2,
    "scaled_dot_product_efficient_attention": 2,
    "scaled_dot_product_cudnn_attention": 2,
    "flash_attention_forward": 2,
    "efficient_attention_forward": 2,
}
_UNWRITTEN = ("empty", "new_empty", "resize")  # prefixes of operations that leave memory as it was
# Torch's own names, which other versions may lack: then it does it, and slower.
_TELLS = all(
    hasattr(eval_frame, name)
    for name in (
        *("get_eval_frame_callback", "set_code_exec_strategy"),
        *("_FrameAction", "_FrameExecStrategy"),
    )
)
_MOST = 4096  # operations that are known at a time
_PUTS_MEMORY = "aten::set_"  # under a tensor: often such as nothing was written to yet


class OperationTaker(Protocol):
    """Takes what operations gave into the step that is being recorded."""

    def take(self, name: str, kind: str, module: str, found: Iterable[Found]) -> None: ...
    def wants(self) -> bool: ...
    def pass_over(self, found: Callable[[], Iterable[Found]]) -> None: ...
    def running_module(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Operation:
    """What is known of an operation before it runs.

    func: itself, held so that its id stays its own. takes: whether its outputs are new values.
    changed: positions and names of the arguments that it changes. opaque: from which output on they
    are its own affair, or None. forward, backward: its names by the module, or the backward
    operation, that it ran in.
    """

    func: Any
    takes: bool
    changed: tuple[tuple[int, str], ...]
    opaque: int | None
    forward: dict[str, str] = field(default_factory=dict)
    backward: dict[str, str] = field(default_factory=dict)


class OperationMode(TorchDispatchMode):
    """Sees all operations of this thread, and of backward passes that it starts."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch puts what keeps torch.compile away around each operation, at 1 us a time: here that
        is done where torch.compile is there, if torch can say so."""
        return not _TELLS

    def __init__(self, taker: OperationTaker) -> None:
        super().__init__()
        self._taker = taker
        self._known: dict[int, _Operation] = {}  # by id: to hash an operation is Python code

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _TELLS and eval_frame.get_eval_frame_callback() is not None:
            return _uncompiled(self, func, args, kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        output = func(*args, **kwargs) if kwargs else func(*args)
        known = self._known.get(id(func))
        if known is None:
            known = self._learned(func)
        takes, changed = known.takes, known.changed
        if takes or changed:
            if self._taker.wants():
                self._take(known, output, args, kwargs)
            else:
                values = [_argument(one, args, kwargs) for one in changed]
                self._taker.pass_over(lambda: tensors_in((output if takes else None, values)))
        return output

    def _take(self, known: _Operation, output: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        node = torch._C._current_autograd_node()
        if node is not None and torch._C._current_graph_task_id() >= 0:
            place = node.name()
            name = known.backward.get(place)
            if name is None:
                name = known.backward[place] = f"(backward {place})/{known.func}"
        else:
            place = self._taker.running_module()
            name = known.forward.get(place)
            if name is None:
                name = known.forward[place] = f"{place}/{known.func}"
        if known.takes:
            told = output if known.opaque is None else output[: known.opaque]
            self._taker.take(name, "output", "", tensors_in(told))
        for one in known.changed:
            found = tensors_in(_argument(one, args, kwargs), f"changed.{one[1]}")
            self._taker.take(name, "output", "", found)

    def _learned(self, func: Any) -> _Operation:
        if len(self._known) >= _MOST:
            self._known.clear()
        known = self._known[id(func)] = _Operation(func, *_facts(func))
        return known


def _argument(one: tuple[int, str], args: tuple[Any, ...], kwargs: Any) -> Any:
    """An argument by its position, or by its name where it was given so."""
    position, name = one
    return args[position] if position < len(args) else (kwargs or {}).get(name)


def _facts(func: Any) -> tuple[bool, tuple[tuple[int, str], ...], int | None]:
    """Whether an operation's outputs are new values, which arguments it changes, and from which
    output on they are its own affair, or None."""
    schema = func._schema
    changed = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name = schema.name.partition("::")[2].lstrip("_")
    if name.startswith(_UNWRITTEN) or schema.name == _PUTS_MEMORY:
        return False, (), None
    fresh = all(one.alias_info is None for one in schema.returns)
    tensors = any("Tensor" in str(one.type) for one in schema.returns)  # no marks of a profiler
    return fresh and tensors, changed, _OPAQUE.get(name)


_uncompiled = torch._disable_dynamo(OperationMode._run)
if _TELLS:  # nor is the method compiled that finds out
    eval_frame.set_code_exec_strategy(
        OperationMode.__torch_dispatch__.__code__,
        eval_frame._FrameExecStrategy(
            eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        ),
    )
