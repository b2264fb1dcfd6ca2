"""The timeline in a real browser: colours in light and dark, and nothing outside of the page.

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
from trace_toy import record_toy

from verify import rendering
from verify.tracing import timeline_page
from verify.tracing.divergence import diff

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STYLE = (Path(rendering.__file__).parent / "templates" / "style.jinja").read_text()
SCHEMES = {"dark": 0, "light": 1}  # as Blink numbers them
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
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        said = f"no browser on PATH ({', '.join(NAMES)}); `bash ci/browser.sh` installs one"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)
    return found


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


def start(browser: str, folder: Path, *words: str) -> str:
    common = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-pings")
    words = (browser, *common, f"--user-data-dir={folder / 'profile'}", *words)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def colour(name: str, scheme: str) -> tuple[int, ...]:
    block = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[scheme == "dark"]
    return tuple(bytes.fromhex(dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", block))[name]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_state_is_seen(browser, page, tmp_path, scheme):
    shot = tmp_path / "shot.png"
    start(
        browser,
        page.parent,
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--window-size=1280,1600",
        f"--screenshot={shot}",
        page.as_uri(),
    )
    pixels: Any = np.rint(255 * matplotlib.image.imread(shot)[:, :, :3]).astype(np.uint8)
    assert tuple(pixels[3, 3]) == colour("page", scheme)
    for name, least in (("bad-solid", 20_000), ("good-solid", 5_000), ("open-solid", 200)):
        assert (pixels == np.array(colour(name, scheme))).all(axis=2).sum() > least, name


def test_nothing_is_outside_and_the_strip_can_be_reached(browser, page):
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
        assert (one["outside"], one["small"], one["links"]) == ([], 0, 65)
        assert one["texts"] > 10
        assert one["first"].startswith("output of blocks.0.mlp culprit (forward): other bits")
        assert one["focused"]
        assert one["inside"]
