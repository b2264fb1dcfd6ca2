"""Launches follow one another in the order of the host, across streams, captured or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hopper_fakes import Fakes, sizes_of, small_problem

from mok import workspaces
from mok.hopper import backward, chains, forward
from mok.hopper.backward import launch_backward
from mok.hopper.backward_problem import BackwardProblem
from mok.hopper.chains import Chain
from mok.hopper.forward import launch

DEVICE = torch.device("cuda", 0)


@dataclass
class FakeEvent:
    """Notes on which stream it was recorded last."""

    at: int = 0

    def record(self, stream: FakeStream) -> None:
        self.at = stream.cuda_stream


@dataclass
class FakeStream:
    """capture: the number of the capture it is in, or None."""

    cuda_stream: int
    capture: int | None = None
    waited: list[int] = field(default_factory=list)
    device: torch.device = DEVICE

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event.at)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """capturing: whether torch's current stream is captured."""
    found: dict[str, Any] = {"capturing": False}
    monkeypatch.setattr(chains, "capturing", lambda device: found["capturing"])
    monkeypatch.setattr(chains, "capture_of", lambda stream: stream.capture)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return found


def _turn(chain: Chain, stream: Any) -> list[int]:
    """One launch; what its stream waited for."""
    stream.waited.clear()
    chain.before(stream)
    chain.after(stream)
    return list(stream.waited)


def test_another_stream_waits_for_the_last_launch_and_the_same_one_does_not(state):
    chain, one, two = Chain(), FakeStream(1), FakeStream(2)
    assert _turn(chain, one) == []
    assert _turn(chain, one) == []
    assert _turn(chain, two) == [1]
    assert _turn(chain, two) == []
    assert _turn(chain, one) == [2]


def test_a_capture_waits_for_nothing_outside_and_nothing_of_another_capture(state):
    chain, plain, two = Chain(), FakeStream(1), FakeStream(2, capture=7)
    _turn(chain, plain)
    state["capturing"] = True
    assert _turn(chain, two) == []
    assert _turn(chain, FakeStream(3, capture=7)) == [2]
    assert _turn(chain, FakeStream(4, capture=8)) == []
    assert _turn(chain, FakeStream(5, capture=8)) == [4]
    assert _turn(chain, FakeStream(6, capture=None)) == []
    assert _turn(chain, FakeStream(7, capture=8)) == []
    state["capturing"] = False
    assert _turn(chain, FakeStream(8)) == [1]


def test_groups_of_one_device_share_a_chain_and_other_devices_do_not(monkeypatch):
    monkeypatch.setattr(workspaces, "_CHAINS", {})
    first = workspaces._chain(DEVICE)
    assert workspaces._chain(DEVICE) is first
    assert workspaces._chain(torch.device("cuda", 1)) is not first


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_failed_launch_holds_nobody_up(monkeypatch, way):
    """The lock is free again and the order is kept, whatever a launch raises."""
    problem = small_problem()
    fakes = Fakes()
    workspace = fakes.workspace(sizes_of(problem, 70))
    memory = fakes.backward(workspace)

    def launches() -> None:
        if way == "forward":
            launch(workspace, problem, saved=None)
        else:
            launch_backward(workspace, memory, problem, BackwardProblem(problem.x))

    def fail(*_: Any) -> None:
        assert not _free(workspace.chain)
        raise RuntimeError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(forward, "launch_kernels", fail)
        patch.setattr(backward, "launch_backward_kernels", fail)
        with pytest.raises(RuntimeError, match="no launch"):
            launches()
    assert _free(workspace.chain)
    launches()


def _free(chain: Chain) -> bool:
    """Whether another thread could launch now."""
    import threading

    found: list[bool] = []

    def ask() -> None:
        got = chain.lock.acquire(blocking=False)
        found.append(got)
        if got:
            chain.lock.release()

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    return found[0]
