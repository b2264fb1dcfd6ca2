"""The cases in ci/gpu/hopper_cases.py: of widths that the kernel takes, and right on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from degree_script import load_backward_degrees, load_degrees, load_problem

import mok
from mok.hopper.layout import Segments, size_problem
from mok.hopper.support import BACKWARD_VARIABLE
from verify import builtin
from verify.builtin import covered
from verify.cases import Case
from verify.errors import UnsupportedError
from verify.plans import RunOptions
from verify.running import run
from verify.sources import source_files
from verify.staging import prepare
from verify.targets import cases_in, find

FILE = Path(mok.__file__).parent.parent / "ci" / "gpu" / "hopper_cases.py"


@pytest.fixture(scope="module")
def cases() -> Iterator[ModuleType]:
    load_backward_degrees()  # `verify run` has the file's folder on its path
    spec = importlib.util.spec_from_file_location("hopper_cases_under_test", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def prepared(cases: ModuleType) -> dict[str, torch.Tensor]:
    """Arguments of the case of degrees, which are many."""
    return prepare(cases.DEGREES).tensors


def _problem(case: Case) -> str | None:
    """Why the kernel cannot run the sizes of a case."""
    tensors = prepare(case).tensors
    shared = tensors.get("w_shared_gate")
    experts, width, hidden = tensors["w_gate"].shape
    return size_problem(
        max_tokens=tensors["x"].shape[0],
        slots=tensors["topk_experts"].shape[1],
        experts=experts,
        hidden=hidden,
        width=width,
        shared_width=0 if shared is None else shared.shape[0],
    )


def test_the_kernel_takes_these_cases_and_of_the_built_in_ones_that_for_timing(
    cases: ModuleType,
) -> None:
    made = cases_in(cases)
    assert len(made) == 6 + 7
    assert {case.name: _problem(case) for case in made} == dict.fromkeys(c.name for c in made)
    taken = [case for case in (*builtin.CASES, *builtin.BY_NAME) if _problem(case) is None]
    assert taken == [builtin.MOE_1024]
    kernels = {Path(name).resolve() for name in covered.ON_GPU}
    for case in (*made, builtin.MOE_1024):
        assert kernels <= set(source_files(case)), case.name


def test_a_gpu_runs_the_kernel_or_fails(cases: ModuleType) -> None:
    assert cases.backend(SimpleNamespace(is_cuda=True)) == "hopper"
    assert cases.backend(SimpleNamespace(is_cuda=False)) == "auto"


def test_every_case_promises_what_ci_asks_of_it(cases: ModuleType) -> None:
    assert len(find(f"{FILE}::hopper/exact-*")) == 7
    assert cases.FORWARD.claims.count("graph") == 1
    assert set(cases.LAYER.claims) >= {"repeat", "process", "schedule", "ep", "reference"}
    assert not any(case.golden for case in cases_in(cases))


def test_the_case_of_degrees_varies_each_of_them_and_brings_about_what_is_hard(
    cases: ModuleType, prepared: dict[str, torch.Tensor]
) -> None:
    degrees, problems, case = load_degrees(), load_problem(), cases.DEGREES
    assert {*case.vary["degree"], cases.DEGREE} == {0, 1, 2, 4, 8, 64}
    assert {one["num_sms"] for one in case.schedule if "num_sms" in one} == {1, 2, 7, 132}
    assert set(case.claims) >= {"vary", "schedule", "contention", "repeat", "process"}
    tensors = prepared
    same_routing = problems.whole_problem(hidden=64, width=64)  # which depends on neither
    assert torch.equal(tensors["topk_experts"], same_routing.topk)
    rows = torch.bincount(tensors["topk_experts"].clamp(min=0).view(-1), minlength=problems.E)
    assert int(rows[problems.CROWDED]) == problems.T
    assert problems.T % 128 == 64
    assert int(rows[-1]) == 0
    whole = cases.whole_problem(**tensors)
    for degree in degrees.DEGREES:
        parts = problems.split(whole, problems.shares(whole, degree))
        assert torch.equal(torch.cat([part.x for part in parts]), whole.x)
        assert torch.equal(torch.cat([part.down for part in parts]), whole.down)
        assert len(parts) == max(1, degree)
    with pytest.raises(UnsupportedError, match="--device cuda"):
        case.execute(**tensors)


def test_the_cases_of_the_backward_promise_the_same_of_every_gradient(
    cases: ModuleType, prepared: dict[str, torch.Tensor]
) -> None:
    both, degrees = cases.BACKWARD, cases.BACKWARD_DEGREES
    assert set(both.claims) >= {"graph", "schedule", "contention", "stream", "sms", "ep", "rank"}
    assert both.schedule == cases.LAYER.schedule
    assert not both.gradients
    assert not degrees.gradients
    assert (degrees.vary, degrees.schedule) == (cases.DEGREES.vary, cases.DEGREES.schedule)
    given = prepare(degrees).tensors
    assert set(given) - set(prepared) == {"d_out"}
    assert all(given[name].requires_grad for name in ("x", "router_weights", "w_down"))
    with pytest.raises(UnsupportedError, match="--device cuda"):
        degrees.execute(**given)


def test_the_backward_on_a_gpu_is_the_kernels_or_an_error(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    monkeypatch.setenv(BACKWARD_VARIABLE, "0")
    cases.insist_on_backward(on_cpu)
    with pytest.raises(UnsupportedError, match=f"set {BACKWARD_VARIABLE}=1"):
        cases.insist_on_backward(on_gpu)
    monkeypatch.delenv(BACKWARD_VARIABLE)
    cases.insist_on_backward(on_gpu)


def test_both_directions_in_one_execution_have_the_gradients_of_autograd(
    cases: ModuleType,
) -> None:
    given = prepare(cases.BACKWARD).tensors
    found = cases.BACKWARD.execute(**given)
    d_out = given.pop("d_out")
    out = cases.LAYER.execute(**given)
    leaves = {name: one for name, one in given.items() if one.requires_grad}
    wanted = torch.autograd.grad(out, list(leaves.values()), d_out)
    assert set(found) == {"out", *(f"d_{name}" for name in leaves)}
    for name, one in zip(leaves, wanted, strict=True):
        assert torch.equal(found[f"d_{name}"], one), name


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def test_an_execution_without_what_is_hard_is_an_error(
    cases: ModuleType, prepared: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    degrees, case = load_degrees(), cases.DEGREES
    tensors = {**prepared, "x": prepared["x"].as_subclass(OnGpu)}
    opened, facts = [], [degrees.Facts((0, 5, 7), 9, 4, 2, 3, 1, 1)]

    def open_ranks(degree: int, sizes: object, device: object, segments: object) -> object:
        opened.append((degree, sizes.ranks, segments))  # type: ignore[attr-defined]
        return SimpleNamespace(workspaces=(), wait=lambda: None)

    def run(ranks: object, parts: list[Any], num_sms: int) -> torch.Tensor:
        assert sum(part.x.shape[0] for part in parts) == tensors["x"].shape[0]
        return torch.full((1,), num_sms)

    monkeypatch.setattr(cases, "_RANKS", {})
    for name, made in (("open_ranks", open_ranks), ("run", run)):
        monkeypatch.setattr(cases.degrees, name, made)
    monkeypatch.setattr(cases.degrees, "facts_of", lambda workspaces, tokens: facts[0])
    assert case.execute(**tensors, degree=8, num_sms=7).item() == 7
    case.execute(**tensors, degree=8)
    case.execute(**tensors)
    assert opened == [(n, n, degrees.SMALLEST) for n in (8, cases.DEGREE)]  # made once
    facts[0] = replace(facts[0], wraps_h=1)
    with pytest.raises(RuntimeError, match="degree 8 ran without a ring of hidden rows"):
        case.execute(**tensors, degree=8)
    for segments in (degrees.SEGMENTS[1], None):
        case.execute(**tensors, degree=8, segments=segments)
    assert [segments for *_, segments in opened[2:]] == [Segments(1, 2), None]


def test_what_did_not_occur_is_named_and_nothing_else() -> None:
    degrees = load_degrees()
    good = degrees.Facts((0, 5, 7), 9, 4, 2, 3, 1, 1)
    assert degrees.lacking(good) == []
    assert degrees.lacking(degrees.Facts((12,), 9, 4, 2, 3, 1, 1)) == []
    for changed, word in (
        ({"wraps_x": 1}, "ring of rows"),
        ({"wraps_h": 1}, "ring of hidden"),
        ({"tails": 0}, "tail"),
        ({"empty_experts": 0}, "without rows"),
        ({"crossing": 0}, "border"),
        ({"tokens": (1, 5, 7)}, "without tokens"),
    ):
        (told,) = degrees.lacking(replace(good, **changed))
        assert word in told
    assert len(degrees.lacking(degrees.Facts((3, 3), 0, 0, 0, 0, 0, 0))) == 7


@pytest.mark.slow
def test_they_are_right_on_a_cpu() -> None:
    names = ("hopper/clamped", "hopper/exact-tiled-skewed")
    options = RunOptions(ranks=1, runs=1, claims=("reference", "exact"))
    found = run([f"{FILE}::{name}" for name in names], options)  # in one process
    told = [{one["claim"]: one["verdict"] for one in case["claims"]} for case in found["cases"]]
    # Each promises one of both.
    assert told == [
        {"reference": "VERIFIED", "exact": "UNVERIFIED"},
        {"reference": "UNVERIFIED", "exact": "VERIFIED"},
    ]
