"""How many fresh processes run at once: never more than memory, cores and the main run allow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify import footprints
from verify.evidence import Finished, from_line, to_line

GB = 10**9


def finished(needed: int = GB, room: int = 100 * GB, rank: int = 0, gpu: int = 0) -> Finished:
    host = {"needed": GB, "room": 200 * GB}
    there = {"needed": needed, "room": room}
    return Finished("c", rank, 0, {"cpu": host, f"cuda:{gpu}": there})


def allowed(*told: Finished, timeout: float = 300.0, cores: int = 16) -> int:
    return footprints.at_once(told, len(told) or 1, timeout=timeout, cores=cores)


def test_a_case_on_a_gpu_has_several_and_what_is_not_known_one_at_a_time() -> None:
    assert allowed(finished()) == 8
    assert allowed(finished(), cores=6) == 3
    assert allowed(finished(), cores=1) == 1
    assert allowed(finished(needed=10 * GB)) == 5  # half of the room, no more
    assert allowed(finished(needed=60 * GB)) == 1
    assert allowed(finished(room=0)) == 1  # a GPU that lets only one process in
    assert allowed(finished(), timeout=59.0) == 1
    assert allowed(Finished("c", 0)) == 1
    assert allowed(Finished("c", 0, 0, {"cpu": {"needed": 1, "room": GB}})) == 1
    assert allowed() == 1
    little = Finished("c", 0, 0, {**finished().footprint, "cpu": {"needed": GB, "room": 7 * GB}})
    assert allowed(little) == 3


def test_ranks_count_together_on_one_gpu_and_each_on_its_own() -> None:
    shared = [finished(needed=10 * GB, rank=rank) for rank in range(2)]
    own = [finished(needed=10 * GB, rank=rank, gpu=rank) for rank in range(2)]
    assert allowed(*shared, cores=64) == 2
    assert allowed(*own, cores=64) == 5
    assert allowed(*own, cores=8) == 2
    assert allowed(own[0], Finished("c", 1), cores=64) == 1
    assert footprints.at_once(own[:1], 2, timeout=300.0, cores=64) == 1  # a rank said nothing


memories = st.fixed_dictionaries({"needed": st.integers(0, 2**38), "room": st.integers(0, 2**38)})


@given(
    st.lists(st.dictionaries(st.sampled_from(["cpu", "cuda:0", "cuda:1"]), memories), max_size=4),
    st.integers(1, 300),
)
def test_together_they_never_need_more_than_half_of_any_room(
    footprint: list[dict[str, dict[str, int]]], cores: int
) -> None:
    told = [Finished("c", rank, 0, one) for rank, one in enumerate(footprint)]
    count = allowed(*told, cores=cores)
    assert 1 <= count <= footprints.MOST
    if count > 1:
        assert count * len(told) <= cores / 2
        for place in ("cpu", "cuda:0", "cuda:1"):
            here = [one[place] for one in footprint if place in one]
            needed = sum(one["needed"] for one in here)
            assert all(count * needed <= one["room"] / 2 for one in here)


def test_a_footprint_is_a_line_of_evidence_and_older_lines_have_none() -> None:
    assert from_line(to_line(finished())) == finished()
    assert from_line('{"kind": "finished", "case": "c", "rank": 2}') == Finished("c", 2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.cuda of two devices of which the case uses the second, as far as it is asked here."""
    held = SimpleNamespace(counts=[5, 9], reserved=[1, 2 * GB], peak=[1, 3 * GB], free=[0, 90 * GB])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda one: {"allocation.all.allocated": held.counts[one]}
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda one: held.reserved[one])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda one: held.peak[one])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda one: (held.free[one], 0))
    monkeypatch.setattr(footprints, "_lets_several_in", lambda one: True)
    return held


def test_what_a_case_took_is_told_of_the_devices_that_it_used(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = footprints.footprint({0: 5, 1: 7})
    assert set(told) == {"cpu", "cuda:1"}
    assert told["cuda:1"] == {"needed": 3 * GB + footprints.CONTEXT, "room": 92 * GB}
    assert told["cpu"]["needed"] > 10 * 2**20
    assert told["cpu"]["room"] > 0
    assert footprints.footprint(footprints.asked()) == {}  # another case used it, not this one
    monkeypatch.setattr(footprints, "_lets_several_in", lambda one: False)
    assert footprints.footprint({})["cuda:1"]["room"] == 0


def test_after_a_cuda_error_and_without_cuda_nothing_is_told(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert footprints.footprint({}) == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert footprints.asked() == footprints.footprint({}) == {}


def test_a_device_without_a_driver_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self, mode: int, failed: int = 0) -> None:
            self.mode, self.failed = mode, failed

        def cuDeviceGetAttribute(self, found: Any, attribute: int, device: int) -> int:
            assert (attribute, device) == (20, 1)
            found._obj.value = self.mode
            return self.failed

    for driver, several in ((Driver(0), True), (Driver(3), False), (Driver(0, 1), False)):
        monkeypatch.setattr(footprints.ctypes, "CDLL", lambda name, driver=driver: driver)
        assert footprints._lets_several_in(1) is several

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(footprints.ctypes, "CDLL", missing)
    assert not footprints._lets_several_in(0)


def test_the_machine_s_memory_is_that_of_the_container_if_it_has_one(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "group"
    proc.mkdir()
    group.mkdir()
    assert footprints._host(proc, group) is None
    (proc / "meminfo").write_text("MemTotal:  9000000 kB\nMemAvailable:  8000000 kB\n")
    host = footprints._host(proc, group)
    assert host is not None
    assert host["room"] == 8_000_000 * 1024
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("3000000000\n")
    assert footprints._host(proc, group) == {**host, "room": 8_000_000 * 1024}
    (group / "memory.max").write_text("4000000000\n")
    assert footprints._host(proc, group) == {**host, "room": GB}
    (group / "memory.stat").write_text("anon 2000000000\ninactive_file 500000000\n")
    assert footprints._host(proc, group) == {**host, "room": 1_500_000_000}


@pytest.mark.gpu
def test_a_process_on_a_gpu_tells_what_it_took() -> None:
    before = footprints.asked()
    held = torch.zeros(2**26, device="cuda")
    told = footprints.footprint(before)
    assert told[f"cuda:{held.device.index}"]["needed"] >= held.nbytes + footprints.CONTEXT
    assert footprints.at_once([Finished("c", 0, 0, told)], 1, timeout=300.0, cores=16) > 1
    assert footprints.footprint(footprints.asked()) == {}
