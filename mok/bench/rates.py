"""Rates that peers are known to reach, so that a ratio against a badly running peer does not count.

Measured on one H200 (700 W) on 2026-11-30 with torch 2.11, CUDA 13.0 and the versions in PEERS, by
loops like this harness's and not by itself: ROTATION and ALONE say how. TFLOP/s on useful FLOPs,
forward and backward, Gaussian routing. A peer is comparable when it is the same version and its own
rate here lies within 7 % of its known one (for a pair: of the span between both protocols, since a
partner that draws less power lets the card cool); where the known rate is of another protocol the
remark says so and nothing is widened. A peer without a known rate, or of another version, is shown
and never counts. Refuses to judge our own layer.
"""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 0.07
"""A judgement on whether a peer is itself, not on numerics: processes differ by 3 to 6 %."""

KNOWN_DEVICE = "H200"
PEERS = {
    "torch": "2.11.0+cu130",
    "huggingface": "5.17.0",
    "liger": "0.8.5",
    "sonicmoe": "0.1.2.post1",
}

ROTATION: dict[tuple[str, str], tuple[float, float]] = {
    ("kimi-shard", "sonicmoe"): (628, 622),
    ("kimi-shard", "torch"): (462, 487),
    ("kimi-shard", "liger"): (358, 280),
    ("kimi-shard", "huggingface"): (351, 391),
    ("qwen35-shard", "sonicmoe"): (593, 598),
    ("qwen35-shard", "torch"): (351, 386),
    ("qwen35-shard", "liger"): (345, 280),
    ("qwen35-shard", "huggingface"): (235, 275),
    ("v4pro-shard", "sonicmoe"): (575, 637),
    ("v4pro-shard", "torch"): (466, 488),
    ("v4pro-shard", "liger"): (351, 280),
    ("v4pro-shard", "huggingface"): (378, 416),
    ("glm-shard", "sonicmoe"): (634, 641),
    ("glm-shard", "torch"): (450, 477),
    ("glm-shard", "liger"): (365, 295),
    ("glm-shard", "huggingface"): (340, 385),
    ("qwen3-30b", "sonicmoe"): (611, 605),
    ("qwen3-30b", "torch"): (300, 338),
    ("qwen3-30b", "liger"): (340, 260),
    ("qwen3-30b", "huggingface"): (186, 227),
    ("sonic-120b", "sonicmoe"): (629, 615),
    ("sonic-120b", "torch"): (427, 486),
    ("sonic-120b", "liger"): (351, 273),
    ("sonic-120b", "huggingface"): (321, 383),
}
"""2 warm and 25 timed rounds in turn with a dense GEMM, a one-weight GEMM and the other peers, the
starting one rotating; here the order is drawn anew for every round."""

ALONE: dict[tuple[str, str], tuple[float, float]] = {
    ("kimi-shard", "sonicmoe"): (554, 552),
    ("kimi-shard", "torch"): (460, 475),
    ("qwen35-shard", "sonicmoe"): (543, 540),
    ("qwen35-shard", "torch"): (369, 396),
    ("v4pro-shard", "sonicmoe"): (523, 565),
    ("v4pro-shard", "torch"): (472, 492),
    ("glm-shard", "sonicmoe"): (553, 572),
    ("glm-shard", "torch"): (458, 487),
    ("qwen3-30b", "sonicmoe"): (540, 548),
    ("qwen3-30b", "torch"): (320, 356),
    ("sonic-120b", "sonicmoe"): (557, 592),
    ("sonic-120b", "torch"): (460, 476),
}
"""0.6 s of warm loop, then 30 forward or 25 backward calls back to back: 0.1 to 0.7 s. Here a loop
is timed for 2 s after such a warm-up, when the card has become warmer."""
_ONE_SIDED = " (of a rotation of both directions)"
_ELSEWHERE = {
    "rotation": "",
    "alone": " (of a loop of 25 to 30 calls)",
    "pair": " (of other protocols)",
}


@dataclass(frozen=True)
class Comparability:
    """Whether a peer runs as it is known to. percent: of the nearest known rate, None without."""

    comparable: bool
    percent: float | None
    why: str


def known_rates(protocol: str, shape: str, peer: str, direction: str) -> tuple[float, ...]:
    """TFLOP/s known for a protocol ("rotation", "alone"; "pair" takes both); () if none is."""
    tables = {"rotation": (ROTATION,), "alone": (ALONE,), "pair": (ROTATION, ALONE)}[protocol]
    found = [table[shape, peer] for table in tables if (shape, peer) in table]
    if len(found) < len(tables):
        return ()
    return tuple(sorted(rates[0 if direction == "forward" else 1] for rates in found))


def comparability(
    protocol: str,
    shape: str,
    peer: str,
    direction: str,
    tflops: float,
    *,
    version: str,
    same_setting: bool,
    one_sided: bool = False,
) -> Comparability:
    """Judges one peer's row. version: of the peer, as its package says it. same_setting: an H200,
    one rank, Gaussian routing, the table's T. one_sided: the peer ran in this direction alone."""
    known = known_rates(protocol, shape, peer, direction)
    if not known:
        return Comparability(False, None, "not comparable: no known rate of this peer here")
    if not same_setting:
        return Comparability(
            False, None, "not comparable: known rates are of one H200 with Gaussian routing"
        )
    if version != PEERS.get(peer):
        known_version = PEERS.get(peer, "no version")
        why = f"not comparable: known rates are of {known_version}, not of {version}"
        return Comparability(False, None, why)
    nearest = min(max(tflops, known[0]), known[-1])
    percent = 100 * tflops / nearest
    elsewhere = _ONE_SIDED if one_sided and protocol == "rotation" else _ELSEWHERE[protocol]
    why = f"peer at {percent:.0f} % of its known rate{elsewhere}"
    if abs(percent - 100) <= 100 * TOLERANCE:
        return Comparability(True, percent, why)
    return Comparability(False, percent, f"not comparable: {why}")
