"""The order of launches on one device, across streams: that in which the host makes them.

It exists because a launch that waits for peers may hold every multiprocessor: if two such launches
ran in one order on one rank and in the other order on another, each would wait for the other's
peer. So all launches of groups on a device share a chain, whatever layer, shape or group they are
of; a workspace of one rank alone has a chain of its own, for its memory's sake. Refuses nothing;
what ranks issue in different orders, no chain can mend.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from mok.hopper.support import capturing
from mok.toolchain import cuda_module


@dataclass(eq=False)
class Chain:
    """The last launch, outside of captures and inside of the last one.

    lock: held from `before` to `after` by whoever launches, so that threads do not interleave.
    """

    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _event: torch.cuda.Event | None = None
    _stream: int = 0
    _recorded: torch.cuda.Event | None = None
    _recorded_at: tuple[int, int] | None = None  # capture, stream

    def before(self, stream: torch.cuda.Stream) -> None:
        """Makes `stream`, torch's current one, wait for the last launch if that was elsewhere.

        Inside a capture only launches of the same capture count: an event from outside cannot be
        waited for there, and the order of replays is the caller's.
        """
        if not capturing(stream.device):
            if self._event is not None and self._stream != stream.cuda_stream:
                stream.wait_event(self._event)
            return
        if self._recorded is None or self._recorded_at is None:
            return
        capture, where = self._recorded_at
        if where != stream.cuda_stream and capture == capture_of(stream):
            stream.wait_event(self._recorded)

    def after(self, stream: torch.cuda.Stream) -> None:
        """Remembers what was launched on `stream` as the last one."""
        if not capturing(stream.device):
            self._event = self._event or torch.cuda.Event()
            self._event.record(stream)
            self._stream = stream.cuda_stream
            return
        capture = capture_of(stream)
        if capture is None:
            self._recorded_at = None
            return
        self._recorded = self._recorded or torch.cuda.Event()
        self._recorded.record(stream)
        self._recorded_at = (capture, stream.cuda_stream)


def capture_of(stream: torch.cuda.Stream) -> int | None:
    """The number of the capture that a stream is in, which the driver never gives again."""
    driver = cuda_module("cuda.bindings.driver")
    status, _, number, *_ = driver.cuStreamGetCaptureInfo(stream.cuda_stream)
    return int(number) if int(status) == 0 else None
