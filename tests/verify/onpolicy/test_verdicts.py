"""What supports which verdict: each reason with a pair that provokes it and a clean twin."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onpolicy_records import both, dump, lists, sample

from verify.onpolicy.causes.table import Cause, cause
from verify.onpolicy.gates import parse_gate
from verify.onpolicy.numbers import measure
from verify.onpolicy.pairing import Pairs, pair
from verify.onpolicy.routing import RoutingCheck
from verify.onpolicy.routing_table import FAULTS, WRONG, Fault
from verify.onpolicy.samples import Place, Problem
from verify.onpolicy.verdicts import ONPOLICY_REASONS, OnPolicyVerdict, judge
from verify.reasons import Verdict

IDS = [1, 2, 3]
SAME = [-1.0, -2.0, -0.5]
NEAR = [-1.0, -2.01, -0.5]
NAN, INF = float("nan"), float("inf")


def verdict(pairs: Pairs, *gates: str, causes: tuple[Cause, ...] = ()) -> OnPolicyVerdict:
    found = judge(pairs, measure(pairs), causes, [parse_gate(one) for one in gates])
    json.dumps([one.to_json() for one in (*found.findings, *found.outcomes)], allow_nan=False)
    assert all(one.remedy for one in found.findings)
    return found


def reasons(found: OnPolicyVerdict) -> list[str]:
    return [one.reason for one in found.findings]


def test_every_compared_token_equal_is_verified():
    found = verdict(lists(SAME, SAME))
    assert found.verdict is Verdict.VERIFIED
    assert found.exit_code == 0
    assert found.findings == ()


def test_drift_without_a_bound_is_unverified():
    found = verdict(lists(SAME, NEAR))
    assert found.verdict is Verdict.UNVERIFIED
    assert found.exit_code == 3
    assert reasons(found) == ["no-bound"]
    assert "1 of 3 tokens differ, largest |d| 0.01" in found.findings[0].what


@pytest.mark.parametrize(
    ("gates", "expected", "exit_code"),
    [
        (["differing_tokens>0"], ["bound-exceeded"], 1),
        (["abs_max>0.1"], [], 0),
        (["abs_max>0.1", "differing_share>0.1"], ["bound-exceeded"], 1),
        (["compared_tokens<2"], ["no-bound"], 3),
        (["compared_tokens<10"], ["bound-exceeded", "no-bound"], 1),
        (["abs_max<0"], ["no-bound"], 3),
        (["gen_kl_error>0.1"], [], 0),
    ],
)
def test_drift_with_bounds(gates, expected, exit_code):
    found = verdict(lists(SAME, NEAR), *gates)
    assert reasons(found) == expected
    assert found.exit_code == exit_code
    assert len(found.outcomes) == len(gates)


def test_counts_have_commas_as_in_the_headline():
    many = np.full(12_345, -1.0) - np.arange(12_345) * 1e-4
    pairs = lists([*many, -0.5], [*(many - 1e-3), -0.5])
    assert "12,345 of 12,346 tokens differ" in verdict(pairs).findings[0].what
    assert verdict(pairs, "differing_tokens>0").findings[0].what.endswith(">0: 12,345")
    nothing = verdict(lists([None] * 1_000, [-1.0] * 1_000)).findings
    assert "tokens: 1,000, masked: 0" in nothing[0].what
    assert "1,000 of the trainer" in nothing[1].what


def test_equal_values_do_not_excuse_a_bound_on_something_else():
    assert verdict(lists(SAME, SAME), "compared_tokens<10").exit_code == 1


def test_a_structural_cause_counts_only_when_it_is_claimed():
    claimed = cause("temperature", weight=0.9, claimed=True, for_=("fits T = 0.6",))
    found = verdict(lists(SAME, NEAR), "abs_max>9", causes=(claimed,))
    assert found.exit_code == 1
    assert reasons(found) == ["structural-cause"]
    assert found.findings[0].what == "temperature: fits T = 0.6"
    assert found.findings[0].remedy == claimed.remedy != ""
    unclaimed = cause("temperature", weight=0.4, claimed=False)
    noise = cause("numeric-drift", weight=0.6, claimed=True)
    assert verdict(lists(SAME, NEAR), "abs_max>9", causes=(unclaimed, noise)).exit_code == 0


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("length", both(sample("x", IDS, trainer=SAME, rollout=[*SAME, -1.0]))),
        ("response-length", both(sample("x", IDS, trainer=SAME, rollout=SAME, response_length=2))),
        (
            "other-tokens",
            pair(
                dump(sample("x", IDS, trainer=SAME), sample("y", IDS, trainer=SAME)),
                dump(sample("x", [1, 9, 3], rollout=SAME), sample("y", IDS, rollout=SAME)),
            ),
        ),
        (
            "duplicate-key",
            pair(
                dump(*(sample(key, IDS, trainer=SAME) for key in "xxy")),
                dump(*(sample(key, IDS, rollout=SAME) for key in "xxy")),
            ),
        ),
    ],
)
def test_a_misalignment_is_a_mismatch_by_itself(kind, pairs):
    found = verdict(pairs, "differing_tokens>0")
    assert found.exit_code == 1
    assert found.findings[0].reason == "misaligned"
    assert found.findings[0].kind == kind


def test_a_sample_without_its_counterpart_is_missing_evidence():
    pairs = pair(
        dump(sample("x", IDS, trainer=SAME), sample("y", IDS, trainer=SAME)),
        dump(sample("x", IDS, rollout=SAME)),
    )
    found = verdict(pairs)
    assert found.exit_code == 3
    assert [(one.reason, one.kind) for one in found.findings] == [
        ("missing-sample", "missing-sample")
    ]


@pytest.mark.parametrize(("value", "what"), [(NAN, "nan"), (-INF, "-inf"), (INF, "inf")])
@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_what_is_not_finite_and_counts_is_a_mismatch(value, what, side):
    """BUG-48"""
    values = {"trainer": SAME, "rollout": SAME, side: [-1.0, value, -0.5]}
    found = verdict(both(sample("7", IDS, **values)), "abs_max>1")
    assert found.exit_code == 1
    assert reasons(found) == ["non-finite"]
    assert found.findings[0].what == f"1 of the {side}, first 7 position 1: {what}"
    hidden = verdict(both(sample("7", IDS, mask=[1, 0, 1], **values)))
    assert hidden.exit_code == 0


def test_nan_on_both_sides_is_no_agreement():
    found = verdict(lists([NAN, -1.0, -2.0], [NAN, -1.0, -2.0]))
    assert found.exit_code == 1
    assert reasons(found) == ["non-finite", "non-finite"]


def test_a_value_that_is_absent_where_it_counts_is_missing():
    pairs = lists([-1.0, None, -0.5], [-1.0, -2.0, -0.5])
    found = verdict(pairs)
    assert found.exit_code == 3
    assert reasons(found) == ["missing-values"]
    assert found.findings[0].what == "1 of the trainer, first s position 1"
    assert verdict(lists([-1.0, None, -0.5], SAME, [1, 0, 1])).exit_code == 0


@pytest.mark.parametrize(
    "pairs", [both(), lists(SAME, NEAR, [0, 0, 0]), both(sample("x", [], trainer=[], rollout=[]))]
)
def test_nothing_compared_is_no_pass(pairs):
    found = verdict(pairs, "differing_tokens>0")
    assert found.exit_code == 3
    assert reasons(found) == ["nothing-compared"]


def test_equal_constants_prove_nothing():
    assert reasons(verdict(lists([0.0] * 3, [0.0] * 3))) == ["vacuous"]
    assert reasons(verdict(lists([-1.0] * 3, [-1.0] * 3))) == ["vacuous"]
    assert reasons(verdict(lists([0.0], [0.0]))) == ["vacuous"]
    assert verdict(lists([-1.0], [-1.0])).exit_code == 0
    assert verdict(lists([0.0, 0.0, -1.0], [0.0, 0.0, -1.0])).exit_code == 0


def test_what_could_not_be_read_keeps_from_verified():
    one = sample("x", IDS, trainer=SAME, rollout=SAME)
    place = Place("a.jsonl", "line 2")
    bad = Problem(place, "mask", "a list is needed")
    note = Problem(place, "mask", "all true", "note")
    found = verdict(pair(dump(one, problems=[bad])))
    assert found.exit_code == 3
    assert reasons(found) == ["not-read"]
    assert "a.jsonl, line 2, mask: a list is needed" in found.findings[0].what
    assert verdict(pair(dump(one, problems=[note]))).exit_code == 0


def test_a_bound_on_nan_is_not_measured():
    """BUG-56"""
    found = verdict(lists([NAN, -1.0], [-1.0, -1.0]), "gen_kl_error>1")
    assert reasons(found) == ["non-finite", "not-measured"]


def test_mismatch_comes_first_and_beats_the_rest():
    pairs = lists([-1.0, None, NAN], [-1.5, -1.0, -1.0])
    found = verdict(pairs)
    assert found.exit_code == 1
    assert reasons(found) == ["non-finite", "missing-values", "no-bound"]


VALUE = st.one_of(st.none(), st.sampled_from([0.0, -0.0, -1.0, -2.5, NAN, -INF]))


@settings(max_examples=80)
@given(
    st.lists(st.tuples(VALUE, VALUE, st.booleans()), max_size=6),
    st.sampled_from([(), ("differing_tokens>0",), ("abs_max>2",), ("compared_tokens<1",)]),
)
def test_verified_only_with_all_the_evidence(rows, gates):
    pairs = lists([t for t, _, _ in rows], [r for _, r, _ in rows], [m for _, _, m in rows])
    found = verdict(pairs, *gates)
    counted = [(t, r) for t, r, m in rows if m]
    whole = bool(counted) and all(
        t is not None and r is not None and abs(t) < INF and abs(r) < INF for t, r in counted
    )
    if found.verdict is Verdict.VERIFIED:
        assert whole
        equal = all(t == r for t, r in counted)
        assert equal or gates == ("abs_max>2",)
        assert equal or max(abs(t - r) for t, r in counted) <= 2
    if not counted:
        assert found.verdict is not Verdict.VERIFIED
    if whole and any(t != r for t, r in counted) and gates == ("differing_tokens>0",):
        assert found.verdict is Verdict.MISMATCH


def test_each_reason_says_what_to_do():
    assert all(reason.meaning and reason.remedy for reason in ONPOLICY_REASONS.values())


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_what_is_above_0_by_more_than_rounding_is_no_log_probability(side):
    """Equal losses, or equal probabilities, are no agreement of log-probabilities."""
    values = {"trainer": SAME, "rollout": SAME, side: [-1.0, 0.7, -0.5]}
    found = verdict(lists(values["trainer"], values["rollout"]), "abs_max>10")
    assert found.verdict is Verdict.MISMATCH
    assert reasons(found) == ["no-probability"]
    assert f"1 of the {side}, first s position 1: 0.7" in found.findings[0].what
    both_sides = verdict(lists([1.0, 2.0], [1.0, 2.0]))
    assert reasons(both_sides) == ["no-probability", "no-probability"]


def test_rounding_above_0_and_what_the_mask_hides_are_no_fault():
    assert verdict(lists([-1.0, 0.0625], [-1.0, 0.0625])).verdict is Verdict.VERIFIED
    hidden = both(
        sample("x", IDS, trainer=[*SAME[:2], 1.0], rollout=[*SAME[:2], 1.0], mask=[1, 1, 0])
    )
    assert verdict(hidden).verdict is Verdict.VERIFIED


def test_a_bound_that_lets_a_wide_mismatch_pass_is_no_bound():
    """d is +2 and -2 in turn: its mean is 0."""
    found = verdict(lists([-3.0, -3.0], [-1.0, -5.0]), "k1>0.01", "mean>0.01")
    assert reasons(found) == ["no-bound"]
    assert "signed means cancel" in found.findings[0].what
    assert reasons(verdict(lists(SAME, NEAR), "abs_mean>0.1", "k1>0.01")) == []


def of_routing(*kinds: str) -> OnPolicyVerdict:
    faults = tuple(Fault(kind, f"layer {at}", "what was seen") for at, kind in enumerate(kinds))
    check = RoutingCheck(1, (), faults, np.full(3, -1, np.int32), 0.0, None)
    pairs = lists(SAME, SAME)
    return judge(pairs, measure(pairs), routing=check)


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_a_record_that_would_be_replayed_wrongly_is_a_mismatch(kind):
    found = of_routing(kind, kind)
    assert found.verdict is Verdict.MISMATCH
    (one,) = found.findings
    assert (one.reason, one.kind, one.count) == ("routing-record", kind, 2)
    assert one.what == "layer 0: what was seen"
    assert one.remedy == FAULTS[kind]


def test_a_record_that_says_too_little_is_none():
    assert of_routing(*sorted(set(FAULTS) - WRONG)).verdict is Verdict.VERIFIED
    assert of_routing().verdict is Verdict.VERIFIED
