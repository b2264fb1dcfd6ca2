"""CUDA graphs in a recording: what is taken while one is captured belongs to each of its replays.

A replay calls no hook. So a hook that runs during a capture puts its digest into the graph, and a
watch on `torch.cuda.CUDAGraph` remembers which event each digest stands for; behind every replay
the events come into the step, in the order of the capture. A graph that outlives its recording
gives its events to a later one of the same model and level. torch.cuda.graph and what torch builds
on it go through that class, whose methods are put back when the recording ends.

Nothing inside of a graph that was captured elsewhere can be seen. Its replay is told as a value
without a digest, so a comparison is not VERIFIED; but not of what torch.compile captured, since a
recording looks at the borders of a compiled module only.
"""

from __future__ import annotations

import functools
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verify.errors import UnsupportedError
from verify.hashing import digest_on_host, dtype_name
from verify.tracing.definitions import Whole
from verify.tracing.host_lanes import added, places_of
from verify.tracing.states import Held
from verify.tracing.tensors import located

_ROWS = {"module": 1 << 14, "op": 1 << 16}  # digests of one graph: 4.5 and 18 MB until it is there
_OTHERS = ("torch._inductor.", "torch._dynamo.", "verify.device_digests")  # hide no module's call
_INSIDE = "what a CUDA graph computes"
_EARLIER = (
    "it was not captured inside of this recording, or of one of the same model and level, and was "
    "first replayed in step {}: nothing inside of it is seen; capture it inside of the `with`"
)
_UNKNOWN = "a call was captured, and the beginning of its capture was not seen in this recording"


@dataclass(frozen=True)
class GraphEvent:
    """An event of each replay. rows: the first of its rows among the graph's lanes, and how many
    add up. Of a value on the host, which the graph has as it was captured, its lanes instead."""

    name: str
    kind: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    module: str
    whole: Whole | None
    rows: tuple[int, int] | bytes


class Digests(Protocol):
    """The digests of one graph, as `graph_digests.GraphDigests` has them."""

    @property
    def index(self) -> int: ...
    @property
    def expected(self) -> tuple[int, int, int, int]: ...
    def takes(self, t: Tensor) -> Tensor: ...
    def add(self, tensors: Sequence[tuple[Tensor, Whole | None]]) -> list[tuple[int, int]]: ...
    def finish(self) -> None: ...
    def clear(self) -> None: ...
    def lanes(self) -> Tensor: ...


class Captures(Protocol):
    """The device's side of captures."""

    def number(self) -> int | None:
        """Of the capture that is under way here; None outside of one."""

    def digests(self, rows: int) -> Digests:
        """Room for those of a capture that begins. UnsupportedError where there can be none."""

    def fixed(self, t: Tensor, whole: Whole | None) -> bytes | None:
        """The lanes of a value that replays take from the capture; None for one on the device.
        UnsupportedError for a value that is neither, or has no digest."""


class Recorder(Protocol):
    """What of a recorder is needed."""

    @property
    def listening(self) -> bool: ...
    @property
    def number(self) -> int: ...
    def skip(self, what: str, why: str) -> None: ...
    def replay(self, captured: Captured, run: Callable[[], Any]) -> Any:
        """Runs a replay and appends its events, in the order of the capture."""


@dataclass(eq=False)
class Captured:
    """A graph that was captured inside of a recording.

    digests: None where there can be none, and `refused` says why. unseen: what replays cannot tell,
    and why. optimizers: whose steps are in the graph. ends: whether a replay ends the step. inner:
    graphs that became a part of this one, whose digests run with it.
    """

    model: weakref.ref[nn.Module]
    level: str
    digests: Digests | None = None
    events: list[GraphEvent] = field(default_factory=list)
    refused: str = ""
    unseen: dict[str, str] = field(default_factory=dict)
    optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)
    ends: bool = False
    inner: list[Captured] = field(default_factory=list)


# Of all recordings: a graph may live longer than the one that it was captured in.
_known: weakref.WeakKeyDictionary[Any, Captured] = weakref.WeakKeyDictionary()


class CudaCaptures:
    """Captures of torch's CUDA devices."""

    def number(self) -> int | None:
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return None
        from verify.tracing.graph_digests import capture_number

        return capture_number()

    def digests(self, rows: int) -> Digests:
        from verify.tracing.graph_digests import GraphDigests

        return GraphDigests(rows)

    def fixed(self, t: Tensor, whole: Whole | None) -> bytes | None:
        if t.device.type != "cpu":
            return None
        if t.is_pinned():  # a copy in the graph reads it anew
            raise UnsupportedError("it is in pinned memory, which each replay may read anew")
        found = [digest_on_host(piece, place).lanes for piece, place in places_of(t, whole)]
        return struct.pack("<4Q", *added(found))


def capturing() -> bool:
    """Whether what runs now is captured into a CUDA graph."""
    return CudaCaptures().number() is not None


class GraphWatch:
    """Watches captures and replays for one recorder.

    captures, graphs: None is CUDA's, and `torch.cuda.CUDAGraph`.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        level: str,
        captures: Captures | None = None,
        graphs: type | None = None,
    ) -> None:
        self._recorder, self._model, self._level = recorder, weakref.ref(model), level
        self._captures = captures or CudaCaptures()
        self._graphs = graphs or torch.cuda.CUDAGraph
        self._open: dict[int, tuple[weakref.ref[Any], Captured]] = {}
        self._undo: list[Callable[[], None]] = []
        self._attached = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Looks at captures and replays inside of the `with`, and at the end of captures that are
        under way when it ends: digests in them need their tables."""
        self._attached = True
        for name in ("capture_begin", "capture_end", "replay"):
            self._undo.append(_wrapped(self._graphs, name, getattr(self, f"_{name}")))
        try:
            yield
        finally:
            self._attached = False
            self._put_back()

    def capturing(self) -> bool:
        """Whether what runs now is captured."""
        return self._captures.number() is not None

    def take(self, module: str, held: Iterable[Held]) -> None:
        """Puts digests of values into the graph that is being captured."""
        captured = self._current()
        if captured is None:
            self._recorder.skip(_INSIDE, _UNKNOWN)
            return
        if captured.digests is None:
            captured.unseen.setdefault(_INSIDE, captured.refused)
            return
        events: list[GraphEvent] = []
        on_device: list[tuple[int, Held, Tensor, Whole | None]] = []
        for one in held:
            try:
                local, whole = located(one.value)
                lanes = self._captures.fixed(local, whole)
                if lanes is None:
                    on_device.append((len(events), one, captured.digests.takes(local), whole))
                events.append(_event(module, one, local, whole, lanes or b""))
            except UnsupportedError as error:
                captured.unseen.setdefault(_label(one), str(error))
        if on_device:
            try:
                rows = captured.digests.add([(t, whole) for _, _, t, whole in on_device])
            except UnsupportedError as error:
                for _, one, _, _ in on_device:
                    captured.unseen.setdefault(_label(one), str(error))
                events = [one for one in events if one.rows]
            else:
                for (place, *_), at in zip(on_device, rows, strict=True):
                    events[place] = replace(events[place], rows=at)
        captured.events += events

    def ends_step(self, optimizer: Optimizer | None, ends: bool) -> None:
        """An optimizer's step is in the graph that is being captured. ends: whether the step of the
        recording ends with it, so behind each replay; without an optimizer, by order."""
        captured = self._current()
        if captured is not None:
            captured.ends |= ends
            if optimizer is not None:
                captured.optimizers.append(weakref.ref(optimizer))

    def _current(self) -> Captured | None:
        """What is being captured here; None if its beginning was not seen."""
        number = self._captures.number()
        if number == 0 and len(self._open) == 1:  # the driver did not say which
            number = next(iter(self._open))
        return self._open[number][1] if number in self._open else None

    def _capture_begin(self, graph: Any, begin: Callable[[], Any]) -> Any:
        if not self._recorder.listening:
            return begin()
        self._open = {key: one for key, one in self._open.items() if one[0]() is not None}
        captured = Captured(self._model, self._level)
        try:
            if self._open or self.capturing():  # to wait for the device would break that one
                raise UnsupportedError("another capture was under way when it was captured")
            with torch._C._DisableTorchDispatch():  # operations of ours, and none of the program
                captured.digests = self._captures.digests(_ROWS[self._level])
        except UnsupportedError as error:
            captured.refused = str(error)
        result = begin()
        number = self._captures.number() or -1
        while number in self._open:  # the driver does not tell them apart
            number -= 1
        self._open[number] = (weakref.ref(graph), captured)
        return result

    def _capture_end(self, graph: Any, end: Callable[[], Any]) -> Any:
        mine = [key for key, one in self._open.items() if one[0]() is graph]
        ended = [self._open.pop(key)[1] for key in mine]  # also one that fails
        try:
            result = end()
            for captured in ended:
                try:
                    if captured.digests is not None:
                        with torch._C._DisableTorchDispatch():  # tables hold addresses
                            captured.digests.finish()
                except BaseException:
                    graph.reset()  # its digests would read tables that are not there
                    raise
                _remember(graph, captured)
        finally:
            self._put_back()
        return result

    def _replay(self, graph: Any, run: Callable[[], Any]) -> Any:
        if not self._recorder.listening:
            return run()
        known = captured = _known.get(graph)
        if captured is not None and not (
            captured.level == self._level and captured.model() is self._model()
        ):
            captured = None
        if self.capturing():  # it becomes a part of another graph
            outer = self._current()
            if outer is not None and known is not None:
                outer.inner.append(known)  # its chunks are not to be another graph's meanwhile
            if outer is not None and (captured is None or captured.events or captured.unseen):
                outer.unseen.setdefault(_INSIDE, "it was replayed while another was captured")
            return run()
        if captured is None:
            if not _of_others():
                self._recorder.skip(_INSIDE, _EARLIER.format(self._recorder.number))
            return run()
        for what, why in captured.unseen.items():
            self._recorder.skip(what, why)
        if not captured.events and not captured.ends:
            return run()
        return self._recorder.replay(captured, run)

    def _put_back(self) -> None:
        """Puts the methods back once no recording and no capture needs them."""
        if not self._attached and not any(one[0]() is not None for one in self._open.values()):
            while self._undo:
                self._undo.pop()()


def _event(
    module: str, one: Held, local: Tensor, whole: Whole | None, rows: tuple[int, int] | bytes
) -> GraphEvent:
    dtype = one.dtype or dtype_name(local.dtype)
    shape = tuple(local.shape)
    return GraphEvent(one.name, one.kind, one.path, dtype, shape, module, whole, rows)


def _label(one: Held) -> str:
    return f"{one.kind} of {one.name} {one.path}".rstrip() + " in a CUDA graph"


def _remember(graph: Any, captured: Captured) -> None:
    """What is in a graph, until it is reset: it may be captured again where nobody looks."""
    _known[graph] = captured
    itself = weakref.ref(graph)

    def reset() -> Any:
        kept = itself()
        if kept is None:
            return None
        _known.pop(kept, None)
        vars(kept).pop("reset", None)
        return kept.reset()

    graph.reset = reset


def _wrapped(graphs: type, name: str, act: Callable[..., Any]) -> Callable[[], None]:
    """Puts `act` around a method; what puts it back, unless somebody has put theirs around it."""
    own, original = name in vars(graphs), getattr(graphs, name)

    @functools.wraps(original)
    def method(graph: Any, *args: Any, **kwargs: Any) -> Any:
        return act(graph, lambda: original(graph, *args, **kwargs))

    def undo() -> None:
        if vars(graphs).get(name) is method:
            if own:
                setattr(graphs, name, original)
            else:
                delattr(graphs, name)

    setattr(graphs, name, method)
    return undo


def _of_others() -> bool:
    """Whether the replay was asked for by one whose graphs hide no module's call."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_OTHERS)
