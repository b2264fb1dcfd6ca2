"""Runs a passing and a failing example and takes pictures of their HTML reports into docs/.

The failing one is the example of README plus a data-parallel function that forgets to reduce its
gradient. It refuses to keep a picture of a run that did not end as it should.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.image

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCHEMES = {"dark": 0, "light": 1}  # as Blink numbers them
WIDTH = 1200
LIMIT = 400_000  # bytes of a picture

RANKS = """import torch, verify


@verify.case(
    inputs={
        "x": verify.normal(256, 64),
        "w": verify.normal(64, 96, requires_grad=True),
    },
    placement={
        "x": verify.sharded(0),
        "out": verify.sharded(0),
        "w": verify.replicated,
        "grad.w": verify.replicated,
    },
    claims=("repeat", "rank"),
)
def data_parallel(x, w):
    return torch.tanh(x @ w)  # nobody adds up grad.w
"""


def main() -> None:
    """Writes docs/report-passing.png, docs/report-failing.png and docs/report-failing-dark.png."""
    browser = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if browser is None:
        sys.exit(f"no browser on PATH ({', '.join(BROWSERS)}); `bash ci/browser.sh` installs one")
    DOCS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        (folder / "my_case.py").write_text(next(b for b in blocks if "@verify.case" in b))
        (folder / "ranks_case.py").write_text(RANKS)
        run(folder, "passing", 0, "moe", "--ranks", "4")
        run(folder, "failing", 1, "my_case.py", "ranks_case.py", "--ranks", "4")
        picture(browser, folder, "passing", "light", 1000)
        picture(browser, folder, "failing", "light", 1460)
        picture(browser, folder, "failing", "dark", 1460)


def run(folder: Path, name: str, code: int, *words: str) -> None:
    """`verify run` of some targets with a report; ends the command unless it exits with `code`."""
    command = [sys.executable, "-m", "verify", "run", *words, "--report", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != code:
        sys.exit(f"{name}: exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}")


def picture(browser: str, folder: Path, name: str, scheme: str, height: int) -> None:
    """The top of a report, WIDTH by at most `height` pixels, without the empty page below it."""
    suffix = "" if scheme == "light" else f"-{scheme}"
    target = DOCS / f"report-{name}{suffix}.png"
    shot = folder / "shot.png"
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--window-size={WIDTH},{height}",
        f"--screenshot={shot}",
        (folder / name / "report.html").as_uri(),
    ]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    pixels = matplotlib.image.imread(shot)
    used = (pixels != pixels[2, 2]).any(axis=(1, 2)).nonzero()[0].max()
    matplotlib.image.imsave(target, pixels[: min(used + 24, height)])
    size = target.stat().st_size
    if size > LIMIT:
        sys.exit(f"{target}: {size} bytes, more than {LIMIT}")
    sys.stdout.write(f"{target.relative_to(ROOT)}: {size} bytes\n")


if __name__ == "__main__":
    main()
