"""The stages of mok's layer as events of a recording, so that a fault is located inside of it.

They are probes by name, `layers.3.mlp/mok.gate`: the module whose forward ran, then the stage. A
backward knows no module; it is found by the layer's input, whose memory autograd keeps until then.
"""

from __future__ import annotations

from typing import Protocol

from mok.stages import Told
from verify.tracing.calls import STAGE
from verify.tracing.tensors import Found


class Taker(Protocol):
    """What of a recorder is needed."""

    def take(self, name: str, kind: str, module: str, found: list[Found]) -> None:
        """Appends digests."""

    def running_module(self) -> str:
        """The module whose forward is running."""


class LayerStages:
    """A listener of mok.stages that takes what it is told."""

    def __init__(self, recorder: Taker) -> None:
        self._recorder = recorder
        self._modules: dict[int, str] = {}

    def __call__(self, told: Told) -> None:
        """Takes one tensor of a stage."""
        module = self._recorder.running_module()
        path = told.part
        if told.backward:
            module = self._modules.get(told.owner, module)
            path = f"{path}.grad" if path else "grad"
        else:
            self._modules[told.owner] = module
        self._recorder.take(f"{module}{STAGE}{told.stage}", "probe", "mok", [(path, told.tensor)])
