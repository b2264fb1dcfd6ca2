"""Does the on-policy doctor name the right cause first? N generated pairs, seeds drawn anew.

Prints the confusion matrix. Exit 1 if fewer than 90 % of the first names are right, or if anything
was claimed of a pair that has nothing wrong but noise. `--seed` repeats a run; `--wrong` shows how
every pair was made that was named wrongly.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one process per core; threads would fight
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import onpolicy_score as scoring
from onpolicy_generator import fresh_seed
from onpolicy_score import Outcome

ENOUGH = 0.9


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", type=int, help="how many pairs")
    parser.add_argument("--seed", type=int, help="repeats a run; drawn anew by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--wrong", action="store_true", help="show the pairs named wrongly")
    given = parser.parse_args(arguments)
    if given.pairs < 1 or given.jobs < 1:
        parser.error("pairs and --jobs must be at least 1")
    seed = fresh_seed() if given.seed is None else given.seed
    say(f"seed {seed}")
    start = time.perf_counter()
    outcomes = examined(scoring.seeds_and_kinds(given.pairs, seed), given.jobs)
    if given.wrong:
        for one in outcomes:
            if not one.right or one.claimed_on_clean:
                say(f"seed {one.seed} {one.kind!r}: {one.label} -> {one.claimed}: {one.truth}")
    say(scoring.summary(outcomes))
    say(f"{time.perf_counter() - start:.0f} seconds in all")
    return status(outcomes)


def examined(work: Sequence[tuple[int, str]], jobs: int) -> list[Outcome]:
    """What the doctor says of each pair, on `jobs` processes."""
    if jobs == 1:
        return [scoring.outcome(*one) for one in work]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return pool.starmap(scoring.outcome, work, chunksize=1)


def status(outcomes: Sequence[Outcome]) -> int:
    """0 where enough first names are right and nothing was claimed of a clean pair, else 1."""
    claimed = any(one.claimed_on_clean for one in outcomes)
    return 0 if scoring.share(outcomes) >= ENOUGH and not claimed else 1


if __name__ == "__main__":
    sys.exit(main())
