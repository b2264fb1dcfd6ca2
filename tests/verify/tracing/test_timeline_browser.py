"""The timeline in a real browser: colours in light and dark, and nothing outside of the page.

Without a browser it skips, and fails where CI is set, as the tests of the report do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from browsers import colour, count, find_browser, measure, screenshot
from trace_toy import record_toy

from verify.tracing import timeline_page
from verify.tracing.divergence import diff

WIDTHS = (1280, 420)
MEASURE = """
window.onload = () => {
  const out = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    const box = (e) => e.getBoundingClientRect();
    const texts = [...page.querySelectorAll("main p, main li, main h2, main dd, main td, .tip")]
      .filter((e) => e.checkVisibility() && !e.closest(".scroll"));
    const first = page.querySelector(".strip .first .tip");
    const links = page.querySelectorAll(".strip a");
    const out_of = (e) => box(e).right > frame.clientWidth + 0.5;
    links[0].focus();
    out[frame.id] = {
      inner: frame.clientWidth, scroll: root.scrollWidth, texts: texts.length,
      outside: texts.filter(out_of).map((e) => e.textContent),
      small: [...links].filter((e) => box(e).width < 8 || box(e).height < 8).length,
      links: links.length, first: first.textContent, focused: page.activeElement === links[0],
      inside: box(first).bottom <= box(first.closest("ol")).bottom,
    };
  }
  document.body.dataset.measured = JSON.stringify(out);
};
"""


@pytest.fixture(scope="module")
def browser() -> str:
    return find_browser()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for rank in range(3):
        record_toy(folder / "a", rank=rank, world=3, steps=9)
        faults = [(4 + rank, "forward", "blocks.0.mlp")] if rank else []
        record_toy(folder / "b", faults, rank=rank, world=3, steps=9 - 2 * rank)
    found = diff(folder / "a", folder / "b")
    timeline_page.write_page(found, folder / "a", folder / "b", folder / "page.html")
    return folder / "page.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_state_is_seen(browser, page, tmp_path, scheme):
    pixels = screenshot(browser, page, tmp_path, scheme)
    assert tuple(pixels[3, 3]) == colour("page", scheme)
    for name, least in (("bad-solid", 20_000), ("good-solid", 5_000), ("open-solid", 200)):
        assert count(pixels, name, scheme) > least, name


def test_nothing_is_outside_and_the_strip_can_be_reached(browser, page):
    measured = measure(browser, page, MEASURE, WIDTHS)
    for width in WIDTHS:
        one = measured[f"w{width}"]
        assert one["scroll"] <= one["inner"]
        assert (one["outside"], one["small"], one["links"]) == ([], 0, 65)
        assert one["texts"] > 10
        assert one["first"].startswith("output of blocks.0.mlp culprit (forward): other bits")
        assert one["focused"]
        assert one["inside"]
