"""Tables of what is fast: the digest, layers with their joules, each direction, recording; goals.

For docs/measured.md; `short_speed`, `short_digest`, `short_recording` and `missed` are for README.

Each takes the evidence of its part, one file for each number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import goals  # both beside this file
from table_grids import grid

Json = Mapping[str, Any]


def digest(own: Sequence[Json]) -> str:
    """The benchmark's rows as they are, its other figures, and each goal beside what was met."""
    parts = []
    for one in own:
        for step in one["results"].values():
            document = step.get("document") or {}
            rows = document.get("rows", [])
            names = list(dict.fromkeys(name for row in rows for name in row))
            unit = document.get("unit", "")
            parts.append(grid([[_cell(row.get(n)) for n in names] for row in rows], names))
            others = [
                f"{name} {_cell(value)}"
                for name, value in document.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            ]
            told = [f"Unit: {unit}" if unit else "", document.get("protocol", ""), *others]
            parts.append("; ".join(text for text in told if text) + ".")
            parts += goals_met(goals.judged(document))
    return "\n\n".join(parts)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def bench(own: Sequence[Json]) -> str:
    """Speed and energy, as the benchmark draws its own document."""
    from mok.bench import tables

    texts = []
    for one in own:
        for name, step in one["results"].items():
            document = step.get("document")
            state = "" if step["status"] == "passed" else f" ({step['status']})"
            if len(one["results"]) > 1 or state:
                texts.append(f"Step `{name}`{state}:" if document else f"Step `{name}`{state}.")
            if document:
                texts.append(tables.markdown(_terse(document)).strip())
                if document["ended"] != "finished":
                    texts.append(
                        f"This step {document['ended']}: rows that are not here were not reached."
                    )
    return "\n\n".join(texts)


def _terse(document: Json) -> Json:
    """The benchmark's document with what `verify` found as a verdict: that has its own table."""
    verdict = re.compile(r"^(MISMATCH|VERIFIED|UNVERIFIED):.*(?= \(on )")
    rows = [
        row | {"determinism": verdict.sub(r"\1", str(row["determinism"]))}
        for row in document["rows"]
    ]
    return document | {"rows": rows}


def forward(own: Sequence[Json]) -> str:
    """The benchmark's tables; of one rank each goal beside what was met, and of several what they
    reach of one."""
    return _direction(own, "forward")


def backward(own: Sequence[Json]) -> str:
    """The same of the backward."""
    return _direction(own, "backward")


def _direction(own: Sequence[Json], direction: str) -> str:
    met = [text for found in goals.by_ranks(direction, own) for text in goals_met(found)]
    return "\n\n".join([bench(own), *met])


CONTENDERS = {
    "alone": "alone",
    "module": "recorded, module level",
    "op": "recorded, op level",
    "module-10": "module level, every 10th in full",
    "op-10": "op level, every 10th in full",
    "debug": "DebugMode with hash_tensor",
}


def recording(own: Sequence[Json]) -> str:
    """A training step alone, recorded, and under torch's DebugMode; and each goal."""
    parts = []
    for one in own:
        for step in one["results"].values():
            document = step.get("document") or {}
            parts += [_recorded(document), *goals_met(goals.judged_recording(document))]
    return "\n\n".join(parts)


def _recorded(document: Json) -> str:
    lines = [
        [
            CONTENDERS.get(row["name"], row["name"]),
            f"{row['ms']:.1f}",
            f"{row['ratio']:.3f}",
            f"{100 * row['spread']:.1f} % of {row['rounds']}",
            "yes" if row["same"] else "NO",
            row.get("events", "-"),
            *_step_bytes(row),
        ]
        for row in document.get("rows", ())
    ]
    headers = ["a step", "ms", "/ alone", "spread of rounds", "same losses", "events"]
    return grid(lines, [*headers, "kB of a step on disk"])


def _step_bytes(row: Json) -> tuple[str]:
    """All that a recording holds, shared among its steps."""
    steps = row.get("recorded_steps")
    return ("-",) if not steps else (f"{row['bytes'] / steps / 1000:.1f}",)


def goals_met(found: list[goals.Judged]) -> list[str]:
    """A table of each goal beside what was met, and how many were."""
    cells = [one.cells() for one in found]
    return [grid(cells, ["", "goal", "measured", "met"]), goals.summary(found)]


def short_speed(own: Sequence[Json]) -> str:
    """Of each direction and shape on one rank ours beside SonicMoE and the torch pipeline."""
    rows = []
    for direction in dict.fromkeys(one["part"] for one in own):
        some = [one for one in own if one["part"] == direction]
        rows += [
            (direction, *cells) for cells in goals.compared(goals.documents(some, 1), direction)
        ]
    headers = ["direction", "shape", "TFLOP/s", "speed / SonicMoE's", "the same, alone"]
    return grid(rows, [*headers, "speed / torch pipeline's", "memory / SonicMoE's"])


def short_digest(own: Sequence[Json]) -> str:
    """The digest's speed by dtype and against what reads as much; its time on the host."""
    parts = []
    for one in own:
        for step in one["results"].values():
            document = step.get("document") or {}
            rows = [
                [row.get("dtype"), _cell(row.get("verify digest")), *goals.digest_shares(row)]
                for row in document.get("rows", ())
            ]
            headers = ["dtype", f"digest, {document.get('unit', '')}", "/ int64 sum"]
            parts.append(grid(rows, [*headers, "/ torch.hash_tensor"]))
            host = [
                f"{goal.what}: {goal.measured}"
                for goal in goals.judged(document)[-len(goals.HOST) :]
            ]
            parts.append("; ".join([document.get("protocol", ""), *host]) + ".")
    return "\n\n".join(parts)


def short_recording(own: Sequence[Json]) -> str:
    """A training step alone, recorded, and under torch's DebugMode."""
    steps = [step for one in own for step in one["results"].values()]
    return "\n\n".join(_recorded(step.get("document") or {}) for step in steps)


def missed(own: Sequence[Json]) -> str:
    """How many goals each part met; and every one that was not met, or not measured."""
    met, rows = [], []
    for part in dict.fromkeys(one["part"] for one in own):
        found = goals.of_part(part, [one for one in own if one["part"] == part])
        wanted = [goal for goal in found if goal.met != goals.FREE]
        lost = [goal for goal in wanted if goal.met != goals.YES]
        met.append(f"{part} {len(wanted) - len(lost)} of {len(wanted)}")
        rows += [(part, *goal.cells()) for goal in lost]
    told = f"Goals met: {', '.join(met)}."
    if not rows:
        return told
    return f"{told}\n\n{grid(rows, ['part', 'what', 'goal', 'measured', 'met'])}"
