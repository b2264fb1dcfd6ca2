"""The page for a pull request: worst first, below the limit, and no way out of a cell."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from large_reports import NUM_FAILING, large

from verify.rendering import render
from verify.rendering.escaping import block, code, prose
from verify.rendering.markdown import LIMIT
from verify.verdicts import CaseVerdict, Finding


def _outside_of_blocks(page: str) -> str:
    """Markdown does not look into a <pre> block, which ends at the first </pre>."""
    return re.sub(r"<pre>\n.*?</pre>", "", page, flags=re.DOTALL)


def test_totals_first_then_mismatches_then_the_rest(mixed):
    page = render(mixed, "markdown")
    assert page.startswith("### verdict=MISMATCH 3 cases, 4 claims, 4 ranks")
    assert page.index("bits&#45;differ") < page.index("missing&#45;rank") < page.index("| case |")
    rows = [line for line in page.splitlines() if line.startswith("| <code>")]
    assert [re.search(r"verdict=(\w+)", row).group(1) for row in rows] == [
        "MISMATCH",
        "UNVERIFIED",
        "VERIFIED",
        "VERIFIED",
    ]
    assert "reproduce: verify run f.py::bad --claims repeat --ranks 4" in page
    assert "0x3f800000" in page


def test_every_row_has_the_same_number_of_cells(nasty, mixed):
    for document in (nasty, mixed):
        rows = [
            line
            for line in _outside_of_blocks(render(document, "markdown")).splitlines()
            if line[:1] == "|"
        ]
        assert rows
        assert {row.count("|") for row in rows} == {6}


def test_hostile_names_do_nothing(nasty):
    page = render(nasty, "markdown")
    page.encode("utf-8")
    assert "<script" not in page
    assert "`" not in _outside_of_blocks(page)
    assert not any(line.lstrip().startswith("::") for line in page.splitlines())
    assert set(re.findall(r"</?(\w+)>", page)) <= {"code", "pre", "sub"}


def test_the_page_stays_below_the_limit(make_result, make_claim):
    finding = Finding("bits-differ", "d" * 3000)
    claims = [make_claim("repeat", [finding], differing=1)]
    cases = [CaseVerdict(f"case{i}" + "n" * 500, "t", claims) for i in range(600)]
    page = render(make_result(cases), "markdown")
    assert len(page.encode()) <= LIMIT
    assert page.startswith("### verdict=MISMATCH 600 cases")
    assert "left out to stay below 200 kB" in page
    assert "550 claims more not verified" in page


def test_a_thousand_cases_name_all_thirty_failures(make_result, make_claim, nasty):
    hostile = nasty["cases"][0]["case"]
    for name in (lambda i: f"suite/case-{i}", lambda i: f"{i} {hostile}"):
        document = large(make_result, make_claim, name)
        page = render(document, "markdown")
        assert len(page.encode()) < LIMIT
        assert "left out" not in page
        assert page.startswith("### verdict=MISMATCH 1000 cases, 8000 claims, 4 ranks")
        table = page.index("| case |")
        failing = [case["case"] for case in document["cases"] if case["verdict"] == "MISMATCH"]
        assert len(failing) == NUM_FAILING
        for case in failing:
            place = page.index(code(f"verdict=MISMATCH {case} / repeat").removesuffix("</code>"))
            assert place < table < page.rindex(code(case))
        assert "7670 claims more VERIFIED; see the result document." in page
        assert page.count("first: out[") == NUM_FAILING
        assert page.rstrip().endswith("</sub>")


def test_one_oversized_finding_cannot_hide_the_totals(make_result, make_claim):
    finding = Finding("bits-differ", "d" * 300_000)
    case = CaseVerdict("c", "c", [make_claim("repeat", [finding], differing=1)])
    page = render(make_result([case]), "markdown")
    assert len(page.encode()) <= LIMIT
    assert "verdict=MISMATCH" in page


def test_nothing_run_is_said(make_result):
    assert "nothing was checked" in render(make_result([]), "markdown")


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_escapes_leave_no_markup(text):
    for escaped in (code(text), prose(text)):
        inner = escaped.removeprefix("<code>").removesuffix("</code>")
        assert not set(inner) & set("<>`|*_[]@:\\\n\r")
        inner.encode("utf-8")
    inner = block([text]).removeprefix("<pre>\n").removesuffix("\n</pre>")
    assert not set(inner) & set("<>\n\r")
