"""What all executions say together: every cause has evidence that brings it up, and some that
does not; none of it touches a verdict or depends on the order of records."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify.decision import decide
from verify.evidence import BASE, FIRST, Execution, Facts, Plan
from verify.reasons import Verdict
from verify.verdicts import ClaimVerdict

A, B, C, D = 1, 2, 3, 4  # contents


def digest(value: int, dtype: str = "float32", shape: str = "4") -> str:
    return f"{dtype}[{shape}]:{value:064x}"


def outputs(out: int, other: int = 9, **more: str) -> dict[str, str]:
    return {"out": digest(out), "other": digest(other), **more}


def execution(claim: str, variant: str, run: int = 0, **fields: Any) -> Execution:
    given_: dict[str, Any] = {
        "case": "c",
        "claim": claim,
        "variant": variant,
        "rank": 0,
        "run": run,
        "inputs": {"x": digest(7)},
        "facts": {"out": Facts(4, False, 0)},
    }
    return Execution(**{**given_, **fields})


def base(out: int = A, rank: int = 0, **fields: Any) -> Execution:
    return execution(BASE, FIRST, rank=rank, **{"outputs": outputs(out), **fields})


def repeats(contents: Sequence[int], rank: int = 0, claim: str = "repeat") -> list[Execution]:
    return [
        execution(claim, "restored", run, rank=rank, outputs=outputs(out))
        for run, out in enumerate(contents)
    ]


def fresh(contents: Sequence[int], **fields: Any) -> list[Execution]:
    return [
        execution("process", f"process {p}", process=p, outputs=outputs(out), **fields)
        for p, out in enumerate(contents, start=1)
    ]


def varied(claim: str, contents: Mapping[str, int | Sequence[int]]) -> list[Execution]:
    found: list[Execution] = []
    for variant, content in contents.items():
        for out in [content] if isinstance(content, int) else content:
            found.append(execution(claim, variant, len(found), outputs=outputs(out)))
    return found


def plan(claims: Sequence[str], ranks: int = 1, **placement: str) -> Plan:
    return Plan("c", "c", list(claims), ranks, dict.fromkeys(claims, 1), placement=placement)


def judged(records: Sequence[Execution], claim: str, **options: Any) -> ClaimVerdict:
    claims = list(dict.fromkeys([e.claim for e in records if e.claim != BASE] + [claim]))
    verdict = decide(plan(claims, **options), list(records))
    return next(one for one in verdict.claims if one.claim == claim)


def told(records: Sequence[Execution], claim: str, tensor: str = "out", **options: Any) -> str:
    """Everything that the first finding of the tensor says."""
    found = judged(records, claim, **options).findings
    first = next(f for f in found if f.tensor == tensor)
    difference = first.difference or {}
    return "\n".join([*difference.get("lines", ()), *difference.get("suggests", ())])


FIRST_CALL = "the first call differs from"


def test_only_the_first_call_differs() -> None:
    said = told([base(), *repeats([B, B, B])], "repeat")
    assert f"{FIRST_CALL} 3 later ones, which agree with each other: warm-up" in said
    assert "4 executions, 2 different results" in said
    assert "equal in all executions of this claim: other" in said


@pytest.mark.parametrize("later", [[B, B], [B, B, C], [A, B, B], [B, A, B]])
def test_not_the_first_call(later: list[int]) -> None:
    assert FIRST_CALL not in told([base(), *repeats(later)], "repeat")


def test_later_calls_that_agree_within_a_claim_only() -> None:
    records = [base(), *repeats([B, B, B]), *repeats([C], claim="contention")]
    assert FIRST_CALL not in told(records, "repeat")
    assert FIRST_CALL not in told(records, "contention")


def test_the_first_call_of_fresh_processes_is_as_odd_and_the_reference_says_which_is_wrong() -> (
    None
):
    records = [base(), *repeats([B, B, B]), *fresh([A, A])]
    measured = execution(
        "reference",
        "float64",
        compare="measured",
        outputs={"out": digest(A)},
        measurements={"out": {"numel": 4, "over_budget": 0}},
    )
    said = told([*records, measured], "repeat")
    assert "the first call of every fresh process is like the first one here" in said
    assert "it is the first that is wrong" in said
    wrong = replace(measured, measurements={"out": {"numel": 4, "over_budget": 2}})
    said = told([*records[:-1], *fresh([A, C])[1:], wrong], "repeat")
    assert "every fresh process" not in said
    assert "is wrong" not in said


def test_the_first_call_is_not_blamed_on_what_was_varied() -> None:
    records = [base(), *repeats([B, B, B])]
    same = varied("threads", {"threads=1": B, "threads=3": B})
    assert "not a matter of threads, see repeat" in told([*records, *same], "threads")
    other = varied("threads", {"threads=1": B, "threads=3": C})
    assert FIRST_CALL not in told([*records, *other], "threads")


def test_executions_with_other_inputs_prove_nothing() -> None:
    other = [replace(e, inputs={"x": digest(8)}) for e in repeats([C])]
    records = [base(), *repeats([B, B, B]), *other]
    assert FIRST_CALL in told(records, "repeat")


def test_groups_of_processes() -> None:
    stable = [base(), *repeats([A, A, A])]
    said = told([*stable, *fresh([B, A, B])], "process")
    assert "2 groups of processes that agree: {main, process 2} {process 1, process 3}" in said
    assert "within a process: 0 of 3 runs differ" in said
    assert "chosen once per process" in said
    unstable = told([base(), *repeats([A, B, C]), *fresh([B, D])], "process")
    assert "within a process: 2 of 3 runs differ" in unstable
    assert "it differs within a process as well" in unstable
    assert "chosen once" not in unstable
    assert "chosen once" not in told([base(), *fresh([B, A])], "process")  # who knows


def test_what_is_recorded_of_processes_and_follows_their_groups_is_named() -> None:
    def seeds(contents: Sequence[int], values: Sequence[str]) -> str:
        first = base(effective={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "2"})
        later = [
            replace(e, effective={"PYTHONHASHSEED": value, "OMP_NUM_THREADS": "2"})
            for e, value in zip(fresh(contents), values, strict=True)
        ]
        return told([first, *later], "process")

    said = seeds([B, B, A], ["1", "1", "0"])
    line = "PYTHONHASHSEED (main: 0, process 1: 1, process 2: 1, process 3: 0) follows the groups"
    assert line in said
    assert "OMP_NUM_THREADS" not in said
    assert "does not follow the groups" in seeds([B, A, A], ["1", "1", "0"])
    assert "does not follow the groups" in seeds([B, B], ["1", "2"])  # not one value in a group
    assert "does not follow the groups" in seeds([B, C], ["1", "1"])  # one value in two groups


def test_the_same_tensors_under_other_names() -> None:
    first = base()
    swapped = execution(
        "process", "process 1", process=1, outputs={"out": digest(9), "other": digest(A)}
    )
    said = told([first, *repeats([A, A, A]), swapped], "process")
    assert "the same 2 tensors under other names (out holds what other held in the base)" in said
    assert "PYTHONHASHSEED" in said
    assert "chosen once" not in said
    new = replace(swapped, outputs={"out": digest(9), "other": digest(C)})
    assert "under other names" not in told([first, new], "process")


EVERYWHERE = {"x": "replicated", "out": "replicated", "other": "replicated"}


def ranks_with(contents: Mapping[int, Sequence[int]]) -> list[Execution]:
    bases = [base(rank=rank) for rank in contents]
    return bases + [e for rank, found in contents.items() for e in repeats(found, rank)]


def test_one_rank_of_several() -> None:
    same = [A] * 5
    records = ranks_with({0: same, 1: [A, B, C, B, D], 2: same})
    said = told(records, "repeat", ranks=3, **EVERYWHERE)
    assert "only rank 1 differs, in 4 of 5 runs" in said
    assert "device or memory of rank 1 is suspected" in said
    assert "ranks without any difference to their first result: 0, 2" in said
    assert "rank 1: 6 executions, 4 different results" in said
    rare = told(ranks_with({0: same, 1: [A, A, B, A, B], 2: same}), "repeat", ranks=3, **EVERYWHERE)
    assert "only rank 1 differs, in 2 of 5 runs, which may be chance" in rare
    assert "suspected" not in rare
    shards = {**EVERYWHERE, "x": "sharded(0)"}
    said = told(records, "repeat", ranks=3, **shards)
    assert "look at what only this rank has" in said
    assert "suspected" not in said
    both = ranks_with({0: [A, B, A], 1: [A, B, A]})
    assert "only rank" not in told(both, "repeat", ranks=2, **EVERYWHERE)


def test_ranks_that_disagree_but_repeat_themselves() -> None:
    def of(first: Sequence[int], later: Sequence[int]) -> list[Execution]:
        return [
            e
            for rank in (0, 1)
            for e in (base(first[rank], rank), *repeats([later[rank]] * 2, rank, "rank"))
        ]

    shards = {**EVERYWHERE, "x": "sharded(0)"}
    said = told(of([A, B], [A, B]), "rank", ranks=2, **shards)
    assert (
        "in 2 runs, so it is no race: a missing reduction over ranks (x is not the same on all)"
        in said
    )
    assert "code that depends on the rank" in told(
        of([A, B], [A, B]), "rank", ranks=2, **EVERYWHERE
    )
    found = judged(of([A, A], [A, B]), "rank", ranks=2, **shards).findings
    texts = [s for f in found for s in (f.difference or {}).get("suggests", ())]
    assert {f.reason for f in found} == {"ranks-differ", "bits-differ"}
    assert not any("no race" in text for text in texts)


@pytest.mark.parametrize("content", range(20, 32))
def test_without_a_majority_the_first_rank_is_taken_as_right(content: int) -> None:
    records = [base(content, 0), base(A, 1)]
    records += [*repeats([content], 0, "rank"), *repeats([A], 1, "rank")]
    for shuffled in (records, records[::-1]):
        found = judged(shuffled, "rank", ranks=2, **EVERYWHERE).findings
        assert {f.rank for f in found} == {1}
        assert all("ranks [1] of 2" in f.detail for f in found)


def test_settings_that_differ_and_settings_that_do_not() -> None:
    cuts = {"cut=64": A, "cut=128": A, "cut=96": [B, B, B], "cut=100": C}
    said = told([base(), *repeats([A, A]), *varied("vary", cuts)], "vary")
    assert "out differs at cut=96, cut=100; equal at cut=64, cut=128" in said
    assert "cut=96: 3 runs, the same result" in said
    assert "repeated without a change: 0 of 2 runs differ" in said
    assert "equal where cut is a multiple of 64" in said
    assert "race" not in said


@pytest.mark.parametrize(
    "settings",
    [
        {"cut=64": A, "cut=96": B},  # one value is no rule
        {"cut=64": A, "cut=128": A, "cut=192": B},  # also a multiple
        {"cut=64": A, "cut=128": A, "cut=192": B, "cut=96": B},  # one of them is
        {"cut=64": A, "cut=129": A, "cut=96": B},  # no common divisor
        {"mode=a": A, "mode=b": A, "mode=c": B},
    ],
)
def test_no_common_divisor(settings: dict[str, int]) -> None:
    assert "multiple" not in told([base(), *varied("vary", settings)], "vary")


def test_a_setting_that_brings_about_a_race() -> None:
    wild = varied("vary", {"mode=on": [B, C, D], "mode=off": A})
    said = told([base(), *repeats([A, A]), *wild], "vary")
    assert "mode=on: 3 runs, 3 different results" in said
    assert "other bits in each run at mode=on: a race that this setting brings about" in said
    assert "a race" not in told([base(), *repeats([A, B]), *wild], "vary")
    assert "a race" not in told([base(), *wild], "vary")


def test_memory_alone() -> None:
    filled = varied("memory", {"fill=0xfe": B, "fill=0x80": C})
    assert "follows what new memory holds" in told([base(), *repeats([A, A]), *filled], "memory")
    assert "new memory holds" not in told([base(), *repeats([A, B]), *filled], "memory")
    assert "new memory holds" not in told([base(), *filled], "memory")


BATCH = {"size=1": A, "position=reversed": A, "neighbours=replaced": A}


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"size=1": B}, "on the number of entries: a tile, split or kernel chosen by size"),
        ({"position=reversed": B}, "on the place in the batch: a tile border"),
        ({"size=1": B, "position=reversed": B}, "on the number of entries and the place"),
        ({"neighbours=replaced": B}, "on the content of its neighbours: a leak"),
        ({"size=1": B, "neighbours=replaced": B}, "on the content of its neighbours: a leak"),
    ],
)
def test_size_place_and_neighbours(other: dict[str, int], text: str) -> None:
    said = told([base(), *varied("batch", {**BATCH, **other})], "batch")
    assert f"an entry depends {text}" in said
    assert ("not a leak" in said) == ("neighbours=replaced" not in other)
    unstable = told([base(), *repeats([A, B]), *varied("batch", {**BATCH, **other})], "batch")
    assert "an entry depends" not in unstable


def test_without_other_neighbours_nothing_is_said_of_a_leak() -> None:
    said = told([base(), *varied("batch", {"size=1": B, "size=2": A})], "batch")
    assert "leak" not in said


def chosen(ids: int, scores: int, shape: str = "4", dtype: str = "int64") -> dict[str, str]:
    return {"out": digest(ids, dtype), "scores": digest(scores, shape=shape)}


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (chosen(A, C), chosen(B, C), True),
        (chosen(A, C), chosen(B, D), False),  # another choice altogether
        (chosen(A, C, shape="5"), chosen(B, C, shape="5"), False),  # not what it was chosen by
        (chosen(A, C, dtype="float32"), chosen(B, C, dtype="float32"), False),
    ],
)
def test_ties(first: dict[str, str], later: dict[str, str], expected: bool) -> None:
    records = [base(outputs=first), execution("repeat", "restored", outputs=later)]
    assert ("a tie is broken otherwise" in told(records, "repeat")) == expected


def test_a_generator_left_elsewhere_explains_what_follows() -> None:
    first = base(generator={"torch": "s0", "numpy": "n"})
    other = execution("vary", "v=1", outputs=outputs(B), generator={"torch": "s1", "numpy": "n"})
    said = told([first, other], "vary")
    assert "the global generator torch is left in another state" in said
    equal = replace(other, generator=first.generator)
    assert "generator" not in told([first, equal], "vary")
    elsewhere = replace(other, variant="w=1", run=1, outputs=first.outputs)
    assert "generator" not in told([first, equal, elsewhere], "vary")


def test_what_is_said_of_a_generator_is_about_its_state() -> None:
    first = base(generator={"torch": "s0"})
    later = [
        execution("repeat", "restored", run, outputs=outputs(A), generator={"torch": state})
        for run, state in enumerate(("s0", "s1", "s2"))
    ]
    assert "4 executions, 3 different results" in told([first, *later], "repeat", "generator.torch")


def test_the_free_arm_names_the_generators() -> None:
    free = [
        execution("repeat", "free", run, arm="free", outputs=outputs(B + run), consumed=["numpy"])
        for run in (1, 2)
    ]
    said = told([base(), *repeats([A]), *free], "repeat")
    assert "global generators drawn from: numpy" in said
    assert "drawn from" not in told([base(), *repeats([B])], "repeat")


def random_plan(ranks: int = 1) -> Plan:
    return replace(plan(["repeat"], ranks, out="local", other="replicated"), random=True)


def free_arm(contents: Mapping[int, Sequence[int]], consumed: Sequence[str]) -> list[Execution]:
    return [
        execution(
            "repeat", "free", run, rank=rank, arm="free", outputs=outputs(out), consumed=consumed
        )
        for rank, found in contents.items()
        for run, out in enumerate(found, start=5)
    ]


@pytest.mark.parametrize(
    ("later", "consumed", "expected"),
    [
        ([A, A], ["torch"], "too equal: declared random, and torch is drawn from"),
        ([A, A], [], "declared random, but nothing was drawn"),
        ([B, C], ["torch"], None),
        ([A, B], ["torch"], None),
    ],
)
def test_too_equal(later: list[int], consumed: list[str], expected: str | None) -> None:
    records = [base(), *repeats([A]), *free_arm({0: later}, consumed)]
    verdict = decide(random_plan(), records)
    assert verdict.verdict is Verdict.VERIFIED
    said = [note for note in verdict.notes if "declared random" in note]
    assert (expected is None and not said) or (expected is not None and expected in said[0])
    undeclared = decide(plan(["repeat"]), records)
    assert not any("declared random" in note for note in undeclared.notes)


@pytest.mark.parametrize(("second", "expected"), [([B, C], True), ([C, B], False), ([B, D], False)])
def test_too_equal_on_all_ranks(second: list[int], expected: bool) -> None:
    records = [e for rank in (0, 1) for e in (base(rank=rank), *repeats([A], rank))]
    records += free_arm({0: [B, C], 1: second}, ["torch"])
    notes = decide(random_plan(2), records).notes
    assert any("the same on all 2 ranks" in note for note in notes) == expected
    replica = replace(random_plan(2), placement={"out": "replicated", "other": "replicated"})
    assert not any("on all 2 ranks" in note for note in decide(replica, records).notes)


@given(
    st.lists(st.integers(A, C), min_size=1, max_size=5),
    st.lists(st.integers(A, C), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_hints_do_not_depend_on_the_order_of_records(
    later: list[int], processes: list[int], chance: random.Random
) -> None:
    records = [base(), *repeats(later), *fresh(processes)]
    shuffled = list(records)
    chance.shuffle(shuffled)
    for claim, contents in (("repeat", later), ("process", processes)):
        one, other = judged(records, claim), judged(shuffled, claim)
        assert one.verdict is other.verdict
        assert (one.verdict is Verdict.VERIFIED) == (set(contents) == {A})
        if one.findings:
            assert told(records, claim) == told(shuffled, claim)


def test_an_explanation_that_is_there_stays() -> None:
    known = {"out": {"lines": ["out[3]"], "suggests": ["a race"], "first": {"index": [3]}}}
    records = [base(), replace(repeats([B])[0], differences=known)]
    difference = judged(records, "repeat").findings[0].difference
    assert difference is not None
    assert difference["first"] == {"index": [3]}
    assert difference["lines"][0] == "out[3]"
    assert difference["suggests"][-1] == "a race"


def test_a_result_is_told_before_its_gradients_and_what_equals_the_golden_is_named() -> None:
    names = ("out", "grad.w", "counts")
    wanted = {name: digest(A) for name in names}
    got = {**wanted, "out": digest(B), "grad.w": digest(B)}
    golden = execution("golden", "exact", compare="exact", outputs=got, expected=wanted)
    plan = Plan("c", "c.py::c", ["golden"], 1, {"golden": 1})
    (claim,) = decide(plan, [base(), golden]).claims
    assert [finding.tensor for finding in claim.findings] == ["out", "grad.w"]
    assert claim.findings[0].difference is not None
    assert claim.findings[0].difference["lines"] == [
        "equal in all executions of this claim: counts"
    ]
    same = replace(golden, outputs=wanted)
    assert decide(plan, [base(), same]).claims[0].verdict is Verdict.VERIFIED
