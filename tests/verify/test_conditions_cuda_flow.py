"""How conditions on a GPU proceed, with the GPU replaced: records, effects, and loads that end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import verify
from mok.jit import CompilerMissing
from verify.cases import ON_CUDA, Case
from verify.conditions import (
    CONDITIONS,
    cuda_contention,
    cuda_memory,
    multiprocessors,
    recording,
)
from verify.conditions.overlap import Overlap
from verify.conditions.watching import cuda_devices, uses_cpu, watched
from verify.decision import decide
from verify.evidence import COLD_CACHE, Execution, Plan, Record, Trouble
from verify.execution import execute
from verify.sessions import Session, first
from verify.staging import prepare
from verify.verdicts import ClaimVerdict

X = {"x": verify.normal(12, 4, requires_grad=True)}
CUDA = torch.device("cuda", 0)


def session_of(
    claim: str, function: Callable[..., Any], runs: int = 1, **options: Any
) -> tuple[Session, list[Record]]:
    case = Case(name="c", execute=function, **{"inputs": X, "claims": (claim,), **options})
    records: list[Record] = []
    plan = Plan("c", "c", [claim], 1, {claim: runs})
    session = Session(prepare(case), plan, records.append)
    first(session)
    return session, records


def judged(session: Session, records: list[Record]) -> ClaimVerdict:
    return decide(session.plan, records).claims[0]


def reasons(claim: ClaimVerdict) -> set[str]:
    return {finding.reason for finding in claim.findings}


def executions(records: list[Record], claim: str) -> list[Execution]:
    return [r for r in records if isinstance(r, Execution) and r.claim == claim]


@dataclass
class FakeLoad:
    """A load of four blocks; `beside` of them run beside each execution."""

    beside: int
    log: list[str] = field(default_factory=list)

    def start(self) -> int:
        self.log.append("start")
        return 4

    def begin(self) -> None:
        self.log.append("begin")

    def overlap(self) -> Overlap:
        self.log.append("overlap")
        return Overlap(4, 4, self.beside, self.beside, 0, 10, 1000)

    def release(self) -> None:
        self.log.append("release")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[FakeLoad]]:
    """A device of 16 multiprocessors; `hold=4` never overlaps if the list `absent` says so."""
    made: dict[str, list[FakeLoad]] = {"all": [], "absent": []}

    @contextmanager
    def opened(device: Any, *, held: int, work: str, timeout: float) -> Iterator[FakeLoad]:
        load = FakeLoad(0 if made["absent"] and held == 4 else 4)
        made["all"].append(load)
        yield load
        load.log.append("closed")

    properties = SimpleNamespace(multi_processor_count=16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_contention, "opened", opened)
    monkeypatch.setattr(
        cuda_contention,
        "_under_cold_cache",
        lambda session, runs, devices: (0, 0.001),
    )
    return made


def test_every_load_is_run_and_released(device: dict[str, list[FakeLoad]]) -> None:
    session, records = session_of("contention", lambda x: x * 2, 3)
    cuda_contention.run(session, 3, [CUDA])
    own = executions(records, "contention")
    assert [v.name for v in cuda_contention.variants(16)] == list(
        dict.fromkeys(e.variant for e in own)
    )
    assert all(e.in_effect and e.effective["load_blocks"] == 4 for e in own)
    assert [e.run for e in own] == list(range(len(own)))
    assert not judged(session, records).findings
    for load in device["all"]:
        assert load.log[:4] == ["start", "begin", "overlap", "release"]
        assert load.log[-2:] == ["release", "closed"]


def test_one_kind_of_load_that_never_ran_is_no_overlap(device: dict[str, list[FakeLoad]]) -> None:
    device["absent"].append(FakeLoad(0))
    session, records = session_of("contention", lambda x: x * 2, 3)
    cuda_contention.run(session, 3, [CUDA])
    claim = judged(session, records)
    assert reasons(claim) == {"no-overlap"}
    assert [f.variant for f in claim.findings] == ["hold=4"]
    own = executions(records, "contention")
    assert sum(e.variant == "hold=4" for e in own) == cuda_contention.MISSES
    assert sum(e.in_effect for e in own) > 3  # which alone would be enough of them


def test_a_difference_under_one_load_says_which(device: dict[str, list[FakeLoad]]) -> None:
    def function(x: Tensor) -> Tensor:
        log = device["all"][-1].log if device["all"] else []
        return x * 2 + (len(device["all"]) == 4 and log.count("begin") == 2)

    session, records = session_of("contention", function, 3)
    cuda_contention.run(session, 3, [CUDA])
    claim = judged(session, records)
    assert reasons(claim) == {"bits-differ"}
    assert {f.variant for f in claim.findings} == {"hold=8"}
    assert claim.differing == 1
    lines = "\n".join((claim.findings[0].difference or {})["lines"])
    assert "out differs at hold=8; equal at busy memory" in lines


def test_loads_end_when_the_engine_raises(device: dict[str, list[FakeLoad]]) -> None:
    session, _ = session_of("contention", lambda x: x * 2, 3)

    def broken(record: Record) -> None:
        raise KeyboardInterrupt

    session.emit = broken
    with pytest.raises(KeyboardInterrupt):
        cuda_contention.run(session, 3, [CUDA])
    assert device["all"][0].log.count("start") == 1
    assert device["all"][0].log[-1] == "release"


def test_without_a_compiler_nothing_is_claimed(
    device: dict[str, list[FakeLoad]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*args: Any, **kwargs: Any) -> Any:
        raise CompilerMissing("install it")

    monkeypatch.setattr(cuda_contention, "opened", opened)
    session, records = session_of("contention", lambda x: x * 2)
    cuda_contention.run(session, 3, [CUDA])
    assert reasons(judged(session, records)) == {"unsupported"}
    assert "install it" in judged(session, records).findings[0].detail


def test_a_cold_cache_is_emptied_right_before_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Fake:
        device = CUDA

        def chill(self) -> tuple[int, int]:
            order.append("cold")
            return 280, 700

    def function(x: Tensor) -> Tensor:
        order.append("called")
        return x * 2

    monkeypatch.setattr(cuda_contention, "cache_of", lambda device: Fake())
    session, records = session_of("contention", function)
    order.clear()
    cuda_contention._under_cold_cache(session, 2, [CUDA])
    assert order == ["cold", "called"] * 2
    own = executions(records, "contention")
    assert [(e.variant, e.in_effect) for e in own] == [(COLD_CACHE, True)] * 2
    Fake.chill = lambda self: (280, 290)  # type: ignore[method-assign]
    del records[1:]
    cuda_contention._under_cold_cache(session, 2, [CUDA])
    assert reasons(judged(session, records)) == {"no-effect"}


@pytest.mark.parametrize("claim", ON_CUDA)
def test_a_case_on_the_cpu_cannot_have_claims_about_a_gpu(claim: str) -> None:
    session, records = session_of(claim, lambda x: x * 2)
    assert (cuda_devices(session), uses_cpu(session)) == ([], True)
    CONDITIONS[claim](session, 2)
    assert [type(r) for r in records[1:]] == [Trouble]
    assert reasons(judged(session, records)) == {"unsupported"}


def on_a_device(monkeypatch: pytest.MonkeyPatch, module: Any, reached: int) -> None:
    @contextmanager
    def limited(device: Any, count: int) -> Iterator[tuple[None, int]]:
        yield None, count

    properties = SimpleNamespace(multi_processor_count=16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(module, "cuda_devices", lambda session: [CUDA])
    monkeypatch.setattr(module, "limited_stream", limited)
    monkeypatch.setattr(
        module, "reached_multiprocessors", lambda device, stream: set(range(reached))
    )


def test_multiprocessors_are_limited_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch, multiprocessors, 4)
    session, records = session_of("sms", lambda x: x * 2, 4)
    multiprocessors.run(session, 4)
    own = executions(records, "sms")
    assert [e.variant for e in own] == ["sms=4", "sms=4", "sms=12", "sms=12"]
    assert not judged(session, records).findings


def test_a_limit_that_does_not_hold_is_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch, multiprocessors, 12)
    session, records = session_of("sms", lambda x: x * 2, 2)
    multiprocessors.run(session, 2)
    claim = judged(session, records)
    assert reasons(claim) == {"no-effect"}
    assert [f.variant for f in claim.findings] == ["sms=4"]


def test_a_watched_case_is_the_same_case() -> None:
    def function(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale

    looks: list[str] = []
    session, _ = session_of("repeat", function)
    seen = watched(
        session,
        before=lambda arguments: looks.append(",".join(arguments)),
        after=lambda returned: looks.append("after"),
    )
    assert session.base is not None
    capture = execute(seen.stage, session.base.given, upstream=session.base.upstream)
    assert looks == ["x", "after"]
    assert capture.outputs.keys() == session.base.kept.keys() == {"out", "grad.x"}
    assert all(torch.equal(capture.outputs[n], t) for n, t in session.base.kept.items())


class FakeGraph:
    """A recording that replays by computing again, on the CPU."""

    def __init__(self, body: Callable[[], dict[str, Tensor]], writes: Callable[[str, int], bool]):
        self.static = {name: tensor.clone() for name, tensor in body().items()}
        leaves = body.args[3]  # type: ignore[attr-defined]
        self.all = {**self.static, **{f"grad {i}": leaf.grad for i, leaf in enumerate(leaves)}}
        self.values = {name: tensor.clone() for name, tensor in self.all.items()}
        self.writes, self.turn = writes, 0

    def replay(self) -> None:
        for name, tensor in self.all.items():
            if self.writes(name, self.turn):
                tensor.copy_(self.values[name])
        self.turn += 1

    def reset(self) -> None:
        pass


def replayed(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    writes: Callable[[str, int], bool] = lambda name, turn: True,
) -> tuple[ClaimVerdict, recording.Replays, Session]:
    def record(device: Any, body: Any, generators: Any) -> Any:
        graph = FakeGraph(body, writes)
        return graph, (0, 1), graph.static

    everywhere = [{"address": 0, "total_size": 2**63, "segment_pool_id": (0, 1)}]
    monkeypatch.setattr(recording, "_record", record)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: everywhere)
    monkeypatch.setattr("verify.conditions.graphs.cuda_devices", lambda session: [CUDA])
    seen: list[recording.Replays] = []
    monkeypatch.setattr(
        "verify.conditions.graphs.Replays",
        lambda wanted: seen.append(recording.Replays(wanted)) or seen[-1],
    )
    session, records = session_of("graph", function)
    CONDITIONS["graph"](session, 1)
    assert len(executions(records, "graph")) == 1
    return judged(session, records), seen[0], session


def two(x: Tensor) -> dict[str, Tensor]:
    return {"a": x * 2, "b": (x * x).sum(0)}


def test_replays_are_compared_under_the_names_of_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    claim, replays, session = replayed(monkeypatch, two)
    assert not claim.findings
    assert session.base is not None
    assert claim.compared == sorted(session.base.kept) == ["a", "b", "grad.x"]
    assert (replays.done, replays.poisoned, replays.rewritten) == (3, 3, 3)


def test_a_result_that_a_replay_leaves_out_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    claim, replays, _ = replayed(monkeypatch, two, lambda name, turn: name != "b")
    assert replays.rewritten == 2
    assert reasons(claim) == {"bits-differ"}
    assert {f.tensor for f in claim.findings} == {"b"}


def test_a_later_replay_that_differs_is_the_one_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim, replays, _ = replayed(monkeypatch, two, lambda name, turn: turn != 1 or name != "a")
    assert replays.done == 3  # none is left out: peers may wait in the same collective
    assert {f.tensor for f in claim.findings} == {"a"}


def test_every_cuda_error_while_recording_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory\nadvice")

    monkeypatch.setattr(recording, "_captured", broken)
    with pytest.raises(recording.CaptureRefused, match="OutOfMemoryError: out of memory advice"):
        recording._record(CUDA, dict, ())
    monkeypatch.setattr(torch, "zeros", broken)
    recording._recover(CUDA, (0, 1))  # nor does mending hide what went wrong


def test_what_cannot_be_recorded_is_unsupported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(device: Any, body: Any, generators: Any) -> Any:
        raise recording.CaptureRefused("operation not permitted when stream is capturing")

    monkeypatch.setattr(recording, "_record", record)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr("verify.conditions.graphs.cuda_devices", lambda session: [CUDA])
    session, records = session_of("graph", two)
    CONDITIONS["graph"](session, 2)
    claim = judged(session, records)
    assert reasons(claim) == {"unsupported"}
    assert "operation not permitted" in claim.findings[0].detail


def test_sizes_of_a_case_without_cuda_tensors() -> None:
    session, _ = session_of("memory", lambda x: x * 2)
    assert cuda_memory.sizes_of(session) == {}


def fake_memory(monkeypatch: pytest.MonkeyPatch, filled: bool) -> list[int]:
    fills: list[int] = []
    monkeypatch.setattr(cuda_memory, "sizes_of", lambda session: {CUDA: [512]})
    monkeypatch.setattr(
        cuda_memory, "fill_free_memory", lambda device, fill, sizes=(): fills.append(fill)
    )
    monkeypatch.setattr(cuda_memory, "_share_filled", lambda device, fill, sizes: (filled, 1))
    monkeypatch.setattr(cuda_memory, "hold_free_memory", lambda device: [])
    lies = iter(range(0, 10**6, 512))
    monkeypatch.setattr(cuda_memory, "_probe", lambda device, sizes: [next(lies)])
    return fills


def test_memory_is_filled_in_turn_and_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    fills = fake_memory(monkeypatch, True)
    session, records = session_of("memory", lambda x: x * 2, 3)
    cuda_memory.run(session, 3, [CUDA])
    own = executions(records, "memory")
    assert [e.variant for e in own] == [
        "cuda fill=0xfe",
        "cuda fill=0x80",
        "cuda recycled-nan",
        "cuda shifted",
    ]
    assert fills == [0xFE, 0xFE, 0x80, 0x80, 0xFF, 0xFF]  # again, after looking
    assert not judged(session, records).findings


def test_memory_that_was_not_filled_is_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_memory(monkeypatch, False)
    session, records = session_of("memory", lambda x: x * 2, 3)
    cuda_memory.run(session, 3, [CUDA])
    claim = judged(session, records)
    assert reasons(claim) == {"no-effect"}
    assert len(claim.findings) == 3  # every fill; the shift was in effect


def test_an_allocator_that_cannot_tell_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_memory(monkeypatch, True)

    def refuses(device: Any, fill: int, sizes: Any = ()) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(cuda_memory, "fill_free_memory", refuses)
    session, records = session_of("memory", lambda x: x * 2, 3)
    cuda_memory.run(session, 3, [CUDA])
    assert reasons(judged(session, records)) == {"unsupported"}
