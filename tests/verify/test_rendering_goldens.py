"""The table of goldens that changed: the same cells everywhere, harmless, and nothing lost."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from verify.rendering import goldens

DIGEST = "float32[2]:"
ROW: dict[str, Any] = {
    "case": "moe/a",
    "kind": "exact",
    "tensor": "out",
    "old": DIGEST + "0" * 8 + "1" * 56,
    "new": DIGEST + "0" * 8 + "2" * 56,
    "max_ulp": 1024,
    "differing": 1,
    "reason": "fused",
}
HOSTILE = st.text("|`<>@&#[]*:\\\n\r\x1b\u202e\ud800a")
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
VALUES = st.none() | st.text() | HOSTILE | NUMBERS


def rows(page: str) -> list[list[str]]:
    """The cells of a markdown table, without its head."""
    lines = page.splitlines()
    assert lines[0] == f"| {' | '.join(goldens.COLUMNS)} |"
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def test_the_cells_of_a_row() -> None:
    zeros = "0" * 8  # a whole lane: the upper half of small integers says nothing
    old, new = f"{DIGEST}{zeros}11111111", f"{DIGEST}{zeros}22222222"
    expected = ("moe/a", "exact", "out", old, new, "1,024", "1", "fused")
    assert goldens.cells([ROW]) == [expected]
    bare = {**ROW, "old": None, "max_ulp": None, "reason": None}
    del bare["differing"]  # as in a document of an earlier version
    assert goldens.cells([bare]) == [("moe/a", "exact", "out", "-", new, "-", "-", "")]
    parts = {**ROW, "old": "budget 1a2b, margin 3c4d", "max_ulp": 0.25}
    assert goldens.cells([parts])[0][3:6] == ("budget 1a2b, margin 3c4d", new, "0.25")


def test_every_form_shows_the_same_cells() -> None:
    (cells,) = goldens.cells([ROW])
    header, _, line = goldens.text([ROW])
    assert re.split(r"  +", header) == list(goldens.COLUMNS)
    assert re.split(r"  +", line) == list(cells)
    (shown,) = rows(goldens.page([ROW]))
    assert shown == [*(f"`{cell}`" for cell in cells[:-1]), cells[-1]]
    assert "".join(goldens.markdown([ROW])) == goldens.page([ROW])


def test_a_report_counts_what_it_leaves_out_and_an_update_shows_all() -> None:
    many = [{**ROW, "reason": "x" * 150} for _ in range(goldens.SHOWN + 3)]
    assert goldens.more(many) == ["and 3 goldens more in the result document"]
    assert goldens.text(many)[2 + goldens.SHOWN :] == goldens.more(many)
    assert len(goldens.screen(many).splitlines()) == 2 + len(many), "no document holds the others"
    assert goldens.screen([]) == goldens.page([]) == "No golden changed.\n"
    assert goldens.more(many[3:]) == []
    assert len(goldens.cells(many)) == goldens.SHOWN
    assert goldens.text(many)[-1].startswith("and 3 goldens more")
    assert "(150 characters)" in goldens.cells(many)[0][-1]
    whole = rows(goldens.page(many))
    assert (len(whole), whole[0][-1]) == (len(many), "x" * 150)


def test_nothing_changed() -> None:
    assert goldens.page([]) == "No golden changed.\n"
    assert goldens.text([]) == goldens.cells([]) == list(goldens.markdown([])) == []


@given(st.fixed_dictionaries(dict.fromkeys(ROW, VALUES)))
def test_no_value_of_a_document_can_do_anything(row: dict[str, Any]) -> None:
    (cells,) = rows(goldens.page([row]))
    assert len(cells) == len(goldens.COLUMNS), "no cell ends the table"
    for cell in cells:
        plain = cell[1:-1] if re.fullmatch("`[^`]+`", cell) else re.sub("</?code>", "", cell)
        assert re.fullmatch(r"[^<>@`|*\\]*", plain)
    for cell in goldens.cells([row])[0]:
        assert cell.isprintable()
        assert len(cell) < goldens.LONGEST + 40
