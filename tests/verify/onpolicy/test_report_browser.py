"""The page of `verify onpolicy` in a real browser: colours, widths, and the arrow keys' readout.

Without a browser it skips, and fails where CI is set, as the tests of the report do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from browsers import colour, count, find_browser, measure, screenshot
from onpolicy_analyses import analysed, drift, odd, routed

from verify.onpolicy import report_page

WIDTHS = (1280, 420)
MEASURE = """
window.onload = () => {
  const out = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    const box = (e) => e.getBoundingClientRect();
    const shown = (e) => getComputedStyle(e).clipPath === "none";
    const texts = [...page.querySelectorAll("main p, main li, main h2, main h3, main dd, legend")]
      .filter((e) => e.checkVisibility() && !e.closest(".scroll") && !e.closest("label"));
    const cells = page.querySelectorAll(".cells label");
    const first = page.querySelector(".cells label:has(:checked) span");
    const strips = page.querySelectorAll("fieldset.tokens");
    const other = strips[0].querySelectorAll("input")[2];
    out[frame.id] = {
      inner: frame.clientWidth, scroll: root.scrollWidth, texts: texts.length,
      outside: texts.filter((e) => box(e).right > frame.clientWidth + 0.5).map((e) => e.outerHTML),
      small: [...cells].filter((e) => box(e).width < 8 || box(e).height < 24).length,
      cells: cells.length, first: first.textContent, seen: shown(first),
      readouts: [...strips].map((e) => [...e.querySelectorAll("label span")].filter(shown).length),
      inside: box(first).bottom <= box(first.closest("fieldset")).bottom,
    };
    other.focus(); other.checked = true;
    out[frame.id].focused = page.activeElement === other;
    out[frame.id].moved = shown(other.nextSibling) && !shown(first);
  }
  document.body.dataset.measured = JSON.stringify(out);
};
"""


@pytest.fixture(scope="module")
def browser() -> str:
    return find_browser()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    found = analysed(*odd(), *drift(4, 60, 0.3), routed([1, 2]), gates=["abs_max>9"])
    report_page.write_page(found, file)
    return file


def test_every_kind_of_token_is_seen_in_the_dark(browser, page, tmp_path):
    pixels = screenshot(browser, page, tmp_path, "dark", height=3200)
    assert tuple(pixels[3, 3]) == colour("page", "dark")
    for name, least in (("bad-solid", 9_000), ("link", 5_000), ("open-solid", 600)):
        assert count(pixels, name, "dark") > least, name


def test_nothing_is_outside_and_one_token_of_each_strip_is_read_out(browser, page):
    measured = measure(browser, page, MEASURE, WIDTHS)
    for width in WIDTHS:
        one = measured[f"w{width}"]
        assert one["scroll"] <= one["inner"]
        assert (one["outside"], one["small"]) == ([], 0)
        assert one["texts"] > 20
        assert one["readouts"] == [1] * 5
        assert one["cells"] == 6 + 4 * 60
        assert one["first"].startswith("position 1, token 6: trainer nan")
        assert (one["seen"], one["inside"], one["focused"], one["moved"]) == (True,) * 4
