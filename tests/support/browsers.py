"""Pages in a real browser: a Chromium draws what a person would see.

Without one the tests skip, and fail where CI is set: there it must not go missing. Each start takes
seconds, so there are few.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from verify import rendering

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STYLE = (Path(rendering.__file__).parent / "templates" / "style.jinja").read_text()
SCHEMES = {"dark": 0, "light": 1}  # as Blink numbers them


def find_browser() -> str:
    """Its path; skips or fails the test where there is none."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        said = f"no browser on PATH ({', '.join(NAMES)}); `bash ci/browser.sh` installs one"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)
    return found


def start(browser: str, profile: Path, *words: str) -> str:
    """What it prints."""
    common = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-pings")
    words = (browser, *common, f"--user-data-dir={profile}", *words)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def screenshot(browser: str, page: Path, folder: Path, scheme: str, height: int = 1600) -> Any:
    """The page as an array [height, 1280, 3] of bytes."""
    shot = folder / "shot.png"
    start(
        browser,
        folder / "profile",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--window-size=1280,{height}",
        f"--screenshot={shot}",
        page.as_uri(),
    )
    return np.rint(255 * matplotlib.image.imread(shot)[:, :, :3]).astype(np.uint8)


def colour(name: str, scheme: str) -> tuple[int, ...]:
    """Red, green and blue of a name of the style."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    value = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", blocks[scheme == "dark"]))[name]
    return tuple(bytes.fromhex(value))


def count(pixels: Any, name: str, scheme: str) -> int:
    """Pixels of a colour of the style."""
    return int((pixels == np.array(colour(name, scheme))).all(axis=2).sum())


def measure(browser: str, page: Path, script: str, widths: Sequence[int]) -> dict[str, Any]:
    """What a script finds in frames of these widths, by f"w{width}"; it leaves JSON in
    document.body.dataset.measured when it is loaded."""
    frames = "".join(
        f'<iframe id="w{width}" src="{page.name}" style="width:{width}px;height:900px"></iframe>'
        for width in widths
    )
    outer = page.parent / "outer.html"
    outer.write_text(f"<!doctype html><body>{frames}<script>{script}</script></body>")
    return measured(
        start(
            browser,
            page.parent / "profile",
            "--allow-file-access-from-files",
            "--virtual-time-budget=20000",
            "--dump-dom",
            outer.as_uri(),
        )
    )


def measured(dom: str) -> dict[str, Any]:
    """The JSON that a script left in the printed page."""
    found = re.search(r'data-measured="([^"]*)"', dom)
    assert found is not None, "the script has left nothing"
    held: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return held
