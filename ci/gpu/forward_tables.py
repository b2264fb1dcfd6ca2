"""Tables of the Hopper kernels' bits: at every degree, and in many calls under load.

For docs/measured.md. Each takes the evidence of its part, one file for each number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import goals  # all three beside this file
from speed_tables import goals_met
from table_grids import grid

Json = Mapping[str, Any]


def degrees(own: Sequence[Json]) -> str:
    """Degrees on one GPU: a line for each and each size of segments, over all grids."""
    lines = []
    for (_, degree, segments), rows in _by_degree(own).items():
        facts = [
            max(row[name] for row in rows)
            for name in ("blocks", "wraps_x", "wraps_h", "tails", "empty_experts", "crossing")
        ]
        least = min(count for row in rows for count in row["tokens"])
        most = max(count for row in rows for count in row["tokens"])
        lines.append(
            [
                degree or "one rank",
                segments,
                ", ".join(str(row["ctas"]) for row in rows),
                f"{least} to {most}" if least != most else most,
                *facts,
                f"{sum(row['equal'] for row in rows)} of {len(rows)}",
                sum(row["records"] for row in rows),
                sum(row["broken"] for row in rows),
            ]
        )
    headers = ["ranks", "segments", "CTAs", "tokens of a rank", "blocks", "rings of x began anew"]
    headers += ["of hidden rows", "tails", "empty experts", "experts across segments"]
    return grid(lines, [*headers, "same bits", "log records", "rules broken"])


def backward_degrees(own: Sequence[Json]) -> str:
    """The same of gradients."""
    lines = []
    for (_, degree, segments), rows in _by_degree(own).items():
        counts = [count for row in rows for count in row["tokens"]]
        facts = ("blocks", "wraps", "parts", "tails", "empty_experts", "crossing")
        lines.append(
            [
                degree or "one rank",
                segments,
                ", ".join(str(row["ctas"]) for row in rows),
                f"{min(counts)} to {max(counts)}" if len(set(counts)) > 1 else counts[0],
                *(max(row[name] for row in rows) for name in facts),
                f"{sum(row['equal'] for row in rows)} of {len(rows)}",
            ]
        )
    headers = ["ranks", "segments", "CTAs", "tokens of a rank", "blocks", "the ring began anew"]
    headers += ["experts in parts", "tails", "empty experts", "experts across segments"]
    return grid(lines, [*headers, "same bits"])


def _by_degree(own: Sequence[Json]) -> dict[tuple[int, int, str], list[Json]]:
    """Rows by the place of their evidence, degree and size of segments."""
    found: dict[tuple[int, int, str], list[Json]] = {}
    for at, one in enumerate(own):
        for step in one["results"].values():
            for row in step.get("document", {}).get("rows", ()):
                found.setdefault((at, row["degree"], row["segments"]), []).append(row)
    return found


def training(own: Sequence[Json]) -> str:
    """A line for each setting: the digests of its losses and weights, and from what to what."""
    lines = []
    for one in own:
        for step in one["results"].values():
            for row in step.get("document", {}).get("rows", ()):
                lines.append(
                    [
                        row["ranks"],
                        "yes" if row["shared"] else "no",
                        "computed again" if row["recompute"] else "kept",
                        f"{row['times']} of {row['steps']} steps",
                        "yes" if row["equal"] else "NO",
                        row["losses"][:16],
                        row["weights"][:16],
                        f"{row['first']:.3f} to {row['last']:.3f}",
                        row["kernels"],
                    ]
                )
    headers = ["ranks", "shared expert", "activations", "trainings", "same bits", "losses"]
    return grid(lines, [*headers, "weights", "loss", "backwards of the kernels"])


def endurance(own: Sequence[Json]) -> str:
    """Forwards under load: how many digests, how fast, under what; and the goals."""
    return _endurance(own, "forward")


def backward_endurance(own: Sequence[Json]) -> str:
    """The same of backwards, and the digests of each gradient."""
    return _endurance(own, "backward")


def _endurance(own: Sequence[Json], direction: str) -> str:
    parts = []
    for one in own:
        for step in one["results"].values():
            document = step.get("document", {})
            lines = [
                [
                    row["shape"],
                    row["forwards"],
                    row["under_load"],
                    row["distinct"],
                    *((_outputs(row),) if direction == "backward" else ()),
                    f"{row['ms_alone']:.3f}",
                    f"{row['per_second']:.0f}",
                    "; ".join(
                        f"{load['load']} {load['under_load']} ({load['ms']:.2f} ms)"
                        for load in row["loads"]
                    ),
                ]
                for row in document.get("rows", ())
            ]
            headers = ["shape", f"{direction}s", "under load", "distinct digests"]
            headers += ["of each gradient"] if direction == "backward" else []
            headers += ["ms alone", "a second under load", f"loads: {direction}s (ms)"]
            parts.append(grid(lines, headers))
            parts += goals_met(goals.judged_endurance(document, direction))
    return "\n\n".join(parts)


def _outputs(row: Json) -> str:
    return ", ".join(f"{name} {count}" for name, count in row["outputs"].items())
