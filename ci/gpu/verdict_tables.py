"""Tables of what holds bit for bit: tests, verify, peers, planted faults, sanitizer.

For docs/measured.md; `verified` is the short one for README.

Each takes the evidence of its part, one file for each number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from table_grids import grid  # beside this file

Json = Mapping[str, Any]


def tests(own: Sequence[Json]) -> str:
    """How many tests passed, failed and were skipped: a line for each number of GPUs."""
    rows = []
    for one in own:
        steps = [step for step in one["results"].values() if "passed" in step]
        passed = sum(step["passed"] for step in steps)
        failed = sum(len(step["failed"]) for step in steps)
        skipped = sum(step["skipped"] for step in steps)
        rows.append([one["ranks"], passed, failed, skipped, one["seconds"]])
    return grid(rows, ["GPUs", "passed", "failed", "skipped", "seconds"])


def layer(own: Sequence[Json]) -> str:
    """`verify run moe` on GPUs: a line for each case and number of ranks."""
    rows = []
    for one in own:
        for step in one["results"].values():
            for case in step.get("cases", ()):
                rows.append([case["case"], _ranks(case, one), _claims(case), *_counts(case)])
    return grid(rows, ["case", "ranks", "claims", "executions", "differing", "verdict"])


def verified(own: Sequence[Json]) -> str:
    """The same in short: a line for each group of cases that have a name's beginning and all their
    claims in common. A case on two numbers of ranks counts twice."""
    groups: dict[tuple[str, str], list[tuple[str, Json]]] = {}
    for one in own:
        for step in one["results"].values():
            for case in step.get("cases", ()):
                claims = ", ".join(claim["claim"] for claim in case["claims"])
                folder, slash, name = case["case"].rpartition("/")
                key = (f"{folder}{slash}{name.partition('-')[0]}", claims)
                groups.setdefault(key, []).append((_ranks(case, one), case))
    rows = []
    for (_, claims), some in groups.items():
        cases = [case for _, case in some]
        counts = [_counts(case) for case in cases]
        rows.append(
            [
                _common_name([case["case"] for case in cases]),
                "; ".join(dict.fromkeys(ranks for ranks, _ in some)),
                claims,
                len(cases),
                sum(executions for executions, _, _ in counts),
                sum(differing for _, differing, _ in counts),
                _common_verdict(cases),
            ]
        )
    headers = ["cases", "ranks", "claims", "number", "executions", "differing", "verdict"]
    return grid(rows, headers)


def _common_name(names: Sequence[str]) -> str:
    """`moe/exact-*` for cases whose names begin so; all names where nothing is left of them."""
    distinct = list(dict.fromkeys(names))
    columns = zip(*(name.split("-") for name in distinct), strict=False)
    begin = "-".join(some[0] for some in takewhile(lambda some: len(set(some)) == 1, columns))
    shared = len(distinct) > 1 and all(name.startswith(f"{begin}-") for name in distinct)
    return f"{begin}-*" if shared else ", ".join(distinct)


def _common_verdict(cases: Sequence[Json]) -> str:
    """VERIFIED where every case and every claim is; otherwise how many are something else."""
    others: dict[str, int] = {}
    for case in cases:
        verdicts = [case["verdict"], *(claim["verdict"] for claim in case["claims"])]
        other = next((one for one in verdicts if one != "VERIFIED"), None)
        if other is not None:
            others[other] = others.get(other, 0) + 1
    told = [f"{other}: {count} of {len(cases)}" for other, count in others.items()]
    return ", ".join(told) or "VERIFIED"


def _ranks(case: Json, one: Json) -> str:
    shared = case["ranks"] > 1 and case["ranks"] > one["environment"]["cuda"].get("visible", 0)
    return f"{case['ranks']}{' on one GPU' if shared else ''}"


def _claims(case: Json) -> str:
    found: dict[str, list[str]] = {}
    for claim in case["claims"]:
        found.setdefault(claim["verdict"], []).append(claim["claim"])
    if list(found) == ["VERIFIED"]:
        return ", ".join(found["VERIFIED"])
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in found.items())


def _counts(case: Json) -> tuple[int, int, str]:
    claims = case["claims"]
    executions = sum(claim["executions"] for claim in claims)
    return executions, sum(claim["differing"] for claim in claims), case["verdict"]


def peers(own: Sequence[Json]) -> str:
    """Which peers give the same bits again: a line for each case, and what differs."""
    rows = []
    for one in own:
        for called, step in one["results"].items():
            if "cases" not in step:  # it took too long: that row is not left out
                rows.append([called.removeprefix("peers-"), "-", step["status"], *["-"] * 4])
            for case in step.get("cases", ()):
                name = case["case"].rpartition("::")[2].removeprefix("peers/")
                rows.append([name, case["ranks"], case["verdict"], *_per_claim(case)])
    headers = ["peer and shape", "ranks", "verdict", "repeat", "process", "others", "what differs"]
    return grid(rows, headers)


def _per_claim(case: Json) -> list[str]:
    claims = {claim["claim"]: claim for claim in case["claims"]}
    others = [
        f"{name} {_differing(claim)}"
        for name, claim in claims.items()
        if name not in ("repeat", "process")
    ]
    first = [_differing(claims[name]) if name in claims else "-" for name in ("repeat", "process")]
    return [*first, "; ".join(others) or "-", _difference(case)]


def _differing(claim: Json) -> str:
    """Of a claim that compares bits, how many differed; of others the verdict and its reason."""
    reasons = list(dict.fromkeys(finding["reason"] for finding in claim["findings"]))
    if claim["verdict"] == "VERIFIED" or "bits-differ" in reasons:
        return f"{claim['differing']} of {claim['executions']}"
    return f"{claim['verdict']} ({', '.join(reasons)})"


def _difference(case: Json) -> str:
    tensors = [
        finding["tensor"]
        for claim in case["claims"]
        if claim["verdict"] == "MISMATCH"
        for finding in claim["findings"]
        if finding["tensor"]
    ]
    if tensors:
        return ", ".join(dict.fromkeys(tensors))
    details = [f["detail"] for claim in case["claims"] for f in claim["findings"]]
    return details[0][:120] if details and case["verdict"] != "VERIFIED" else "-"


def faults(own: Sequence[Json]) -> str:
    """Planted faults: in how many of how many runs each is seen, and by a plain check."""
    rows = []
    for one in own:
        for step in one["results"].values():
            for fault in step.get("document", {}).get("faults", ()):
                tally = fault["claims"].get(fault["claim"])
                plain, twin = fault["plain_check"], fault["twin"]
                rows.append(
                    [
                        fault["fault"],
                        fault["claim"],
                        "caught" if fault["caught"] else "MISSED",
                        _share(tally),
                        _share(fault["claims"].get("repeat")),
                        f"{plain['noticed']} of {plain['trials']}",
                        f"{twin['differing']} of {twin['executions']}"
                        + "".join(f"; {text}" for text in twin["not_verified"]),
                    ]
                )
    headers = ["planted fault", "claim", "", "differs there", "in repeat"]
    return grid(rows, [*headers, "plain check notices", "clean twin differs"])


def _share(tally: Json | None) -> str:
    if tally is None or not tally["executions"]:
        return "-"
    low, high = tally["interval_95"]
    return f"{tally['differing']} of {tally['executions']}, {100 * low:.1f} to {100 * high:.1f} %"


def sanitize(own: Sequence[Json]) -> str:
    """What compute-sanitizer said: a line for each tool and script."""
    rows = [
        [name, step["status"], step.get("said", "-")]
        for one in own
        for name, step in one["results"].items()
    ]
    return grid(rows, ["tool and script", "", "it says"])
