"""The HTML page: worst first, complete, offline, harmless, and small whatever it is given."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from large_reports import CLAIMS, NUM_CASES, NUM_FAILING, difference, large

from verify import results
from verify.rendering import html, render
from verify.verdicts import CaseVerdict, Finding

VOID = {"meta", "rect", "path", "br", "hr", "img", "input", "link"}
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer"),
    *("article", "h1", "h2", "h3", "p", "b", "i", "em", "small", "span", "code", "pre", "a"),
    *("ul", "li", "dl", "dt", "dd", "div", "details", "summary", "figure", "figcaption", "mark"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "svg", "text", "path", "rect"),
}


class Page(HTMLParser):
    """What a browser would find: tags, attributes, texts; an error for what is not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.cards: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name == "href"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "article":
            self.cards.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data
        if "article" in self._open:
            self.cards[-1] += data


def _matrix(page: Page) -> list[list[str]]:
    """The first cells of each row of the matrix: those of tables that begin with `case`."""
    start = next(i for i, row in enumerate(page.rows) if row[0] == "case")
    width = len(page.rows[start])
    rows = []
    for row in page.rows[start:]:
        if len(row) != width:
            break
        rows.append([" ".join(cell.split()) for cell in row])
    return rows


def _failing_document(make_result, make_claim, **more):
    finding = Finding(
        "bits-differ",
        "out has other bits",
        tensor="out",
        rank=1,
        run=3,
        variant="restored",
        difference={**difference(), **more},
    )
    claims = [make_claim("repeat", [finding], ranks=4, differing=2), make_claim("rank", ranks=4)]
    return make_result([CaseVerdict("sums", "f.py::sums", claims)], ranks=4)


def test_worst_first_and_everything_in_its_place(mixed):
    page = render(mixed, "html")
    order = ["verdict=MISMATCH 3 cases, 4 claims", "Cases and claims", "Findings", "Evidence"]
    places = [page.index(text) for text in [*order, "Where it was run"]]
    assert places == sorted(places)
    cards = Page(page).cards
    assert [card.split()[1] for card in cards] == ["MISMATCH", "UNVERIFIED"]
    for text in ("bits-differ", "out has other bits", "one element: a race", "0x3f800000"):
        assert text in cards[0]
    assert "verify run f.py::bad --claims repeat --ranks 4" in cards[0]
    assert "rank 1 was killed by SIGKILL" in cards[1]
    assert "2026-01-02 03:04:05+00:00" in page
    assert "1, mismatch" in page
    assert "not run" in page
    assert page.endswith("</html>\n")


def test_matrix_tells_states_in_words_and_links_to_cards(mixed):
    page = Page(render(mixed, "html"))
    assert _matrix(page) == [
        ["case", "repeat", "process", "rank"],
        ["bad", "\u2717 MISMATCH", "\u00b7not promised", "\u00b7not promised"],
        ["gone", "\u00b7not promised", "\u2713VERIFIED", "? UNVERIFIED"],
        ["good", "\u2713VERIFIED", "\u00b7not promised", "\u00b7not promised"],
    ]
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert {"f1-0", "f2-0", "c0"} <= {link.removeprefix("#") for link in page.links}


def test_claims_stand_in_their_own_order_and_unknown_ones_last(make_result, make_claim):
    claims = [make_claim(name) for name in ("later", "rank", "repeat")]
    page = Page(render(make_result([CaseVerdict("a", "a", claims)]), "html"))
    assert _matrix(page)[0] == ["case", "repeat", "rank", "later"]


def test_no_row_looks_better_than_its_claims(mixed):
    mixed["cases"][1]["verdict"] = "VERIFIED"
    mixed["cases"][2]["claims"][0]["verdict"] = "VERIFIED"
    assert [row[0] for row in _matrix(Page(render(mixed, "html")))] == [
        "case",
        "bad",
        "gone",
        "good",
    ]


def test_a_card_shows_difference_figures_ranks_and_command(make_result, make_claim):
    page = render(_failing_document(make_result, make_claim), "html")
    (card,) = Page(page).cards
    for text in ("first difference: out[", "base", "other", "few ulp", "runs that differ, by rank"):
        assert text in card
    assert "first: out[" not in card  # told by the table
    assert page.count('<svg class="histogram"') == page.count('<svg class="tiles"') == 1
    assert "rows 0-95 of 96, columns 0-39 of 40" in page
    assert page.count("<mark>") >= 2
    states = re.findall(r'<li class="(\w+)"><b>(\d)</b>', page)
    assert states == [("other", "0"), ("differs", "1"), ("equal", "2"), ("equal", "3")]


@pytest.mark.parametrize("name", ["tiles", "ulps", "first", "values", "bits", "numel", "lines"])
@pytest.mark.parametrize("value", [None, "text", [], [[1], "x"], {}, {"a": 1}, -1, True])
def test_malformed_differences_are_told_without_a_figure(make_result, make_claim, name, value):
    page = render(_failing_document(make_result, make_claim, **{name: value}), "html")
    assert "out has other bits" in Page(page).cards[0]


def test_evidence_says_conditions_bounds_and_measurements(make_result, make_claim):
    page = render(large(make_result, make_claim, number=2, failing=1), "html")
    for text in (
        "0 of 5 runs on each of 4 ranks differed; a fault rarer than 45.1 % per run",
        "requested num_threads 2, 3; base 1",
        "in effect num_threads 2, 3",
        "reference: measured against the reference",
        "0.61",
    ):
        assert text in page


def test_missing_evidence_is_a_card(make_result, make_claim):
    silent = make_claim("repeat")
    document = make_result([CaseVerdict("empty", "e", []), CaseVerdict("odd", "o", [silent])])
    document["cases"][1]["claims"][0]["verdict"] = "UNVERIFIED"
    cards = Page(render(document, "html")).cards
    assert "no claim was checked" in cards[0]
    assert "no finding was recorded" in cards[1]


def test_nothing_run_is_said(make_result):
    assert "nothing was checked" in render(make_result([]), "html")


def test_a_passing_page_has_no_findings(make_result):
    page = render(make_result(), "html")
    assert Page(page).cards == []
    assert "Findings" not in page
    assert "0, verified" in page


def test_the_gate_comes_before_the_cases(mixed):
    assert "Gate" not in render(mixed, "html")
    mixed["gate"] = {
        "config": "ci/gate.toml",
        "since": "origin/main",
        "base": "a" * 40,
        "kernels": ["csrc/**"],
        "changed": [f"mok/file{i}.py" for i in range(30)],
        "affected": ["good"],
        "uncovered": ["csrc/<new>.cu"],
        "left_out": [],
        "golden_changes": [
            {
                "case": "good",
                "kind": "bits",
                "tensor": "out",
                "old": None,
                "new": "float32[2]:" + "1" * 64,
                "max_ulp": 3,
                "differing": 2,
                "reason": "round once",
            }
        ],
        "findings": [{"reason": "not-covered", "verdict": "UNVERIFIED", "detail": "csrc/<new>.cu"}],
        "budget": {"seconds": 9.0, "executions": None, "used_seconds": 1.0, "used_executions": 5},
    }
    page = Page(render(mixed, "html"))
    assert "a source file changed" in page.cards[0]
    assert "csrc/<new>.cu" in page.cards[0]
    assert [
        "good",
        "bits",
        "out",
        "-",
        "float32[2]:1111111111111111",
        "3",
        "2",
        "round once",
    ] in page.rows
    assert {f"mok/file{i}.py" for i in range(30)} <= set(page.texts)
    texts = "".join(page.texts)
    assert texts.index("Gate") < texts.index("Cases and claims")


def test_the_page_refers_to_nothing_outside(mixed, nasty, make_result, make_claim):
    for document in (mixed, nasty, _failing_document(make_result, make_claim)):
        text = render(document, "html")
        page = Page(text)
        assert all(link.startswith("#") for link in page.links)
        assert not {"src", "srcset", "action", "data", "poster"} & {n for n, _ in page.attributes}
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert set(page.tags) <= TAGS
        style = text[text.index("<style>") : text.index("</style>")]
        assert not re.search(r"url\(|@import|@font-face|//", style)
        assert "default-src 'none'; style-src 'unsafe-inline'" in text[:600]


def test_hostile_texts_do_nothing(nasty):
    text = render(nasty, "html")
    text.encode("utf-8")
    assert "<script" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    (card,) = Page(text).cards
    assert r"a::b|`<script>&\n::error::x\x1b[2J\ud800##\x5bgroup]" in card


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=40))
def test_no_text_adds_a_tag(text):
    claim = {
        "claim": text,
        "verdict": "MISMATCH",
        "findings": [
            {
                "reason": text,
                "verdict": "MISMATCH",
                "detail": text,
                "tensor": text,
                "rank": 0,
                "run": 0,
                "process": None,
                "variant": text,
                "difference": {"lines": [text], "suggests": [text], "ulps": {text: 1}},
            }
        ],
        "executions": 1,
        "differing": 1,
        "bound": None,
        "rate": None,
        "ranks": [
            {"rank": 0, "executions": 1, "differing": 1, "variants": [text], "outputs": {text: ""}}
        ],
        "compared": [text],
        "not_compared": {text: text},
        "requested": [{text: text}],
        "effective": [],
        "measurements": {text: {"worst_ratio": text}} if text == "nan" else {},
        "seconds": 0.0,
        "reproduce": text,
    }
    case = {
        "case": text,
        "target": text,
        "verdict": "MISMATCH",
        "description": text,
        "notes": [text],
        "ranks": 1,
        "seed": None,
        "placement": {text: text},
        "sources": [text],
        "reproduce": text,
        "claims": [claim],
        "timings": {"case_seconds": 0.0, "overhead_seconds": 0.0, "overhead_share": None},
    }
    document = {
        "verdict": "MISMATCH",
        "exit_code": 1,
        "started": text,
        "seconds": 0.0,
        "command": text,
        "ranks": 1,
        "totals": dict.fromkeys(
            ("cases", "claims", "executions", "verified", "mismatch", "unverified"), 1
        ),
        "controls": {"status": "failed", "passed": 0, "failed": [text]},
        "environment": {text: {text: text}},
        "options": {text: [text]},
        "tool": {"name": text, "version": text, "digest_scheme": text},
        "cases": [case],
    }
    page = render(document, "html")
    page.encode("utf-8")
    parsed = Page(page)
    assert set(parsed.tags) <= TAGS
    assert len(parsed.cards) == 1
    assert all(link.startswith("#") for link in parsed.links)


def test_a_thousand_cases_with_thirty_failures_fit(make_result, make_claim, nasty):
    hostile = nasty["cases"][0]["case"]
    for name in (lambda i: f"suite/case-{i}", lambda i: f"{i} {hostile}"):
        text = render(large(make_result, make_claim, name), "html")
        assert len(text.encode()) < html.LIMIT
        page = Page(text)
        assert len(page.cards) == NUM_FAILING
        assert "more in result.json" not in text
        rows = [row for row in page.rows if len(row) == len(CLAIMS) + 1 and row[0] != "case"]
        assert len(rows) == NUM_CASES
        assert all("MISMATCH" in row[1] for row in rows[:NUM_FAILING])
        assert not any("MISMATCH" in "".join(row) for row in rows[NUM_FAILING:])
        assert text.count('class="behind"') + text.count('<p class="case') == NUM_CASES


def test_a_thousand_failures_with_huge_texts_fit_and_are_counted(make_result, make_claim, nasty):
    hostile = nasty["cases"][0]["case"] * 100
    document = large(
        make_result, make_claim, lambda i: f"{i} {hostile} {i}", failing=1000, detail=hostile * 4
    )
    text = render(document, "html")
    assert len(text.encode()) < html.LIMIT
    drawn = len(Page(text).cards)
    assert 50 < drawn <= 200
    assert f"{1000 - drawn} findings more in result.json" in text
    assert "verdict=MISMATCH 1000 cases" in text


def test_small_cards_are_counted_too(make_result, make_claim):
    lost = Finding("not-run", "promised, but never executed")
    cases = [CaseVerdict(f"case{i}", f"t{i}", [make_claim("repeat", [lost])]) for i in range(230)]
    text = render(make_result(cases, executions=[]), "html")
    page = Page(text)
    assert len(page.cards) == 200
    assert "30 findings more in result.json" in text
    assert sum(row[1:] != [] and "UNVERIFIED" in row[1] for row in _matrix(page)) == 230


def test_many_claims_environments_and_findings_are_bounded(make_result, make_claim):
    findings = [Finding("bits-differ", f"d{i}", tensor=f"t{i}") for i in range(20)]
    claims = [make_claim(f"claim{i}", findings if i == 0 else []) for i in range(60)]
    document = make_result(
        [CaseVerdict("wide", "w", claims)],
        environment={f"key{i}": "v" * 5000 for i in range(5000)},
    )
    text = render(document, "html")
    assert len(text.encode()) < 1_000_000
    assert "8 findings more in result.json" in text
    assert re.search(r"[\d,]+ entries more in result.json", text)


def test_no_renderer_imports_torch_numpy_or_matplotlib(tmp_path, mixed):
    results.write(mixed, tmp_path / "result.json")
    code = (
        "import sys; from pathlib import Path\n"
        "from verify import rendering, results\n"
        f"result = results.read(Path({str(tmp_path)!r}))\n"
        "for form in rendering.FORMATS: assert rendering.render(result, form)\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
