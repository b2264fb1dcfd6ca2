"""Every operation that torch dispatches, as events: what to turn to when a module is too coarse.

An operation is named `module/aten.add.Tensor`, after the module that is running; those of a
backward pass after the backward operation, `(backward MmBackward0)/aten.mm.default`. Its outputs
are events, and so are arguments that it changes. Views and memory that nothing was written to yet
are left out: a view has the values of its base, and fresh memory has any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
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
_PUTS_MEMORY = "aten::set_"  # under a tensor: often such as nothing was written to yet


class OperationTaker(Protocol):
    """Takes what operations gave into the step that is being recorded."""

    def take(self, name: str, kind: str, module: str, found: Iterable[Found]) -> None: ...
    def wants(self) -> bool: ...
    def pass_over(self, found: Callable[[], Iterable[Found]]) -> None: ...
    def running_module(self) -> str: ...


class OperationMode(TorchDispatchMode):
    """Sees all operations of this thread, and of backward passes that it starts."""

    def __init__(self, taker: OperationTaker) -> None:
        super().__init__()
        self._taker = taker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        output = func(*args, **given)
        takes, changed, opaque = _facts(func)
        if (takes or changed) and not self._taker.wants():
            values = [_argument(one, args, given) for one in changed]
            self._taker.pass_over(lambda: tensors_in((output if takes else None, values)))
        elif takes or changed:
            name = f"{self._place()}/{func}"
            if takes:
                told = output if opaque is None else output[:opaque]
                self._taker.take(name, "output", "", tensors_in(told))
            for one in changed:
                found = tensors_in(_argument(one, args, given), f"changed.{one[1]}")
                self._taker.take(name, "output", "", found)
        return output

    def _place(self) -> str:
        node = torch._C._current_autograd_node()
        if node is not None and torch._C._current_graph_task_id() >= 0:
            return f"(backward {node.name()})"
        return self._taker.running_module()


def _argument(one: tuple[int, str], args: tuple[Any, ...], given: Any) -> Any:
    """An argument by its position, or by its name where it was given so."""
    position, name = one
    return args[position] if position < len(args) else given.get(name)


@functools.lru_cache(maxsize=4096)
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
