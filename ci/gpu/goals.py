"""What digest, forward, backward and recording are meant to reach on a GPU, beside what they
reached.

A miss is told, not hidden.

Speeds hang on the card, so that a missed goal fails no test; README and docs/measured.md must
say it instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

SHARE_OF_READ = 0.92  # of the int64 sum of the same 2 GB, in one rotation
SHARE_OF_HASH = 1.0  # of torch.hash_tensor, and more than that
HOST = {"plan_replay_us": ("replay", 15.0), "plan_build_us": ("build", 100.0)}
YES, NO, UNKNOWN = "yes", "NO", "not measured"
NOTHING = "nothing that counts"
FREE = "-"  # a figure without a goal
_SETTING = {"routing": "gaussian", "ranks": 1}


@dataclass(frozen=True)
class Judged:
    """One figure: what it is, its goal and itself as text, and whether it met the goal."""

    what: str
    goal: str
    measured: str
    met: str

    def cells(self) -> tuple[str, str, str, str]:
        return self.what, self.goal, self.measured, self.met


def judged(document: Mapping[str, Any]) -> list[Judged]:
    """Every goal of the digest against the document of `mok bench digest --device cuda`.

    What the document lacks is "not measured", never left out.
    """
    found = []
    rows: Sequence[Mapping[str, Any]] = document.get("rows") or [{"dtype": "every dtype"}]
    for row in rows:
        dtype = row.get("dtype")
        share, hashed = row.get("of the read"), row.get("of hash_tensor")
        found.append(
            Judged(
                f"{dtype}: digest / int64 sum",
                f"{SHARE_OF_READ} or more",
                *_outcome(share, "", share is not None and share >= SHARE_OF_READ),
            )
        )
        found.append(
            Judged(
                f"{dtype}: digest / torch.hash_tensor",
                "above 1",
                *_outcome(hashed, "", hashed is not None and hashed > SHARE_OF_HASH),
            )
        )
    for key, (what, bound) in HOST.items():
        value = document.get(key)
        found.append(
            Judged(
                f"host time to {what} a plan of {document.get('plan_tensors', 64)} tensors",
                f"{bound:g} us or less",
                *_outcome(value, " us", value is not None and value <= bound),
            )
        )
    return found


def digest_shares(row: Mapping[str, Any]) -> tuple[str, str]:
    """Of a dtype's row the digest's speed over the int64 sum's and torch.hash_tensor's."""
    read, hashed = (
        _outcome(row.get(f"of {name}"), "", True) for name in ("the read", "hash_tensor")
    )
    return read[0], hashed[0]


SONIC_LEAST = 0.95  # of SonicMoE's speed, in the rotation, at every shape
SONIC_ROTATION = (1.0, 4)  # of SonicMoE's speed, and at how many shapes
SONIC_ALONE = (1.05, 4)
TORCH_LEAST = 1.3  # of the torch pipeline's speed, at every shape
MEMORY_MOST = 1.05  # of SonicMoE's memory above the inputs
_MANY_LEAST = {"kimi-shard": 0.9, "v4pro-shard": 0.9}
DEGREE_LEAST: Mapping[str, Mapping[int, Mapping[str, float]]] = {
    "forward": {
        2: {"kimi-shard": 0.93, "qwen35-shard": 0.88, "v4pro-shard": 0.93, "glm-shard": 0.93},
        4: _MANY_LEAST,
        8: _MANY_LEAST,
    },
    "backward": {
        2: dict.fromkeys(
            (
                *("kimi-shard", "qwen35-shard", "v4pro-shard", "glm-shard"),
                *("qwen3-30b", "sonic-120b"),
            ),
            0.93,
        ),
        4: _MANY_LEAST,
        8: _MANY_LEAST,
    },
}
"""By direction, number of ranks and shape, of one rank's speed; other shapes are told without a
goal."""
MANY = 10_000  # calls under load of shapes that take so many ms or less, by direction
AT_MOST_MS = {"forward": 1, "backward": 2}
LARGE = {"forward": ("kimi-shard", 300), "backward": ("kimi-shard", 200)}


def judged_direction(
    documents: Sequence[Mapping[str, Any]], direction: str = "forward"
) -> list[Judged]:
    """Every goal of a direction on one rank, against documents of `mok bench layer`.

    A peer's row that was timed apart, or that is not comparable, counts no more than one that is
    missing: the goal is then not met.
    """
    from mok.bench.shapes import PEER_SHAPES

    found, by_protocol = [], {}
    for protocol in ("rotation", "alone"):
        speeds = {
            shape: _speed(documents, direction, shape, "sonicmoe", protocol)
            for shape in PEER_SHAPES
        }
        by_protocol[protocol] = {shape: one for shape, one in speeds.items() if one is not None}
    for shape in PEER_SHAPES:
        speed = by_protocol["rotation"].get(shape)
        found.append(_least(f"{shape}: speed / SonicMoE's, rotation", speed, SONIC_LEAST))
    for protocol, (least, shapes) in (("rotation", SONIC_ROTATION), ("alone", SONIC_ALONE)):
        counted = by_protocol[protocol]
        good = sum(speed >= least for speed in counted.values())
        told = f"{good} of {len(counted)} that count"
        what = f"shapes with {least:g} x SonicMoE's speed or more, {protocol}"
        found.append(Judged(what, f"{shapes} or more", told, YES if good >= shapes else NO))
    for shape in PEER_SHAPES:
        speed = _speed(documents, direction, shape, "torch", "rotation")
        found.append(_least(f"{shape}: speed / torch pipeline's, rotation", speed, TORCH_LEAST))
    for shape in PEER_SHAPES:
        share = _memory(documents, direction, shape)
        told = NOTHING if share is None else _rounded_up(share)
        met = YES if share is not None and share <= MEMORY_MOST else NO
        found.append(Judged(f"{shape}: memory / SonicMoE's", f"{MEMORY_MOST} or less", told, met))
    return found


def _least(what: str, value: float | None, goal: float) -> Judged:
    if value is None:
        return Judged(what, f"{goal:g} or more", NOTHING, NO)
    return Judged(what, f"{goal:g} or more", *_outcome(value, "", value >= goal))


def judged_degrees(
    one: Sequence[Mapping[str, Any]],
    many: Sequence[Mapping[str, Any]],
    direction: str,
    ranks: int,
) -> list[Judged]:
    """Ours on several ranks, each with the tokens of one, against one: documents of both.

    A shape without a goal is told all the same.
    """
    from mok.bench.shapes import PEER_SHAPES

    goals = DEGREE_LEAST[direction].get(ranks, {})
    found = []
    for shape in PEER_SHAPES:
        alone = _own_ms(one, direction, shape, 1)
        together = _own_ms(many, direction, shape, ranks)
        share = None if alone is None or together is None else alone / together
        what = f"{shape}: speed of {ranks} ranks / of one, rotation"
        judged = _least(what, share, goals.get(shape, 0.0))
        found.append(judged if shape in goals else replace(judged, goal=FREE, met=FREE))
    return found


def _own_ms(
    documents: Sequence[Mapping[str, Any]], direction: str, shape: str, ranks: int
) -> float | None:
    """Ours in the last rotation of the documents."""
    wanted = {"shape": shape, "protocol": "rotation", "direction": direction, **_SETTING}
    found = [
        float(row["median_ms"])
        for document in documents
        for row in document["rows"]
        if row["contender"] == document["ours"] and _is(row, {**wanted, "ranks": ranks})
    ]
    return found[-1] if found else None


def _speed(
    documents: Sequence[Mapping[str, Any]], direction: str, shape: str, peer: str, protocol: str
) -> float | None:
    """Ours over the peer's, in the last of the documents where that counts."""
    wanted = {"shape": shape, "peer": peer, "protocol": protocol, "direction": direction}
    wanted |= _SETTING
    found = [
        float(one["time"])
        for document in documents
        for one in document["ratios"]
        if one["counts"] and _is(one, wanted)
    ]
    return found[-1] if found else None


def _memory(documents: Sequence[Mapping[str, Any]], direction: str, shape: str) -> float | None:
    """Ours over SonicMoE's in the rotation, where both rows count."""
    found = None
    wanted = {"shape": shape, "protocol": "rotation", "direction": direction, **_SETTING}
    for document in documents:
        of: dict[str, float] = {}
        for row in document["rows"]:
            counts = row["comparable"] is not False and not row["apart"] and row["memory_bytes"]
            if counts and _is(row, wanted):
                of[row["contender"]] = float(row["memory_bytes"])
        if of.keys() >= {document["ours"], "sonicmoe"}:
            found = of[document["ours"]] / of["sonicmoe"]
    return found


def compared(documents: Sequence[Mapping[str, Any]], direction: str) -> list[tuple[str, ...]]:
    """Of each shape our TFLOP/s in the rotation, and ours over peers' as the goals have it: speed
    over SonicMoE's, in the rotation and alone, over the torch pipeline's, and memory over
    SonicMoE's.

    A peer that does not count is told with the reason; a dash: not measured.
    """
    from mok.bench.shapes import PEER_SHAPES

    rows = {shape: _rotated(documents, direction, shape)[-1:] for shape in PEER_SHAPES}
    return [
        (
            shape,
            next((f"{row['tflops']:.4g}" for row in rows[shape]), FREE),
            _speed_told(documents, direction, shape, "sonicmoe", "rotation"),
            _speed_told(documents, direction, shape, "sonicmoe", "alone"),
            _speed_told(documents, direction, shape, "torch", "rotation"),
            _memory_told(documents, direction, shape),
        )
        for shape in PEER_SHAPES
    ]


def _rotated(
    documents: Sequence[Mapping[str, Any]], direction: str, shape: str, contender: str = ""
) -> list[Mapping[str, Any]]:
    """A contender's rows of the rotation; ours unless one is named."""
    wanted = {"shape": shape, "protocol": "rotation", "direction": direction, **_SETTING}
    return [
        row
        for document in documents
        for row in document["rows"]
        if row["contender"] == (contender or document["ours"]) and _is(row, wanted)
    ]


def _speed_told(
    documents: Sequence[Mapping[str, Any]], direction: str, shape: str, peer: str, protocol: str
) -> str:
    speed = _speed(documents, direction, shape, peer, protocol)
    if speed is not None:
        return _outcome(speed, "", True)[0]
    wanted = {"shape": shape, "peer": peer, "protocol": protocol, "direction": direction}
    wanted |= _SETTING
    why = [one["why"] for document in documents for one in document["ratios"] if _is(one, wanted)]
    return str(why[-1]).partition(" (")[0] if why else FREE


def _memory_told(documents: Sequence[Mapping[str, Any]], direction: str, shape: str) -> str:
    share = _memory(documents, direction, shape)
    if share is not None:
        return _rounded_up(share)
    peers = _rotated(documents, direction, shape, "sonicmoe")
    if not peers:
        return FREE
    return "not comparable" if peers[-1]["comparable"] is False else NOTHING


def documents(own: Sequence[Mapping[str, Any]], ranks: int) -> list[Mapping[str, Any]]:
    """What the benchmark of layers left of so many ranks, in evidence."""
    steps = [step for one in own if one["ranks"] == ranks for step in one["results"].values()]
    return [step["document"] for step in steps if step.get("document")]


def by_ranks(direction: str, own: Sequence[Mapping[str, Any]]) -> list[list[Judged]]:
    """The goals of a direction for each number of ranks that there is evidence of; several are held
    against one."""
    one = documents(own, 1)
    found = []
    for ranks in sorted({some["ranks"] for some in own}):
        if ranks == 1:
            found.append(judged_direction(one, direction))
        elif one and (many := documents(own, ranks)):
            found.append(judged_degrees(one, many, direction, ranks))
    return found


def of_part(part: str, own: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """Every goal of a part, against its evidence; none for a part that has no goals."""
    if part in ("forward", "backward"):
        return [goal for some in by_ranks(part, own) for goal in some]
    judge = _JUDGES.get(part)
    if judge is None:
        return []
    steps = [step for one in own for step in one["results"].values()]
    return [goal for step in steps for goal in judge(step.get("document") or {})]


def _is(one: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(one.get(name) == value for name, value in wanted.items())


def judged_endurance(document: Mapping[str, Any], direction: str = "forward") -> list[Judged]:
    """Every goal of calls under load, against the document of ci/gpu/endurance.py or of
    ci/gpu/backward_endurance.py."""
    rows: Sequence[Mapping[str, Any]] = document.get("rows") or ()
    found = [
        Judged(f"{row['shape']}: digests of all {direction}s", "1", str(row["distinct"]), met)
        for row in rows
        for met in (YES if row["distinct"] == 1 else NO,)
    ]
    longest = AT_MOST_MS[direction]
    small = sum(row["under_load"] for row in rows if row["ms_alone"] <= longest)
    name, least = LARGE[direction]
    large = sum(row["under_load"] for row in rows if row["shape"] == name)
    for what, done, wanted in (
        (f"{direction}s under load of shapes that take {longest} ms or less", small, MANY),
        (f"{direction}s under load of {name}", large, least),
    ):
        found.append(Judged(what, f"{wanted} or more", str(done), YES if done >= wanted else NO))
    return found


RECORDING_MOST = {
    "cuda": {"module": 1.03, "op": 1.15, "module-10": 1.03, "op-10": 1.15},
    "cpu": {"module": 1.15, "module-10": 1.15},
}
"""By device, the most that a recorded step may take, as a share of the step alone; `-10`: where
every 10th is recorded in full, on an average."""
RECORDING_DEARER = 5.0  # times the cost of the op level that DebugMode's has at least, on a GPU


def judged_recording(document: Mapping[str, Any]) -> list[Judged]:
    """Every goal of recording on a device, against the document of ci/gpu/recording.py."""
    device = document.get("device", "cuda")
    ratios = {row["name"]: float(row["ratio"]) for row in document.get("rows") or ()}
    found = []
    for level, most in RECORDING_MOST[device].items():
        ratio = ratios.get(level)
        told = "-" if ratio is None else _rounded_up(ratio)
        met = UNKNOWN if ratio is None else YES if ratio <= most else NO
        kind, _, every = level.partition("-")
        what = f"a step at {kind} level{f', every {every}th in full,' * bool(every)} / alone"
        found.append(Judged(what, f"{most:g} or less", told, met))
    if device == "cuda":
        costs = [ratios[name] - 1 for name in ("debug", "op") if name in ratios]
        # less than a thousandth of a step cannot be told from nothing
        times = None if len(costs) < 2 else costs[0] / max(costs[1], 0.001)
        met = times is not None and times >= RECORDING_DEARER
        goal = f"{RECORDING_DEARER:g} or more"
        found.append(Judged("cost of DebugMode / of op level", goal, *_outcome(times, "", met)))
    return found


def _rounded_up(value: float) -> str:
    """Of what should be small: to the worse side as well."""
    return f"{math.ceil(round(value * 1000, 6)) / 1000:.3f}"


_JUDGES: Mapping[str, Callable[[Mapping[str, Any]], list[Judged]]] = {
    "digest": judged,
    "endurance": judged_endurance,
    "backward-endurance": lambda document: judged_endurance(document, "backward"),
    "recording": judged_recording,
}


def _outcome(value: float | None, unit: str, met: bool) -> tuple[str, str]:
    """Rounded to the worse side: what just misses its goal must not look like it."""
    if value is None:
        return "-", UNKNOWN
    if unit:
        text = f"{math.ceil(round(value * 10, 6)) / 10:.1f}{unit}"
    else:
        text = f"{math.floor(round(value * 1000, 6)) / 1000:.3f}"
    return text, YES if met else NO


def summary(found: list[Judged]) -> str:
    """One sentence: how many goals are met, and which are not."""
    wanted = [one for one in found if one.met != FREE]
    if not wanted:
        return "No goals."
    missed = [one.what for one in wanted if one.met != YES]
    met = f"{len(wanted) - len(missed)} of {len(wanted)} goals met"
    return f"{met}; not met: {', '.join(missed)}." if missed else f"{met}."
