"""Which marks a library's decorator can set, told from its parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mok.errors import UnsupportedError
from mok.integrations.marks import ALL, NAMES, Marks, marks_of

Decorator = Callable[..., object]


def _first(experts_class=None, *, is_transposed=False, has_bias=False):
    """As in 5.0 to 5.2."""


def _gated(
    experts_class=None,
    *,
    experts_interface=None,
    is_transposed=False,
    has_bias=False,
    has_gate=True,
):
    """As in 5.4 to 5.6."""


def _laid_out(
    experts_class=None,
    *,
    experts_interface=None,
    is_concatenated=True,
    is_transposed=False,
    has_bias=False,
    has_gate=True,
):
    """As in 5.7 to 5.19."""


def _normalised(
    experts_class=None,
    *,
    experts_interface=None,
    is_concatenated=True,
    is_transposed=False,
    has_bias=False,
    has_gate=True,
    has_post_expert_norm=False,
):
    """As since 5.20."""


def _later(
    experts_class=None,
    *,
    is_concatenated=True,
    is_transposed=False,
    has_bias=False,
    has_gate=True,
    has_post_expert_norm=False,
    has_scale=False,
):
    """With a mark that nobody knows yet."""


def _open(experts_class=None, *, is_concatenated, is_transposed, has_bias, has_gate, **more):
    """One that takes anything."""


@pytest.mark.parametrize(
    ("decorator", "marks"),
    [
        (_normalised, ALL),
        (_laid_out, Marks(said=NAMES[:-1])),
        (_later, Marks(others=(("has_scale", False),))),
    ],
)
def test_marks_are_the_parameters(decorator: Decorator, marks: Marks) -> None:
    assert NAMES[-1] == "has_post_expert_norm"
    assert marks_of(decorator, "5.x") == marks


@pytest.mark.parametrize(
    ("decorator", "why"),
    [
        (_first, "does not take is_concatenated, has_gate"),
        (_gated, "does not take is_concatenated"),
        (_open, "takes parameters without names"),
    ],
)
def test_a_decorator_that_says_too_little_is_refused(decorator: Decorator, why: str) -> None:
    told = rf"cannot use transformers 5\.6\.2 \(use_experts_implementation {why}\); allowed: 5\.7"
    with pytest.raises(UnsupportedError, match=told):
        marks_of(decorator, "5.6.2")
