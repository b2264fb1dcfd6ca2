"""Every metric of the field against a loop written from its formula."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onpolicy_records import both, lists, sample

from verify.onpolicy.metrics import METRICS, field_metrics

VALUE = st.floats(-12.0, -0.0009765625, width=32)
ROWS = st.lists(
    st.lists(st.tuples(VALUE, VALUE, st.booleans()), min_size=1, max_size=5), min_size=1, max_size=4
)


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def avg(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def k3(x: float) -> float:
    return math.exp(x) - 1 - x


def by_hand(samples: list[list[tuple[float, float]]]) -> dict[str, float]:
    """From the formulas, one token at a time. samples: (t, r) of the counted tokens."""
    flat = [pair for rows in samples for pair in rows]
    d = [t - r for t, r in flat]
    apart = [abs(math.exp(t) - math.exp(r)) for t, r in flat]
    ratios = [math.exp(one) for one in d]
    w = [math.exp(clamp(one, -20, 20)) for one in d]
    bounded = [clamp(one, 0.5, 2.0) for one in w]
    error = [avg([math.exp(abs(t - r)) for t, r in rows]) for rows in samples]
    t_ppl = [-avg([t for t, _ in rows]) for rows in samples]
    r_ppl = [-avg([r for _, r in rows]) for rows in samples]
    gap = [a - b for a, b in zip(t_ppl, r_ppl, strict=True)]
    seq_w = [avg([math.exp(clamp(t - r, -20, 20)) for t, r in rows]) for rows in samples]
    mixtures = [math.log(0.5 * math.exp(t) + 0.5 * math.exp(r)) for t, r in flat]
    js = [
        0.5 * (math.exp(t - m) - (t - m) - 1) + 0.5 * (math.exp(r - m) - (r - m) - 1)
        for (t, r), m in zip(flat, mixtures, strict=True)
    ]
    sums = [math.fsum(t - r for t, r in rows) for rows in samples]
    cut = [min(one, 2.0) for one in ratios]
    verl = {
        "training_ppl": avg([math.exp(x) for x in t_ppl]),
        "training_log_ppl": avg(t_ppl),
        "rollout_ppl": avg([math.exp(x) for x in r_ppl]),
        "rollout_log_ppl": avg(r_ppl),
        "kl": avg([r - t for t, r in flat]),
        "k3_kl": avg([k3(one) for one in d]),
        "log_ppl_diff": avg(gap),
        "log_ppl_abs_diff": avg([abs(one) for one in gap]),
        "log_ppl_diff_max": max(gap),
        "log_ppl_diff_min": min(gap),
        "ppl_ratio": avg([math.exp(one) for one in gap]),
        "chi2_token": avg([one * one for one in w]) - 1,
        "chi2_seq": avg([math.exp(2 * clamp(one, -20, 20)) for one in sums]) - 1,
        "rollout_is_mean": avg(w),
        "rollout_is_max": max(w),
        "rollout_is_min": min(w),
        "rollout_is_std": statistics.pstdev(bounded),
        "rollout_is_eff_sample_size": 1 / avg([(x / (avg(bounded) + 1e-8)) ** 2 for x in bounded]),
        "rollout_is_ratio_fraction_high": avg([float(one > 2) for one in w]),
        "rollout_is_ratio_fraction_low": avg([float(one < 0.5) for one in w]),
        "rollout_is_seq_mean": avg(seq_w),
        "rollout_is_seq_std": deviation(seq_w),
        "rollout_is_seq_max": max(seq_w),
        "rollout_is_seq_min": min(seq_w),
        "rollout_is_seq_max_deviation": max(abs(one - 1) for one in seq_w),
    }
    slime = {
        "training_log_ppl": avg(t_ppl),
        "training_ppl": avg([math.exp(x) for x in t_ppl]),
        "rollout_log_ppl": avg(r_ppl),
        "rollout_ppl": avg([math.exp(x) for x in r_ppl]),
        "kl": avg([avg([r - t for t, r in rows]) for rows in samples]),
        "k3_kl": avg([avg([k3(t - r) for t, r in rows]) for rows in samples]),
        "log_ppl_diff": avg(gap),
        "log_ppl_abs_diff": avg([abs(one) for one in gap]),
        "ppl_ratio": avg([math.exp(one) for one in gap]),
    }
    areal = {
        "rollout_train_k3_kl/avg": avg([k3(one) for one in d]),
        "rollout_train_logp_abs_diff/avg": avg([abs(one) for one in d]),
        "rollout_train_logp_sq_diff/avg": avg([one * one for one in d]),
        "rollout_train_extreme_frac_tau2/avg": avg([float(abs(x) > math.log(2)) for x in d]),
        "rollout_train_extreme_frac_tau5/avg": avg([float(abs(x) > math.log(5)) for x in d]),
        "n_valid_tokens": len(d),
    }
    return {
        "token_mult_prob_error": avg([math.exp(abs(one)) for one in d]),
        "max_seq_mult_prob_error": max(error),
        "mean_seq_mult_prob_error": avg(error),
        "min_seq_mult_prob_error": min(error),
        "gen_kl_error": avg([k3(one) for one in d]),
        "policy_kl_error": avg([k3(-one) for one in d]),
        "js_divergence_error": avg(js),
        "sampling_importance_ratio": avg(ratios),
        "training/rollout_probs_diff_max": max(apart),
        "training/rollout_probs_diff_mean": avg(apart),
        "training/rollout_probs_diff_std": deviation(apart) if len(apart) > 1 else math.nan,
        **{f"rollout_corr/{name}": value for name, value in verl.items()},
        **{f"mismatch_{name}": value for name, value in slime.items()},
        "train_rollout_logprob_abs_diff": avg([avg([abs(t - r) for t, r in x]) for x in samples]),
        "train_rollout_kl": avg(
            [avg([clamp(k3(clamp(t - r, -20, 20)), -10, 10) for t, r in rows]) for rows in samples]
        ),
        "sampling/sampling_logp_difference/mean": avg([abs(one) for one in d]),
        "sampling/sampling_logp_difference/max": max(abs(one) for one in d),
        "sampling/importance_sampling_ratio/min": min(cut),
        "sampling/importance_sampling_ratio/mean": avg(cut),
        "sampling/importance_sampling_ratio/max": max(cut),
        "mismatch_kl/all/mean": avg([k3(one) for one in d]),
        "mismatch_kl/all/max": max(k3(one) for one in d),
        "mismatch_kl/all/std": deviation([k3(x) for x in d]) if len(d) > 1 else math.nan,
        "debug/vllm_vs_local_logprob_diff_mean": avg([abs(one) for one in d]),
        "debug/vllm_vs_local_logprob_diff_max": max(abs(one) for one in d),
        "debug/vllm_vs_local_logprob_diff_std": deviation([abs(one) for one in d]),
        "debug/vllm_local_reverse_kl": avg([math.exp(r) * (r - t) for t, r in flat]),
        **{f"compute_logp/r3/{name}": value for name, value in areal.items()},
    }


@settings(max_examples=60)
@given(ROWS)
def test_each_metric_as_a_loop_from_its_formula(samples):
    pairs = both(
        *(
            sample(
                str(index), range(len(rows)), trainer=[t for t, _, _ in rows],
                rollout=[r for _, r, _ in rows], mask=[m for _, _, m in rows],
            )
            for index, rows in enumerate(samples)
        )
    )  # fmt: skip
    found = field_metrics(pairs)
    kept = [[(t, r) for t, r, counted in rows if counted] for rows in samples]
    kept = [rows for rows in kept if rows]
    if not kept:
        assert set(found.values()) == {None}
        return
    expected = by_hand(kept)
    assert set(found) - {"training/rollout_actor_probs_pearson_corr"} == set(expected)
    for name, value in expected.items():
        got = found[name]
        size = abs(value) + 1
        assert math.isnan(got) == math.isnan(value), name
        assert math.isnan(value) or abs(got - value) <= 2e-8 * size, (name, got, value)


def test_correlation_is_that_of_torch():
    rng = np.random.default_rng(2)
    t, r = -3 * rng.random(50), -3 * rng.random(50)
    found = field_metrics(lists(t.tolist(), r.tolist()))
    expected = torch.corrcoef(torch.tensor(np.stack([np.exp(t), np.exp(r)])))[0, 1].item()
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected, rel=1e-12)


def test_the_mean_of_samples_is_not_the_mean_of_tokens():
    """RL-Kernel #335: slime's name sounds like a maximum and is a mean of means."""
    pairs = both(
        sample("a", [1], trainer=[-1.0], rollout=[-2.0]),
        sample("b", [1, 2, 3], trainer=[-1.0] * 3, rollout=[-1.0] * 3),
    )
    found = field_metrics(pairs)
    assert found["train_rollout_logprob_abs_diff"] == 0.5
    assert found["debug/vllm_vs_local_logprob_diff_mean"] == 0.25
    assert found["debug/vllm_vs_local_logprob_diff_max"] == 1.0


def test_clamps_hide_what_the_numbers_show():
    found = field_metrics(lists([-1.0, -1.0], [-41.0, -1.0]))
    assert found["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(20))
    assert found["sampling/importance_sampling_ratio/max"] == 2.0
    assert found["train_rollout_kl"] == 5.0
    assert found["token_mult_prob_error"] == pytest.approx((math.exp(40) + 1) / 2)


def test_nan_in_nan_out_and_overflow_is_infinite():
    assert math.isnan(field_metrics(lists([float("nan"), -1.0], [-1.0, -1.0]))["gen_kl_error"])
    found = field_metrics(lists([-1.0, -1.0], [-1001.0, -1.0]))
    assert found["gen_kl_error"] == math.inf
    assert found["sampling_importance_ratio"] == 0.5  # NeMo-RL turns the infinity into 0


def test_equal_values_give_no_mismatch():
    found = field_metrics(lists([-1.0, -2.0, -0.5], [-1.0, -2.0, -0.5]))
    for name, metric in METRICS.items():
        if metric.good == "low" and "ratio" not in name and "mult" not in name:
            assert found[name] in (0.0, 1.0), name
    assert found["token_mult_prob_error"] == 1.0


def test_every_metric_has_a_formula():
    assert all(metric.formula and metric.projects for metric in METRICS.values())
    assert {metric.good for metric in METRICS.values()} == {"low", ""}
