"""Hooks on a model's modules that see every input, output and gradient, and change none.

Torch's full backward hooks are not used: they put a node of their own in front of and behind a
module, which makes some changes in place fail, and makes the engine add up a tensor's gradients in
another order, so other bits. Instead a hook sits on each output (its whole gradient), and on each
backward operation of the module that sends a gradient to one of its inputs: what the module itself
contributes. An input that several operations of a module read has one event for each.

Inside what torch.compile compiled no module is looked at, since that would change what it compiles:
the compiled module's own borders are events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from verify.tracing.arrays import NoDigest
from verify.tracing.tensors import Found, only_tensors, tensors_in, tensors_of_call

ROOT = "(root)"  # the model itself; no attribute is called that
_WRAPPERS = {  # classes that stand in front of a module: the attribute that holds it
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
_MOST_NODES = 20_000  # of a graph, looked at for one module
Node = Any  # torch.autograd.graph.Node
# Those between attach and detach. The hooks are functions of this module, which find them here, so
# that a model can be copied and pickled while it is recorded.
_attached: list[ModuleHooks] = []


class Taker(Protocol):
    """Takes tensors into the step that is being recorded."""

    def take(self, name: str, kind: str, module: str, found: Iterable[Found]) -> None: ...
    def wants(self) -> bool:
        """Whether it takes what comes now."""

    def pass_over(self, found: Callable[[], Iterable[Found]]) -> None:
        """Takes note of what it does not take."""


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with names in which wrappers do not occur, each once; of a wrapper, what it wraps.

    A compiled module is given itself, and nothing inside of it.
    """
    return _named(model, "", set())


def plain_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or buffer without the wrappers on the way to it."""
    kept, here = [], model
    parts = name.split(".")
    for part in parts[:-1]:
        if _WRAPPERS.get(type(here).__name__) != part:
            kept.append(part)
        here = getattr(here, part, None)  # type: ignore[assignment]
    if _WRAPPERS.get(type(here).__name__) != parts[-1]:
        kept.append(parts[-1])
    return ".".join(kept)


def _named(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    wrapped = _WRAPPERS.get(type(module).__name__)
    inner = module._modules.get(wrapped) if wrapped else None
    compiled = type(module).__name__ == "OptimizedModule"
    if compiled or module._compiled_call_impl is not None:
        yield name or ROOT, module
        return
    if inner is not None:
        yield from _named(inner, name, seen)
        return
    yield name or ROOT, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _named(child, f"{name}.{key}" if name else key, seen)


@dataclass(frozen=True)
class _Call:
    """A call that has begun. inputs: gradient edges of its inputs, with their paths."""

    name: str
    module: nn.Module
    first_node: int
    inputs: dict[tuple[Node, int], list[str]]


def _before_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # nothing else, so that what is compiled with this hook has nothing of it
    if not torch.compiler.is_compiling():
        for one in _attached:
            one.before(module, args, kwargs)


def _after_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling():
        for one in _attached:
            one.after(module, args, output)


def gradients_follow() -> bool:
    """Whether what is computed now can get gradients: not inside of torch.func's transforms."""
    return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


class _Open(threading.local):
    """begun: the calls of this thread that have begun; backward passes run in threads of their
    own."""

    def __init__(self) -> None:
        self.begun: list[_Call] = []


class ModuleHooks:
    """Sees the calls of a model's modules between `attach` and `detach`."""

    def __init__(self, model: nn.Module, taker: Taker) -> None:
        self._taker = taker
        self._names = {id(module): (name, module) for name, module in named_modules(model)}
        self._calls = _Open()
        self._undo: list[Callable[[], None]] = []
        self._on_leaves: list[Callable[[], None]] = []

    def attach(self) -> None:
        # A hook on a module inside of a TransformerEncoderLayer turns its fast path off. Global
        # hooks do not, but see the positional arguments only.
        shy = {
            id(inner)
            for _, module in self._names.values()
            if isinstance(module, nn.TransformerEncoderLayer)
            for inner in module.modules()
        }
        for key, (_, module) in self._names.items():
            if module._compiled_call_impl is not None:
                self._wrap_compiled(module)
            elif key not in shy:
                self._keep(module.register_forward_pre_hook(_before_call, with_kwargs=True))
                self._keep(module.register_forward_hook(_after_call, always_call=True))
        if shy:
            every = nn.modules.module
            self._keep(every.register_module_forward_pre_hook(self._before_shy(shy)))
            after = self._after_shy(shy)
            self._keep(every.register_module_forward_hook(after, always_call=True))
        _attached.append(self)
        self._undo.append(lambda: _attached.remove(self))

    def detach(self) -> None:
        self.forget_leaves()
        while self._undo:
            self._undo.pop()()

    def forget_leaves(self) -> None:
        """Takes hooks off the leaves that modules returned, which live on after a step."""
        while self._on_leaves:
            self._on_leaves.pop()()

    def running(self) -> str:
        """The name of the module whose forward is running in this thread, or the root's."""
        begun = self._calls.begun
        return begun[-1].name if begun else ROOT

    def idle(self) -> bool:
        """Whether no module's forward is running in this thread."""
        return not self._begun()

    def _keep(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _before_shy(self, shy: set[int]) -> Callable[..., None]:
        return lambda module, args: self.before(module, args, {}) if id(module) in shy else None

    def _after_shy(self, shy: set[int]) -> Callable[..., None]:
        return lambda module, args, out: (
            self.after(module, args, out) if id(module) in shy else None
        )

    def _wrap_compiled(self, module: nn.Module) -> None:
        """Borders of what `module.compile()` compiled, whose hooks would be compiled with it."""
        original: Any = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            self.before(module, args, kwargs)
            output = None
            try:
                output = original(*args, **kwargs)
            finally:
                self.after(module, args, output)
            return output

        def undo() -> None:
            module._compiled_call_impl = original

        module._compiled_call_impl = call
        self._undo.append(undo)

    def _name(self, module: nn.Module) -> str | None:
        """The name of a module whose calls are taken now; a copy of one has none."""
        found = self._names.get(id(module))
        if found is None or torch.jit.is_tracing():
            return None
        return found[0]

    def _begun(self) -> list[_Call]:
        return self._calls.begun

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call begins: its inputs."""
        name = self._name(module)
        if name is None:
            return
        if not self._taker.wants():
            self._taker.pass_over(lambda: tensors_of_call(args, kwargs))
            return
        found = tensors_of_call(args, kwargs)
        kind = type(module).__name__
        self._taker.take(name, "input", kind, found)
        first = torch._C._autograd._get_sequence_nr()
        inputs: dict[tuple[Node, int], list[str]] = {}
        if gradients_follow():
            for path, t in only_tensors(found):
                if t.requires_grad:
                    try:
                        edges = _edges(t, path)
                    except Exception as error:  # a subclass or lazy parameter that refuses
                        self._taker.take(name, "grad_input", kind, [(path, _unseen(t, error))])
                        continue
                    for edge, at in edges:
                        inputs.setdefault(edge, []).append(at)
        self._begun().append(_Call(name, module, first, inputs))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A call ends: its outputs, and hooks for the gradients. output: None after an exception,
        such as the one that ends the second forward of checkpointing."""
        name = self._name(module)
        if name is None:
            return
        begun = self._begun()
        call = None
        if begun and begun[-1].module is module:
            call = begun.pop()
        elif any(one.module is module for one in begun):  # a hook before ours may have failed
            while begun[-1].module is not module:  # Ctrl-C leaves some
                begun.pop()
            call = begun.pop()
        if not self._taker.wants():
            self._taker.pass_over(lambda: tensors_in(output))
            return
        kind = type(module).__name__
        found = list(tensors_in(output))
        self._taker.take(name, "output", kind, found)
        follow = gradients_follow()
        tracked = [(path, t) for path, t in only_tensors(found) if t.requires_grad and follow]
        for path, t in tracked:
            self.on_gradient(t, name, "grad_output", kind, path)
        if call is not None and call.inputs and tracked:
            nodes = (t.grad_fn for _, t in tracked)
            for node, edges in contributions(nodes, call.inputs, call.first_node):
                self._on_node(node, edges, name, kind)

    def on_gradient(self, t: Tensor, name: str, kind: str, module: str, path: str) -> None:
        """Takes the gradient of a tensor when it is known in full."""

        def hook(gradient: Tensor) -> None:
            if self._taker.wants():
                self._taker.take(name, kind, module, [(path, gradient)])
            else:
                self._taker.pass_over(lambda: [(path, gradient)])

        try:
            handle = t.register_hook(hook)
        except Exception as error:
            self._taker.take(name, kind, module, [(path, _unseen(t, error))])
            return
        if t.is_leaf:
            self._on_leaves.append(handle.remove)

    def _on_node(self, node: Node, edges: list[tuple[int, str]], name: str, module: str) -> None:
        def hook(gradients: Any, _: Any) -> None:
            given = gradients if isinstance(gradients, tuple) else (gradients,)
            found = [(path, given[i]) for i, path in edges if given[i] is not None]
            if self._taker.wants():
                self._taker.take(name, "grad_input", module, found)
            else:
                self._taker.pass_over(lambda: found)

        node.register_hook(hook)


def _edges(t: Tensor, path: str) -> list[tuple[tuple[Node, int], str]]:
    """Where gradients of an input arrive: with the paths that are told."""
    node, number = torch.autograd.graph.get_gradient_edge(t)[:2]
    found = [((node, number), path)]
    base = t._base
    if base is not None and base.requires_grad:  # for a change in place of a view
        node, number = torch.autograd.graph.get_gradient_edge(base)[:2]
        found.append(((node, number), f"{path}.base"))
    return found


def _unseen(t: Tensor, error: Exception) -> NoDigest:
    return NoDigest(
        f"no digest of the gradient of a {type(t).__name__}: to follow it raises "
        f"{type(error).__name__}"
    )


def contributions(
    outputs: Iterable[Node | None], inputs: dict[tuple[Node, int], list[str]], first: int
) -> Iterator[tuple[Node, list[tuple[int, str]]]]:
    """The backward operations between outputs and inputs that send a gradient to an input.

    Each with the positions of those gradients among what it returns, and the inputs' paths. first:
    the number of the first node of the call; older ones are not between.
    """
    waiting = [node for node in outputs if node is not None]
    seen = set(waiting)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        edges: list[tuple[int, str]] = []
        for position, (following, number) in enumerate(node.next_functions):
            paths = inputs.get((following, number))
            if paths is not None:
                edges.extend((position, path) for path in paths)
            elif following is not None and following not in seen:
                seen.add(following)
                if following._sequence_nr() >= first:
                    waiting.append(following)
        if edges and (node._sequence_nr() >= first):
            yield node, edges
