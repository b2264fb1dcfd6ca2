"""What differs between two result documents: digests of outputs, verdicts, and what explains them.

Reads documents only, so it works without torch and on results of other machines. It refuses to
compare digests of different schemes; it never says that other bits are expected, only which inputs
or settings differ as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from verify.listing import flatten

Json = Mapping[str, Any]


def result_entries(a: Json, b: Json) -> tuple[list[dict[str, Any]], list[str]]:
    """Entries as fields of `diffs.Entry`, and notes."""
    schemes = [one["tool"]["digest_scheme"] for one in (a, b)]
    if schemes[0] != schemes[1]:
        note = f"digest schemes differ ({schemes[0]}, {schemes[1]}): digests cannot be compared"
        return [], [note]
    left, right = _cases(a), _cases(b)
    entries: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in [*left, *(name for name in right if name not in left)]:
        if name not in left or name not in right:
            side = "A" if name in left else "B"
            entries.append(_entry(f"case {name}", equal=False, detail=f"only in {side}"))
            continue
        digests = list(_digests(name, left[name], right[name]))
        entries += digests or [_unsettled(f"case {name}", "no outputs in A and B: not compared")]
        entries += _unverified(name, left[name], right[name], digests)
        entries += _verdicts(name, left[name], right[name])
        notes += _givens(name, left[name], right[name])
    notes += _environment(a["environment"], b["environment"])
    if notes and entries:
        same = all(entry["equal"] for entry in entries if entry["compared"])
        if any(entry["compared"] for entry in entries):
            notes.insert(
                0,
                "the bits are the same although the following differ"
                if same
                else "the bits differ, and so do the following, which may be why",
            )
    return entries, notes


def double(result: Json) -> str | None:
    """A case that occurs twice, by name and target: one of the two would stand for both."""
    labels = Counter(_labels(result))
    return next((label for label, count in labels.items() if count > 1), None)


def _cases(result: Json) -> dict[str, Json]:
    return dict(zip(_labels(result), result["cases"], strict=True))


def _labels(result: Json) -> list[str]:
    """Every case's name; a name that occurs twice is told apart by its target."""
    names = Counter(case["case"] for case in result["cases"])
    return [
        case["case"] if names[case["case"]] == 1 else f"{case['case']} ({case['target']})"
        for case in result["cases"]
    ]


def _digests(name: str, a: Json, b: Json) -> Iterator[dict[str, Any]]:
    """The base outputs of every rank."""
    for rank in sorted({*a["outputs"], *b["outputs"]}, key=int):
        left, right = a["outputs"].get(rank), b["outputs"].get(rank)
        if left is None or right is None:
            side = "A" if right is None else "B"
            yield _entry(f"{name} rank {rank}", equal=False, detail=f"only in {side}")
            continue
        if not left and not right:
            yield _unsettled(f"{name} rank {rank}", "no outputs in A and B: not compared")
        for tensor in sorted({*left, *right}):
            label = f"{name} rank {rank} {tensor}"
            if tensor not in left or tensor not in right:
                side = "A" if tensor in left else "B"
                yield _entry(label, equal=False, detail=f"only in {side}")
            elif left[tensor] == right[tensor]:
                yield _entry(label, equal=True, compared=True)
            else:
                shown = [f"A {left[tensor]}", f"B {right[tensor]}"]
                yield _entry(label, equal=False, compared=True, lines=shown)


def _unverified(name: str, a: Json, b: Json, digests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """That neither run was verified: equal outputs then say nothing about the code's bits."""
    states = [one["verdict"] for one in (a, b)]
    if "VERIFIED" in states:
        return []
    both = states[0] == states[1]
    runs = f"both runs were {states[0]}" if both else f"A was {states[0]} and B {states[1]}"
    equal = any(one["compared"] for one in digests) and all(one["equal"] for one in digests)
    return [_unsettled(f"case {name}", f"outputs are equal, but {runs}" if equal else runs)]


def _verdicts(name: str, a: Json, b: Json) -> Iterator[dict[str, Any]]:
    """Claims with another verdict, or on one side only. Equal ones are no news."""
    left = {claim["claim"]: claim["verdict"] for claim in a["claims"]}
    right = {claim["claim"]: claim["verdict"] for claim in b["claims"]}
    for claim in [*left, *(claim for claim in right if claim not in left)]:
        states = [side.get(claim, "not claimed") for side in (left, right)]
        if states[0] != states[1]:
            detail = f"verdict={states[0]} in A, verdict={states[1]} in B"
            yield _entry(f"{name} claim {claim}", equal=False, detail=detail)


def _givens(name: str, a: Json, b: Json) -> Iterator[str]:
    """Seed, source, inputs and generator state that were not the same."""
    for field in ("seed", "source_digest"):
        if a[field] != b[field]:
            yield f"{name}: {field} {a[field]!r} in A, {b[field]!r} in B"
    for field in ("inputs", "generator"):
        ranks = sorted({*a[field]} & {*b[field]}, key=int)
        names = sorted(
            {
                tensor
                for rank in ranks
                for tensor in {*a[field][rank], *b[field][rank]}
                if a[field][rank].get(tensor) != b[field][rank].get(tensor)
            }
        )
        if names:
            yield f"{name}: {field} differ: {', '.join(names)}"


def _environment(a: Json, b: Json) -> Iterator[str]:
    left, right = flatten(a), flatten(b)
    for name in sorted({*left, *right}):
        if left.get(name) != right.get(name):
            yield f"environment {name}: {left.get(name)!r} in A, {right.get(name)!r} in B"


def _unsettled(name: str, detail: str) -> dict[str, Any]:
    return {**_entry(name, equal=True, detail=detail), "unsettled": True}


def _entry(
    name: str, *, equal: bool, detail: str = "", compared: bool = False, lines: Any = ()
) -> dict[str, Any]:
    return {
        "name": name,
        "equal": equal,
        "detail": detail,
        "lines": tuple(lines),
        "compared": compared,
    }
