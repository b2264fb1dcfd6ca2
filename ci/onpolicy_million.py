"""Measures `verify onpolicy` on 1,000,000 tokens: two JSON Lines files of 500 samples.

Prints seconds and peak memory of the whole command, with and without the HTML page, and the size of
the page. Ends with 1 where a promise is broken: 20 seconds and 2 GB for the command, 5 seconds more
for a page of at most 2 MB. Sampler and trainer differ by noise, and one sample stands out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verify.onpolicy.recorder import Recorder

SAMPLES, TOKENS, PROMPT = 500, 2000, 200
SECONDS, PAGE_SECONDS = 20.0, 5.0
MEMORY, PAGE = 2_000_000_000, 2_000_000  # bytes
UNVERIFIED = 3


@dataclass(frozen=True)
class Cost:
    """Seconds that passed, seconds of all cores, and bytes at the peak."""

    seconds: float
    cores: float
    memory: int

    def __str__(self) -> str:
        used = f"{self.seconds:5.1f} s ({self.cores:.1f} s of cores)"
        return f"{used}, peak memory {self.memory / 1e9:.2f} GB"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each sample")
    parser.add_argument("--keep", type=Path, help="a folder for the files and the page")
    given = parser.parse_args(arguments)
    if given.samples < 1 or given.tokens < 1:
        parser.error("--samples and --tokens must be at least 1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if given.keep is None else given.keep
        folder.mkdir(parents=True, exist_ok=True)
        return judged(folder, write(folder, given.samples, given.tokens))


def write(folder: Path, samples: int, tokens: int) -> tuple[Path, Path]:
    """The two files."""
    rng = np.random.default_rng(8)
    files = folder / "trainer.jsonl", folder / "rollout.jsonl"
    for file in files:
        file.unlink(missing_ok=True)
    trainer, rollout = Recorder(files[0], "trainer"), Recorder(files[1], "sampler")
    for at in range(samples):
        prompt = rng.integers(0, 50_000, PROMPT)
        ids = rng.integers(0, 50_000, tokens)
        theirs = -rng.exponential(0.7, tokens).astype(np.float32)
        size = 0.1 if at == samples // 2 else 0.004
        noise = rng.normal(0.0, size, tokens) * np.minimum(1.0, -theirs)
        ours = np.minimum(theirs + noise, 0.0).astype(np.float32)
        about = {"rank": at % 8, "step": 7}
        trainer.add(at, ids, ours, prompt_ids=prompt, **about)
        rollout.add(at, ids, theirs, prompt_ids=prompt, temperature=1.0)
    return files


def judged(folder: Path, files: tuple[Path, Path]) -> int:
    """Runs the command twice and compares what it took with what is promised."""
    held = sum(file.stat().st_size for file in files)
    say(f"files {held / 1e6:.1f} MB")
    page = folder / "report.html"
    plain = measured(*map(str, files))
    drawn = measured(*map(str, files), "--html", str(page))
    size = page.stat().st_size
    say(f"command   {plain}")
    say(f"with page {drawn}, page {size / 1e6:.2f} MB")
    broken = plain.seconds > SECONDS or drawn.seconds > SECONDS + PAGE_SECONDS or size > PAGE
    broken = broken or max(plain.memory, drawn.memory) > MEMORY
    say("a promise is broken" if broken else "within what is promised")
    return int(broken)


def measured(*words: str) -> Cost:
    """What `verify onpolicy WORDS` takes; ends this command unless the verdict is UNVERIFIED, as
    for noise without a bound."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "verify", "onpolicy", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shown = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)  # of this process alone, unlike RUSAGE_CHILDREN
    seconds = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    process.returncode = code
    if code != UNVERIFIED:
        sys.exit(f"exit code {code}, not {UNVERIFIED}\n{shown}")
    return Cost(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
