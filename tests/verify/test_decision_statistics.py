"""Bounds and intervals, against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.decision.statistics import rate_interval, undetected_rate


@given(st.integers(1, 100_000))
def test_a_fault_of_that_rate_stays_unseen_with_five_percent(n: int) -> None:
    assert (1 - undetected_rate(n)) ** n == pytest.approx(0.05, rel=1e-9)


def test_three_processes_exclude_only_faults_above_63_percent() -> None:
    assert undetected_rate(3) == pytest.approx(0.6316, abs=1e-4)
    assert undetected_rate(1) == pytest.approx(0.95)
    with pytest.raises(ValueError, match="at least 1"):
        undetected_rate(0)


def at_most(k: int, n: int, p: Fraction) -> Fraction:
    return sum((comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)), Fraction(0))


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_is_clopper_pearson(numbers: tuple[int, int]) -> None:
    k, n = numbers
    rate, low, high = rate_interval(k, n)
    assert rate == k / n
    assert 0 <= low <= rate <= high <= 1
    if k:
        assert float(1 - at_most(k - 1, n, Fraction(low))) == pytest.approx(0.025, rel=1e-6)
    else:
        assert low == 0
    if k < n:
        assert float(at_most(k, n, Fraction(high))) == pytest.approx(0.025, rel=1e-6)
    else:
        assert high == 1


def test_known_interval_and_refusals() -> None:
    # R: binom.test(3, 100)$conf.int
    assert rate_interval(3, 100) == pytest.approx((0.03, 0.006229972, 0.085176053), abs=1e-8)
    for k, n in ((-1, 5), (6, 5), (0, 0)):
        with pytest.raises(ValueError, match="not a rate"):
            rate_interval(k, n)
