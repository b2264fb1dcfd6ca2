"""The HTML page in a real browser: pixels in light and dark, layout wide and narrow, no scripts.

See tests/support/browsers.py for what happens without a browser.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import colour, count, find_browser, measured, screenshot, start
from large_reports import difference, large

from verify.rendering import render
from verify.verdicts import CaseVerdict, Finding

WIDTHS = (1280, 400)


# Draws each page in a frame of each width and measures it there; the pages keep their own policy.
MEASURE = """
const OUT = {};
const shown = (element) => element.checkVisibility() && !element.closest("i, title, svg");
function measure(name, frame) {
  const page = frame.contentDocument, root = page.documentElement;
  const holds = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const texts = [...page.querySelectorAll("body *")].filter((e) => holds(e) && shown(e));
  const box = (e) => e.getBoundingClientRect();
  const out = (e) => !e.closest(".scroll") && box(e).right > frame.clientWidth + 0.5;
  const label = (e) => e.tagName + ": " + e.textContent.slice(0, 60);
  OUT[name] = {
    inner: frame.clientWidth,
    scroll: root.scrollWidth,
    cards: page.querySelectorAll(".card").length,
    texts: texts.length,
    empty: texts.filter((e) => !(box(e).width > 0 && box(e).height > 0)).map(label),
    outside: texts.filter(out).map(label),
    flat: [...page.querySelectorAll(".card, .card svg")].filter((e) => box(e).height < 20).length,
    title: page.title,
  };
}
window.onload = () => {
  for (const frame of document.querySelectorAll("iframe")) measure(frame.id, frame);
  document.body.dataset.measured = JSON.stringify(OUT);
};
"""


@pytest.fixture(scope="module")
def browser() -> str:
    return find_browser()


def _screenshot(browser: str, folder: Path, text: str, scheme: str, height: int = 1600) -> Any:
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    return screenshot(browser, page, folder, scheme, height)


@pytest.fixture
def failing(make_result, make_claim) -> dict[str, Any]:
    finding = Finding(
        "bits-differ",
        "out has other bits",
        tensor="out",
        rank=1,
        variant="restored",
        difference=difference(),
    )
    lost = Finding("missing-rank", "rank 3 was killed by SIGKILL", rank=3)
    claims = [
        make_claim("repeat", [finding], ranks=4, differing=2),
        make_claim("rank", [lost], ranks=3),
        make_claim("memory", ranks=4),
    ]
    verdicts = [
        CaseVerdict("sums", "f.py::sums", claims),
        CaseVerdict("linear", "f.py::linear", [make_claim(ranks=4)]),
    ]
    return make_result(verdicts, ranks=4)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_failing_page_shows_every_state(browser, tmp_path, failing, scheme):
    pixels = _screenshot(browser, tmp_path, render(failing, "html"), scheme)
    assert tuple(pixels[3, 3]) == colour("page", scheme)
    assert (pixels.mean() > 200) if scheme == "light" else (pixels.mean() < 60)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100  # letters are drawn, not only boxes
    for name in ("good-bg", "bad-bg", "open-bg", "bad-solid", "good-solid"):
        assert count(pixels, name, scheme) > 500, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_passing_page_shows_nothing_red(browser, tmp_path, make_result, scheme):
    pixels = _screenshot(browser, tmp_path, render(make_result(), "html"), scheme)
    assert tuple(pixels[3, 3]) == colour("page", scheme)
    assert count(pixels, "good-bg", scheme) > 500
    assert count(pixels, "good-solid", scheme) > 500
    for name in ("bad-bg", "bad-solid", "open-bg", "open-solid"):
        assert count(pixels, name, scheme) == 0, name


def test_a_page_of_a_thousand_cases_shows_the_failures_first(
    browser, tmp_path, make_result, make_claim
):
    text = render(large(make_result, make_claim), "html")
    pixels = _screenshot(browser, tmp_path, text, "light", height=1400)
    bad = (pixels == np.array(colour("bad-bg", "light"))).all(axis=2).any(axis=1)
    rows = np.flatnonzero(bad)
    assert 200 < rows[0] < 500  # right below the verdict
    assert np.count_nonzero(bad[:1250]) > 30 * 15  # thirty rows of the matrix


def test_layout_and_policy(browser, tmp_path, failing, nasty, mixed, make_result, make_claim):
    pages = {
        "failing": render(failing, "html"),
        "mixed": render(mixed, "html"),
        "nasty": render(nasty, "html"),
        "passing": render(make_result(), "html"),
        "large": render(large(make_result, make_claim, failing=6), "html"),
    }
    frames = {f"{name} {w}": (text, w) for name, text in pages.items() for w in WIDTHS}
    script = "<script>document.title = 'a script ran'</script></body>"
    attacked = pages["passing"].replace("</body>", script)
    frames["attacked 1280"] = (attacked, 1280)
    frames["unguarded 1280"] = (re.sub("<meta http-equiv[^>]*>", "", attacked), 1280)
    body = "".join(
        f'<iframe id="{name}" style="width:{width}px;height:900px;border:0"'
        f' srcdoc="{html.escape(text)}"></iframe>'
        for name, (text, width) in frames.items()
    )
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"<!doctype html><meta charset=utf-8><body>{body}<script>{MEASURE}</script>",
        encoding="utf-8",
    )
    dom = start(browser, tmp_path / "profile", "--dump-dom", outer.as_uri())
    found = measured(dom)
    assert set(found) == set(frames)
    for name, one in found.items():
        assert one["inner"] == frames[name][1], name
        assert one["scroll"] <= one["inner"], name
        assert one["texts"] > 20, name
        assert one["empty"] == [], name
        assert one["outside"] == [], name
        assert one["flat"] == 0, name
        expected = frames[name][0].count("<article")
        assert one["cards"] == expected, name
    assert found["attacked 1280"]["title"] == found["passing 1280"]["title"]
    assert found["unguarded 1280"]["title"] == "a script ran"  # so the policy is what stopped it
