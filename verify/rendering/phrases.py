"""The sentences that every format shares: evidence with its bound, totals, one finding as a card.

They live in one place so that the terminal, the pull request and the test report never say
different things about the same claim. All of them are printable; none is escaped for a format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verify.reasons import REASONS
from verify.rendering.escaping import lines, printable
from verify.rendering.grouping import Group

Json = Mapping[str, Any]
SHOWN_LINES = 40
SHOWN_PLACES = 6
SHOWN_VARIANTS = 3


def totals(result: Json) -> str:
    """The line that ends every report: `verdict=VERIFIED 3 cases, 21 claims, ...`."""
    counts = result["totals"]
    parts = [
        number(counts["cases"], "case"),
        number(counts["claims"], "claim"),
        number(result["ranks"], "rank"),
        number(counts["executions"], "execution"),
    ]
    line = f"verdict={result['verdict']} {', '.join(parts)}"
    bad = [f"{counts[name]} {name}" for name in ("mismatch", "unverified") if counts[name]]
    if counts["claims"] == 0:
        bad.append("nothing was checked")
    controls = result["controls"]
    if controls["status"] == "failed":
        bad.append(f"controls failed: {', '.join(map(printable, controls['failed']))}")
    gate = result.get("gate") or {"findings": ()}
    found = dict.fromkeys(printable(finding["reason"]) for finding in gate["findings"])
    found.pop("control-failed", None)  # their names were given
    if found:
        bad.append(f"gate: {', '.join(found)}")
    return line + (f"; {', '.join(bad)}" if bad else "")


def number(count: int, noun: str) -> str:
    """`1 case`, `2 cases`, `3 tries`."""
    if count == 1:
        return f"{count} {noun}"
    ends_in_y = noun.endswith("y") and noun[-2:-1] not in "aeiou"
    return f"{count} {noun[:-1]}ies" if ends_in_y else f"{count} {noun}s"


def commit(environment: Json) -> str:
    """Which commit was checked, as the environment record says; "" when it does not."""
    source = environment.get("source")
    if not isinstance(source, Mapping) or not source.get("commit"):
        return ""
    dirty = ", with uncommitted changes" if source.get("dirty") else ""
    return f"commit {printable(source['commit'])[:12]}{dirty}"


def evidence(claim: Json) -> str:
    """What was executed, what differed, and what that does not exclude."""
    ranks = claim["ranks"]
    if claim["executions"] == 0:
        return "no executions"
    if claim["differing"] == 0:
        runs = number(claim["executions"], "run")
        everywhere = f" on each of {len(ranks)} ranks" if len(ranks) > 1 else ""
        said = f"0 of {runs}{everywhere} differed"
        if claim["measurements"]:
            said = f"measured in {runs}{everywhere}"
        if claim["bound"] is not None:
            share = percent(claim["bound"])
            said += f"; a fault rarer than {share} per run is not excluded"
        return said
    said = f"{claim['differing']} of {number(claim['executions'], 'run')} differed"
    if len(ranks) > 1:
        each = [f"rank {one['rank']}: {one['differing']}/{one['executions']}" for one in ranks]
        said += f" ({', '.join(each)})"
    if claim["rate"] is not None:
        estimate, low, high = claim["rate"]
        said += f"; rate {percent(estimate)} ({percent(low)} to {percent(high)} at 95 %)"
    return said


def changed(claim: Json) -> str:
    """What was varied, as the executions name it: `threads=1, threads=3`, few of them."""
    variants = list(dict.fromkeys(v for one in claim["ranks"] for v in one["variants"]))
    shown = ", ".join(printable(v) for v in variants[:SHOWN_VARIANTS])
    more = len(variants) - SHOWN_VARIANTS
    return shown + (f" and {more} more" if more > 0 else "")


def percent(share: float) -> str:
    """A share with three significant digits, so that a rare one is not printed as zero."""
    return f"{share * 100:.3g} %"


def ranks(claim: Json, expected: int) -> str:
    """The ranks that gave evidence: `0-3`, `0,2 of 4`."""
    seen = sorted({one["rank"] for one in claim["ranks"]})
    if not seen:
        return f"none of {expected}"
    runs: list[list[int]] = []
    for rank in seen:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(seen) >= expected else f"{text} of {expected}"


def state(claim: Json) -> str:
    """`verdict=VERIFIED`, or `verdict=UNVERIFIED (missing-rank)`."""
    reasons = list(dict.fromkeys(printable(one["reason"]) for one in claim["findings"]))
    return f"verdict={claim['verdict']}" + (f" ({', '.join(reasons)})" if reasons else "")


def headline(case: Json, claims: str, finding: Json | None, verdict: str = "") -> str:
    """The first line of a card: verdict, case, claims and reason."""
    verdict = finding["verdict"] if finding else verdict
    line = f"verdict={verdict} {printable(case['case'])} / {claims}"
    if finding is None:
        return line
    known = REASONS.get(finding["reason"])
    meaning = f": {known.meaning}" if known else ""
    return f"{line}: {printable(finding['reason'])}{meaning}"


def remedy(finding: Json, claims: Sequence[Json]) -> str:
    """What to do; where that is storing a golden, with the whole command of the claim."""
    known = REASONS.get(finding["reason"])
    text = known.remedy if known else ""
    head, command, _ = text.partition("verify golden update")
    stored = next((claim["update"] for claim in claims if claim.get("update")), None)
    return f"{head}{printable(stored)}" if command and stored else text


def card(finding: Json, claims: Sequence[Json]) -> list[str]:
    """Where it was seen, the first difference, what the pattern suggests and what to do."""
    said = []
    seen = [f"{name} {value}" for name, value in places(finding)]
    if seen:
        said.append("where: " + ", ".join(seen))
    said += [f"| {line}" for line in [*detail(finding), *difference_lines(finding)]]
    said += [f"suggests: {text}" for text in suggestions(finding)]
    to_do = remedy(finding, claims)
    if to_do:
        said.append(f"to do: {to_do}")
    return said


def places(finding: Json) -> list[tuple[str, str]]:
    """What is known of where it was seen: pairs such as `("rank", "0")`."""
    return [
        (name, printable(finding[name]))
        for name in ("tensor", "rank", "run", "process", "variant")
        if finding[name] is not None and finding[name] != ""
    ]


def detail(finding: Json) -> list[str]:
    """The finding in its own words, at most SHOWN_LINES lines."""
    return _capped([finding["detail"]]) if finding["detail"] else []


def difference_lines(finding: Json) -> list[str]:
    """What was compared and the first difference, at most SHOWN_LINES lines."""
    return _capped(_texts((finding["difference"] or {}).get("lines")))


def suggestions(finding: Json) -> list[str]:
    """What the pattern of the difference suggests."""
    return [printable(text) for text in _texts((finding["difference"] or {}).get("suggests"))]


def again(group: Group) -> list[str]:
    """The other places of a finding, few of them by name."""
    places: dict[str, None] = {}
    for finding in group.others:
        seen = [
            f"{name} {printable(finding[name])}" if name != "variant" else printable(finding[name])
            for name in ("rank", "run", "process", "variant")
            if finding[name] is not None and finding[name] != ""
        ]
        places[", ".join(seen)] = None
    if not places:
        return []
    shown = list(places)[:SHOWN_PLACES]
    more = f"; and {len(places) - len(shown)} more" if len(places) > len(shown) else ""
    return [f"also: {'; '.join(shown)}{more}"]


def measured(claim: Json) -> list[str]:
    """What the float64 reference measured: the worst over all tensors, ranks and rows."""
    measurements = claim["measurements"]
    if not measurements:
        return []
    worst = max(measurements, key=lambda name: _size(measurements[name].get("worst_ratio", 0)))
    total = sum(values.get("numel", 0) for values in measurements.values())
    elsewhere = sum(values.get("rounded_elsewhere", 0) for values in measurements.values())
    forbidden = sum(values.get("forbidden", 0) for values in measurements.values())
    said = [
        f"{printable(claim['claim'])}: worst error / budget"
        f" {_value(measurements[worst].get('worst_ratio'))} ({printable(worst)});"
        f" {percent(elsewhere / total if total else 0)} of elements rounded otherwise near a"
        f" border, {forbidden} away from one"
    ]
    ratios = [
        _size(values["relative_l2"]) / _size(values["plain_relative_l2"])
        for values in measurements.values()
        if _size(values.get("plain_relative_l2", 0))
    ]
    if ratios:
        said.append(
            f"{printable(claim['claim'])}: error / error of a plain low-precision run"
            f" {min(ratios):.2f} to {max(ratios):.2f} over {number(len(ratios), 'tensor')}"
        )
    return said


def _size(value: Any) -> float:
    return float(value)


def left_out(claim: Json) -> list[str]:
    """One line per reason for which tensors were not compared."""
    by_reason: dict[str, list[str]] = {}
    for tensor, reason in claim["not_compared"].items():
        by_reason.setdefault(printable(reason), []).append(printable(tensor))
    return [
        f"{printable(claim['claim'])} did not compare {', '.join(tensors)}: {reason}"
        for reason, tensors in by_reason.items()
    ]


def timing(case: Json) -> str:
    """Seconds of the case itself and of digests and bookkeeping, with their share."""
    times = case["timings"]
    share = times["overhead_share"]
    said = (
        f"timings: case {times['case_seconds']:.3f} s, "
        f"digests and bookkeeping {times['overhead_seconds']:.3f} s"
        + (f" ({percent(share)} of the case)" if share is not None else "")
    )
    median = times.get("median")
    if median and median["case_seconds"] > 0:
        ratio = median["overhead_seconds"] / median["case_seconds"]
        said += (
            f"; median execution {1000 * median['case_seconds']:.1f} ms and"
            f" {1000 * median['overhead_seconds']:.1f} ms ({percent(ratio)})"
        )
    return said


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else printable(value)


def _texts(value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) else []


def _capped(told: Sequence[Any]) -> list[str]:
    """The first lines of some texts; those that are not shown are not escaped either."""
    content = [line for text in told for line in str(text).splitlines() or [""]]
    shown = [part for line in content[:SHOWN_LINES] for part in lines(line)]
    left = len(content) - SHOWN_LINES
    return [*shown, f"... {left} more lines in the result document"] if left > 0 else shown
