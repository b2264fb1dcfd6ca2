"""Exact cases: small integers for which every product and partial sum of the layer is exact.

Then output and every gradient must equal the rounding reference bit for bit, whatever the order of
accumulation, on any machine: the first test of every backend, and goldens without a key. A lost
token, a wrong index, a swapped matrix, a dropped sigmoid or clamp shows as a wrong bit.

How: each row of x has two ones at positions of its own, so g = 64 a + ... is a sum of two weights:
g in {0, 64, 128} in some hidden units and {0, 128, <= -128} in others, where sigmoid is 1/2, 1 and
(exp(-g) overflowing) 0 exactly. u is in {-2 .. 2}; with a limit of 64, every second unit has u in
{0, +-72, +-144}, which the clamp cuts. Router weights are powers of two, w_down and d_out have two
non-zero values per row. silu(<= -128) may be -0 in fp32, and so may an h or dg made from it; an
output cannot be -0, since it is a sum that starts from +0 and no sum of non-zero terms underflows.

Values come from splitmix64 over names and indices, by integer arithmetic only. The builder refuses
a case that is not exact: rounded intermediates fit 8 significant bits, and the sum of magnitudes of
every product of matrices stays below 2^24 units. It says nothing about sigmoid between its fixed
points.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mok import reference
from mok.deviations import Arithmetic, round_bf16
from mok.errors import InputError

Routing = Literal["balanced", "skewed", "one-expert", "empty-experts", "k1", "unused-slots"]

LIMIT = 64.0
"""The swiglu_limit of clamped exact cases: silu(64) = 64 in fp32."""


@dataclass(frozen=True)
class ExactCase:
    """Inputs, the upstream gradient bf16 [T, H], and the expected outputs (see reference.moe)."""

    inputs: reference.MoEInputs
    d_out: Tensor
    expected: dict[str, Tensor]


def integers(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """uint64 hash values of (name, seed, index): splitmix64, the same on every machine."""
    start = (zlib.crc32(name.encode()) << 32) ^ (seed * 0x9E3779B9)
    count = int(np.prod(shape, dtype=np.int64))
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = z + np.uint64(start & 0xFFFFFFFFFFFFFFFF)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return z.reshape(shape)


def _draw(name: str, shape: tuple[int, ...], values: tuple[float, ...], seed: int) -> np.ndarray:
    chosen = integers(name, shape, seed) % np.uint64(len(values))
    return np.asarray(values, dtype=np.float64)[chosen.astype(np.int64)]


def _bf16(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(torch.bfloat16)


def exact_routes(routing: Routing, tokens: int, experts: int, slots: int, seed: int = 0) -> Tensor:
    """Expert ids, int64 [T, K], distinct inside a token; raises InputError if impossible."""
    if routing not in get_args(Routing):
        raise InputError(f"routing = {routing!r}; allowed: {', '.join(get_args(Routing))}.")
    most = {"one-expert": experts, "empty-experts": (experts + 1) // 2, "k1": 1}
    if not 1 <= slots <= most.get(routing, experts):
        raise InputError(
            f"K = {slots} with routing {routing!r} and {experts} experts; allowed: 1 .. "
            f"{most.get(routing, experts)}. Change K or the routing."
        )
    keys = integers("routes", (tokens, experts), seed) >> np.uint64(40)
    if routing == "one-expert":
        topk = np.full((tokens, slots), -1, dtype=np.int64)
        topk[:, slots - 1] = experts // 2
        return torch.from_numpy(topk)
    if routing == "balanced":
        first = np.arange(tokens, dtype=np.int64)[:, None] * slots
        return torch.from_numpy((first + np.arange(slots)) % experts)
    if routing == "skewed":
        keys = keys * np.arange(1, experts + 1, dtype=np.uint64) ** np.uint64(2)
    if routing == "empty-experts":
        keys[:, 1::2] += np.uint64(1 << 32)
    topk = np.argsort(keys, axis=1, kind="stable")[:, :slots].astype(np.int64)
    if routing == "unused-slots":
        topk[integers("unused", (tokens, slots), seed) % np.uint64(3) == 0] = -1
    return torch.from_numpy(topk)


def _two_per_row(name: str, rows: int, width: int, step: int, signed: bool, seed: int) -> Tensor:
    """[rows, width] with two non-zero values per row, their distance a multiple of step."""
    gaps = max((width - 1) // (2 * step), 1)
    row = np.arange(rows, dtype=np.int64)
    first = (row * 5 + seed) % width if width % 5 else (row * 7 + seed) % width
    second = (first + step * (1 + (row // width + 3 * first) % gaps)) % width
    result = np.zeros((rows, width))
    signs = _draw(name, (rows, 2), (-1.0, 1.0) if signed else (1.0,), seed)
    result[row, first] = signs[:, 0]
    result[row, second] = signs[:, 1]
    return _bf16(result)


def _expert_weights(
    name: str, experts: int, hidden: int, width: int, clamped: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up [E, I, H] and down [E, H, I]; see the module docstring."""
    shape = (experts, width, hidden)
    unit = np.arange(width)[None, :, None]
    gate = np.where(
        unit // 2 % 2 == 0,
        _draw(f"{name}.gate.positive", shape, (0.0, 64.0), seed),
        _draw(f"{name}.gate.signed", shape, (-128.0, 0.0, 128.0), seed),
    )
    up = _draw(f"{name}.up", shape, (-1.0, 0.0, 1.0), seed)
    if clamped:
        up = np.where(unit % 2 == 1, 72.0 * up, up)
    # Row h of w_down has two values, at hidden units of h's parity, so that one token's dx_k mixes
    # only units of one kind and stays within 8 significant bits.
    down = np.zeros((experts, hidden, width))
    pairs = width // 2
    place = integers(f"{name}.down", (experts, hidden, 2), seed) % np.uint64(pairs)
    sign = _draw(f"{name}.down.sign", (experts, hidden, 2), (-1.0, 1.0), seed)
    expert, row = np.arange(experts)[:, None], np.arange(hidden)[None, :]
    first = place[..., 0].astype(np.int64)
    gap = 1 + place[..., 1].astype(np.int64) % max(pairs - 1, 1)
    parity = row % 2
    down[expert, row, 2 * first + parity] = sign[..., 0]
    down[expert, row, 2 * ((first + gap) % pairs) + parity] = sign[..., 1]
    return _bf16(gate), _bf16(up), _bf16(down)


def _lowest_bit(values: Tensor) -> float:
    """The largest power of two that divides all values; 1 when all are zero."""
    array = np.abs(values.numpy())
    array = array[array > 0]
    if not array.size:
        return 1.0
    mantissa, exponent = np.frexp(array)
    integer = np.ldexp(mantissa, 53).astype(np.int64)
    zeros = np.log2((integer & -integer).astype(np.float64))
    return float(np.exp2((exponent - 53 + zeros).min()))


def _assert_rounding_exact(value: Tensor) -> None:
    if not torch.equal(round_bf16(value), value):
        wrong = value[round_bf16(value) != value][0].item()
        raise InputError(
            f"not an exact case: the intermediate {wrong} needs more than 8 significant bits. "
            "Choose another seed or a smaller shape."
        )


def _assert_sum_exact(a: Tensor, b: Tensor) -> None:
    if 0 in a.shape or 0 in b.shape:
        return
    units = float((a.abs() @ b.abs()).max()) / (_lowest_bit(a) * _lowest_bit(b))
    if not units < 2.0**24:
        raise InputError(
            f"not an exact case: partial sums reach {units:.0f} units, allowed: below 2^24. "
            "Choose fewer tokens or a smaller width."
        )


def exact_case(
    tokens: int,
    hidden: int,
    width: int,
    experts: int,
    slots: int,
    routing: Routing = "balanced",
    *,
    shared_width: int | None = None,
    clamped: bool = False,
    seed: int = 0,
) -> ExactCase:
    """An exact case of T, H, I, E, K; clamped: with swiglu_limit 64.

    Rows of x are distinct for T <= H (H - 1) / 2. Raises InputError for H < 6, I < 4, a routing
    that does not fit, or a case that turns out not to be exact.
    """
    if hidden < 6 or width < 4 or width % 2 or (shared_width or 4) < 4 or (shared_width or 0) % 2:
        raise InputError(
            f"H = {hidden}, I = {width}, shared width = {shared_width}; allowed: H at least 6, "
            "widths even and at least 4."
        )
    topk = exact_routes(routing, tokens, experts, slots, seed)
    start = (integers("router", (tokens, 1), seed) % np.uint64(4)).astype(np.int64)
    powers = np.array([0.25, 0.5, 1.0, 2.0], dtype=np.float32)
    router = torch.from_numpy(powers[(start + np.arange(slots)) % 4])
    inputs = reference.MoEInputs(
        x=_two_per_row("x", tokens, hidden, 1, False, seed),
        topk_experts=topk,
        router_weights=router,
        **dict(
            zip(
                ("w_gate", "w_up", "w_down"),
                _expert_weights("routed", experts, hidden, width, clamped, seed),
                strict=True,
            )
        ),
        shared=_shared(hidden, shared_width, clamped, seed),
        swiglu_limit=LIMIT if clamped else None,
    )
    d_out = _two_per_row("d_out", tokens, hidden, 2, True, seed + 1)
    watched = Arithmetic("rounded", on_round=_assert_rounding_exact, on_matmul=_assert_sum_exact)
    values = reference.moe(inputs, d_out, "rounded", arithmetic=watched)
    bf16 = ("out", "d_x")
    expected = {
        name: value.v.to(torch.bfloat16 if name in bf16 else torch.float32)
        for name, value in values.items()
    }
    return ExactCase(inputs, d_out, expected)


def _shared(
    hidden: int, width: int | None, clamped: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    if width is None:
        return None
    gate, up, down = _expert_weights("shared", 1, hidden, width, clamped, seed)
    return gate[0], up[0], down[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits: -0 differs from +0, and NaN payloads count."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(
        a.detach().cpu().contiguous().view(torch.uint8),
        b.detach().cpu().contiguous().view(torch.uint8),
    )
