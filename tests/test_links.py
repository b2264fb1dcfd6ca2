"""Every relative link of the pages for readers leads to a file, and every #anchor to a heading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:")  # https:, mailto:


def _prose(text: str) -> str:
    """Without code, in which brackets are no links and # is no heading."""
    fenced = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", "", code[0]), fenced)


def anchors(text: str) -> list[str]:
    """Of each heading what GitHub calls it; one that comes again is numbered."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", _prose(text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = sum(one == name or re.fullmatch(rf"{name}-\d+", one) is not None for one in found)
        found.append(f"{name}-{again}" if again else name)
    return found


def broken(page: Path) -> Iterator[str]:
    """The links of a page that lead nowhere."""
    for target in _LINK.findall(_prose(page.read_text())):
        if _ELSEWHERE.match(target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_every_page_of_docs_is_linked_from_readme() -> None:
    linked = set(_LINK.findall(_prose(PAGES[0].read_text())))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").iterdir()}
    assert pages - linked == set()
    assert len(pages) > 5


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page, other = tmp_path / "README.md", tmp_path / "docs" / "other.md"
    other.write_text(
        '# Other\n\n## One `thing`, or "two"\n\n## Again\n\n## Again\n\n```\n# no\n```\n'
    )
    right = (
        *("docs/other.md", "docs/other.md#one-thing-or-two", "docs/other.md#again-1", "#top"),
        *("https://example.org/#x", "docs"),
    )
    wrong = ("other.md", "docs/other.md#no", "docs/other.md#again-2", "#bottom", "docs/none.png")
    page.write_text("# Top\n\n" + " ".join(f"[a]({target})" for target in (*right, *wrong)))
    assert list(broken(page)) == list(wrong)
    other.write_text("[up](../README.md#top) [across](README.md) ![picture](../x.png)\n")
    assert list(broken(other)) == ["README.md", "../x.png"]
    page.write_text("# Top\n\n`x[0](none)`\n\n```\n[a](none)\n```\n")
    assert list(broken(page)) == []
