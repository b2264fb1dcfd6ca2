"""The document of `mok bench layer`, version 1: what was measured, how, and what it may claim.

Plain JSON, described by schema/layer-v1.schema.json; changes only add. Tables, figures and README
are made from it alone. It is written again after every step, under another name and then renamed,
so that a run that ends early leaves what it had. Refuses NaN: what is not known is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mok.bench.contenders import DIRECTIONS
from mok.bench.protocols import Timing, quantile
from mok.bench.rates import KNOWN_DEVICE, comparability
from mok.bench.shapes import SHAPES, Shape
from mok.errors import InputError

SCHEMA = "mok-bench-layer"
SCHEMA_VERSION = 1

Document = dict[str, Any]

PROTOCOLS = {
    "rotation": "every ceiling, then every contender's forward and backward, in an order drawn "
    "anew for every round; 2 rounds uncounted; joules are the mean power of the whole rotation "
    "times the median, an estimate",
    "alone": "one direction of one contender back to back for the stated seconds after a warm-up "
    "of 0.3 of them; joules from the energy counter over that loop, an estimate where it is less "
    "certain than 3 %; backward runs on one forward's kept graph",
    "pair": "one direction of two contenders strictly alternating in such a loop; joules are the "
    "mean power of both times the median, an estimate",
}
CONVENTIONS = {
    "forward": "training forward: builds the schedule and keeps what backward needs",
    "backward": "d_x, d_gate_up, d_down, d_router",
    "directions": "a contender whose backward is a stand-in is timed forward only, unless "
    "--direction says otherwise; a rotation then does not call its backward at all",
    "tflops": "useful operations only: forward 6 T K H I, backward 12 T K H I",
    "ranks": "a call's time is that of its slowest rank; joules are per GPU, the largest, with "
    "power and clock of that GPU; memory is the largest",
    "ratios": "of joules only where both are from the energy counter: estimates within one mixture "
    "have the ratio of the times",
    "memory_bytes": "peak above inputs and prepared weights, gradients included; of a forward "
    "alone where no backward is timed",
    "data": "x and d_out N(0, 1), weights N(0, 1) / sqrt(fan-in), never zeros",
    "error": "relative L2 against float64",
}


@dataclass(frozen=True)
class Setting:
    """What the rows of one shape have in common."""

    shape: Shape
    routing: str
    ranks: int
    device: str

    @property
    def known(self) -> bool:
        """Whether known rates were measured in this setting."""
        return (
            KNOWN_DEVICE in self.device
            and self.ranks == 1
            and self.routing == "gaussian"
            and SHAPES.get(self.shape.name) == self.shape
        )


@dataclass(frozen=True)
class Row:
    """One contender, direction, shape and protocol. apart: timed in a rotation of slow ones."""

    shape: str
    routing: str
    ranks: int
    protocol: str
    partner: str | None
    contender: str
    version: str
    direction: str
    apart: bool
    samples: int
    median_ms: float
    p10_ms: float
    p90_ms: float
    tflops: float
    joules: float | None
    joules_kind: str | None
    joules_uncertainty: float | None
    counter_update_ms: float | None
    watts: float | None
    clock_mhz: float | None
    memory_bytes: int | None
    known_percent: float | None
    comparable: bool | None
    comparability: str


def row(
    setting: Setting,
    protocol: str,
    contender: str,
    version: str,
    direction: str,
    timing: Timing,
    *,
    ours: bool,
    sides: Sequence[str] = DIRECTIONS,
    partner: str | None = None,
    apart: bool = False,
    memory: int | None = None,
) -> Document:
    """A row of the document from a timing. sides: directions in which the contender is timed."""
    tflops = setting.shape.flops(direction) / timing.median / 1e12
    judged = comparability(
        protocol,
        setting.shape.name,
        contender,
        direction,
        tflops,
        version=version,
        same_setting=setting.known,
        one_sided=len(sides) == 1,
    )
    own = "our own layer" + (f", {direction} only" if len(sides) == 1 else "")
    return asdict(
        Row(
            shape=setting.shape.name,
            routing=setting.routing,
            ranks=setting.ranks,
            protocol=protocol,
            partner=partner,
            contender=contender,
            version=version,
            direction=direction,
            apart=apart,
            samples=len(timing.seconds),
            median_ms=1e3 * timing.median,
            p10_ms=1e3 * quantile(timing.seconds, 0.1),
            p90_ms=1e3 * quantile(timing.seconds, 0.9),
            tflops=tflops,
            joules=timing.joules,
            joules_kind=timing.kind,
            joules_uncertainty=timing.reading.uncertainty,
            counter_update_ms=timing.reading.update_ms,
            watts=timing.reading.watts,
            clock_mhz=timing.reading.clock_mhz,
            memory_bytes=memory,
            known_percent=None if ours else judged.percent,
            comparable=None if ours else judged.comparable and not apart,
            comparability=own if ours else "timed apart" if apart else judged.why,
        )
    )


def ratios(rows: Sequence[Mapping[str, Any]], ours: str) -> list[Document]:
    """Peer over ours in time and joules, within one shape, protocol, partner and direction.

    Above 1 means that ours is faster or cheaper. joules: only where both are from the energy
    counter; estimates are one mixture's power times each one's median, so their ratio would be that
    of the times. counts: both were in one rotation (or loop pair, or each alone), and the peer ran
    at its known rate.
    """
    found = []
    for own in rows:
        if own["contender"] != ours:
            continue
        for peer in rows:
            same = ("shape", "routing", "ranks", "protocol", "direction")
            if peer["contender"] == ours or any(peer[key] != own[key] for key in same):
                continue
            partners = (own["partner"], peer["partner"])
            if own["protocol"] == "pair" and partners != (peer["contender"], own["contender"]):
                continue
            counted = own["joules_kind"] == peer["joules_kind"] == "counter"
            apart = bool(own["apart"] or peer["apart"])
            found.append(
                {
                    **{key: own[key] for key in same},
                    "ours": ours,
                    "peer": peer["contender"],
                    "time": peer["median_ms"] / own["median_ms"],
                    "joules": peer["joules"] / own["joules"] if counted else None,
                    "counts": bool(peer["comparable"]) and not apart,
                    "why": "not comparable: timed apart" if apart else peer["comparability"],
                }
            )
    return found


def save(document: Document, path: Path) -> None:
    """Writes the document whole or not at all; makes the folders above it."""
    from verify import results

    results.write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def load(path: Path) -> Document:
    """A document from a file. Raises InputError when it is not one of this version."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(
            f"{path}: {error}; allowed: a document that `mok bench layer` wrote. Check the path."
        ) from error
    check(document, str(path))
    return document


def check(document: Any, where: str = "the document") -> None:
    """Raises InputError unless it says that it is a document of this version."""
    given = (document.get("schema"), document.get("schema_version")) if _is_map(document) else None
    if given != (SCHEMA, SCHEMA_VERSION):
        raise InputError(
            f"{where} says schema, version = {given}; allowed: {(SCHEMA, SCHEMA_VERSION)}. Give a "
            "file that `mok bench layer` of this version wrote."
        )


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)
