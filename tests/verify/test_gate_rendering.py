"""The gate's part of every report: what fails it, what it looked at, and harmless names."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from verify import results
from verify.gates.findings import findings
from verify.reasons import GATE_REASONS
from verify.rendering import goldens, render
from verify.rendering.markdown import LIMIT
from verify.verdicts import CaseVerdict

NASTY = "a::b|`<script>&\n::error::x\x1b[2J\ud800##[group]"
ROW = {"case": "moe/exact-a", "kind": "exact", "tensor": "out", "old": "f[2]:" + "a" * 64}
ROW |= {"new": "f[2]:" + "b" * 64, "max_ulp": 3, "differing": 1234, "reason": "rounds later"}


def gate_of(**more: Any) -> dict[str, Any]:
    return {
        "config": "ci/gate.toml",
        "since": "origin/main",
        "base": "0123456789abcdef0123",
        "kernels": ["mok/*.py"],
        "changed": [],
        "affected": [],
        "uncovered": [],
        "left_out": [],
        "golden_changes": [],
        "budget": {
            "seconds": 600.0,
            "executions": None,
            "used_seconds": 12.34,
            "used_executions": 56,
        },
        "findings": [],
        **more,
    }


@pytest.fixture
def document(make_result):
    """Makes a document with one VERIFIED case `moe` and a gate, valid by the schema."""

    def make(verdicts=None, controls=None, **more):
        made = make_result(
            verdicts, controls=controls or {"status": "passed", "passed": 58, "failed": []},
            gate=gate_of(**more),
        )  # fmt: skip
        jsonschema.Draft202012Validator(results.schema()).validate(made)
        return made

    return make


FAILS = {
    "uncovered": ["mok/new.py"],
    "changed": ["mok/new.py", "mok/tiles.py"],
    "affected": ["moe"],
    "left_out": ["far"],
    "findings": findings(uncovered=["mok/new.py"]),
    "golden_changes": [ROW],
}


def test_a_gate_that_passes_says_what_it_asked(document):
    shown = render(document(affected=["moe"], changed=["mok/tiles.py"]), "text")
    assert "case moe (affected by the change)\n" in shown
    assert shown.split("gate ci/gate.toml\n")[1].splitlines() == [
        "  controls: 58 passed",
        "  changes since origin/main (from commit 0123456789ab): 1 file: mok/tiles.py",
        "  coverage: every changed source is covered by a case or exempt",
        "  affected: moe; they ran first",
        "  used: 12.3 of 600 s and 56 executions",
        "",
        "verdict=VERIFIED 1 case, 1 claim, 1 rank, 1 execution",
    ]


def test_a_gate_that_fails_says_why_and_what_to_do(document):
    made = document(**FAILS)
    assert (made["verdict"], made["exit_code"]) == ("UNVERIFIED", 3)
    shown = render(made, "text")
    assert "  covered by no case: mok/new.py\n" in shown
    assert "  left out when the budget was spent, not affected: 1 case: far\n" in shown
    assert re.search(
        r"moe/exact-a +exact +out +f\[2\]:a{16} +f\[2\]:b{16} +3 +1,234 +rounds later", shown
    )
    card = shown[shown.index("verdict=UNVERIFIED gate ci/gate.toml: not-covered: a source") :]
    assert card.splitlines()[1:3] == [
        "  | covered by no case: mok/new.py",
        f"  to do: {GATE_REASONS['not-covered'].remedy}",
    ]
    assert shown.endswith("1 execution; gate: not-covered\n")


def test_what_was_not_asked_is_said(document):
    shown = render(document(since=None, base=None), "text")
    assert "changes: not asked for (no --since), so no source was checked for a case" in shown
    assert "coverage:" not in shown
    shown = render(document(kernels=[]), "text")
    assert "coverage: not checked, the gate names no [sources] kernels" in shown


def test_changes_above_the_folder_are_counted(document):
    changed = ["../csrc/new.cu", "..a", "../x", "mok/tiles.py"]
    shown = render(document(changed=changed), "text")
    line = "covered by a case or exempt; 2 changed files above this folder are not asked for\n"
    assert line in shown
    shown = render(document(changed=changed[:2], uncovered=["..a"]), "text")
    assert "  coverage: 1 changed file above this folder is not asked for\n" in shown
    assert "above this folder" not in render(document(changed=changed[1:2]), "text")
    assert "above this folder" not in render(document(changed=changed, kernels=[]), "text")


def test_goldens_that_the_gate_does_not_check_are_counted(document):
    shown = render(document(goldens_not_checked=3), "text")
    assert "  goldens that no case of this gate checks: 3\n" in shown
    assert "no case of this gate checks" not in render(document(goldens_not_checked=0), "text")
    assert "no case of this gate checks" not in render(document(), "text")


def test_controls_that_cannot_run_here_are_counted(document):
    lacks = {"gpu/split-k": "needs a CUDA device", "gpu/sm-count": "needs a CUDA device"}
    made = document(controls={"status": "passed", "passed": 57, "failed": [], "not_run": lacks})
    line = "  controls: 57 passed, 2 not run here (needs a CUDA device)\n"
    assert line in render(made, "text")
    assert "not run here" not in render(document(), "text")


def test_failed_controls_are_named_once(document):
    failed = {"status": "failed", "passed": 57, "failed": ["memory/nan"]}
    made = document(controls=failed, findings=findings(failed_controls=["memory/nan"]))
    assert render(made, "text").endswith("; controls failed: memory/nan\n")
    assert "controls: 57 passed, 1 failed" in render(made, "text")
    tree = ElementTree.fromstring(render(made, "junit").encode())
    assert tree.get("errors") == "1"


def test_markdown_has_the_findings_first_and_the_goldens_as_a_table(document):
    page = render(document(**FAILS), "markdown")
    order = ["### verdict=UNVERIFIED", "gate ci/gate.toml", "since origin", "rounds later",
             "| case | claim |"]  # fmt: skip
    places = [page.index(part) for part in order]
    assert places == sorted(places)
    (row,) = [line for line in page.splitlines() if "rounds later" in line]
    assert row.count("|") == len(goldens.COLUMNS) + 1
    assert "| case | kind |" not in render(document(), "markdown")


def test_junit_has_one_error_per_finding_or_a_pass(document):
    def tests(made):
        tree = ElementTree.fromstring(render(made, "junit").encode())
        return {t.get("name"): t for t in tree.iter("testcase") if t.get("classname") == "gate"}

    passed = tests(document())
    assert list(passed) == ["ci/gate.toml"]
    assert passed["ci/gate.toml"].find("error") is None
    assert "controls: 58 passed" in passed["ci/gate.toml"].find("system-out").text
    both = findings(uncovered=["a"], dirty=["b"])
    failed = tests(document(findings=both))
    assert [t.find("error").get("type") for t in failed.values()] == ["not-covered", "dirty-source"]
    assert failed["dirty-source"].find("error").get("message").startswith("verdict=UNVERIFIED gate")


def test_hostile_names_do_nothing(document):
    row = {**ROW, "case": NASTY, "tensor": NASTY, "reason": NASTY, "old": NASTY, "max_ulp": NASTY}
    row["kind"] = NASTY
    made = document(
        config=NASTY, since=NASTY, base=NASTY, changed=[NASTY], affected=[NASTY], left_out=[NASTY],
        uncovered=[NASTY], golden_changes=[row], findings=findings(uncovered=[NASTY]),
    )  # fmt: skip
    shown = render(made, "text")
    assert all(character.isprintable() for line in shown.splitlines() for character in line)
    assert not any(line.lstrip().startswith("::") for line in shown.splitlines())
    assert "##[" not in shown
    page = render(made, "markdown")
    outside = re.sub(r"<pre>\n.*?</pre>", "", page, flags=re.DOTALL)
    harmless = {"`f[2]:bbbbbbbbbbbbbbbb`", "`1,234`"}  # of ROW; all else is NASTY
    assert set(re.findall("`[^`]*`", outside)) == harmless
    assert outside.count("`") == 4
    assert set(re.findall(r"</?(\w+)>", page)) <= {"code", "pre", "sub"}
    ElementTree.fromstring(render(made, "junit").encode())


def test_a_huge_change_stays_below_the_limit_and_hides_no_mismatch(document, make_claim, mixed):
    bad = mixed["cases"][1]
    long = ["\u00e9<" * 2000 + str(i) for i in range(300)]
    row = {**ROW, "case": long[0], "tensor": long[1], "reason": long[2]}
    made = document(
        changed=long, affected=long, left_out=long, uncovered=long, golden_changes=[row] * 300,
        findings=findings(uncovered=long, dirty=long, cut_off=long, failed_controls=long),
    )  # fmt: skip
    made["cases"].append(bad)
    page = render(made, "markdown")
    assert len(page.encode()) <= LIMIT
    assert "250 goldens more in the result document" in page
    assert "and 280 more" in page
    assert "verdict=MISMATCH bad" in page


def test_a_document_without_a_gate_has_no_part_about_it(make_result):
    made = make_result()
    assert "gate" not in made
    for form in ("text", "markdown", "junit"):
        assert "gate" not in render(made, form)


def test_the_verdict_of_a_gate_counts_whatever_the_field_says(document):
    made = {**document(**FAILS), "verdict": "VERIFIED", "exit_code": 0}
    assert results.exit_code(made) == 3
    assert results.exit_code({**document(), "verdict": "VERIFIED"}) == 0
    empty = document([CaseVerdict("c", "c", [])])
    assert results.exit_code(empty) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("findings", [{"reason": "not-covered", "verdict": "UNVERIFIED"}]),
        ("findings", [{"reason": "x", "verdict": "PASSED", "detail": ""}]),
        ("changed", "a"),
        ("budget", {"seconds": 1}),
        ("golden_changes", [{"case": "a"}]),
    ],
)
def test_a_damaged_gate_is_no_document(document, tmp_path, key, value):
    from verify.errors import InputFileError

    made = document()
    made["gate"][key] = value
    results.write(made, tmp_path / "result.json")
    with pytest.raises(InputFileError, match="not a result document"):
        results.read(tmp_path)
