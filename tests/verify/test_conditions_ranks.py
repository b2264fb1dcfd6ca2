"""Conditions that one rank cannot make: all ranks leave together, and what a case uses unseen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import verify
from mok.jit import CompilerMissing, LaunchFailed
from verify import allocations
from verify.allocations import Look, devices_used, other_streams, segments_of
from verify.cases import Case
from verify.conditions import CONDITIONS, cuda_contention, cuda_memory, memory, streams
from verify.conditions.availability import Unavailable, available, on_any_rank
from verify.conditions.streams import Late, effect
from verify.conditions.watching import cuda_devices, uses_cpu, watched
from verify.decision import decide
from verify.evidence import Execution, Failure, Plan, Record, Trouble
from verify.sessions import Session, first, perform
from verify.staging import prepare

CUDA = torch.device("cuda", 0)
X = {"x": verify.normal(12, 4, requires_grad=True)}
PEER = Failure("PeerFailed", "rank 1 failed", "", True)


def session_of(claim: str, function: Callable[..., Any], **more: Any) -> tuple[Session, list[Any]]:
    records: list[Record] = []
    case = Case(name="c", execute=function, inputs=X, claims=(claim,), **more)
    session = Session(prepare(case), Plan("c", "c", [claim], 1, {claim: 1}), records.append)
    first(session)
    records.clear()
    return session, records


class Peers:
    """Agreement with ranks that fail at their turns number `fails`; counts the turns."""

    def __init__(self, *fails: int) -> None:
        self.fails, self.turn = fails, 0

    def __call__(self, failure: Failure | None) -> Failure | None:
        self.turn += 1
        return failure or (PEER if self.turn in self.fails else None)


def refuses() -> int:
    raise Unavailable("no such thing here")


def test_what_every_rank_has_is_available() -> None:
    session, records = session_of("memory", lambda x: x * 2)
    session.agree = Peers()
    assert available(session, "memory", lambda: 7) == 7
    assert not records
    assert session.agree.turn == 2  # one to wait for each other, one to agree


def test_what_a_peer_lacks_no_rank_has() -> None:
    session, records = session_of("memory", lambda x: x * 2)
    session.agree = Peers(2)
    assert available(session, "memory", lambda: 7) is None
    assert [(type(r), r.reason, r.claim) for r in records] == [(Trouble, "unsupported", "memory")]
    assert "not every rank" in records[0].detail
    assert "rank 1" in records[0].detail


def test_the_rank_that_lacks_it_says_what_and_agrees_as_often() -> None:
    session, records = session_of("memory", lambda x: x * 2)
    session.agree = Peers()
    assert available(session, "memory", refuses) is None
    assert records[0].detail == "no such thing here"
    assert session.agree.turn == 2
    with pytest.raises(ValueError, match="a bug"):
        available(session, "memory", lambda: int("a bug"))


def test_what_holds_on_a_peer_holds_on_some_rank() -> None:
    session, _ = session_of("memory", lambda x: x * 2)
    for fails, here, told in (((), False, False), ((), True, True), ((2,), False, True)):
        session.agree = Peers(*fails)
        assert on_any_rank(session, here) is told


def test_ranks_of_which_some_use_a_gpu_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    session, records = session_of("memory", lambda x: x * 2)
    session.agree = Peers(2)  # a peer has a device, and then does not lack one
    monkeypatch.setattr(memory, "_run_on_cpu", lambda session, runs: None)
    CONDITIONS["memory"](session, 1)
    assert [r.detail for r in records] == ["only some ranks use a GPU"]


@pytest.mark.parametrize("claim", ["stream", "sms", "graph"])
def test_conditions_agree_before_they_execute(claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session, records = session_of(claim, lambda x: x * 2)
    for module in ("streams", "multiprocessors", "graphs"):
        monkeypatch.setattr(f"verify.conditions.{module}.cuda_devices", lambda session: [CUDA])
    monkeypatch.setattr(streams.jit, "load", lambda *args, **kwargs: None)
    properties = type("Properties", (), {"multi_processor_count": 16})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    session.agree = Peers(2)
    CONDITIONS[claim](session, 1)
    assert [type(r) for r in records] == [Trouble]
    assert "not every rank" in records[0].detail


def test_a_load_that_a_peer_cannot_make_ends_the_claim_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    @contextmanager
    def opened(device: Any, **kwargs: Any) -> Iterator[str]:
        yield "load"
        closed.append("load")

    properties = type("Properties", (), {"multi_processor_count": 16})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_contention, "opened", opened)
    monkeypatch.setattr(cuda_contention, "_under_cold_cache", lambda *args: (0, 0.001))
    session, records = session_of("contention", lambda x: x * 2)
    session.agree = Peers(4)  # they agree twice on the devices before
    cuda_contention.run(session, 3, [CUDA])
    assert [type(r) for r in records] == [Trouble]
    assert closed == ["load"]


def test_a_device_that_answers_with_an_error_ends_contention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(device: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    session, records = session_of("contention", lambda x: x * 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    cuda_contention.run(session, 3, [CUDA])
    (trouble,) = records
    assert (trouble.reason, trouble.detail) == (
        "unsupported",
        "RuntimeError: CUDA error: out of memory",
    )


class Broken:
    """A load of one block; `at` names what of it raises."""

    def __init__(self, at: str) -> None:
        self.at = at

    def _do(self, what: str) -> None:
        if self.at == what:
            raise LaunchFailed(f"{what} went wrong")

    def start(self) -> None:
        self._do("start")

    def begin(self) -> None:
        self._do("begin")

    def overlap(self) -> Any:
        self._do("overlap")
        raise AssertionError

    def release(self) -> None:
        self._do("release")


def test_a_load_that_does_not_start_leaves_the_rank_in_step() -> None:
    session, records = session_of("contention", lambda x: x * 2)
    session.agree = Peers()
    variant = cuda_contention.Variant("hold=1", 1)
    assert not cuda_contention._under(session, variant, [Broken("start")], 0)  # type: ignore[list-item]
    (record,) = records
    assert not record.in_effect
    assert record.effective == {"load": "LaunchFailed: start went wrong"}
    assert session.agree.turn == 1


@pytest.mark.parametrize("at", ["overlap", "release"])
def test_a_case_that_fails_under_a_load_is_what_is_told(at: str) -> None:
    calls = deque([False, True])

    def fails(x: Tensor) -> Tensor:
        if calls.popleft():
            raise RuntimeError("an illegal memory access")
        return x * 2

    session, records = session_of("contention", fails)
    variant = cuda_contention.Variant("hold=1", 1)
    load = Broken(at)
    if at == "release":
        load.overlap = lambda: load._do("release")  # type: ignore[method-assign]
    assert not cuda_contention._under(session, variant, [load], 0)  # type: ignore[list-item]
    (record,) = records
    assert "an illegal memory access" in record.failure.message
    assert not record.in_effect


def test_what_an_effect_raises_after_a_success_is_raised() -> None:
    session, _ = session_of("contention", lambda x: x * 2)
    with pytest.raises(CompilerMissing, match="install it"):
        perform(session, "contention", "v", effective=_refusing)


def _refusing() -> Any:
    raise CompilerMissing("install it")


# --- what a case uses without showing it ----------------------------------------------------------


def test_devices_are_those_on_which_memory_was_asked_for() -> None:
    before = Look({0: 5, 1: 2}, frozenset())
    assert devices_used(before, Look({0: 5, 1: 3}, frozenset())) == (1,)
    assert devices_used(before, before) == ()
    assert devices_used(Look({}, frozenset()), Look({0: 0, 1: 9}, frozenset())) == (1,)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> set[allocations.Segment]:
    """No segments from before the case, whatever other tests left."""
    segments: set[allocations.Segment] = set()
    monkeypatch.setattr(allocations, "_left", segments)
    return segments


def test_segments_of_other_streams_count(
    monkeypatch: pytest.MonkeyPatch, left: set[allocations.Segment]
) -> None:
    stream = type("Stream", (), {"cuda_stream": 7})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    before = Look({0: 1}, frozenset({(0, 9, 4096)}))
    same = Look({0: 2}, frozenset({(0, 9, 4096), (0, 7, 8192)}))
    other = Look({0: 2}, same.segments | {(0, 8, 16384), (0, 8, 20480), (0, 9, 0)})
    assert other_streams(before, same) == 1  # the setup may have left it, with room
    assert other_streams(before, other) == 2
    left |= before.segments
    assert other_streams(before, same) == 0
    assert other_streams(before, other) == 2
    assert other_streams(Look({0: 1}, frozenset()), same) == 1  # freed, and taken again


def test_what_is_full_before_a_case_or_a_condition_s_own_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, left: set[allocations.Segment]
) -> None:
    def segment(stream: int, address: int, *states: str) -> dict[str, Any]:
        blocks = [{"state": state} for state in states]
        return {"device": 0, "stream": stream, "address": address, "blocks": blocks}

    used, free = "active_allocated", "inactive"
    snapshot = [segment(8, 0, used, used), segment(8, 512, used, free), segment(9, 1024, free)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    left.add((0, 8, 4096))  # not there any more
    allocations.give_back()
    assert left == {(0, 8, 0)}
    allocations.leave(CUDA, SimpleNamespace(cuda_stream=9))
    assert left == {(0, 8, 0), (0, 9, 1024)}


def test_what_the_setup_left_free_is_given_back_before_the_first_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    empty = Look({}, frozenset())
    monkeypatch.setattr("verify.sessions.free_unused", lambda: order.append("free"))
    monkeypatch.setattr("verify.sessions.look", lambda: order.append("look") or empty)
    session_of("memory", lambda x: order.append("case") or x * 2)
    assert order == ["free", "look", "case", "look"]


def test_segments_of_private_pools_are_left_out() -> None:
    one = {"device": 0, "stream": 3, "address": 512, "segment_pool_id": (0, 0)}
    assert segments_of([one, {**one, "segment_pool_id": (0, 4)}]) == {(0, 3, 512)}
    assert segments_of([{k: v for k, v in one.items() if k != "segment_pool_id"}]) == {(0, 3, 512)}


def test_looking_asks_cuda_only_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[Any]:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {allocations.COUNTER: device})
    monkeypatch.setattr(torch.cuda, "memory_snapshot", refuse)
    assert allocations.look() == Look({}, frozenset())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert allocations.look() == Look({0: 0, 1: 1}, frozenset())


def test_a_case_that_goes_to_a_gpu_and_back_is_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([Look({0: 3}, frozenset()), Look({0: 4}, frozenset())])
    monkeypatch.setattr("verify.sessions.look", lambda: next(looks))
    session, _ = session_of("memory", lambda x: x * 2)
    assert (cuda_devices(session), uses_cpu(session)) == ([CUDA], True)
    assert session.base is not None
    own = [cuda_memory.rounded(t.nbytes) for t in (*X_of(session), *session.base.kept.values())]
    assert cuda_memory.sizes_of(session) == {CUDA: [*own, *cuda_memory.SMALL]}


def X_of(session: Session) -> list[Tensor]:
    assert session.base is not None
    return list(session.base.given.tensors.values())


def test_fills_do_not_reach_streams_of_the_case_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    session, records = session_of("memory", lambda x: x * 2)
    assert session.base is not None
    session.base.own_streams = 1
    monkeypatch.setattr(cuda_memory, "_fill", lambda *args: ({"filled_allocations": 1}, True))
    monkeypatch.setattr(cuda_memory, "_shift", lambda *args: lambda: ({"moved": 1}, True))
    cuda_memory.run(session, 1, [CUDA])
    assert len(records) == 4
    assert all(isinstance(r, Execution) and not r.in_effect for r in records)
    assert all(r.effective["own_streams"] == 1 for r in records)


# --- late inputs and gradients --------------------------------------------------------------------


def test_a_late_stream_needs_inputs_or_gradients_that_were_late() -> None:
    assert effect([1, 1], 0, Late(inputs=2))[1]
    assert effect([1, 1], 0, Late(inputs=0, awaited=1, gradients=1))[1]
    told, held = effect([1, 1], 0, Late(inputs=2, awaited=1, gradients=0))
    assert not held
    assert told["awaited"] == 1
    assert not effect([1, 1], 0, Late())[1]
    assert not effect([1, 0], 0, Late(inputs=2))[1]
    refused = Late(inputs=0, awaited=1, gradients=1, refused="why")
    told, held = effect([1, 1], 0, refused)
    assert (told["not_late"], held) == ("why", False)


def test_late_inputs_are_on_one_device() -> None:
    with pytest.raises(Unavailable, match="it uses cuda:0, cuda:1; inputs are made late on one"):
        streams._prepared([CUDA, torch.device("cuda", 1)])


def test_an_expanded_input_cannot_be_late_and_stays_as_it_was() -> None:
    given = {"a": torch.ones(3), "b": torch.ones(1).expand(4), "c": torch.ones(3)}
    with pytest.raises(Unavailable, match="make it contiguous"):
        streams._make_late(torch.device("cpu"), given, 0.01)
    assert all(bool((one == 1).all()) for one in given.values())


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The CPU in place of a device; keeps what a late tensor held while the stream paused."""
    stream = type("Stream", (), {"synchronize": lambda self: None})
    held: list[Tensor] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream())
    monkeypatch.setattr(streams, "_poison", lambda tensor: (poison(tensor), held.append(tensor)))
    monkeypatch.setattr(streams, "delay_stream", lambda device, seconds: held.append(held[-1] + 0))
    return held


poison = streams._poison


def test_gradients_at_the_results_are_late_and_right(on_cpu: list[Tensor]) -> None:
    x, late = torch.randn(5, requires_grad=True), Late()
    out, upstream = (x * 3).clone(), torch.randn(5)
    kept = upstream.clone()
    streams._await_gradients(torch.device("cpu"), {"a": out, "b": out}, 0.01, late)
    assert (late.awaited, late.gradients) == (1, 0)
    out.backward(upstream)
    assert (late.awaited, late.gradients) == (1, 1)
    assert bool(on_cpu[1].isnan().all())
    assert x.grad is not None
    assert torch.equal(x.grad, 3 * kept)
    assert torch.equal(upstream, kept)


def test_a_gradient_that_cannot_be_late_is_passed_on_without_a_mark(
    on_cpu: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: Any, seconds: float) -> None:
        raise LaunchFailed("no")

    monkeypatch.setattr(streams, "delay_stream", broken)
    x, late = torch.randn(5, requires_grad=True), Late()
    out = x * 3
    streams._await_gradients(torch.device("cpu"), out, 0.01, late)
    out.backward(torch.ones(5))
    assert (late.awaited, late.gradients) == (1, 0)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((5,), 3.0))


@pytest.mark.parametrize("error", [LaunchFailed, ValueError])
def test_inputs_have_their_values_though_being_late_failed(
    on_cpu: list[Tensor], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(device: Any, seconds: float) -> None:
        raise error("no")

    monkeypatch.setattr(streams, "delay_stream", broken)
    session, records = session_of("stream", lambda x: x * 2)
    at = torch.device("cpu")
    late = watched(session, before=lambda given: streams._make_late(at, given, 0.01) and None)
    perform(late, "stream", "late", effective=({}, False))
    (record,) = records
    assert record.failure is None
    assert session.base is not None
    assert record.outputs == session.base.digests
    assert decide(session.plan, records).claims[0].verdict != "MISMATCH"
