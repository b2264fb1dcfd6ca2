"""What the doctor found, for a terminal: the verdict first, then causes, numbers, and the rest.

Ids, file names and texts come from dumps: every line begins with a word of ours, and all of it is
printable. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tabulate import tabulate

from verify.onpolicy.analysing import Analysis
from verify.onpolicy.causes.table import CAUSES, UNKNOWN, Cause
from verify.onpolicy.formats.table import matrix
from verify.onpolicy.metrics import METRICS
from verify.onpolicy.numbers import Numbers, Spot
from verify.onpolicy.routing import RoutingCheck
from verify.onpolicy.routing_table import FAULTS
from verify.onpolicy.verdicts import Finding
from verify.reasons import Verdict
from verify.rendering.escaping import clipped, printable
from verify.rendering.phrases import number, percent

_SHOWN = 5
_LONGEST = 300
_NAME = 60
_SIZES = ("abs_mean", "abs_p50", "abs_p99", "abs_max", "share_beyond_ln2")
_KL = ("k1", "k2", "k3", "k3_reverse", "chi2_token", "ess_token")


def text(found: Analysis, *, metrics: bool = False) -> str:
    """The report. metrics: with the field's own names and formulas."""
    return "\n".join(
        [
            headline(found),
            *_sources(found),
            *_findings(found),
            *_causes(found.causes),
            *_numbers(found.numbers),
            *(_metrics(found) if metrics else ()),
            *(_routing(found.routing) if found.routing is not None else ()),
            *_gates(found),
            *_misaligned(found),
            *_rest(found),
        ]
    )


def headline(found: Analysis) -> str:
    """`verdict=MISMATCH 812 of 4,096 tokens differ in 32 samples (structural-cause); first cause:
    temperature`."""
    figures = found.numbers.figures
    differing, compared = figures["differing_tokens"] or 0, figures["compared_tokens"] or 0
    samples = number(int(figures["samples"] or 0), "sample")
    said = f"{differing:,} of {compared:,} tokens differ in {samples}"
    if found.verdict.findings:
        reasons = dict.fromkeys(one.reason for one in found.verdict.findings)
        said += f" ({', '.join(reasons)})"
    if (named := leading(found.causes)) is not None:
        unknown = f"the cause cannot be told from these files ({UNKNOWN})"
        said += f"; {unknown if named.name == UNKNOWN else f'first cause: {named.name}'}"
    return f"verdict={found.verdict.verdict} {said}"


def leading(causes: Sequence[Cause]) -> Cause | None:
    """The first cause if it is claimed, or if it is that the cause cannot be told."""
    first = causes[0] if causes else None
    return first if first is not None and (first.claimed or first.name == UNKNOWN) else None


def formats_text() -> str:
    """The matrix of formats and fields."""
    head, *rows = matrix()
    table = tabulate(
        [(row[0], _fields(head[1:], row[1:])) for row in rows],
        ("format", "what can be read of it"),
        tablefmt="simple",
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in table.splitlines())


def _fields(names: Sequence[str], held: Sequence[str]) -> str:
    given = [
        name if how == "yes" else f"{name} ({how})"
        for name, how in zip(names, held, strict=True)
        if how != "-"
    ]
    return ", ".join(given)


def _sources(found: Analysis) -> Iterator[str]:
    both = found.rollout is None
    path, form = found.trainer
    yield f"{'both sides' if both else 'trainer'}: {clipped(path, _LONGEST)} ({form})"
    if found.rollout is not None:
        yield f"rollout: {clipped(found.rollout[0], _LONGEST)} ({found.rollout[1]})"


def _findings(found: Analysis) -> Iterator[str]:
    shown = found.verdict.findings[: 2 * _SHOWN]
    told = {one.name for one in found.causes[:_SHOWN]}  # these say below what to do
    for one in shown:
        yield f"{reason(one)}: {clipped(one.what, _LONGEST)}"
        if one.reason != "structural-cause" or one.kind not in told:
            yield f"  to do: {clipped(one.remedy, 2 * _LONGEST)}"
    more = len(found.verdict.findings) - len(shown)
    if more > 0:
        yield f"and {number(more, 'finding')} more"


def reason(one: Finding) -> str:
    """`misaligned (other-tokens)`; the kind is left out where what was found begins with it."""
    named = not one.kind or one.what.startswith(one.kind)
    return one.reason if named else f"{one.reason} ({printable(one.kind)})"


def _causes(causes: Sequence[Cause]) -> Iterator[str]:
    for place, one in enumerate(causes[:_SHOWN], start=1):
        claim = "" if one.claimed or one.name == UNKNOWN else ", not claimed"
        where = f" in {clipped(one.where, _NAME)}" if one.where else ""
        share = f", {one.share}" if one.share else ""
        yield f"cause {place}: {one.name}{where}{share}{claim}: {CAUSES[one.name].meaning}"
        yield from (f"  for: {clipped(said, _LONGEST)}" for said in one.for_[: 2 * _SHOWN])
        yield from (f"  against: {clipped(said, _LONGEST)}" for said in one.against[: 2 * _SHOWN])
        yield f"  to do: {clipped(one.remedy, 2 * _LONGEST)}"
    more = len(causes) - _SHOWN
    if more > 0:
        yield f"and {number(more, 'cause')} more"


def _numbers(numbers: Numbers) -> Iterator[str]:
    figures = numbers.figures
    hidden = figures["masked_tokens"]
    yield (
        f"tokens: {figures['tokens']:,}, {hidden:,} hidden by the mask, "
        f"{figures['compared_tokens']:,} compared, {figures['differing_tokens'] or 0:,} differ"
    )
    for name, one in (("first", numbers.first), ("largest", numbers.largest)):
        if one is not None:
            yield f"{name}: {spot(one)}"
    for title, names in (("d", _SIZES), ("KL", _KL)):
        said = [f"{name} {value(figures[name])}" for name in names if name in figures]
        if figures["finite_tokens"]:
            yield f"{title}: {', '.join(said)}"
    odd = [
        f"{figures[name]:,} {name.partition('_')[0]} of the {name.partition('_')[2]}"
        for name in ("nan_trainer", "nan_rollout", "inf_trainer", "inf_rollout")
        if figures[name]
    ]
    if odd:
        yield f"not finite: {', '.join(odd)}"


def spot(one: Spot) -> str:
    """Where a token stands, and both its values."""
    token = f" token {one.token}" if one.token >= 0 else ""
    return (
        f"sample {clipped(one.key, _NAME)} position {one.position}{token}: trainer "
        f"{one.trainer:.9g}, rollout {one.rollout:.9g}, d {one.trainer - one.rollout:.4g}"
    )


def _metrics(found: Analysis) -> Iterator[str]:
    rows = [
        (METRICS[name].projects, name, value(measured), METRICS[name].formula)
        for name, measured in found.metrics.items()
    ]
    table = tabulate(
        rows, ("projects", "metric", "value", "formula"), tablefmt="simple", disable_numparse=True
    )
    yield from (line.rstrip() for line in table.splitlines())


def _routing(found: RoutingCheck) -> Iterator[str]:
    if found.layers:
        known = int((found.flips >= 0).sum())
        flipped = int((found.flips > 0).sum())
        share = "" if found.share is None else f", they carry {percent(found.share)} of |d|"
        yield (
            f"routing: {flipped:,} of {known:,} tokens chose other experts in at least one of "
            f"{number(len(found.layers), 'layer')}{share}"
        )
        rows = [
            (
                one.layer,
                f"{one.flipped:,} of {one.rows:,}",
                f"{one.overlap:.4f}",
                value(one.margin_flipped),
                value(one.margin_kept),
            )
            for one in sorted(found.layers, key=lambda one: one.overlap)[: 2 * _SHOWN]
        ]
        head = ("layer", "flipped", "overlap", "margin at a flip", "margin elsewhere")
        table = tabulate(rows, head, tablefmt="simple", disable_numparse=True)
        yield from (f"  {line.rstrip()}" for line in table.splitlines())
        yield f"  by chance experts overlap by {found.chance:.4f}"
    for fault in found.faults[:_SHOWN]:
        where = clipped(fault.where, _NAME)
        yield f"routing record: {fault.kind} in {where}: {clipped(fault.what, _LONGEST)}"
        yield f"  to do: {printable(FAULTS[fault.kind])}"
    if len(found.faults) > _SHOWN:
        yield f"routing record: {len(found.faults) - _SHOWN} more"


def _gates(found: Analysis) -> Iterator[str]:
    for one in found.verdict.outcomes:
        state = {True: "fired", False: "holds", None: "not measured"}[one.fired]
        yield f"gate: {printable(one.gate.text)}: {value(one.value)}, {state}"


def _misaligned(found: Analysis) -> Iterator[str]:
    shown = found.pairs.misalignments[:_SHOWN]
    for one in shown:
        place = f" ({clipped(one.places[0], _LONGEST)})" if one.places else ""
        yield (
            f"misaligned: sample {clipped(one.key, _NAME)}: {one.kind}: "
            f"{clipped(one.what, _LONGEST)}{place}"
        )
    more = len(found.pairs.misalignments) - len(shown)
    if more > 0:
        yield f"misaligned: {more:,} more"


def _rest(found: Analysis) -> Iterator[str]:
    for title, all_of in (("not read", found.pairs.problems), ("note", found.pairs.notes)):
        for one in all_of[:_SHOWN]:
            if isinstance(one, str):
                yield f"{title}: {clipped(one, _LONGEST)}"
            else:
                what = title if one.kind != "note" else "note"
                name = f", {one.field}" if one.field else ""
                yield f"{what}: {clipped(f'{one.place}{name}: {one.what}', _LONGEST)}"
        if len(all_of) > _SHOWN:
            yield f"{title}: {len(all_of) - _SHOWN:,} more"
    if found.verdict.verdict is Verdict.VERIFIED and not found.numbers.figures["differing_tokens"]:
        yield "all compared tokens have the same log-probability on both sides"


def value(measured: float | int | None) -> str:
    """A figure with four digits, a count with all of them, "-" for what was not measured."""
    if measured is None:
        return "-"
    if isinstance(measured, int) or (measured.is_integer() and 1e4 <= abs(measured) < 1e15):
        return f"{int(measured):,}"
    return f"{measured:.4g}"
