"""The cases in ci/gpu/hopper_cases.py: of widths that the kernel takes, and right on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import mok
from mok.hopper.layout import size_problem
from verify import builtin
from verify.builtin import covered
from verify.cases import Case
from verify.plans import RunOptions
from verify.running import run
from verify.sources import source_files
from verify.staging import prepare
from verify.targets import cases_in, find

FILE = Path(mok.__file__).parent.parent / "ci" / "gpu" / "hopper_cases.py"


@pytest.fixture(scope="module")
def cases() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("hopper_cases_under_test", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


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
    assert len(made) == 3 + 7
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


@pytest.mark.slow
def test_they_are_right_on_a_cpu() -> None:
    target = f"{FILE}::hopper/"
    layer = run([f"{target}clamped"], RunOptions(ranks=1, runs=1, claims=("reference",)))
    exact = run([f"{target}exact-tiled-skewed"], RunOptions(ranks=1, runs=1, claims=("exact",)))
    assert (layer["verdict"], exact["verdict"]) == ("VERIFIED", "VERIFIED")
