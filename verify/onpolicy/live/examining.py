"""From a model to a verdict: sample, score, score again in other company, locate, judge.

The pair of sampler and trainer goes through the doctor as if it came from files; so does each
layout against the sequence alone. What differs is located, and computed again in float64 to tell
rounding from another computation. A layout that could not be made is no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from verify.errors import UnsupportedError
from verify.onpolicy.analysing import Analysis, analyse_dumps
from verify.onpolicy.gates import Gate
from verify.onpolicy.live import choices, layouts, rowwise, sampling, widening
from verify.onpolicy.live.calling import Convention, convention
from verify.onpolicy.live.capturing import Seen
from verify.onpolicy.live.conditions import Condition, ModelReport, Request
from verify.onpolicy.live.judging import Judged, informed, judge
from verify.onpolicy.live.layouts import DECODE, LAYOUTS, Layout, Setting
from verify.onpolicy.live.locating import Parted, first_difference
from verify.onpolicy.live.models import Live, promises_equal_rows
from verify.onpolicy.live.rowwise import RowWise
from verify.onpolicy.live.scoring import Scored, score
from verify.onpolicy.live.sequences import Sampled
from verify.onpolicy.live.widening import Wide
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Place, Sample, Series

FORMAT = "model"


@dataclass(frozen=True, eq=False)
class Examined:
    """The doctor's analysis of sampler and trainer, whose verdict covers all conditions; the
    report; and the two sides as dumps."""

    analysis: Analysis
    report: ModelReport
    trainer: Dump
    rollout: Dump


def examine(
    live: Live,
    request: Request,
    *,
    gates: Sequence[Gate] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Examined:
    """Samples with a cache, scores in one pass, and compares every layout with that.

    gates: bounds on each of these pairs. Raises UnsupportedError for a model that cannot be called
    or sampled.
    """
    how = convention(live.model)
    setting = Setting(request.chunk, live.pad)
    progress("sampling with a cache")
    prompts = sampling.prompts(live, request.samples, request.seed)
    samples, sampled = sampling.sample(live, how, prompts, request.tokens, request.seed)
    progress("scoring in one pass")
    base = score(live.model, how, layouts.alone(samples, how, setting), samples)
    trainer = _dump(live, TRAINER, samples, base)
    rollout = _dump(live, ROLLOUT, samples, sampled)
    assert base.seen is not None
    looked = _Against(live, base.seen)
    main = analyse_dumps(trainer, rollout, gates=gates)
    ran = [looked.at(DECODE, sampled, main)]
    made: dict[str, Layout] = {DECODE: layouts.decode(samples, how, setting)}
    del sampled  # of each layout the rows are dropped when they were compared
    for name in request.layouts:
        progress(f"scoring: {name}")
        try:
            made[name] = LAYOUTS[name](samples, how, setting)
            found = score(live.model, how, made[name], samples)
        except UnsupportedError as error:
            ran.append(_Ran(name, None, problem=str(error)))
            continue
        other = _dump(live, ROLLOUT, samples, found, made[name].padding)
        ran.append(looked.at(name, found, analyse_dumps(trainer, other, gates=gates)))
    differ = [one.name for one in ran if one.differing]
    notes: list[str] = []
    finite = {one.name for one in ran if one.finite}
    wide = _wide(live, how, samples, {name: made[name] for name in differ}, finite, notes, progress)
    judged = [
        Judged(one.name, one.analysis, wide.get(one.name), one.problem, one.broken) for one in ran
    ]
    conditions = tuple(_condition(*both) for both in zip(judged, ran, strict=True))
    whole = replace(main, verdict=judge(main, judged), causes=informed(main, judged))
    report = ModelReport(live.facts(), request, conditions, tuple(notes))
    return Examined(whole, report, trainer, rollout)


@dataclass(frozen=True, eq=False)
class _Ran:
    """What is kept of a layout: its analysis, where it parted, and what its modules did."""

    name: str
    analysis: Analysis | None
    parted: Parted | None = None
    rows: tuple[RowWise, ...] = ()
    problem: str = ""
    broken: str = ""

    @property
    def differing(self) -> int:
        """Tokens."""
        if self.analysis is None:
            return 0
        return int(self.analysis.numbers.figures["differing_tokens"] or 0)

    @property
    def finite(self) -> bool:
        """Whether every log-probability is a number, on both sides."""
        if self.analysis is None:
            return False
        figures = self.analysis.numbers.figures
        return figures["finite_tokens"] == figures["compared_tokens"]


class _Against:
    """Compares layouts with the sequence alone."""

    def __init__(self, live: Live, base: Seen) -> None:
        self._base = base
        self._leaves = rowwise.leaves(live.model)
        self._experts = {one.module for one in choices.choices(base)}
        self._chosen = choices.events(base)
        self._promised = promises_equal_rows(live.model)

    def at(self, name: str, found: Scored, analysis: Analysis) -> _Ran:
        """What there is to know of one layout."""
        assert found.seen is not None
        parted = first_difference(self._base, found.seen, chosen=self._chosen)
        rows = tuple(rowwise.by_type(self._base, found.seen, self._leaves, self._experts))
        broken = next((one for one in rows if self._promised and one.experts and one.other), None)
        what = ""
        if broken is not None:
            what = (
                f"{broken.first} ({broken.type}): other bits for equal inputs at {broken.other} of "
                f"{broken.rows} places"
            )
        return _Ran(name, analysis, parted, rows, broken=what)


def _condition(one: Judged, ran: _Ran) -> Condition:
    reasons = tuple(dict.fromkeys(each.reason for each in one.findings()))
    if one.analysis is None:
        return Condition(one.name, one.verdict(), reasons, problem=one.problem)
    figures = one.analysis.numbers.figures
    return Condition(
        one.name,
        one.verdict(),
        reasons,
        int(figures["compared_tokens"] or 0),
        ran.differing,
        figures["abs_max"],
        ran.parted,
        ran.rows,
        one.wide,
    )


def _wide(
    live: Live,
    how: Convention,
    samples: Sequence[Sampled],
    differ: Mapping[str, Layout],
    finite: Collection[str],
    notes: list[str],
    progress: Callable[[str], None],
) -> dict[str, Wide]:
    """What float64 says of the layouts that differ. finite: those of numbers alone."""
    if not differ:
        return {}
    progress("computing again in float64")
    setting = Setting(1, live.pad)
    alone = layouts.alone(samples, how, setting)
    try:
        copy = widening.widened(live.model)
        reference = _in_copy(copy, how, alone, samples, notes)
    except UnsupportedError as error:
        problem = str(error)
        return {name: Wide(None, None, problem) for name in differ}
    assert reference.seen is not None
    chosen = choices.events(reference.seen)
    found = {}
    for name, layout in differ.items():
        try:
            other = score(copy, how, layout, samples, mend=name in finite)
        except UnsupportedError as error:
            found[name] = Wide(None, None, str(error))
            continue
        found[name] = widening.compared(reference, other, chosen, finite=name in finite)
    return found


def _in_copy(
    copy: nn.Module,
    how: Convention,
    alone: Layout,
    samples: Sequence[Sampled],
    notes: list[str],
) -> Scored:
    """The reference in float64; with transformers' own experts where others refuse that dtype."""
    try:
        return score(copy, how, alone, samples)
    except UnsupportedError:
        replaced = widening.plain_experts(copy)
        if not replaced:
            raise
        found = score(copy, how, alone, samples)
        notes.append(f"in float64 experts were computed by transformers, not by {replaced}")
        return found


def _dump(
    live: Live,
    side: str,
    samples: Sequence[Sampled],
    scored: Scored,
    padding: Sequence[int] = (),
) -> Dump:
    assert scored.seen is not None
    records = choices.routing(scored.seen, samples)
    held = []
    for number, (one, values) in enumerate(zip(samples, scored.values, strict=True)):
        meta: dict[str, Any] = {"finish_reason": "stop" if one.stopped else "length"}
        if padding:
            meta["padding"] = padding[number]
        held.append(
            Sample(
                key=str(number),
                place=Place(live.name, f"sample {number}, {scored.layout}"),
                prompt=np.array(one.prompt, dtype=np.int64),
                tokens=np.array(one.response, dtype=np.int64),
                series={
                    side: Series(
                        values.astype(np.float64), np.zeros(len(values), dtype=np.bool_), "float32"
                    )
                },
                routing={} if records is None else {side: records[number]},
                meta=meta,
            )
        )
    config: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "vocab_size": live.vocabulary}
    what = "sampled with a cache" if scored.layout == DECODE else f"scored {scored.layout}"
    return Dump(FORMAT, (f"{live.name}, {what}",), tuple(held), config=config)
