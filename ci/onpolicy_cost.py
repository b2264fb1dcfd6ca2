"""Prints what `verify.onpolicy.measure_logprobs` costs, beside a plain mean |d| in numpy.

python ci/onpolicy_cost.py [TOKENS ...]: median core time of many calls, float32 in, with a mask
and samples of 500 tokens. The promise is under 1 ms per 10,000 tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from verify.onpolicy import measure_logprobs

SAMPLE, BUDGET_MS, SECONDS = 500, 1.0, 1.0


def median_ms(call: Callable[[], object]) -> float:
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 5:
        start = time.thread_time()  # of this core: neighbours do not count
        call()
        times.append(1000 * (time.thread_time() - start))
    return statistics.median(times)


def main() -> int:
    over = False
    for tokens in [int(one) for one in sys.argv[1:]] or [1_000, 10_000, 100_000, 1_000_000]:
        rng = np.random.default_rng(tokens)
        rollout = -rng.exponential(1.0, tokens).astype(np.float32)
        trainer = rollout + rng.normal(0, 0.01, tokens).astype(np.float32)
        mask = rng.random(tokens) < 0.95
        starts = np.minimum(np.arange(-(-tokens // SAMPLE) + 1) * SAMPLE, tokens)
        ours = median_ms(lambda: measure_logprobs(trainer, rollout, mask, starts))  # noqa: B023
        plain = median_ms(lambda: float(np.mean(np.abs(trainer - rollout)[mask])))  # noqa: B023
        per = ours * 10_000 / tokens
        over |= per > BUDGET_MS and tokens >= 10_000
        print(  # noqa: T201
            f"{tokens} tokens: measure_logprobs {ours:.3f} ms ({per:.3f} ms per 10,000),"
            f" mean |d| alone {plain:.3f} ms, ratio {ours / plain:.1f}"
        )
    return int(over)


if __name__ == "__main__":
    raise SystemExit(main())
