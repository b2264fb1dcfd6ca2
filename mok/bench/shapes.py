"""The shapes that layers are timed on: one named table, and any other from the command line.

Why these: the first six are the ones whose peers were measured before (mok.bench.rates), `small` is
for accuracy and determinism, and the rest are the routed experts of published models, whole, on
tokens as one rank of a training step sees them. Refuses shared experts, biases and clamps: what a
model has beyond plain SwiGLU experts is in its note and not in the timing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mok.errors import InputError

FIELDS = ("T", "E", "H", "I", "K")
_SPEC = re.compile(r"([TEHIK])=([0-9]{1,9})")


@dataclass(frozen=True)
class Shape:
    """T tokens of each rank, E experts of the whole group, H hidden size, I width, K slots."""

    name: str
    T: int
    E: int
    H: int
    I: int  # noqa: E741 - the letter that every table of such shapes uses
    K: int
    note: str = ""

    def __post_init__(self) -> None:
        for field in FIELDS:
            if getattr(self, field) < 1:
                raise InputError(
                    f"shape {self.name}: {field} = {getattr(self, field)}; allowed: 1 or more. "
                    "Give every one of T, E, H, I and K."
                )
        if self.K > self.E:
            raise InputError(
                f"shape {self.name}: K = {self.K} slots from E = {self.E} experts; allowed: K up "
                "to E, since a token uses an expert once. Lower K."
            )

    @property
    def forward_flops(self) -> int:
        """Useful floating-point operations of a forward of one rank: 6 T K H I, no padding."""
        return 6 * self.T * self.K * self.H * self.I

    @property
    def backward_flops(self) -> int:
        """12 T K H I: input gradients and weight gradients of three matrices."""
        return 2 * self.forward_flops

    def flops(self, direction: str) -> int:
        """By direction, "forward" or "backward"."""
        return self.forward_flops if direction == "forward" else self.backward_flops

    def work(self, directions: Iterable[str]) -> int:
        """Useful operations of one call of each."""
        return sum(self.flops(direction) for direction in directions)

    @property
    def weight_bytes(self) -> int:
        """bf16 weights of the whole group: gate, up and down."""
        return 6 * self.E * self.H * self.I


_TABLE = (
    Shape("kimi-shard", 7168, 48, 7168, 2048, 8),
    Shape("qwen35-shard", 7168, 64, 4096, 1024, 10),
    Shape("v4pro-shard", 7168, 48, 7168, 3072, 6),
    Shape("glm-shard", 7168, 32, 6144, 2048, 8),
    Shape("qwen3-30b", 32768, 128, 2048, 768, 8),
    Shape("sonic-120b", 32768, 64, 4096, 2048, 4),
    Shape("small", 512, 8, 1024, 512, 2, "for accuracy and determinism"),
    Shape("kimi-k2.7", 7168, 384, 7168, 2048, 8, "1 shared expert in the model"),
    Shape("glm-5.2", 7168, 256, 6144, 2048, 8, "1 shared expert in the model"),
    Shape("qwen3.5-397b", 7168, 512, 4096, 1024, 10, "1 gated shared expert in the model"),
    Shape("deepseek-v4-pro", 7168, 384, 7168, 3072, 6, "1 shared expert, clamps in the model"),
    Shape("deepseek-v4-flash", 7168, 256, 4096, 2048, 6, "1 shared expert, clamps in the model"),
    Shape("deepseek-v3", 7168, 256, 7168, 2048, 8, "1 shared expert in the model"),
    Shape("qwen3-30b-a3b", 7168, 128, 2048, 768, 8),
    Shape("olmoe", 7168, 64, 2048, 1024, 8),
    Shape("gpt-oss-120b", 7168, 128, 2880, 2880, 4, "biases, clamps, (up + 1) in the model"),
    Shape("gpt-oss-20b", 7168, 32, 2880, 2880, 4, "biases, clamps, (up + 1) in the model"),
    Shape("mixtral-8x7b", 7168, 8, 4096, 14336, 2),
    Shape("mixtral-8x22b", 7168, 8, 6144, 16384, 2),
)
SHAPES = {shape.name: shape for shape in _TABLE}
PEER_SHAPES = tuple(shape.name for shape in _TABLE[:6])
"""The shapes with known rates of peers; what a run on a GPU measures when none is named."""


def parse_shape(text: str, tokens: int | None = None) -> Shape:
    """A name from SHAPES, or `T=512,E=8,H=1024,I=512,K=2` in any order; `tokens` replaces T.

    Raises InputError for an unknown name, a missing, repeated or unknown letter, or sizes that no
    layer has.
    """
    known = SHAPES.get(text)
    shape = known if known is not None else _from_sizes(text)
    if tokens is None or tokens == shape.T:
        return shape
    return replace(shape, name=f"{shape.name}@T={tokens}" if known else shape.name, T=tokens)


def _from_sizes(text: str) -> Shape:
    sizes: dict[str, int] = {}
    for piece in text.split(","):
        found = _SPEC.fullmatch(piece.strip())
        if found is None or found[1] in sizes:
            raise InputError(
                f"shape {text!r}; allowed: one of {', '.join(SHAPES)}, or each of T, E, H, I and K "
                "once, such as T=512,E=8,H=1024,I=512,K=2. Check the spelling."
            )
        sizes[found[1]] = int(found[2])
    missing = [field for field in FIELDS if field not in sizes]
    if missing:
        raise InputError(
            f"shape {text!r} lacks {', '.join(missing)}; allowed: each of T, E, H, I and K once. "
            "Add what is missing."
        )
    name = ",".join(f"{field}={sizes[field]}" for field in FIELDS)
    return Shape(name, sizes["T"], sizes["E"], sizes["H"], sizes["I"], sizes["K"])
