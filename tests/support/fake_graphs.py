"""CUDA graphs without a GPU: a capture keeps the operations of this thread, a replay runs them
again into the same memory, and the digest kernel among them reads the table of parts that it finds.

Differs from CUDA in that a capture computes, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packed_parts import lanes_of
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from verify.device_kernel import DEFAULT_TUNING, Loaded
from verify.device_parts import FIELDS
from verify.hashing import plain_tensor
from verify.tracing import graph_digests, graphs, queues

M64 = 2**64 - 1
_UNFILLED = -6148914691236517206  # 0xaaaa..., what memory holds that nobody wrote to


class _Taping(TorchDispatchMode):
    def __init__(self, tape: list[Callable[[], None]]) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)

        def again() -> None:
            with torch.no_grad():
                new = pytree.tree_leaves(func(*args, **given))
                for kept, value in zip(pytree.tree_leaves(out), new, strict=True):
                    if isinstance(kept, Tensor) and kept is not value:
                        kept.copy_(value)

        self._tape.append(again)
        return out


class FakeGraph:
    """As torch.cuda.CUDAGraph."""

    number = 0  # of captures so far
    current: FakeGraph | None = None  # that is being captured
    fails = False  # whether the captures that end now do so in an error

    def __init__(self) -> None:
        self.tape: list[Callable[[], None]] = []
        self.ended = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if self.ended or FakeGraph.current is not None:
            raise RuntimeError("a graph that is captured already, or another capture")
        FakeGraph.number += 1
        FakeGraph.current = self
        self._mode = _Taping(self.tape)
        self._mode.__enter__()

    def capture_end(self) -> None:
        self._mode.__exit__(None, None, None)
        FakeGraph.current = None
        if FakeGraph.fails:
            raise RuntimeError("the capture was invalidated")
        self.ended = True

    def replay(self) -> None:
        if not self.ended:
            raise RuntimeError("nothing to replay")
        if FakeGraph.current is not None:  # becomes a part of the other
            FakeGraph.current.tape += self.tape
            return
        self.run()

    def run(self) -> None:
        for one in self.tape:
            one()

    def reset(self) -> None:
        self.tape, self.ended = [], False


@contextmanager
def capture(graph: FakeGraph) -> Iterator[None]:
    """As torch.cuda.graph."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


class FakeCaptures(graphs.CudaCaptures):
    """The real ones, on the CPU's memory. host: tensors that are told to be the host's."""

    host: tuple[Tensor, ...] = ()
    told = True  # whether captures are told apart

    def number(self) -> int | None:
        if FakeGraph.current is None:
            return None
        return FakeGraph.number if self.told else 0

    def fixed(self, t: Tensor, whole: Any) -> bytes | None:
        mine = any(t.data_ptr() == one.data_ptr() for one in self.host)
        return super().fixed(t, whole) if mine else None


class _Kernel:
    """Launched during a capture, it runs with each replay."""

    def launch(
        self,
        parts: Any,
        count: Any,
        tiles: Any,
        seed: Any,
        other: Any,
        out: Any,
        step: Any,
        **_: Any,
    ) -> None:
        assert FakeGraph.current is not None
        assert step.value == 1
        FakeGraph.current.tape.append(
            lambda: _digest(parts.value, count.value, tiles.value, out.value)
        )


def _digest(parts: int, count: int, tiles: int, out: int) -> None:
    data = ctypes.string_at(parts, 8 * FIELDS * count)
    table = np.frombuffer(data, np.uint64).reshape(count, FIELDS)
    outputs = int((table[:, 7] & np.uint64(0xFFFFFFFF)).max()) + 1
    lanes = (ctypes.c_uint64 * (4 * outputs)).from_address(out)
    found = lanes_of(table, tiles, outputs, DEFAULT_TUNING.geometry)
    for at, value in enumerate(value for row in found for value in row):
        lanes[at] = (lanes[at] + value) & M64


class _Event:
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


def _empty(size: Any, *, dtype: torch.dtype, device: Any, pin_memory: bool = False) -> Tensor:
    """Of a named device: torch's default one may be another, which nothing is pinned on."""
    return torch.full(size if isinstance(size, tuple) else (size,), _UNFILLED).to(dtype)


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """Makes recordings see these graphs, and digests in them lie in the CPU's memory."""
    cuda = SimpleNamespace(
        current_device=lambda: 0,
        synchronize=lambda _: None,
        device=lambda _: nullcontext(),
        current_stream=lambda *_: SimpleNamespace(wait_event=lambda _: None),
        Event=_Event,
        memory_snapshot=list,
    )
    shim = SimpleNamespace(
        cuda=cuda,
        empty=_empty,
        arange=torch.arange,
        device=lambda *_: "cpu",
        cat=torch.cat,
        int64=torch.int64,
        int16=torch.int16,
        uint8=torch.uint8,
        inference_mode=torch.inference_mode,
    )
    loaded = Loaded(_Kernel(), blocks=4)  # type: ignore[arg-type]
    monkeypatch.setattr(FakeGraph, "number", 0)
    monkeypatch.setattr(FakeGraph, "current", None)
    monkeypatch.setattr(graph_digests, "torch", shim)
    monkeypatch.setattr(graph_digests, "loaded", lambda _: loaded)
    monkeypatch.setattr(graph_digests, "_spare", {})
    monkeypatch.setattr(graph_digests, "_read_on", lambda *_: None)
    monkeypatch.setattr(graph_digests.GraphDigests, "takes", lambda _, t: plain_tensor(t))
    monkeypatch.setattr(graphs, "CudaCaptures", FakeCaptures)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(queues, "_remember_stream", lambda *_: None)
    monkeypatch.setattr(queues, "_copied", lambda _, on: (torch.cat(on.lanes), _Event()))
    return FakeGraph
