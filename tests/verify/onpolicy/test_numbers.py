"""Every figure against a loop over exact fractions; NaN, infinities, masks and overflow."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onpolicy_records import both, lists, sample

from verify.onpolicy.figures import FIGURES, measure_columns
from verify.onpolicy.numbers import measure

NAN, INF = float("nan"), float("inf")
VALUE = st.one_of(
    st.floats(-30.0, 0.0, width=32), st.sampled_from([0.0, -0.0, -1.0, -0.6931471805599453])
)
ANY = st.one_of(VALUE, st.sampled_from([NAN, INF, -INF, None]))
ROW = st.tuples(ANY, ANY, st.booleans())
ROWS = st.lists(st.lists(ROW, max_size=6), max_size=4)


def pairs_of(samples):
    return both(
        *(
            sample(
                f"s{index}",
                [100 * index + place for place in range(len(rows))],
                trainer=[row[0] for row in rows],
                rollout=[row[1] for row in rows],
                mask=[row[2] for row in rows],
            )
            for index, rows in enumerate(samples)
        )
    )


def exactly(value: float) -> Fraction:
    return Fraction(value)


def close(found: float, expected: float, size: float = 0.0) -> bool:
    return math.isclose(found, expected, rel_tol=1e-11, abs_tol=1e-13 + 1e-14 * size)


@settings(max_examples=80)
@given(ROWS)
def test_counts_and_places_as_a_loop_counts_them(samples):
    numbers = measure(pairs_of(samples))
    expected = dict.fromkeys(
        ("masked_tokens", "absent_trainer", "absent_rollout", "compared_tokens", "finite_tokens",
         "differing_tokens", "nan_trainer", "nan_rollout", "inf_trainer", "inf_rollout",
         "above_zero_trainer", "above_zero_rollout", "hidden_differing", "hidden_nonfinite"),
        0,
    )  # fmt: skip
    first = largest = None
    differing_samples = set()
    hidden = []
    for index, rows in enumerate(samples):
        for place, (t, r, counted) in enumerate(rows):
            there = t is not None and r is not None
            unequal = there and t != r and not (math.isnan(t) and math.isnan(r))
            finite = there and math.isfinite(t) and math.isfinite(r)
            if not counted:
                expected["masked_tokens"] += 1
                expected["hidden_differing"] += unequal
                expected["hidden_nonfinite"] += there and not finite
                hidden += [abs(t - r)] if finite else []
                continue
            if not there:
                expected["absent_trainer"] += t is None or math.isnan(t)
                expected["absent_rollout"] += r is None or math.isnan(r)
                continue
            expected["compared_tokens"] += 1
            expected["finite_tokens"] += finite
            for side, value in (("trainer", t), ("rollout", r)):
                expected[f"nan_{side}"] += math.isnan(value)
                expected[f"inf_{side}"] += math.isinf(value)
                expected[f"above_zero_{side}"] += finite and value > 0
            if unequal:
                expected["differing_tokens"] += 1
                differing_samples.add(index)
                first = first or (f"s{index}", place, 100 * index + place)
            if finite and t != r and (largest is None or abs(t - r) > largest[0]):
                largest = (abs(t - r), f"s{index}", place)
    for name, count in expected.items():
        assert numbers.figures[name] == count, name
    assert numbers.tokens == sum(len(rows) for rows in samples)
    assert numbers.samples == len(samples)
    assert numbers.differing_samples == len(differing_samples)
    assert numbers.hidden_abs_max == (max(hidden) if hidden else None)
    if expected["compared_tokens"]:
        assert numbers.differing_share == (
            expected["differing_tokens"] / expected["compared_tokens"]
        )
    assert (
        numbers.first and (numbers.first.key, numbers.first.position, numbers.first.token)
    ) == first
    spot = numbers.largest
    assert (spot and (spot.key, spot.position)) == (largest and largest[1:])


@settings(max_examples=80)
@given(ROWS)
def test_figures_as_exact_arithmetic_gives_them(samples):
    numbers = measure(pairs_of(samples))
    d: list[float] = []
    sums: list[Fraction] = []
    for rows in samples:
        kept = [
            t - r
            for t, r, counted in rows
            if counted and t is not None and r is not None and math.isfinite(t) and math.isfinite(r)
        ]
        d += kept
        sums += [sum((exactly(one) for one in kept), Fraction(0))] if kept else []
    if not d:
        for name in ("mean", "abs_max", "k3", "ess_token", "chi2_sequence", "sum_max", "ratio_max"):
            assert numbers.figures[name] is None
        return
    n, exact = len(d), [exactly(one) for one in d]
    mean = sum(exact) / n
    assert close(numbers.mean, float(mean), 30)
    assert numbers.k1 == -numbers.mean
    assert numbers.k1_reverse == numbers.mean
    assert close(numbers.abs_mean, float(sum(map(abs, exact)) / n))
    assert close(numbers.std, math.sqrt(float(sum((one - mean) ** 2 for one in exact) / n)), 30)
    assert close(numbers.k2, float(sum(one * one for one in exact) / n / 2))
    assert numbers.k2 == numbers.k2_reverse
    assert close(numbers.k3, math.fsum(math.expm1(one) - one for one in d) / n)
    assert close(numbers.k3_reverse, math.fsum(math.expm1(-one) + one for one in d) / n)
    chi2 = math.fsum(math.expm1(2 * one) for one in d) / n
    assert close(numbers.chi2_token, chi2)
    assert close(numbers.ratio_mean, math.fsum(math.exp(one) for one in d) / n)
    assert close(numbers.ratio_max, math.exp(max(d)))
    assert close(numbers.ratio_min, math.exp(min(d)))
    assert close(numbers.ess_token, effective(d))
    assert numbers.share_beyond_ln2 == sum(abs(one) > math.log(2) for one in d) / n
    assert numbers.abs_max == max(map(abs, d))
    ordered = sorted(map(abs, d))
    for name, share in (
        ("abs_p50", Fraction(1, 2)), ("abs_p90", Fraction(9, 10)),
        ("abs_p99", Fraction(99, 100)), ("abs_p999", Fraction(999, 1000)),
    ):  # fmt: skip
        smallest = next(one for one in ordered if sum(x <= one for x in ordered) >= share * n)
        assert numbers.figures[name] == smallest
    floats = [float(one) for one in sums]
    assert close(numbers.sum_min, min(floats), 200)
    assert close(numbers.sum_max, max(floats), 200)
    assert close(numbers.sum_abs_max, max(map(abs, floats)), 200)
    assert close(numbers.sum_mean, float(sum(sums) / len(sums)), 200)
    assert math.isclose(
        numbers.chi2_sequence,
        math.fsum(math.expm1(2 * one) for one in floats) / len(floats),
        rel_tol=1e-9,
        abs_tol=1e-12,
    )
    assert math.isclose(numbers.ess_sequence, effective(floats), rel_tol=1e-9)


def effective(logs: list[float]) -> float:
    high = max(logs)
    weights = [math.exp(one - high) for one in logs]
    return math.fsum(weights) ** 2 / (len(logs) * math.fsum(one * one for one in weights))


@pytest.mark.parametrize("n", [1, 2, 10, 99, 100, 101, 999, 1000, 1001, 40_000])
def test_quantiles_are_values_of_the_data_and_exact_at_round_counts(n):
    values = np.arange(1, n + 1, dtype=float)
    np.random.default_rng(n).shuffle(values)
    found = measure_columns(values, np.zeros(n), np.array([0, n])).values
    assert found["abs_p50"] == math.ceil(Fraction(n, 2))
    assert found["abs_p90"] == math.ceil(Fraction(9 * n, 10))
    assert found["abs_p99"] == math.ceil(Fraction(99 * n, 100))
    assert found["abs_p999"] == math.ceil(Fraction(999 * n, 1000))


def test_many_chunks_add_up_as_one():
    rng = np.random.default_rng(1)
    d = rng.normal(0, 0.3, 50_001)
    found = measure_columns(d, np.zeros_like(d), np.array([0, 30_000, 30_000, 50_001])).values
    assert close(found["k3"], math.fsum(math.expm1(x) - x for x in d) / len(d))
    assert close(found["chi2_token"], math.fsum(math.expm1(2 * x) for x in d) / len(d))
    assert math.isclose(found["ess_token"], effective(d.tolist()), rel_tol=1e-12)


def test_small_differences_do_not_cancel():
    numbers = measure(lists([-1.0 + 2**-30, -1.0], [-1.0, -1.0]))
    assert math.isclose(numbers.k3, 2**-61 / 2, rel_tol=1e-6)
    assert math.isclose(numbers.chi2_token, 2**-30, rel_tol=1e-6)


def test_ratios_beyond_float64_are_infinite_and_counted():
    numbers = measure(lists([-1.0, -1.0, -1.0], [-1.0, -801.0, -1.0]))
    assert numbers.ratio_max == INF
    assert numbers.chi2_token == INF
    assert numbers.k3 == INF
    assert numbers.k1 == pytest.approx(-800 / 3)
    assert numbers.overflow_tokens == 1
    assert numbers.overflow_sequences == 1
    assert numbers.ess_token == pytest.approx(1 / 3)  # of its own scale, and exact
    assert numbers.abs_max == 800
    document = json.loads(json.dumps(numbers.to_json(), allow_nan=False))
    assert document["k3"] == "inf"
    assert document["abs_max"] == 800
    calm = measure(lists([-1.0, -1.0], [-1.0, -300.0]))
    assert calm.overflow_tokens == 0
    assert math.isfinite(calm.chi2_token)


def test_a_long_sample_may_overflow_where_no_token_does():
    numbers = measure(lists([-1.0] * 500, [-2.0] * 500))
    assert numbers.overflow_tokens == 0
    assert numbers.overflow_sequences == 1
    assert numbers.chi2_sequence == INF
    assert numbers.sum_max == 500
    assert numbers.largest_sum == "s"


def test_nan_and_infinities_are_counted_and_left_out():
    numbers = measure(lists([NAN, NAN, -INF, -INF, -1.0], [NAN, -1.0, -INF, -2.0, -1.5]))
    assert (numbers.nan_trainer, numbers.nan_rollout) == (2, 1)
    assert (numbers.inf_trainer, numbers.inf_rollout) == (2, 1)
    assert numbers.differing_tokens == 3  # two NaN, and two equal infinities, are not
    assert numbers.first.position == 1
    assert numbers.finite_tokens == 1
    assert numbers.abs_max == 0.5
    assert numbers.to_json()["first"]["trainer"] == "nan"


def test_signed_zeros_are_equal():
    numbers = measure(lists([0.0, -0.0], [-0.0, 0.0]))
    assert numbers.differing_tokens == 0
    assert numbers.first is None
    assert numbers.largest is None
    assert numbers.abs_max == 0
    assert math.copysign(1, numbers.k1) == 1


def test_what_the_mask_hides_is_told_apart():
    numbers = measure(lists([-1.0, -1.0, NAN, -1.0], [-1.0, -6.0, -1.0, -2.0], [1, 0, 0, 1]))
    assert numbers.masked_tokens == 2
    assert numbers.hidden_differing == 2
    assert numbers.hidden_abs_max == 5
    assert numbers.hidden_nonfinite == 1
    assert numbers.differing_tokens == 1
    assert numbers.nan_trainer == 0


def test_nothing_at_all():
    numbers = measure(both())
    assert numbers.tokens == numbers.compared_tokens == numbers.differing_tokens == 0
    assert numbers.mean is None
    assert numbers.differing_share is None
    json.dumps(numbers.to_json(), allow_nan=False)


def test_figures_are_attributes_and_all_of_them_documented():
    numbers = measure(lists([-1.0], [-2.0]))
    assert set(numbers.figures) == set(FIGURES)
    assert all(figure.formula for figure in FIGURES.values())
    assert numbers.misaligned_samples == 0
    with pytest.raises(AttributeError, match="no figure 'k9'"):
        _ = numbers.k9


def test_misalignments_are_counted_by_kind():
    pairs = both(
        sample("a", [1, 2], trainer=[-1.0], rollout=[-1.0, -2.0]),
        sample("b", [1, 2], trainer=[-1.0, -2.0], rollout=[-1.0, -2.0], response_length=7),
    )
    numbers = measure(pairs)
    assert dict(numbers.misalignments) == {"length": 1, "response-length": 1}
    assert numbers.misaligned_samples == 2
    assert numbers.samples == 1
