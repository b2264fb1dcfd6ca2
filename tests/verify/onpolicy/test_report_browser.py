"""The page of `verify onpolicy` in a real browser: colours, widths, and the arrow keys' readout.

Without a browser it skips, and fails where CI is set, as the tests of the report do.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from onpolicy_analyses import analysed, drift, odd, routed

from verify import rendering
from verify.onpolicy import report_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STYLE = (Path(rendering.__file__).parent / "templates" / "style.jinja").read_text()
DARK = 0  # as Blink numbers colour schemes
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
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        said = f"no browser on PATH ({', '.join(NAMES)}); `bash ci/browser.sh` installs one"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    found = analysed(*odd(), *drift(4, 60, 0.3), routed([1, 2]), gates=["abs_max>9"])
    report_page.write_page(found, file)
    return file


def start(browser: str, folder: Path, *words: str) -> str:
    common = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-pings")
    words = (browser, *common, f"--user-data-dir={folder / 'profile'}", *words)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def colour(name: str) -> tuple[int, ...]:
    block = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[1]
    return tuple(bytes.fromhex(dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", block))[name]))


def test_every_kind_of_token_is_seen_in_the_dark(browser, page, tmp_path):
    shot = tmp_path / "shot.png"
    start(
        browser,
        page.parent,
        f"--blink-settings=preferredColorScheme={DARK}",
        "--window-size=1280,3200",
        f"--screenshot={shot}",
        page.as_uri(),
    )
    pixels: Any = np.rint(255 * matplotlib.image.imread(shot)[:, :, :3]).astype(np.uint8)
    assert tuple(pixels[3, 3]) == colour("page")
    for name, least in (("bad-solid", 9_000), ("link", 5_000), ("open-solid", 600)):
        assert (pixels == np.array(colour(name))).all(axis=2).sum() > least, name


def test_nothing_is_outside_and_one_token_of_each_strip_is_read_out(browser, page):
    frames = "".join(
        f'<iframe id="w{width}" src="{page.name}" style="width:{width}px;height:900px"></iframe>'
        for width in WIDTHS
    )
    outer = page.parent / "outer.html"
    outer.write_text(f"<!doctype html><body>{frames}<script>{MEASURE}</script></body>")
    dumped = start(
        browser,
        page.parent,
        "--allow-file-access-from-files",
        "--virtual-time-budget=20000",
        "--dump-dom",
        outer.as_uri(),
    )
    measured = json.loads(html.unescape(re.search(r'data-measured="(.*?)"', dumped).group(1)))
    for width in WIDTHS:
        one = measured[f"w{width}"]
        assert one["scroll"] <= one["inner"]
        assert (one["outside"], one["small"]) == ([], 0)
        assert one["texts"] > 20
        assert one["readouts"] == [1] * 5
        assert one["cells"] == 6 + 4 * 60
        assert one["first"].startswith("position 1, token 6: trainer nan")
        assert (one["seen"], one["inside"], one["focused"], one["moved"]) == (True,) * 4
