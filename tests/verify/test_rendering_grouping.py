"""One card for what several claims, runs and ranks saw alike."""

from verify.rendering.grouping import grouped


def finding(reason="bits-differ", verdict="MISMATCH", tensor="out", run=0, **extra):
    base = {"reason": reason, "verdict": verdict, "tensor": tensor, "detail": "d", "run": run}
    return {**base, "rank": 0, "process": None, "variant": "v", "difference": None, **extra}


def claim(name, *findings):
    return {"claim": name, "findings": list(findings)}


def test_the_same_finding_of_two_claims_is_one_group_with_both_claims():
    claims = [claim("repeat", finding()), claim("memory", finding(run=3))]
    (group,) = grouped(claims)
    assert [one["claim"] for one in group.claims] == ["repeat", "memory"]
    assert [one["run"] for one in group.others] == [3]


def test_another_tensor_or_reason_is_another_group():
    claims = [claim("repeat", finding(), finding(tensor="dx"), finding(reason="ranks-differ"))]
    assert len(grouped(claims)) == 3


def test_a_finding_that_was_explained_is_the_one_to_show():
    explained = finding(run=7, difference={"lines": ["first: out[3]"]})
    (group,) = grouped([claim("repeat", finding(), explained)])
    assert group.finding is explained
    assert [one["run"] for one in group.others] == [0]


def test_mismatches_come_before_what_is_unverified():
    weak = finding(reason="no-overlap", verdict="UNVERIFIED", tensor=None)
    groups = grouped([claim("contention", weak), claim("repeat", finding())])
    assert [group.finding["reason"] for group in groups] == ["bits-differ", "no-overlap"]


def test_findings_without_a_tensor_are_told_apart_by_their_detail():
    first = finding(tensor=None, detail="rank 1 died")
    second = finding(tensor=None, detail="rank 2 died")
    assert len(grouped([claim("repeat", first, second)])) == 2
    assert grouped([]) == []
