"""The field's own metrics under their own names, so that a dashboard and this report line up.

Over the tokens that the mask counts and both sides have a value for. A NaN there gives NaN, as it
does in those projects. Their clamps and thresholds are stated in `formula`; `numbers` has the same
quantities without them. Metrics that need advantages, a reference model or the loss are not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from verify.onpolicy import scored_columns as of
from verify.onpolicy.pairing import Pairs
from verify.onpolicy.scored_columns import least, mean, most, of_samples, of_tokens


@dataclass(frozen=True)
class Metric:
    """One metric. formula: t trainer, r rollout, d = t - r. good: as in `figures.Figure`."""

    name: str
    projects: str
    formula: str
    value: of.Value
    good: str = "low"


def field_metrics(pairs: Pairs) -> dict[str, float | None]:
    """Every metric of METRICS by name; None where no token was compared."""
    columns = of.scored_columns(pairs)
    if columns is None:
        return dict.fromkeys(METRICS)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return {name: float(metric.value(columns)) for name, metric in METRICS.items()}


def _nemo(name: str, formula: str, value: of.Value, good: str = "low") -> Metric:
    return Metric(name, "NeMo-RL", formula, value, good)


def _verl(name: str, formula: str, value: of.Value, good: str = "low") -> Metric:
    return Metric(name if "/" in name else f"rollout_corr/{name}", "verl", formula, value, good)


def _slime(name: str, formula: str, value: of.Value, good: str = "low") -> Metric:
    return Metric(f"mismatch_{name}", "slime", formula, value, good)


def _trl(name: str, formula: str, value: of.Value, good: str = "low") -> Metric:
    return Metric(f"sampling/{name}", "TRL", formula, value, good)


def _instruct(name: str, formula: str, value: of.Value, good: str = "low") -> Metric:
    return Metric(f"debug/{name}", "open-instruct", formula, value, good)


def _areal(name: str, formula: str, value: of.Value, good: str = "low") -> Metric:
    return Metric(f"compute_logp/r3/{name}", "AReaL", formula, value, good)


_PER_SAMPLE = "over samples of the sample's mean"
_GAP = "over samples of L = mean r - mean t"
_METRICS: tuple[Metric, ...] = (
    _nemo("token_mult_prob_error", "mean exp|d|", of_tokens(mean, "exp_size")),
    _nemo("max_seq_mult_prob_error", f"max {_PER_SAMPLE} exp|d|", of_samples(most, "exp_size")),
    _nemo("mean_seq_mult_prob_error", f"mean {_PER_SAMPLE} exp|d|", of_samples(mean, "exp_size")),
    _nemo("min_seq_mult_prob_error", f"min {_PER_SAMPLE} exp|d|", of_samples(least, "exp_size")),
    _nemo("gen_kl_error", "mean exp(d) - 1 - d (type k3)", of_tokens(mean, "k3")),
    _nemo("policy_kl_error", "mean exp(-d) - 1 + d (type k3)", of_tokens(mean, "k3_reverse")),
    _nemo(
        "js_divergence_error",
        "mean (k3(t || M) + k3(r || M)) / 2, M = log((e^t + e^r) / 2)",
        of.jensen_shannon,
    ),
    _nemo(
        "sampling_importance_ratio",
        "mean exp(d), NaN and infinities taken as 0",
        of_tokens(of.mean_with_zeros, "ratio"),
        "",
    ),
    _verl(
        "training/rollout_probs_diff_max", "max |e^t - e^r|", of_tokens(most, "probabilities_apart")
    ),
    _verl(
        "training/rollout_probs_diff_mean",
        "mean |e^t - e^r|",
        of_tokens(mean, "probabilities_apart"),
    ),
    _verl(
        "training/rollout_probs_diff_std",
        "deviation of |e^t - e^r| over n - 1",
        of_tokens(of.unbiased, "probabilities_apart"),
    ),
    _verl(
        "training/rollout_actor_probs_pearson_corr", "correlation of e^t and e^r", of.pearson, ""
    ),
    _verl("training_ppl", f"mean of exp {_PER_SAMPLE} -t", of_samples(mean, "minus_t", np.exp), ""),
    _verl("training_log_ppl", f"mean {_PER_SAMPLE} -t", of_samples(mean, "minus_t"), ""),
    _verl("rollout_ppl", f"mean of exp {_PER_SAMPLE} -r", of_samples(mean, "minus_r", np.exp), ""),
    _verl("rollout_log_ppl", f"mean {_PER_SAMPLE} -r", of_samples(mean, "minus_r"), ""),
    _verl("kl", "mean -d", of_tokens(mean, "minus_d"), ""),
    _verl("k3_kl", "mean exp(d) - d - 1", of_tokens(mean, "k3")),
    _verl("log_ppl_diff", f"mean {_GAP}", of_samples(mean, "minus_d"), ""),
    _verl("log_ppl_abs_diff", f"mean of | | {_GAP}", of_samples(mean, "minus_d", np.abs)),
    _verl("log_ppl_diff_max", f"max {_GAP}", of_samples(most, "minus_d"), ""),
    _verl("log_ppl_diff_min", f"min {_GAP}", of_samples(least, "minus_d"), ""),
    _verl("ppl_ratio", f"mean of exp {_GAP}", of_samples(mean, "minus_d", np.exp), ""),
    _verl(
        "chi2_token",
        "mean w^2 - 1, w = exp(d clamped to +-20)",
        of_tokens(of.mean_square_less_1, "weights"),
        "",
    ),
    _verl("chi2_seq", "mean over samples of exp(2 (sum d clamped to +-20)) - 1", of.chi2_seq, ""),
    _verl("rollout_is_mean", "mean w, before truncation", of_tokens(mean, "weights"), ""),
    _verl("rollout_is_max", "max w", of_tokens(most, "weights"), ""),
    _verl("rollout_is_min", "min w", of_tokens(least, "weights"), ""),
    _verl(
        "rollout_is_std",
        "deviation over n of w clamped to 1/2 .. 2 (threshold 2)",
        of_tokens(of.verl_deviation, "bounded"),
        "",
    ),
    _verl(
        "rollout_is_eff_sample_size",
        "1 / mean((v / (mean v + 1e-8))^2), v = w clamped to 1/2 .. 2",
        of_tokens(of.verl_sample_size, "bounded"),
        "",
    ),
    _verl(
        "rollout_is_ratio_fraction_high",
        "share of w > 2",
        of_tokens(of.share_above(of.THRESHOLD), "weights"),
        "",
    ),
    _verl(
        "rollout_is_ratio_fraction_low",
        "share of w < 1/2",
        of_tokens(of.share_below(1 / of.THRESHOLD), "weights"),
        "",
    ),
    _verl("rollout_is_seq_mean", f"mean {_PER_SAMPLE} w", of_samples(mean, "weights"), ""),
    _verl(
        "rollout_is_seq_std",
        f"deviation (n - 1) {_PER_SAMPLE} w; 0 for one sample",
        of_samples(of.unbiased_or_0, "weights"),
        "",
    ),
    _verl("rollout_is_seq_max", f"max {_PER_SAMPLE} w", of_samples(most, "weights"), ""),
    _verl("rollout_is_seq_min", f"min {_PER_SAMPLE} w", of_samples(least, "weights"), ""),
    _verl(
        "rollout_is_seq_max_deviation",
        "max over samples of |mean w - 1|",
        of_samples(most, "weights", of.from_1),
    ),
    Metric(
        "train_rollout_logprob_abs_diff",
        "slime, miles, vime",
        f"mean {_PER_SAMPLE} |d|: no maximum",
        of_samples(mean, "size"),
    ),
    Metric(
        "train_rollout_kl",
        "miles",
        f"mean {_PER_SAMPLE} exp(d) - 1 - d, d clamped to +-20 and the result to +-10",
        of_samples(mean, "miles_k3"),
    ),
    _slime("training_log_ppl", f"mean {_PER_SAMPLE} -t", of_samples(mean, "minus_t"), ""),
    _slime(
        "training_ppl", f"mean of exp {_PER_SAMPLE} -t", of_samples(mean, "minus_t", np.exp), ""
    ),
    _slime("rollout_log_ppl", f"mean {_PER_SAMPLE} -r", of_samples(mean, "minus_r"), ""),
    _slime("rollout_ppl", f"mean of exp {_PER_SAMPLE} -r", of_samples(mean, "minus_r", np.exp), ""),
    _slime("kl", f"mean {_PER_SAMPLE} -d", of_samples(mean, "minus_d"), ""),
    _slime("k3_kl", f"mean {_PER_SAMPLE} exp(d) - d - 1", of_samples(mean, "k3")),
    _slime("log_ppl_diff", f"mean {_GAP}", of_samples(mean, "minus_d"), ""),
    _slime("log_ppl_abs_diff", f"mean of | | {_GAP}", of_samples(mean, "minus_d", np.abs)),
    _slime("ppl_ratio", f"mean of exp {_GAP}", of_samples(mean, "minus_d", np.exp), ""),
    _trl("sampling_logp_difference/mean", "mean |d|", of_tokens(mean, "size")),
    _trl("sampling_logp_difference/max", "max |d|", of_tokens(most, "size")),
    _trl(
        "importance_sampling_ratio/min",
        "min of exp(d) at most 2 (token level, cap 2)",
        of_tokens(least, "truncated"),
        "",
    ),
    _trl(
        "importance_sampling_ratio/mean",
        "mean of exp(d) at most 2",
        of_tokens(mean, "truncated"),
        "",
    ),
    _trl(
        "importance_sampling_ratio/max",
        "max of exp(d) at most 2",
        of_tokens(most, "truncated"),
        "",
    ),
    Metric("mismatch_kl/all/mean", "prime-rl", "mean exp(d) - d - 1", of_tokens(mean, "k3")),
    Metric("mismatch_kl/all/max", "prime-rl", "max exp(d) - d - 1", of_tokens(most, "k3")),
    Metric(
        "mismatch_kl/all/std",
        "prime-rl",
        "deviation of exp(d) - d - 1 over n - 1",
        of_tokens(of.unbiased, "k3"),
        "",
    ),
    _instruct("vllm_vs_local_logprob_diff_mean", "mean |d|", of_tokens(mean, "size")),
    _instruct("vllm_vs_local_logprob_diff_max", "max |d|", of_tokens(most, "size")),
    _instruct(
        "vllm_vs_local_logprob_diff_std",
        "deviation of |d| over n - 1; 0 for one token",
        of_tokens(of.unbiased_or_0, "size"),
        "",
    ),
    _instruct(
        "vllm_local_reverse_kl",
        "mean e^r (r - t); some later versions leave e^r out",
        of.reverse_kl,
        "",
    ),
    _areal("rollout_train_k3_kl/avg", "mean exp(d) - 1 - d", of_tokens(mean, "k3")),
    _areal("rollout_train_logp_abs_diff/avg", "mean |d|", of_tokens(mean, "size")),
    _areal("rollout_train_logp_sq_diff/avg", "mean d^2", of_tokens(mean, "square")),
    _areal(
        "rollout_train_extreme_frac_tau2/avg",
        "share of |d| > ln 2",
        of_tokens(of.share_above(math.log(2.0)), "size"),
    ),
    _areal(
        "rollout_train_extreme_frac_tau5/avg",
        "share of |d| > ln 5",
        of_tokens(of.share_above(math.log(5.0)), "size"),
    ),
    _areal("n_valid_tokens", "tokens compared", of.count, ""),
)
METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _METRICS})
