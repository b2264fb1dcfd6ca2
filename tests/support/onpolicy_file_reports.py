"""Reports about what files write for log-probabilities (BUG-48 to BUG-52, and controls).

As in onpolicy_reports: `FAULTS` must be found with the right cause first, `TWINS` stay silent.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from onpolicy_cases import (
    RAW,
    Drawn,
    Files,
    drawn,
    lines,
    log_softmax,
    noisy,
    single,
    two,
)
from onpolicy_tables import Report, Twin


def replaced(value: Any, places: int, masked_out: bool = False, as_text: bool = False) -> Files:
    """`places` of the sampler's values are something else; or they are, and do not count."""
    samples = drawn(48, RAW)
    values = samples.values(RAW)
    rng = np.random.default_rng(48)
    every = [(at, place) for at in range(16) for place in range(40)]
    changed = {every[one] for one in rng.choice(len(every), places, replace=False)}
    broken: list[list[Any]] = [
        [value if (at, place) in changed else one for place, one in enumerate(own)]
        for at, own in enumerate(values)
    ]
    more: dict[str, Any] = {}
    if masked_out:
        more["mask"] = lambda at: [int((at, place) not in changed) for place in range(40)]
    return Files(
        lines(samples, None, noisy(values, 1e-4), **more), lines(samples, broken, None, **more)
    )


def duplicate_names() -> Files:
    samples = drawn(48, RAW, count=4)
    values = samples.values(RAW)
    text = [json.dumps(one) for one in lines(samples, values, None)]
    text[1] = text[1][:-1] + ', "sampler_logprobs": [-1.0]}'
    return Files(lines(samples, None, values), text)


def synthetic_end(fault: bool) -> Files:
    """Every other sample ends with EOS, which was sampled at 1 %, and appended with 0.0."""
    samples, values = ended()
    theirs = [list(one) for one in values]
    for at in range(0, 16, 2):
        theirs[at][-1] = 0.0 if fault else theirs[at][-1]
    return two(samples, theirs, noisy(values, 1e-4), meta=ends)


def ends(at: int) -> dict[str, Any]:
    return {"finish_reason": "length" if at % 2 else "stop", "eos_token_ids": [2, 3]}


def ended() -> tuple[Drawn, list[list[float]]]:
    samples = drawn(49, RAW)
    responses = [[*one[:-1], 2] if at % 2 == 0 else one for at, one in enumerate(samples.responses)]
    samples = Drawn(samples.prompts, tuple(responses), samples.logits)
    values = samples.values(RAW)
    for at in range(0, 16, 2):
        values[at][-1] = single([-4.6 - 0.1 * at])[0]
    return samples, values


def end_lacking() -> Files:
    samples, values = ended()
    trainer = lines(samples, None, values, meta=ends)
    sampler = lines(samples, values, None, meta=ends)
    for line in sampler[::2]:
        line["response_ids"] = line["response_ids"][:-1]
        line["sampler_logprobs"] = line["sampler_logprobs"][:-1]
    return Files(trainer, sampler)


def zero_filled(where: str, level: float = 1e-4) -> Files:
    """Three values lack in every third sample, and zeros were put there to fit."""
    samples = drawn(50, RAW)
    values = samples.values(RAW)
    theirs = []
    for at, one in enumerate(values):
        if where == "whole":
            theirs.append([0.0] * len(one) if at == 5 else one)
        elif at % 3:
            theirs.append(one)
        else:
            front = one[3:] if where == "front" else one[:-3]
            theirs.append([*one[:-3], 0.0, 0.0, 0.0] if where == "end" else [0.0] * 3 + front)
    if where == "nowhere":
        theirs = values
    return two(samples, theirs, noisy(values, level))


def too_few() -> Files:
    samples = drawn(50, RAW, length=12, count=4)
    values = samples.values(RAW)
    return two(samples, [one[:9] for one in values], values)


def truly_certain() -> Files:
    """Exactly 0.0 where the trainer says -1e-7, now and then."""
    samples = drawn(50, RAW)
    ours, theirs = noisy(samples.values(RAW), 1e-4), samples.values(RAW)
    for at in range(16):
        for place in (3 + at, 20):
            ours[at][place], theirs[at][place] = single([-1e-7])[0], 0.0
    return two(samples, theirs, ours)


def tops(samples: Drawn, number: int = 5) -> list[list[dict[str, float]]]:
    """The best alternatives, and not the sampled token."""
    found = []
    for logits in samples.logits:
        rows = []
        for row in logits:
            values = single(log_softmax(row))
            rows.append({str(one): values[one] for one in np.argsort(-row)[:number]})
        found.append(rows)
    return found


def first_of_the_list() -> Files:
    """The top-1 alternative was taken for the sampled token's value."""
    samples = drawn(51, RAW)
    best = tops(samples)
    wrong = [[max(row.values()) for row in rows] for rows in best]
    return Files(
        lines(samples, None, noisy(samples.values(RAW), 1e-4)),
        lines(samples, wrong, None, sampler_top=lambda at: best[at]),
    )


def sampled_value_kept() -> Files:
    samples = drawn(51, RAW)
    values, best = samples.values(RAW), tops(samples)
    for rows, ids, own in zip(best, samples.responses, values, strict=True):
        for row, token, value in zip(rows, ids, own, strict=True):
            row[str(token)] = value
    return Files(
        lines(samples, None, noisy(values, 1e-4)),
        lines(samples, values, None, sampler_top=lambda at: best[at]),
    )


def alternatives_only() -> Files:
    samples = drawn(51, RAW)
    best = tops(samples)
    return Files(
        lines(samples, None, samples.values(RAW)),
        lines(samples, None, None, sampler_top=lambda at: best[at]),
    )


def keyed_by_text() -> Files:
    """An OpenAI answer whose alternatives are texts: two ids of one text are one entry."""
    entry = {
        "token": "true",
        "logprob": -5.1,
        "bytes": None,
        "top_logprobs": [
            {"token": "true", "logprob": -0.2, "bytes": None},
            {"token": "false", "logprob": -1.6, "bytes": None},
        ],
    }
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "true"},
        "logprobs": {"content": [entry]},
    }
    answer = {"id": "a", "object": "chat.completion", "model": "m", "choices": [choice]}
    line = {"id": "a", "prompt_ids": [1], "response_ids": [3009], "trainer_logprobs": [-5.1]}
    return Files([line], [answer])


def lists(what: str) -> Files:
    samples = drawn(52, RAW, count=4, length=9)
    values = samples.values(RAW)
    given: list[list[Any]] = [list(one) for one in values]
    more: dict[str, Any] = {}
    prompts = [[-2.5] * len(prompt) for prompt in samples.prompts]
    if what == "stop":
        given = [[*one, -0.25] for one in given]
    elif what == "prompt":
        given = [[None, *p[1:], *one] for p, one in zip(prompts, given, strict=True)]
    elif what == "cached":
        given = [[*p, *one] for p, one in zip(prompts, given, strict=True)]
    elif what in ("sum", "other sum"):
        extra = -0.75 if what == "other sum" else 0.0
        sums = [float(np.sum(one)) + extra for one in values]
        more["meta"] = lambda at: {"cumulative_logprob": sums[at]}
    return Files(lines(samples, None, values), lines(samples, given, None, **more))


def two_versions() -> Files:
    """A partial rollout: the first half by older weights, and both versions recorded."""
    samples = drawn(9, RAW)
    values = samples.values(RAW)
    ours = noisy(values, 1e-3)
    older = noisy(values, 0.05, seed=2)
    half = [[*old[:20], *new[20:]] for old, new in zip(older, ours, strict=True)]
    versions = ["6"] * 20 + ["7"] * 20
    return Files(
        lines(samples, None, half, meta={"trainer_version": "7"}),
        lines(samples, values, None, meta={"rollout_version": versions}),
    )


SENTINEL = ("sentinel",)


FAULTS = (
    Report(
        "BUG-48", "NaN", lambda: replaced(math.nan, 3), first=SENTINEL, says=(r"non-finite", r"nan")
    ),
    Report(
        "BUG-48",
        "null",
        lambda: replaced(None, 3),
        says=(r"missing-values.* 3 of the rollout",),
        verdict="UNVERIFIED",
    ),
    Report("BUG-48", "-Infinity", lambda: replaced(-math.inf, 3), first=SENTINEL),
    Report("BUG-48", '"-inf"', lambda: replaced("-inf", 3), first=SENTINEL),
    Report("BUG-48", "-100.0", lambda: replaced(-100.0, 31), first=SENTINEL, says=(r"-100\b",)),
    Report("BUG-48", "-9999.0", lambda: replaced(-9999.0, 5), first=SENTINEL, says=(r"-9999",)),
    Report(
        "BUG-48",
        "a name twice",
        duplicate_names,
        says=(r"line 2.*sampler_logprobs.*(twice|again|more than once|duplicate)",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-49",
        "0.0 for EOS",
        lambda: synthetic_end(True),
        first=SENTINEL,
        says=(r"8 of 8 'stop'", r"0 of 8 'length'"),
    ),
    Report(
        "BUG-49",
        "EOS on one side",
        end_lacking,
        first=("other-tokens",),
        misaligned=("end-token",),
        says=(r"trainer has 1 token more, id 2 = EOS",),
    ),
    Report(
        "BUG-50", "behind", lambda: zero_filled("end"), first=SENTINEL, says=(r"runs at the end",)
    ),
    Report(
        "BUG-50", "in front", lambda: zero_filled("front"), first=SENTINEL, says=(r"beginning",)
    ),
    Report(
        "BUG-50",
        "in front, but they lack behind",
        lambda: zero_filled("front, moved"),
        first=("shift", "sentinel"),
        also=("shift", "sentinel"),
    ),
    Report(
        "BUG-50",
        "a whole sample",
        lambda: zero_filled("whole"),
        first=SENTINEL,
        says=(r"sample 5",),
    ),
    Report("BUG-50", "raw lengths", too_few, misaligned=("length",), says=(r"3 too few",)),
    Report(
        "BUG-51",
        "top-1 in place of the sampled token",
        first_of_the_list,
        first=("other-tokens", "sentinel"),
        says=(r"(?i)top-1|best alternative|largest|maximum|highest",),
    ),
    Report(
        "BUG-51",
        "alternatives only",
        alternatives_only,
        misaligned=("no-logprobs",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-51",
        "alternatives keyed by text",
        keyed_by_text,
        misaligned=("no-token-ids",),
        verdict="UNVERIFIED",
    ),
    Report(
        "BUG-52",
        "a stop token's value too many",
        lambda: lists("stop"),
        misaligned=("length",),
        says=(r"ids 9, log-probabilities 10",),
    ),
    Report(
        "BUG-52",
        "prompt's values moved by a cached prefix",
        lambda: lists("cached"),
        misaligned=("prompt-included",),
    ),
    Report("BUG-52", "another sum", lambda: lists("other sum"), misaligned=("cumulative",)),
)
TWINS = (
    Twin("BUG-48", "NaN, masked", lambda: replaced(math.nan, 3, masked_out=True)),
    Twin("BUG-48", "null, masked", lambda: replaced(None, 3, masked_out=True)),
    Twin("BUG-48", "-inf, masked", lambda: replaced(-math.inf, 3, masked_out=True)),
    Twin("BUG-48", "-100, masked", lambda: replaced(-100.0, 31, masked_out=True)),
    Twin("BUG-49", "EOS as sampled", lambda: synthetic_end(False)),
    Twin("BUG-50", "all there", lambda: zero_filled("nowhere")),
    Twin("control-5", "certain tokens", truly_certain),
    Twin("BUG-51", "the sampled token's own value", sampled_value_kept),
    Twin("BUG-52", "prompt included", lambda: lists("prompt"), says=(r"prompt and response",)),
    Twin("BUG-52", "the sum", lambda: lists("sum")),
    Twin(
        "control-9",
        "two versions, both recorded",
        two_versions,
        claims=("numeric-drift", "stale-weights"),
    ),
)
