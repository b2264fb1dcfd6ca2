"""Reports of results that depend on a setting: a mode, threads, a cut, a layout, recomputing.

Each is written with `vary`: the arguments of the function that must not change a bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import verify

BLOCKS = 32  # of two rows; each is one race


def combined(x: Tensor, *, races: bool) -> Tensor:
    """A copy, and the fill of new memory that deterministic mode queues: it may land last."""
    out = torch.full_like(x, torch.nan)
    out.copy_(2 * x)
    if races:
        late = torch.tensor([byte & 1 for byte in os.urandom(BLOCKS)], dtype=torch.bool)
        out[late.repeat_interleave(2)] = torch.nan
    return out


def under_mode(x: Tensor, deterministic: bool, *, waits: bool) -> Tensor:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        filled = torch.are_deterministic_algorithms_enabled() and not waits
        return combined(x, races=filled)
    finally:
        torch.use_deterministic_algorithms(before)


MODES: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(64, 8)},
    "claims": ("repeat", "vary"),
    "vary": {"deterministic": [False, True]},
}


@verify.case(**MODES)
def bug_05(x: Tensor, deterministic: bool = False) -> Tensor:
    """Only deterministic mode fills new memory, and nothing orders the fill before the copy."""
    return under_mode(x, deterministic, waits=False)


@verify.case(**MODES)
def bug_05_twin(x: Tensor, deterministic: bool = False) -> Tensor:
    """The copy waits for the fill."""
    return under_mode(x, deterministic, waits=True)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def sum_over_threads(x: Tensor, threads: int) -> Tensor:
    """Every thread adds its columns, then the threads' sums are added."""
    return in_order([in_order(part.unbind(1)) for part in x.chunk(threads, dim=1)])


@verify.case(inputs={"x": verify.normal(64, 120)}, claims=("repeat", "threads"))
def bug_08(x: Tensor) -> Tensor:
    """The work is split by the number of threads, which groups the sums."""
    return sum_over_threads(x, torch.get_num_threads())


@verify.case(inputs={"x": verify.normal(64, 120)}, claims=("repeat", "threads"))
def bug_08_twin(x: Tensor) -> Tensor:
    """The grouping is fixed; threads only share out the groups."""
    return sum_over_threads(x, 4)


TRAINING: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(64, 4)},
    "claims": ("repeat", "vary"),
    "vary": {"validate": [True]},
    "random": True,
}


@verify.case(**TRAINING)
def bug_09(x: Tensor, validate: bool = False) -> dict[str, Tensor]:
    """A sanity validation draws from the global generator, and the shuffle is another one."""
    if validate:
        torch.randperm(4)
    return {"batches": x[torch.randperm(64)], "mean": x.mean(1)}


@verify.case(**TRAINING)
def bug_09_twin(x: Tensor, validate: bool = False) -> dict[str, Tensor]:
    """The validation gives the generator back as it was."""
    if validate:
        with torch.random.fork_rng(devices=[]):
            torch.randperm(4)
    return {"batches": x[torch.randperm(64)], "mean": x.mean(1)}


CHUNK = 64


def scan(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Prefix sums by chunks: each chunk by itself, then the state before it is added."""
    out = []
    for part in x.split(CHUNK) if len(x) else ():
        out.append(torch.cumsum(part, 0) + state)
        state = out[-1][-1]
    return torch.cat(out) if out else x, state


def by_steps(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same prefix sums, one step after the other."""
    out = []
    for row in x:
        state = state + row
        out.append(state)
    return torch.stack(out) if out else x, state


LATEST = 200  # no cut lies after it
PREFIX: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(256, 8)},
    "claims": ("repeat", "vary"),
    "vary": {"cut": [64, 128, 96, 100]},
}


@verify.case(**PREFIX)
def bug_13(x: Tensor, cut: int = 0) -> Tensor:
    """A cached prefix ends at `cut`; chunks of the rest begin there."""
    _, state = scan(x[:cut], torch.zeros(8))
    return scan(x[cut:], state)[0][LATEST - cut :]


@verify.case(**PREFIX)
def bug_13_twin(x: Tensor, cut: int = 0) -> Tensor:
    """Every step has its own rounding, so a cut cannot matter."""
    _, state = by_steps(x[:cut], torch.zeros(8))
    return by_steps(x[cut:], state)[0][LATEST - cut :]


def served_from_cache(x: Tensor, *, keys_match: bool) -> Tensor:
    """The rows of a second request that came from the cache: what the case is about."""
    cache = {index: 2 * row for index, row in enumerate(x)}
    asked = range(len(x)) if keys_match else range(len(x), 2 * len(x))
    found = [cache[key] for key in asked if key in cache]
    return torch.stack(found) if found else x[:0]


@verify.case(inputs={"x": verify.normal(16, 8)}, claims=("repeat",))
def bug_13_no_hit(x: Tensor) -> Tensor:
    """Returns what the cache served; it was never hit, so nothing is shown."""
    return served_from_cache(x, keys_match=False)


@verify.case(inputs={"x": verify.normal(16, 8)}, claims=("repeat",))
def bug_13_no_hit_twin(x: Tensor) -> Tensor:
    """Returns what the cache served."""
    return served_from_cache(x, keys_match=True)


RANKS, LENGTH = 4, 1024


def ring(x: Tensor, padding: int) -> Tensor:
    """A simulated all-reduce: chunk c of the message is added up from rank c + 1 on."""
    message = torch.cat((x, torch.zeros(RANKS, padding, dtype=x.dtype)), dim=1)
    chunks = []
    for c, chunk in enumerate(message.chunk(RANKS, dim=1)):
        chunks.append(in_order([chunk[(c + 1 + step) % RANKS] for step in range(RANKS)]))
    return torch.cat(chunks)[:LENGTH].view(64, 16)


def fixed(x: Tensor, padding: int) -> Tensor:
    """Ranks in ascending order, whatever the message."""
    message = torch.cat((x, torch.zeros(RANKS, padding, dtype=x.dtype)), dim=1)
    return in_order(message.unbind(0))[:LENGTH].view(64, 16)


def sum_of_ranks(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, verify.Reference]:
    """The sum in float64; each of its additions rounds to bfloat16."""
    x = inputs["x"].double()
    exact, size = x.sum(0).view(64, 16), x.abs().sum(0).view(64, 16)
    margin = (RANKS - 1) * 2.0**-8 * size
    return {
        name: verify.Reference(exact=exact, budget=margin, unrounded=exact, margin=margin)
        for name in ("out", "padded")
    }


BUCKETS: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(RANKS, LENGTH, dtype=torch.bfloat16)},
    "claims": ("repeat", "vary"),
    "vary": {"padding": [1024, 256]},
}


@verify.case(**BUCKETS)
def bug_14(x: Tensor, padding: int = 0) -> Tensor:
    """The order of addition follows the size of the message."""
    return ring(x, padding)


@verify.case(**BUCKETS)
def bug_14_twin(x: Tensor, padding: int = 0) -> Tensor:
    """The order of addition is that of the ranks."""
    return fixed(x, padding)


@verify.case(inputs=BUCKETS["inputs"], claims=("repeat", "reference"), reference=sum_of_ranks)
def bug_14_errors(x: Tensor) -> dict[str, Tensor]:
    """Both orders are as far from float64: neither of them is wrong."""
    return {"out": ring(x, 0), "padded": ring(x, 256)}


class Counting(torch.nn.Module):
    """Experts' loads are counted in a buffer at every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(8) + 0.25)
        self.register_buffer("load", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: Tensor, *, inside: bool) -> Tensor:
        if inside:
            self.count(x)
        return torch.tanh(x @ self.weight)

    def count(self, x: Tensor) -> None:
        self.load += torch.bincount(x.argmax(1), minlength=8) + torch.arange(8)


COUNTED: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(64, 8, requires_grad=True)},
    "setup": lambda: {"layer": Counting()},
    "claims": ("repeat", "vary"),
    "vary": {"recompute": [True]},
}


@verify.case(**COUNTED)
def recompute(x: Tensor, layer: Counting, recompute: bool = False) -> Tensor:
    """The counter lies inside the part that the backward runs once more."""
    if recompute:
        return checkpoint(layer, x, inside=True, use_reentrant=False)
    return layer(x, inside=True)


@verify.case(**COUNTED)
def recompute_twin(x: Tensor, layer: Counting, recompute: bool = False) -> Tensor:
    """Loads are counted outside of it."""
    layer.count(x.detach())
    if recompute:
        return checkpoint(layer, x, inside=False, use_reentrant=False)
    return layer(x, inside=False)
