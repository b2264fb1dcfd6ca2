"""Checks from one's own code: the reasons of every fault, and no traces left in the caller."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import verify
from verify.api import target_of
from verify.errors import CaseError
from verify.reasons import Verdict
from verify.targets import import_file
from verify.verdicts import CaseVerdict

N, H = 64, 8


def scattered(order: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    """Sums rows into four bins in some order: floating-point addition shows which."""

    def add(x: Tensor) -> Tensor:
        rows = order()
        return torch.zeros(4, H).index_add_(0, rows % 4, x[rows])

    return add


def from_system() -> Tensor:
    keys = np.frombuffer(os.urandom(4 * N), dtype=np.uint32)
    return torch.from_numpy(keys.argsort(kind="stable"))


# a file of its own, since the plugin would collect failing cases of a test file
USER = """
import os
import numpy as np, torch, verify

def add(x, rows):
    return torch.zeros(4, 8).index_add_(0, rows % 4, x[rows])

@verify.case(inputs={"x": verify.normal(64, 8)}, claims=("repeat",))
def global_rng(x):
    return add(x, torch.randperm(64))

@verify.case(inputs={"x": verify.normal(64, 8)}, claims=("repeat", "process"))
def urandom(x):
    keys = np.frombuffer(os.urandom(256), dtype=np.uint32)
    return add(x, torch.from_numpy(keys.argsort(kind="stable")))
"""


@pytest.fixture
def user(tmp_path: Path) -> ModuleType:
    path = tmp_path / "user cases.py"
    path.write_text(USER)
    return import_file(path)


def reasons(verdict: CaseVerdict) -> dict[str, set[str]]:
    return {c.claim: {f.reason for f in c.findings} for c in verdict.claims}


def local(function: Callable[..., Any], **options: Any) -> verify.Case:
    """A case that other processes cannot import."""
    return verify.case(inputs={"x": verify.normal(N, H)}, claims=("repeat",), **options)(function)


WORKSPACE = torch.empty(N, H)
KEPT: dict[str, Tensor] = {}
CALLS: list[int] = []


def sometimes(x: Tensor) -> Tensor:
    CALLS.append(1)
    if len(CALLS) == 5:
        raise RuntimeError("the fifth call")
    return x * 2


FAULTS: dict[str, tuple[Callable[[Tensor], Any], Verdict]] = {
    "consumes-global-rng": (scattered(lambda: torch.randperm(N)), Verdict.MISMATCH),
    "bits-differ": (scattered(from_system), Verdict.MISMATCH),
    "input-mutated": (lambda x: x.mul_(2).clone(), Verdict.MISMATCH),
    "aliased-output": (lambda x: torch.mul(x, 2, out=WORKSPACE), Verdict.MISMATCH),
    "cached-output": (lambda x: KEPT.setdefault("x", x.clone()).clone(), Verdict.UNVERIFIED),
    "nothing-compared": (lambda x: "no tensors at all", Verdict.UNVERIFIED),
    "vacuous": (lambda x: torch.zeros_like(x), Verdict.UNVERIFIED),
    "raises-sometimes": (sometimes, Verdict.MISMATCH),
    "case-error": (lambda x: x @ x, Verdict.UNVERIFIED),
    "outputs-differ": (lambda x: x[: 3 + os.urandom(1)[0] % 50], Verdict.MISMATCH),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_every_fault_has_its_own_reason(reason: str) -> None:
    function, expected = FAULTS[reason]
    verdict = verify.check(local(function), runs=8)
    assert reasons(verdict) == {"repeat": {reason}}
    assert verdict.verdict is expected


def test_a_clean_case_has_no_findings() -> None:
    verdict = verify.check(local(lambda x: x * 2), runs=8)
    assert reasons(verdict) == {"repeat": set()}
    assert verdict.claims[0].bound == pytest.approx(1 - 0.05 ** (1 / 8)), (
        "the free arm is another question"
    )


def difference_of(verdict: CaseVerdict) -> tuple[str, dict[str, Any]]:
    difference = verdict.claims[0].findings[0].difference
    assert difference is not None
    return "\n".join(difference["lines"]), dict(difference)


@pytest.mark.slow
def test_module_level_global_rng_is_checked_in_a_worker_and_explained(user: ModuleType) -> None:
    verdict = verify.check(user.global_rng)
    assert reasons(verdict) == {"repeat": {"consumes-global-rng"}}
    text, difference = difference_of(verdict)
    assert verdict.claims[0].findings[0].tensor == "out"
    assert "first: out[" in text
    assert text.count("(0x") >= 2, "both bit patterns"
    assert "%" in text, "share of elements"
    assert difference["suggests"]
    assert any("consumes global randomness: torch" in note for note in verdict.notes)


@pytest.mark.slow
def test_module_level_urandom_differs_on_repeat_and_in_fresh_processes(user: ModuleType) -> None:
    verdict = verify.check(user.urandom)
    assert reasons(verdict) == {"repeat": {"bits-differ"}, "process": {"bits-differ"}}
    assert difference_of(verdict)[1]["suggests"]
    for claim in verdict.claims:
        assert claim.rate is not None
        assert claim.differing > 0
    assert any(f.difference for f in verdict.claims[1].findings), "explained across processes"


def test_targets(user: ModuleType) -> None:
    assert target_of(user.urandom) == f"{user.__file__}::urandom"
    assert target_of(local(lambda x: x)) is None
    with pytest.raises(CaseError, match="top level of a file"):
        verify.check(local(lambda x: x), ranks=2)


def test_what_cannot_be_checked_from_here_is_named() -> None:
    case = verify.case(inputs={"x": verify.normal(N, H)})(lambda x: x * 2)
    verdict = verify.check(case)
    assert reasons(verdict) == {
        "repeat": set(),
        "process": {"unsupported"},
        "memory": set(),
        "threads": set(),
        "history": set(),
    }
    assert verdict.verdict is Verdict.UNVERIFIED


def test_assert_repeatable_on_functions_and_modules() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    verdict = verify.assert_repeatable(torch.mul, x, 2)
    assert [c.claim for c in verdict.claims] == ["repeat", "memory", "threads", "history"]
    assert any("not checked: process" in note for note in verdict.notes)
    verify.assert_repeatable(lambda x, group: x * group, x, group=3)
    verify.assert_repeatable(lambda *xs: sum(xs), x, x, x)
    verify.assert_repeatable(lambda x, *, scale=1.0, **more: x * scale, x, scale=2.0)
    verify.assert_repeatable(lambda x, m: (m(x), m.weight), x, nn.Linear(4, 2))
    sparse = verify.assert_repeatable(nn.Embedding(9, 4, sparse=True), torch.tensor([1, 2, 1]))
    assert any("grad.module.weight (torch.sparse_coo" in note for note in sparse.notes)
    linear = nn.Linear(4, 2)
    found = verify.assert_repeatable(linear, x.clone().requires_grad_())
    assert set(found.claims[0].compared) == {
        "out",
        "grad.input",
        "grad.module.weight",
        "grad.module.bias",
    }


def test_the_caller_s_world_is_as_before() -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    expected = (torch.rand(3), np.random.rand(3))
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))
    module[0].weight.grad = torch.ones(4, 4)
    state = {n: t.clone() for n, t in module.state_dict().items()}
    x = torch.arange(8.0).reshape(2, 4)
    torch.manual_seed(11)
    np.random.seed(11)
    threads = torch.get_num_threads()
    verify.check(
        verify.case(setup=lambda: {"m": module, "x": x}, claims=("repeat",))(lambda m, x: m(x))
    )
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])
    assert all(torch.equal(t, state[n]) for n, t in module.state_dict().items())
    assert torch.equal(module[0].weight.grad, torch.ones(4, 4))
    assert module[0].bias.grad is None
    assert torch.equal(x, torch.arange(8.0).reshape(2, 4))
    assert torch.get_num_threads() == threads


def test_unused_memory_is_given_back_before_the_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("verify.api.allocations.give_back", lambda: order.append("given back"))

    def setup() -> dict[str, Tensor]:
        order.append("setup")
        return {"x": torch.arange(3.0)}

    case = verify.Case(name="c", execute=lambda x: x * 2, setup=setup, claims=("repeat",))
    assert verify.check(case).verdict is Verdict.VERIFIED
    assert order == ["given back", "setup"]


def test_assert_repeatable_says_what_differs() -> None:
    with pytest.raises(AssertionError) as caught:
        verify.assert_repeatable(scattered(from_system), verify.generate("x", (N, H)))
    text = str(caught.value)
    for part in ("verdict=MISMATCH", "reason=bits-differ", "first: out[", "0x", "to do:"):
        assert part in text
    with pytest.raises(AssertionError, match="verdict=UNVERIFIED"):
        verify.assert_repeatable(lambda: None)


def test_assert_bitwise() -> None:
    a = {"w": torch.tensor([[1.0, 2.0], [3.0, 0.0]]), "n": [torch.tensor(3)]}
    verify.assert_bitwise(a, {"w": a["w"].clone(), "n": [torch.tensor(3)]})
    b = {"w": a["w"].clone(), "n": [torch.tensor(3)]}
    b["w"][1, 1] = -0.0
    with pytest.raises(AssertionError, match=r"w\[1,1\].*0x") as caught:
        verify.assert_bitwise(b, a)
    assert "1 of 4" in str(caught.value)
    for wrong in (
        {"w": a["w"]},
        {**a, "z": a["w"]},
        {**a, "w": a["w"].double()},
        {**a, "w": a["w"][0]},
    ):
        with pytest.raises(AssertionError, match="verdict=MISMATCH"):
            verify.assert_bitwise(wrong, a)
    with pytest.raises(AssertionError, match="nothing-compared"):
        verify.assert_bitwise([], [])
    nan = torch.tensor([float("nan")])
    verify.assert_bitwise(nan, nan.clone())


def own_backward(x: torch.Tensor) -> torch.Tensor:
    loss = (x * x).sum()
    loss.backward()
    return loss


def test_a_function_that_calls_backward_itself_has_its_gradients_compared() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    verdict = verify.assert_repeatable(own_backward, x)
    assert "grad.x" in verdict.claims[0].compared
    assert x.grad is None


def drawn(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=generator)


def test_a_generator_among_the_arguments_is_restored_for_every_execution() -> None:
    generator = torch.Generator().manual_seed(3)
    verify.assert_repeatable(drawn, torch.ones(4), generator)
    unseeded = torch.Generator()
    with pytest.raises(AssertionError, match="bits-differ"):
        verify.assert_repeatable(lambda x: drawn(x, unseeded), torch.ones(4))


def test_workspaces_in_turn_are_one_workspace_too_few() -> None:
    workspaces, calls = [torch.empty(3, 4) for _ in range(3)], [0]

    def function(x: Tensor) -> Tensor:
        calls[0] += 1
        return torch.mul(x, 2, out=workspaces[calls[0] % 3])

    with pytest.raises(AssertionError, match="aliased-output"):
        verify.assert_repeatable(function, torch.arange(12.0).reshape(3, 4))


def test_a_memo_of_the_first_arguments_is_a_cached_output() -> None:
    memo: dict[str, Tensor] = {}
    with pytest.raises(AssertionError, match="cached-output"):
        verify.assert_repeatable(
            lambda x: memo.setdefault("first", x * 2).clone(), torch.arange(12.0)
        )


def test_an_argument_under_a_taken_name_is_passed_all_the_same() -> None:
    def function(arg1: Tensor, *more: Tensor) -> Tensor:
        assert len(more) == 1
        return arg1 + more[0]

    verify.assert_repeatable(function, torch.arange(3.0), torch.arange(3.0) * 5)


def test_assert_bitwise_compares_everything_or_says_what_it_cannot() -> None:
    eye = torch.eye(3)
    with pytest.raises(AssertionError, match="bits-differ"):
        verify.assert_bitwise(eye.to_sparse(), (eye * 2).to_sparse())
    with pytest.raises(AssertionError, match="bits-differ"):
        verify.assert_bitwise(np.float32(1), np.float32(2))
    with pytest.raises(AssertionError, match=r"unsupported: cannot compare out \(Linear\)"):
        verify.assert_bitwise(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="nothing-compared"):
        verify.assert_bitwise(torch.empty(0), torch.empty(0))
    verify.assert_bitwise(eye.to_sparse(), eye.to_sparse())
