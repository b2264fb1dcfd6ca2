"""`enter_backward` leaves the model's tables, word by word: on emulated threads, and on a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import emulation
import numpy as np
import pytest
import torch
from backward_tables import Case, check, cuda_backend, launch, make_tables, random_case
from device_schedules import THREADS
from emulation import EmulatedKernel, Emulator, Knobs, Recorder

from mok.hopper.backward_model import Aims
from mok.hopper.layout import Segments
from mok.hopper.records import COUNT_FAILED

PART = ("enter_backward",)
TWO = Segments(1, 2)
needs_compiler = pytest.mark.skipif(emulation.compiler() is None, reason="needs g++")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return emulation.build(tmp_path_factory.mktemp("enter"), parts=PART)


def emulated(emulator: Emulator, seed: int = 0) -> Callable[..., None]:
    """Runs the kernel on emulated threads, which a seeded scheduler chooses."""

    def backend(*args: object, grid: tuple[int, int], regions: list) -> None:
        recorder = Recorder(emulator)
        EmulatedKernel("enter_backward", recorder).launch(*args, grid=grid, block=THREADS)
        failure = emulation.run_launches(recorder, regions, Knobs(seed=seed))
        assert failure == ""

    return backend


def rows_of(seed: int, experts: int, most: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, most, experts).tolist())


LARGE = {
    "more segments than shared memory keeps": Case(
        *((5,), ((128 * 300,) * 8,), 64, 64, 64, Segments(1, 1), 1, Aims(63, 0, 1900, True))
    ),
    "most experts, one each": Case((5,), ((129,) * 1024,), 64, 64, 0, Segments(1, 2), 2, Aims(7)),
    "most experts, many joined": Case(
        *((5,), (rows_of(1, 1024, 3),), 64, 64, 0, Segments(160, 168), 168, Aims(7, 2))
    ),
    "two experts in many parts": Case(
        *((9,), ((128 * 900, 0, 1, 128 * 300),), 64, 64, 0, Segments(1, 2), 2, Aims(6, 0, 300))
    ),
    "as for kimi": Case(
        *((70,), (rows_of(2, 48, 2400),), 7168, 2048, 0, Segments(20, 28), 42, Aims(7, 0, 400))
    ),
}


@needs_compiler
def test_random_ranks(emulator: Emulator) -> None:
    rng = np.random.default_rng(11)
    for number in range(100):
        case = random_case(rng)
        ctas = int(rng.choice([1, 1, 2, 5]))
        assert check(case, emulated(emulator, number), "cpu", ctas) == [], case


@needs_compiler
@pytest.mark.parametrize("name", LARGE)
def test_large_tables(emulator: Emulator, name: str) -> None:
    assert check(LARGE[name], emulated(emulator), "cpu") == []


@needs_compiler
@pytest.mark.parametrize(
    ("added", "fresh"), [(0, 63), (7, 56), (56, 7), (62, 1), (31, 32), (27, 4), (63, 0)]
)
def test_zeros_are_written_where_nothing_is_added(
    emulator: Emulator, added: int, fresh: int
) -> None:
    """Of experts without rows, and of a shared expert without tokens."""
    case = Case((0,), ((0, 130, 0),), 64, 64, 64, TWO, 2, Aims(63, added), fresh=fresh)
    assert check(case, emulated(emulator), "cpu") == []


@needs_compiler
def test_after_a_failed_wait_nothing_is_written_or_told(emulator: Emulator) -> None:
    tables = make_tables(random_case(np.random.default_rng(1)), "cpu")
    for mine in tables.ranks:
        mine["counters"][COUNT_FAILED] = 1
    before = [{name: mine[name].clone() for name in mine} for mine in tables.ranks]
    launch(tables, emulated(emulator), 2)
    for mine, then in zip(tables.ranks, before, strict=True):
        for name, table in mine.items():
            assert torch.equal(table, then[name]), name


# --- faults of the kernel are seen


@dataclass(frozen=True)
class Fault:
    file: str
    old: str
    new: str
    table: str  # one that differs


FAULTS = {
    "ties by the higher expert": Fault(
        "enter_backward.cu", "turn += e.rows[i] >= mine;", "turn += e.rows[i] > mine;", "groups"
    ),
    "kept blocks not looked at": Fault(
        "enter_backward.cu", "max(first, g.saved_blocks)", "first", "groups"
    ),
    "cut at a segment's length": Fault(
        "enter_backward.cu",
        "find_segments(r, g.uncut,",
        "find_segments(r, r.segment_most,",
        "groups",
    ),
    "fp32 gradients of this call left without zeros": Fault(
        "enter_backward.cu",
        "writes_zeros(g.wants, g.fresh,",
        "writes_zeros(g.wants, 0,",
        "groups",
    ),
    "the last block left out": Fault(
        "enter_backward.cu", "b < end; b += 32", "b + 1 < end; b += 32", "segment_of"
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(emulator: Emulator, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    shutil.copytree(emulation.CSRC, tmp_path / "csrc")
    source = tmp_path / "csrc" / "moe" / fault.file
    text = source.read_text()
    assert fault.old in text, "the source changed: plant the fault anew"
    source.write_text(text.replace(fault.old, fault.new, 1))
    planted = emulation.add_kernels(emulator, tmp_path, tmp_path / "csrc", PART)
    case = Case(
        *((200,), ((300, 0, 130, 130, 600, 1100),), 320, 192, 64, Segments(3, 4), 6),
        Aims(63, 0, 4),
        fresh=63,
    )
    assert check(case, emulated(emulator), "cpu") == []
    found = check(case, emulated(planted), "cpu")
    assert found
    assert any(line.startswith(f"rank 0 {fault.table}:") for line in found), found


# --- on a GPU


@pytest.mark.gpu
def test_random_ranks_on_a_gpu() -> None:
    rng = np.random.default_rng(12)
    backend = cuda_backend()
    for _ in range(150):
        case = random_case(rng)
        for ctas in (1, int(rng.choice([2, 8, 132]))):
            assert check(case, backend, "cuda", ctas) == [], case


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_large_tables_on_a_gpu(name: str) -> None:
    backend = cuda_backend()
    for ctas in (1, 8):
        assert check(LARGE[name], backend, "cuda", ctas) == []
    ranks = replace(LARGE[name], tokens=(5, 0), rows=LARGE[name].rows * 2)
    assert check(ranks, backend, "cuda", 33) == []
