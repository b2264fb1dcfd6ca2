"""Checks what a record says of its own lengths and sums against what it holds.

A stated length, a sum and the rows of a routing record are no log-probabilities: a fault in them
does not keep tokens from being compared, and is a fault all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.samples import ROLLOUT, SIDES, TRAINER, Sample, Series

Fault = tuple[str, str]
FEWEST = 5  # values, below which nothing is said of which end fits
MOST_TRIED = 64
_HALF_ULP = 2.0**-24  # of float32, in which samplers add


def check_lengths(
    trainer: Sample,
    rollout: Sample,
    series: Mapping[str, Series | None],
    masks: Mapping[str, NDArray[np.bool_] | None],
) -> list[Fault]:
    """Faults in stated lengths, the sampler's sum and routing rows of both sides."""
    faults: dict[Fault, None] = {}  # one record may be both sides
    for side, record in ((TRAINER, trainer), (ROLLOUT, rollout)):
        if not record.meta and not record.routing:
            continue
        values = series[side]
        length = 0 if values is None else len(values.values)
        for fault in (
            _response(record, length, masks[side]),
            _prompt(record),
            _cumulative(record, values) if side == ROLLOUT else None,
            *(_rows(record, of, length) for of in SIDES if of in record.routing),
        ):
            if fault:
                faults[fault] = None
    return list(faults)


def fitting_ends(trainer: NDArray[np.float64], rollout: NDArray[np.float64]) -> str:
    """Which end of the longer list seems to be the surplus: mean |d| for each, or "" if too short.

    Values are not scored so; the sentence is for whoever mends the dump.
    """
    short, long = sorted((trainer, rollout), key=len)
    gap = len(long) - len(short)
    if not gap or len(short) < FEWEST or gap > MOST_TRIED:
        return ""
    owner = "trainer" if long is trainer else "rollout"
    means: list[tuple[float, int]] = []
    for first in range(gap + 1):
        with np.errstate(invalid="ignore"):
            apart = np.abs(long[first : first + len(short)] - short)
        apart = apart[np.isfinite(apart)]
        if apart.size >= FEWEST:
            means.append((float(np.mean(apart)), first))
    if len(means) < 2:
        return ""
    means.sort()
    return "; ".join(
        f"the {owner}'s list without its {_ends(first, gap - first)} leaves mean |d| {mean:.3g}"
        + (f" (n={len(short)})" if place == 0 else "")
        for place, (mean, first) in enumerate(means[:2])
    )


def _ends(first: int, last: int) -> str:
    return " and ".join(
        f"{name} {count}" if count > 1 else name
        for name, count in (("first", first), ("last", last))
        if count
    )


def _response(record: Sample, length: int, mask: NDArray[np.bool_] | None) -> Fault | None:
    stated = _whole(record.meta.get("response_length"))
    if stated is None or stated == length:
        return None
    if mask is None:
        return ("response-length", f"response_length {stated}, but {length} tokens")
    if stated == (summed := int(mask.sum())):
        return None
    counted = np.flatnonzero(mask)
    span = int(counted[-1] - counted[0]) + 1 if counted.size else 0
    spans = " (the span from the first to the last token that counts)" if stated == span else ""
    return (
        "response-length",
        f"response_length {stated} != mask sum {summed}{spans}; {length} tokens in all",
    )


def _prompt(record: Sample) -> Fault | None:
    stated = _whole(record.meta.get("prompt_length"))
    if stated is None or record.prompt is None:
        return None
    held, padding = len(record.prompt), _whole(record.meta.get("padding")) or 0
    if stated in (held, held + padding, held - padding):
        return None
    return (
        "prompt-length",
        f"prompt_length {stated}, but {held} tokens, of them or besides {padding} of padding",
    )


def _cumulative(record: Sample, series: Series | None) -> Fault | None:
    """The sum, to what adding n values in float32 can lose: n half ulps of the sum of sizes."""
    stated = record.meta.get("cumulative_logprob")
    if series is None or isinstance(stated, bool) or not isinstance(stated, int | float):
        return None
    summed = float(np.sum(series.values))
    if not np.isfinite(summed) or not np.isfinite(stated):
        return None
    size = float(np.sum(np.abs(series.values)))
    if abs(stated - summed) <= (len(series.values) + 1) * _HALF_ULP * max(size, abs(stated)):
        return None
    return (
        "cumulative",
        f"cumulative_logprob {stated:.9g}, but the {len(series.values)} values add up to"
        f" {summed:.9g}",
    )


def _rows(record: Sample, of: str, length: int) -> Fault | None:
    """One row per forwarded token: all of prompt and response, or all but the last."""
    routing = record.routing[of]
    rows = len(routing.experts)
    if record.prompt is None:
        total, allowed = length, {length, length - 1}
        if rows >= length - 1 and routing.start < 0:
            return None  # the prompt's rows may be among them; how many is not known
        if routing.start >= 0:
            return None
    else:
        total = len(record.prompt) + length
        first = max(routing.start, 0)
        allowed = {total - first, total - first - 1}
        if routing.start < 0:
            allowed |= {length, length - 1}
    if rows in allowed or total == 0:
        return None
    return (
        "routing-rows",
        f"routing of the {of}: expected n-1 = {total - 1 - max(routing.start, 0)} rows for"
        f" {total} tokens"
        + (f" from position {routing.start}" if routing.start > 0 else "")
        + f", got {rows}",
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
