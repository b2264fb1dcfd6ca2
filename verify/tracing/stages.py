"""The stages of mok's layer as events of a recording, so that a fault is located inside of it.

They are probes by name, `layers.3.mlp/mok.gate`: the module whose forward ran, then the stage. A
backward knows no module; it is found by the autograd node that the forward was made in and by the
address of the layer's input. Layers may share the input, empty inputs share the address 0, and what
autograd keeps may come back elsewhere, so neither would do alone.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from mok.stages import Told
from verify.tracing.calls import STAGE
from verify.tracing.tensors import Found

_MOST = 1 << 16  # calls whose backward may still come


class Taker(Protocol):
    """What of a recorder is needed."""

    def take(self, name: str, kind: str, module: str, found: list[Found]) -> None:
        """Appends digests."""

    def running_module(self) -> str:
        """The module whose forward is running."""

    @property
    def left_out(self) -> bool:
        """Whether there are steps that are not taken."""


class LayerStages:
    """A listener of mok.stages that takes what it is told."""

    def __init__(self, recorder: Taker) -> None:
        self._recorder = recorder
        self._calls: dict[tuple[int, ...], str] = {}
        self._nodes: dict[int, str | None] = {}
        self._inputs: dict[int, str] = {}

    def __call__(self, told: Told) -> None:
        """Takes one tensor of a stage."""
        path = told.part
        if told.backward:
            module = self._module_of(told)
            if module is None:
                return
            path = f"{path}.grad" if path else "grad"
        else:
            module = self._recorder.running_module()
            self._note(told, module)
        self._recorder.take(f"{module}{STAGE}{told.stage}", "probe", "mok", [(path, told.tensor)])

    def _note(self, told: Told, module: str) -> None:
        """Whose call this is. The first to name a node made it: a call that autograd does not see
        comes later, and names the last node that there is."""
        for key in _keys(told):
            self._calls.setdefault(key, module)
        if self._nodes.setdefault(told.node, module) != module:
            self._nodes[told.node] = None
        self._inputs[told.owner] = module
        for known in (self._calls, self._nodes, self._inputs):
            _forget_oldest(known)

    def _module_of(self, told: Told) -> str | None:
        """The module of a backward. A node alone will do where its input was moved to another
        address until then, and an input alone where autograd has no part in it. None where steps
        are left out and the forward was in one of them: another may have had its input's address.
        """
        found = None
        if told.node >= 0:
            if told.node not in self._nodes and self._recorder.left_out:
                return None
            found = next((self._calls[key] for key in _keys(told) if key in self._calls), None)
            found = found or self._nodes.get(told.node)
        return found or self._inputs.get(told.owner) or self._recorder.running_module()


def _keys(told: Told) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Threads number their nodes each for itself; a backward on a GPU has a thread of its own."""
    return (told.node, told.owner, threading.get_ident()), (told.node, told.owner)


def _forget_oldest(known: dict[Any, Any]) -> None:
    while len(known) > _MOST:
        del known[next(iter(known))]
