"""Declaring cases: what is refused, and what the decorator makes of a function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import verify
from verify.cases import DEFAULT_CLAIMS, Case, accepts, case_of
from verify.errors import CaseError


def double(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
    """Twice.

    More text.
    """
    return x * factor


def test_a_plain_function_needs_only_the_decorator() -> None:
    made = verify.case(inputs={"x": verify.normal(3)})(double)
    assert (made.name, made.description) == ("double", "Twice.")
    assert (
        tuple(made.claims)
        == DEFAULT_CLAIMS
        == ("repeat", "process", "memory", "threads", "history")
    )
    assert torch.equal(made(torch.ones(2)), torch.full((2,), 2.0)), "it can still be called"

    @verify.case
    def nothing() -> torch.Tensor:
        return torch.ones(2)

    assert isinstance(nothing, Case)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"argument 'x'.*inputs=\{'x'"),
        ({"inputs": {"x": 1}, "claim": ("repeat",)}, "does not know claim"),
        (
            {"inputs": {"x": 1}, "claims": ("repeat", "speed")},
            r"claims 'speed'.*allowed are repeat",
        ),
        ({"inputs": {"x": 1}, "claims": ("repeat", "repeat")}, "distinct"),
        ({"inputs": {"x": 1}, "claims": "ep"}, "claims 'e', 'p'"),
        ({"inputs": {"x": 1}, "claims": ("batch",)}, "promises 'batch' but gives no batch"),
        ({"inputs": {"x": 1}, "claims": ("vary",)}, "promises 'vary'"),
        ({"inputs": {"x": 1}, "claims": ("schedule",)}, "promises 'schedule'"),
        ({"inputs": {"x": 1}, "claims": ("ep",)}, "promises 'ep'"),
        ({"inputs": {"x": 1}, "placement": {"x": "sharded"}}, r"placement of 'x'.*verify.sharded"),
    ],
)
def test_wrong_declarations_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        case_of(double, **options)


@pytest.mark.parametrize(
    ("given", "name"), [("", ""), (torch.device("cpu"), "cpu"), (torch.device("cuda", 1), "cuda:1")]
)
def test_a_device_may_be_torchs_own(given: Any, name: str) -> None:
    assert case_of(double, inputs={"x": verify.normal(2)}, device=given).device == name


@pytest.mark.parametrize("given", [0, 1, None, torch.device("meta"), "gpu", "cpu:1"])
def test_another_device_is_refused_by_the_decorator_and_by_check(given: Any) -> None:
    with pytest.raises(CaseError, match=r"'double': device .*allowed are .*cpu, cuda and cuda:N"):
        case_of(double, inputs={"x": verify.normal(2)}, device=given)
    if given is not None:  # there: as the case says
        with pytest.raises(CaseError, match=r"allowed are .*cpu, cuda and cuda:N"):
            verify.check(case_of(double, inputs={"x": verify.normal(2)}), device=given)


def test_decorating_what_is_no_function() -> None:
    with pytest.raises(CaseError, match="decorates a function"):
        verify.case(3)  # type: ignore[call-overload]


def test_setup_may_give_the_arguments_and_group_needs_no_input() -> None:
    case_of(double, setup=lambda: {"x": torch.ones(1)})

    def grouped(x: torch.Tensor, group: Any) -> torch.Tensor:
        return x

    case_of(grouped, inputs={"x": verify.normal(1)})


def test_accepts() -> None:
    def keywords(**kw: Any) -> None: ...
    def named(*, group: Any) -> None: ...

    assert accepts(named, "group", named=True)
    assert accepts(keywords, "group")
    assert not accepts(keywords, "group", named=True)
    assert not accepts(double, "group")
    assert not accepts(torch.add, "group"), "a builtin without a signature"


def test_cases_are_frozen() -> None:
    with pytest.raises(AttributeError):
        case_of(double, inputs={"x": verify.normal(1)}).seed = 4  # type: ignore[misc]


def test_what_is_given_is_promised_unless_claims_are_named() -> None:
    def function(x: Any, tile: int = 1) -> Any:
        return x

    given = {"batch": {"x": 0}, "vary": {"tile": [2]}, "reference": lambda *_: {}}
    case = Case(name="c", execute=function, **given)
    assert case.claims == (*DEFAULT_CLAIMS, "batch", "vary", "reference")
    assert Case(name="c", execute=function, claims=("repeat",), **given).claims == ("repeat",)
    assert Case(name="c", execute=function).claims == DEFAULT_CLAIMS
