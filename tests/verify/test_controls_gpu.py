"""Planted faults on the GPU: the controls, and what calls their kernels.

What needs no device runs everywhere: what is said of controls that cannot run, and launches against
what the kernels declare. On a device every fault is caught by name and every twin is clean.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mok import jit
from verify import controls
from verify.cases import ON_CUDA
from verify.controls import gpu_kernels, gpu_margins, gpu_rates, machine, on_gpu
from verify.inputs import generate
from verify.reasons import Verdict

FAULTS = {control.name: control for control in on_gpu.CONTROLS}
SOURCES = sorted(path.stem for path in (jit.source_root() / "conditions/faults").glob("*.cu"))
DECLARED = re.compile(
    r'extern "C" __global__ void\s*(?:__launch_bounds__\(\d+\)\s*)?(\w+)\(([^)]*)\)'
)


# --- controls --------------------------------------------------------------------------------


def test_every_gpu_control_says_that_it_needs_cuda() -> None:
    assert len(FAULTS) >= 6
    for control in on_gpu.CONTROLS:
        assert control.needs == "cuda"
        assert control.fault.device == control.twin.device == "cuda"
        assert {"repeat", "memory", "contention", *ON_CUDA, control.claim} <= set(
            control.twin.claims
        )
        assert set(control.fault.claims) <= set(control.twin.claims)
    assert {f"condition/{claim}" for claim in ON_CUDA} <= set(FAULTS)


def test_controls_that_cannot_run_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = controls.run("gpu/*")
    assert (outcome["status"], outcome["exit_code"], outcome["passed"]) == ("not-run", 3, 0)
    assert set(outcome["not_run"].values()) == {"needs a CUDA device"}
    assert set(outcome["not_run"]) == set(controls.names("gpu/*"))
    text = controls.text(outcome)
    assert text.startswith("not run here (needs a CUDA device): gpu/atomic-sum, ")
    assert text.endswith("controls: nothing ran")
    json.dumps(outcome, allow_nan=False)


def test_the_list_says_what_a_control_needs() -> None:
    lines = controls.listing(["gpu/split-k", "condition/repeat"]).splitlines()
    assert lines == ["condition/repeat", "gpu/split-k       needs CUDA"]
    assert len(controls.listing(controls.names()).splitlines()) == len(controls.CONTROLS)
    assert controls.listing([]) == ""


def test_the_others_run_and_the_last_line_counts_those_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def here(chosen: Sequence[controls.Control], off: Any, **_: Any) -> controls.Collected:
        cases = [case for one in chosen for case in (one.fault, one.twin)]
        done = {case.name: gpu_rates.executed(case, case.name, {"repeat": 3}) for case in cases}
        plans = {name: plan for name, (plan, _) in done.items()}
        records = {name: tuple(found) for name, (_, found) in done.items()}
        return controls.Collected(tuple(chosen), plans, records)

    monkeypatch.setattr(controls, "collect", here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = controls.run(["reason/nothing-compared", "gpu/split-k"])
    assert (outcome["status"], outcome["exit_code"], outcome["passed"]) == ("passed", 0, 1)
    assert outcome["not_run"] == {"gpu/split-k": "needs a CUDA device"}
    assert controls.text(outcome).endswith("1 caught, 1 twins clean; 1 not run here")


def test_without_a_compiler_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "find_spec", no_package)
    assert "pip install 'mok-verify[cuda]'" in controls.lacking(FAULTS["gpu/split-k"])
    assert controls.lacking(controls.CONTROLS[0]) == ""


def test_with_a_device_they_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    here, left_out = controls.parted(on_gpu.CONTROLS)
    assert (here, left_out) == (list(on_gpu.CONTROLS), {})


# --- kernels, without a device ----------------------------------------------------------------


def _declared() -> dict[str, list[str]]:
    found = {}
    for source in SOURCES:
        text = (jit.source_root() / f"conditions/faults/{source}.cu").read_text()
        for entry, parameters in DECLARED.findall(text):
            found[entry] = [" ".join(one.split()) for one in parameters.split(",")]
    return found


class _Recorder:
    """Takes the place of a loaded kernel and holds its launches against its declaration."""

    def __init__(self, entry: str, launched: list[str]) -> None:
        self.entry, self.launched = entry, launched
        self.shared_limit = 227 * 1024

    def resident_blocks(self, block: int, shared: int) -> int:
        assert 2 * (shared + 1024) <= self.shared_limit < 3 * shared
        return 2

    def launch(
        self, *args: Any, grid: Any, block: int, shared: int = 0, stream: Any = None
    ) -> None:
        self.launched.append(self.entry)
        declared = _declared()[self.entry]
        assert len(args) == len(declared)
        for value, parameter in zip(args, declared, strict=True):
            if "*" in parameter:
                assert value is None or isinstance(value, torch.Tensor)
                if value is not None:
                    words = {"float": 4, "unsigned": 4, "unsigned long long": 8}
                    kind = parameter.replace("const", "").replace("volatile", "").split("*")[0]
                    assert value.element_size() == words[kind.strip()]
                    assert value.is_contiguous()
            else:
                assert parameter.startswith("unsigned ")
                assert isinstance(value, ctypes.c_uint32)
        assert 0 < block <= 1024
        assert 0 <= shared <= self.shared_limit
        assert all(size > 0 for size in (grid if isinstance(grid, tuple) else (grid,)))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def kernel(source: str, entry: str, device: Any, *, fault: bool | None = None) -> _Recorder:
        assert source in SOURCES
        return _Recorder(entry, names)

    monkeypatch.setattr(gpu_kernels, "kernel", kernel)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(gpu_kernels, "reachable_multiprocessors", lambda device: 9)
    properties = SimpleNamespace(multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return names


@pytest.mark.parametrize("fault", [True, False])
def test_launches_fit_what_the_kernels_declare(launched: list[str], fault: bool) -> None:
    x = torch.zeros(100, 32)
    bias = torch.zeros(32, requires_grad=True)
    values = torch.zeros(8, gpu_kernels.TILE)
    times = torch.zeros(2, dtype=torch.int64)
    gpu_kernels.add_bias(x, bias, fault=fault).sum().backward()
    gpu_kernels.split_product(torch.zeros(64, 256), torch.zeros(256, 32), fault=fault)
    gpu_kernels.hand_over(values, fault=fault)
    gpu_kernels.hand_over(values, fault=fault, blocks=2, times=times)
    gpu_kernels.padded_sums(x, count=90, fault=fault)
    gpu_kernels.scaled_tiles(x, fault=fault)
    gpu_kernels.grid_sums(x, num_sms=7, fault=fault)
    calls = gpu_kernels.Calls()
    gpu_kernels.last_block_sums(x, calls, fault=fault)
    gpu_kernels.last_block_sums(x, calls, fault=fault)
    assert calls.count == 2
    gpu_kernels.doubled_plus_one(x[0], fault=fault)
    gpu_kernels.doubled(bias, fault=fault).sum().backward()
    twin_only = set() if not fault else {"planted_column_tree"}
    assert set(launched) == set(_declared()) - twin_only
    assert bias.grad is not None


def test_every_control_calls_its_kernels(launched: list[str]) -> None:
    for control in on_gpu.CONTROLS:
        for case in (control.fault, control.twin):
            before = len(launched)
            shapes = {
                name: torch.zeros(spec.shape, dtype=spec.dtype).requires_grad_(spec.requires_grad)
                for name, spec in case.inputs.items()
            }
            more = {"num_sms": 7} if control.claim == "vary" else {}
            out = case.execute(**shapes, **more)
            if out.requires_grad:
                out.sum().backward()
            assert len(launched) > before


@pytest.mark.parametrize("source", SOURCES)
def test_fault_and_twin_compile_without_spills(source: str) -> None:
    pytest.importorskip("cuda.core")
    text = (jit.source_root() / f"conditions/faults/{source}.cu").read_text()
    for macros in [{"FAULT": 0}, {"FAULT": 1}] if "#ifndef FAULT" in text else [{}]:
        compiled = jit.compile_source(
            f"conditions/faults/{source}.cu", arch="sm_90a", macros=macros
        )
        assert compiled.resources
        for used in compiled.resources:
            assert used.entry.startswith("planted_")
            assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)


def _clock_reads(cubin: bytes, entry: str) -> int:
    """Instructions of an entry that read the multiprocessor's clock (CS2R of SR_CLOCKLO)."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    wanted = f".text.{entry}".encode() + b"\0"
    for name, _, _, _, offset, length in heads:
        if cubin.startswith(wanted, heads[names][4] + name):
            words = (cubin[at : at + 16] for at in range(offset, offset + length, 16))
            return sum(
                int.from_bytes(word[:2], "little") & 0xFFF == 0x805 and word[9] == 0x50
                for word in words
            )
    raise AssertionError(f"no code of {entry}")


@pytest.mark.parametrize(
    ("source", "entry", "macros", "reads"),
    [  # one at the start and one in each loop; what is measured and drawn reads it as well
        ("two_streams", "planted_slow_double", {}, 2),
        ("two_streams", "planted_increment", {}, 0),
        ("handover", "planted_handover", {"FAULT": 0}, 5),
        ("handover", "planted_handover", {"FAULT": 1}, 6),
    ],
)
def test_loops_that_let_time_go_by_are_in_the_code(
    source: str, entry: str, macros: dict[str, int], reads: int
) -> None:
    pytest.importorskip("cuda.core")
    source = f"conditions/faults/{source}.cu"
    compiled = jit.compile_source(source, arch="sm_90a", macros=macros)
    assert _clock_reads(compiled.cubin, entry) == reads


def test_hand_over_is_what_it_says() -> None:
    values = torch.arange(64.0).view(2, 32)
    tile = values[0] + values[1] + values[0]
    assert torch.equal(gpu_kernels.handed_over(values, 4), 2 * tile.roll(-1) - tile)
    assert gpu_kernels.PAUSE * 1.3 < gpu_kernels.WORK < gpu_kernels.PAUSE * 1.8


def test_a_source_with_a_fault_asks_which_one_is_wanted() -> None:
    pytest.importorskip("cuda.core")
    with pytest.raises(jit.CompilationFailed, match="define FAULT as 0"):
        jit.compile_source("conditions/faults/tail.cu", arch="sm_90a", cache=False)


# --- on a device ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes() -> dict[str, controls.ControlOutcome]:
    collected = controls.collect(on_gpu.CONTROLS)
    return {outcome.name: outcome for outcome in controls.evaluate(collected).outcomes}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_fault_is_caught_by_name_and_twin_is_clean(
    name: str, outcomes: dict[str, controls.ControlOutcome]
) -> None:
    assert outcomes[name].passed, outcomes[name].detail


@pytest.mark.gpu
def test_twins_compute_what_they_say() -> None:
    x = generate("x", (1000, 256)).cuda()
    a, b = generate("a", (128, 2048)).cuda(), generate("b", (2048, 128)).cuda()
    values = generate("values", (8, gpu_kernels.TILE)).cuda()
    sums = x.double().sum(0)
    for got, wanted, tolerance in (
        (gpu_kernels.column_sums(x, fault=False), sums, 1e-3),
        (gpu_kernels.split_product(a, b, fault=False), a.double() @ b.double(), 1e-2),
        (
            gpu_kernels.hand_over(values, fault=False, blocks=20),
            gpu_kernels.handed_over(values, 20).double(),
            0.0,
        ),
        (gpu_kernels.padded_sums(x, count=900, fault=False), x[:900].double().sum(0), 1e-3),
        (gpu_kernels.scaled_tiles(x, fault=False), 1.5 * x.double() + 0.25, 1e-5),
        (gpu_kernels.grid_sums(x, num_sms=None, fault=False), sums, 1e-3),
        (gpu_kernels.last_block_sums(x, gpu_kernels.Calls(), fault=False), sums, 1e-3),
        (gpu_kernels.doubled_plus_one(x[0], fault=False), 2 * x[0].double() + 1, 1e-5),
        (gpu_kernels.doubled(x[0], fault=False), 2 * x[0].double(), 0.0),
    ):
        assert float((got.double() - wanted).abs().max()) <= tolerance
    leaf = x[0].clone().requires_grad_()
    gpu_kernels.doubled(leaf, fault=False).backward(x[1])
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, 2 * x[1])


@pytest.mark.gpu
def test_a_tile_whose_parts_never_came_is_seen_as_such() -> None:
    values = generate("values", (8, gpu_kernels.TILE)).cuda()
    out, parts = values.new_empty(gpu_kernels.TILE), values.new_zeros(9, gpu_kernels.TILE)
    numbers = [ctypes.c_uint32(one) for one in (8, 1_000_000, 0, 30)]  # rows, pause, work, odds
    for patience, starved in ((1, True), (10**9, False)):
        macros = {"FAULT": 0, "PATIENCE": patience}
        source = "conditions/faults/handover.cu"
        waiting = jit.load(source, "planted_handover", macros=macros, device=values.device)
        arrived = torch.zeros(1, dtype=torch.int32, device=values.device)
        waiting.launch(values, parts, out, arrived, *numbers, None, grid=10, block=64)
        lost = out.view(torch.int32) == gpu_kernels.STARVED
        assert bool(lost.all()) == starved
        assert starved or torch.equal(out, gpu_kernels.handed_over(values, 10))


@pytest.mark.gpu
def test_the_missing_barrier_hides_when_quiet_and_shows_when_multiprocessors_are_taken() -> None:
    from verify.conditions.cuda_loads import held_multiprocessors

    values = gpu_rates.given(FAULTS["gpu/missing-barrier"].fault)["values"]
    count = torch.cuda.get_device_properties(0).multi_processor_count
    half = {"half": lambda: held_multiprocessors(count // 2, timeout=10.0)}
    margins = gpu_margins.measure(values, half, runs=30)
    assert margins.hides, margins
    assert margins.shows == ["half"], margins
    assert margins.loaded[0].wrong == 30


@pytest.mark.gpu
def test_plain_check_misses_what_the_condition_finds() -> None:
    control = FAULTS["gpu/atomic-sum"]
    inputs = gpu_rates.given(control.fault)
    assert not any(gpu_rates.plain_check(control.fault, inputs) for _ in range(20))
    _, records = gpu_rates.executed(control.fault, "t:c", {"repeat": 10})
    assert gpu_rates.tallies(records)["repeat"].differing > 0


def test_verdict_of_gpu_controls_is_a_mismatch() -> None:
    assert {control.verdict for control in on_gpu.CONTROLS} == {Verdict.MISMATCH}
