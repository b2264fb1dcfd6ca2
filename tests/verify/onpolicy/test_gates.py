"""Bounds: what is accepted, what fires, and that what was not measured is not judged."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onpolicy_records import both, lists

from verify.errors import VerifyError
from verify.onpolicy.figures import FIGURES
from verify.onpolicy.gates import COMPARISONS, Outcome, look, parse_gate
from verify.onpolicy.metrics import METRICS
from verify.onpolicy.numbers import measure


def outcome(text: str, pairs) -> Outcome:
    return look([parse_gate(text)], pairs, measure(pairs))[0]


@pytest.mark.parametrize(
    ("text", "name", "comparison", "bound"),
    [
        ("differing_tokens>0", "differing_tokens", ">", 0),
        (" abs_p99 >= 1e-3 ", "abs_p99", ">=", 1e-3),
        ("rollout_corr/k3_kl>.5", "rollout_corr/k3_kl", ">", 0.5),
        ("ess_token<=0.99", "ess_token", "<=", 0.99),
        ("k1!=-0", "k1", "!=", 0),
        ("training/rollout_probs_diff_max == 1.", "training/rollout_probs_diff_max", "==", 1),
    ],
)
def test_expressions(text, name, comparison, bound):
    gate = parse_gate(text)
    assert (gate.name, gate.comparison, gate.bound, gate.text) == (
        name,
        comparison,
        bound,
        text.strip(),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("differing_token>0", "did you mean differing_tokens"),
        ("kl>0", "no figure kl"),
        ("xyzzyplugh>0", "such as differing_tokens"),
        ("differing_tokens", "not understood"),
        ("differing_tokens>>0", "not a finite number"),
        ("differing_tokens=0", "not understood"),
        ("differing_tokens>nan", "not a finite number"),
        ("differing_tokens>inf", "not a finite number"),
        ("differing_tokens>1e999", "not a finite number"),
        ("differing_tokens>1_000", "not a finite number"),
        ("differing_tokens>\u0663", "not a finite number"),
        ("differing_tokens>0 or k3>1", "not understood"),
        ("__class__>0", "not understood"),
        ("", "not understood"),
        ("k3>" + "1" * 5000, "not understood"),
        ("k3\x1b[31m>0", "\\x1b"),
    ],
)
def test_what_is_not_an_expression_says_why(text, says):
    with pytest.raises(VerifyError) as error:
        parse_gate(text)
    assert says in str(error.value)
    assert "\x1b" not in str(error.value)
    assert len(str(error.value)) < 500


@given(st.text(max_size=40))
def test_any_text_is_a_gate_or_a_clear_error(text):
    try:
        gate = parse_gate(text)
    except VerifyError:
        return
    assert gate.name in FIGURES or gate.name in METRICS
    assert math.isfinite(gate.bound)


@given(
    st.sampled_from(sorted([*FIGURES, *METRICS])),
    st.sampled_from(sorted(COMPARISONS)),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_every_name_and_number_can_be_written(name, comparison, bound):
    gate = parse_gate(f"{name} {comparison} {bound!r}")
    assert (gate.name, gate.comparison, gate.bound) == (name, comparison, bound)


def test_a_gate_fires_when_it_is_true_and_not_at_the_bound():
    pairs = lists([-1.0, -2.0], [-1.0, -2.5])
    assert outcome("differing_tokens>0", pairs).fired is True
    assert outcome("differing_tokens>1", pairs).fired is False
    assert outcome("abs_max>=0.5", pairs).fired is True
    assert outcome("abs_max>0.5", pairs).fired is False
    assert outcome("gen_kl_error>0.05", pairs).fired is True
    assert outcome("compared_tokens<100", pairs).value == 2


def test_an_infinite_value_is_over_any_bound():
    found = outcome("ratio_max>1e300", lists([-1.0], [-1000.0]))
    assert found.fired is True
    assert found.to_json() == {"gate": "ratio_max>1e300", "value": "inf", "fired": True}


def test_nan_passes_no_gate():
    """BUG-56: neither side of the comparison is true of NaN, so neither is a pass."""
    pairs = lists([float("nan"), -1.0], [-1.0, -1.0])
    for text in ("gen_kl_error>0.1", "gen_kl_error<0.1"):
        assert outcome(text, pairs).fired is None
    assert outcome("gen_kl_error>0", pairs).to_json()["value"] == "nan"


def test_what_was_not_measured_passes_no_gate():
    assert outcome("abs_max>0", both()).fired is None
    assert outcome("token_mult_prob_error>1.05", both()).fired is None
    assert outcome("differing_tokens>0", both()).fired is False


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("differing_tokens>0", True),
        ("abs_p99>=0.1", True),
        ("k3!=0", True),
        ("train_rollout_logprob_abs_diff>0.01", True),
        ("ess_token<0.9", False),
        ("rollout_corr/log_ppl_diff_min<-1", False),
        ("rollout_corr/kl>0.001", False),
        ("abs_max<0.1", False),
        ("ess_token>0.9", False),
        ("compared_tokens<1000", False),
        ("nan_trainer>0", False),
        ("rollout_corr/training_ppl>10", False),
        ("differing_tokens==3", False),
    ],
)
def test_only_a_bound_from_the_side_of_more_mismatch_limits_it(text, limits):
    assert parse_gate(text).limits is limits


def wide() -> dict[str, list[float]]:
    """What the rollout says of 400 tokens in three mismatches that nobody would let pass."""
    rng = np.random.default_rng(7)
    trainer = -6.0 - rng.exponential(size=400)
    return {
        "trainer": trainer.tolist(),
        "close": (trainer + rng.normal(0.0, 1e-3, 400)).tolist(),
        "above": (trainer + 3.0).tolist(),
        "below": (trainer - 3.0).tolist(),
        "noisy": (trainer + rng.normal(0.0, 2.0, 400)).tolist(),
    }


@pytest.mark.parametrize("name", [*FIGURES, *METRICS])
def test_a_bound_that_limits_lets_no_wide_mismatch_pass(name):
    """A signed mean or a spread is small for these; a gate on one is no reason for VERIFIED."""
    if not parse_gate(f"{name}>0").limits:
        return
    values = wide()
    trainer = values.pop("trainer")
    bound = outcome(f"{name}>0", lists(trainer, values.pop("close"))).value
    for rollout in values.values():
        found = outcome(f"{name}>{bound!r}", lists(trainer, rollout))
        assert found.fired or (name.startswith("differing") and found.value == bound)
