"""The real kernels of the backward on emulated threads: values, protocol, planted faults.

See tests/support/emulation.py for what the emulation sees and what it cannot. Needs g++.
"""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Callable
from pathlib import Path

import emulation
import pytest
import torch
from emulation import Emulator, Knobs
from emulation_backward import PARTS, Asked, BackKnobs, run_passes
from emulation_backward_cases import (
    BackExample,
    Pass,
    asked_of,
    draw_backward,
    problems_of_backward,
    run_example,
)
from emulation_backward_examples import EXAMPLES, ONE, PAIR, TWO
from emulation_backward_faults import FAULTS
from emulation_cases import Shape, split
from emulation_faults import changed_sources, check_seen
from emulation_transposed import TOO_EARLY, WRONG_LAYOUT, multiply

from mok import reference
from mok.exact import same_bits
from mok.hopper.gradient_records import WANT_ROUTED
from mok.hopper.packing import Results
from mok.hopper.records import PLAN_BLOCKS, failed_wait
from mok.reference import MoEInputs

pytestmark = pytest.mark.skipif(emulation.compiler() is None, reason="needs g++")


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    """Small tensors; threads of torch would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return emulation.build(tmp_path_factory.mktemp("emulator"), parts=PARTS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_exact_bits(emulator: Emulator, name: str) -> None:
    assert problems_of_backward(EXAMPLES[name], emulator) == []


def test_random_shapes_and_schedules(emulator: Emulator) -> None:
    """More: `python tests/support/emulation_search.py SEED SECONDS backward`."""
    rng = random.Random(5)
    for _ in range(3):
        drawn = draw_backward(rng)
        assert problems_of_backward(drawn, emulator) == [], drawn


def test_what_the_examples_cover(emulator: Emulator) -> None:
    """The ring wraps around, and parts go through scratch memory."""
    for name, wraps in (("ring wraps", True), ("parts of an expert", True), ("one token", False)):
        outcome = run_example(EXAMPLES[name], emulator)
        workspace = outcome.workspaces[0]
        assert workspace.backward is not None
        blocks = int(workspace.words("counters")[PLAN_BLOCKS])
        assert (blocks > workspace.backward.layout.ring) == wraps, name
        scratch = workspace.backward.layout.local.get("scratch")
        if name == "parts of an expert":
            assert scratch is not None
            used = workspace.backward.local[scratch.offset : scratch.offset + 64].view(
                torch.float32
            )
            assert not used.isnan().any()


@pytest.mark.parametrize("limit", [None, 1.5])
def test_random_values_are_within_rounding(
    emulator: Emulator, make_inputs: Callable[..., MoEInputs], limit: float | None
) -> None:
    inputs = make_inputs(90, 128, 128, 4, 3, shared_width=64, limit=limit)
    counts = (50, 40)
    generator = torch.Generator().manual_seed(3)
    d_out = torch.randn((90, 128), generator=generator).bfloat16()
    problems = split(inputs, counts)
    asked = [
        Asked(problem, part.clone(), 1, dtype=torch.float32)
        for problem, part in zip(problems, d_out.split(counts), strict=True)
    ]
    shape = Shape(counts, 128, 128, 2, 3, shared=64)
    knobs = BackKnobs(Knobs(ctas=2, seed=21, segments=TWO))
    outcome = run_passes(emulator, [asked], shape.sizes, knobs)
    assert outcome.failure == ""
    given = [passed.gradients for passed in outcome.passes[0]]
    got = {
        "d_x": torch.cat([g.d_x for g in given]),
        "d_router_weights": torch.cat([g.d_router for g in given]),
    }
    for name in ("gate", "up", "down"):
        got[f"d_w_{name}"] = torch.cat([getattr(g, f"d_{name}") for g in given])
        for rank in range(2):
            rows = slice(0, 50) if rank == 0 else slice(50, 90)
            own = reference.moe(inputs, d_out, "rounded", 2.0**-22, rows)
            shared = f"d_w_shared_{name}"
            judged = reference.agreement(own[shared], getattr(given[rank], f"d_shared_{name}"))
            assert judged.outside == 0, shared
    wanted = reference.moe(inputs, d_out, "rounded", 2.0**-22)
    for name, value in got.items():
        judged = reference.agreement(wanted[name], value)
        assert judged.outside == 0, name
    judged = reference.agreement(wanted["d_x"], got["d_x"])
    assert judged.different < judged.count / 50


SPECIAL = (0.0, -0.0, 1e-30, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30)


@pytest.mark.parametrize("limit", [None, 1.5])
def test_elements_are_within_rounding_of_float64(
    emulator: Emulator, make_inputs: Callable[..., MoEInputs], limit: float | None
) -> None:
    """d_gate, d_up and w h' as they lie in the ring, for g and u of any size."""
    inputs = make_inputs(100, 64, 128, 1, 1, limit=limit)
    generator = torch.Generator().manual_seed(6)
    d_out, u = (torch.randn((100, n), generator=generator).bfloat16() for n in (64, 128))
    g = (8 * torch.randn((100, 128), generator=generator)).bfloat16()
    g[:20, : len(SPECIAL)] = torch.tensor(SPECIAL).bfloat16()
    u[20:40, : len(SPECIAL)] = torch.tensor(SPECIAL).bfloat16()
    [problem] = split(inputs, (100,))
    rows = [torch.cat([t, torch.full((28, 128), torch.nan).bfloat16()]) for t in (g, u)]
    asked = Asked(problem, d_out, None, WANT_ROUTED, kept=Results(problem.x, *rows))
    outcome = run_passes(emulator, [[asked]], Shape((100,), 64, 128, 1, 1).sizes, BackKnobs())
    assert outcome.failure == ""
    memory = outcome.workspaces[0].backward
    assert memory is not None

    product = d_out.double() @ problem.down[0].double()
    most = torch.inf if limit is None else limit
    clamped_g, clamped_u = g.double().clamp(max=most), u.double().clamp(-most, most)
    s = 1 / (1 + (-clamped_g).exp())
    slope = s * (1 + clamped_g * (1 - s))
    d_hidden = problem.router.double() * product
    open_g, open_u = g.double() <= most, u.double().abs() <= most
    wanted = {
        "d_gate": (d_hidden * clamped_u * slope * open_g, d_hidden * clamped_u),
        "d_up": (d_hidden * clamped_g * s * open_u, d_hidden),
        "weighted": (problem.router.double() * clamped_g * s * clamped_u, clamped_u),
    }
    for name, (exact, scale) in wanted.items():
        region = memory.layout.local[name]
        ring = memory.local[region.offset : region.offset + region.nbytes].view(torch.bfloat16)
        found = ring.view(-1, 128)[:128].double()
        assert not found[100:].any(), f"{name} of padding"
        error = (found[:100] - exact).abs()
        # half a unit of bf16, and fp32's where terms cancel
        assert bool((error <= 2.0**-8 * exact.abs() + 2.0**-18 * scale.abs() + 1e-30).all()), name


def test_random_values_have_the_same_bits_however_they_are_shared_out(
    emulator: Emulator, make_inputs: Callable[..., MoEInputs]
) -> None:
    """Over ranks, segments, parts, rows that were kept, and CTAs."""
    inputs = make_inputs(270, 64, 64, 4, 2)
    d_out = torch.randn((270, 64), generator=torch.Generator().manual_seed(4)).bfloat16()
    ways = (
        ((270,), 5, BackKnobs(Knobs(ctas=2, segments=ONE), ONE)),
        ((270,), None, BackKnobs(Knobs(ctas=3, segments=TWO, seed=1), ONE, 1, True)),
        ((200, 70), 1, BackKnobs(Knobs(segments=TWO, seed=2), TWO)),
        ((3, 130, 0, 137), 0, BackKnobs(Knobs(segments=TWO, seed=3, together=False), ONE, 1, True)),
    )
    every = []
    for counts, kept, knobs in ways:
        asked = [
            Asked(problem, part.clone(), kept, WANT_ROUTED)
            for problem, part in zip(split(inputs, counts), d_out.split(counts), strict=True)
        ]
        sizes = Shape(counts, 64, 64, 4 // len(counts), 2).sizes
        outcome = run_passes(emulator, [asked], sizes, knobs)
        assert outcome.failure == ""
        ranks = [passed.gradients for passed in outcome.passes[0]]
        names = ("d_x", "d_router", "d_gate", "d_up", "d_down")
        every.append([torch.cat([getattr(g, name) for g in ranks]) for name in names])
    for found in every:
        assert all(value.abs().amax() > 0.01 for value in found)
        assert all(map(same_bits, found, every[0]))


# ---- waits that end by time ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("enter_backward", "backward"), "rank 1 to enter the launch|the dispatched rows of block"),
        (("backward",), "the results of rank 1"),
    ],
)
def test_missing_peer_ends_in_a_record(
    emulator: Emulator, missing: tuple[str, ...], words: str
) -> None:
    asked = asked_of(Pass(PAIR, 1), 0, PAIR.sizes)
    skip = frozenset((1, name) for name in missing)
    run = Knobs(ctas=2, segments=ONE, together=False, skip=skip)
    stuck = run_passes(emulator, [asked], PAIR.sizes, BackKnobs(run, ONE))
    assert stuck.failure.startswith("deadlock")
    run = Knobs(**{**vars(run), "let_time_pass": True})
    outcome = run_passes(emulator, [asked], PAIR.sizes, BackKnobs(run, ONE))
    assert outcome.failure == ""
    pointer = outcome.workspaces[0].failure.data_ptr()
    assert re.search(words, str(failed_wait(ctypes.string_at(pointer, 32))))


# ---- planted faults -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(emulator: Emulator, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    csrc = changed_sources(tmp_path, (fault.file, fault.old, fault.new))
    planted = emulation.add_kernels(emulator, tmp_path, csrc, ("backward",), "-O0")
    chosen = EXAMPLES[fault.example]

    def problems_with(seed: int) -> list[str]:
        run = Knobs(**{**vars(chosen.knobs.run), "seed": seed})
        knobs = BackKnobs(**{**vars(chosen.knobs), "run": run})
        return problems_of_backward(BackExample(chosen.passes, knobs), planted)

    check_seen(fault, problems_with)


def test_too_small_ring_is_a_deadlock(emulator: Emulator) -> None:
    """Two segments have to fit; the host sees to it, so the ring is cut behind its back."""
    fits = EXAMPLES["ring wraps"]
    run = Knobs(segments=ONE, ctas=1)
    for uncut, ring, ends in ((1, 2, True), (1, 1, False)):
        knobs = BackKnobs(run, ONE, uncut, ring=ring)
        found = problems_of_backward(BackExample(fits.passes, knobs), emulator)
        assert (found == []) == ends
        assert ends or found[0].startswith("deadlock")


# ---- the machine: transposed operands, ldmatrix, stores in three dimensions ----------------------


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return emulation.build(tmp_path_factory.mktemp("machine"), parts=("transposed",))


def integers(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.randint(-8, 9, (rows, columns), generator=generator).bfloat16()


@pytest.mark.parametrize("across", [(False, False), (False, True), (True, False), (True, True)])
def test_products_of_every_layout(machine: Emulator, across: tuple[bool, bool]) -> None:
    a, b = integers(64, 192), integers(256, 192)
    for seed in range(3):
        done = multiply(machine, a, b, across=across, tile=(2, 70, 72), at=(1, 16, 8), seed=seed)
        assert done.failure == ""
        assert torch.equal(done.product, a.float() @ b.float().t())
        # rows and columns beyond the border are cut off, and nothing else is touched
        stored = a[:, :64].t() if across[0] else a[:, :64]
        wanted = torch.full((2, 70, 72), torch.nan, dtype=torch.bfloat16)
        wanted[1, 16:, 8:] = stored[:54]
        assert torch.equal(done.tile.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("across", [False, True])
def test_a_descriptor_of_the_other_layout_is_told(machine: Emulator, across: bool) -> None:
    given = (integers(64, 64), integers(256, 64))
    done = multiply(machine, *given, across=(across, across), wrong=WRONG_LAYOUT)
    assert "leading offset" in done.failure


def test_ldmatrix_before_the_load_is_told(machine: Emulator) -> None:
    given = (integers(64, 64), integers(256, 64))
    made = [
        multiply(machine, *given, across=(True, True), wrong=TOO_EARLY, seed=s) for s in range(8)
    ]
    assert any("ldmatrix reads shared memory" in done.failure for done in made)
