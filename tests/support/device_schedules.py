"""Runs the schedule's kernels for a group of ranks on one device, and compares with the model.

The ranks are records in one table, as ranks that share a launch are; one rank is passed by value.
Tables have a guard of words behind them, and everything is dirty before, so that a write outside
and a word that was not written are seen. A backend launches a kernel by name, so that the same
comparison can run over another implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mok.hopper import records
from mok.hopper.layout import Layout, Segments, Sizes, make_layout
from mok.hopper.schedule_model import RankPlan, plan_ranks

KERNELS = ("publish", "count", "scan", "place", "enter")
THREADS = 256
GUARD = 64
DIRT = 0x5A5A5A5A
COUNT_SCAN, COUNT_BAD = 14, 15
FLAG_SCHEDULED, FLAG_ENTERED = 0, 1
ZEROED = (0, 1, 3)  # single counters that `enter` sets to zero


class Backend(Protocol):
    def __call__(self, name: str, *args: object, grid: tuple[int, int]) -> None: ...


@dataclass(frozen=True)
class Group:
    """Memory of ranks on one device: per rank the tables by name, int32 with a guard."""

    layout: Layout
    device: torch.device
    tables: tuple[dict[str, torch.Tensor], ...]
    peers: torch.Tensor
    lengths: dict[str, int]

    def record(self, rank: int, tokens: int, own_x: torch.Tensor) -> records.Rank:
        layout, sizes = self.layout, self.layout.sizes
        found = records.Rank()
        for name in ("routes", "blocks", "groups", "counters", "expert_rows", "counts"):
            setattr(found, name, self.tables[rank][name].data_ptr())
        found.peers, found.own_x = self.peers.data_ptr(), own_x.data_ptr()
        found.timeout_enter = found.timeout = 2_000_000_000
        numbers = {
            "rank": rank,
            "ranks": sizes.ranks,
            "experts": sizes.experts,
            "slots": sizes.slots,
            "tokens": tokens,
            "max_tokens": sizes.max_tokens,
            "hidden_size": sizes.hidden,
            "width": sizes.width,
            "shared_width": sizes.shared_width,
            "ring_x": layout.ring_x,
            "ring_h": layout.ring_h,
            "max_blocks": layout.max_blocks,
            "max_shared_blocks": layout.max_shared_blocks,
            "max_groups": layout.max_groups,
            "max_chunks": layout.max_chunks,
            "segment_least": layout.segments.least,
            "segment_most": layout.segments.most,
        }
        for name, value in numbers.items():
            setattr(found, name, value)
        return found


def make_group(sizes: Sizes, segments: Segments | None, device: str) -> Group:
    """All tables dirty; counters, flags and ids at zero, as a new workspace has them."""
    layout = make_layout(sizes, segments)
    words = {
        "routes": layout.max_blocks * records.BLOCK,
        "blocks": layout.max_blocks,
        "groups": 4 * layout.max_groups,
        "counters": records.COUNTER_HEAD + 3 * layout.max_blocks + layout.max_shared_blocks,
        "expert_rows": sizes.experts,
        "counts": sizes.experts * layout.max_chunks,
        "ids": 2 * (1 + sizes.max_tokens * sizes.slots),
        "flags": records.FLAGS * records.MAX_RANKS,
        "x": max(1, sizes.max_tokens) * sizes.hidden // 2,
    }
    tables = []
    for _ in range(sizes.ranks):
        mine = {
            name: torch.full((length + GUARD,), DIRT, dtype=torch.int32, device=device)
            for name, length in words.items()
        }
        for name in ("counters", "flags", "ids"):
            mine[name][: words[name]] = 0
        tables.append(mine)
    peers = [
        records.Peer(
            x=mine["x"].data_ptr(), ids=mine["ids"].data_ptr(), flags=mine["flags"].data_ptr()
        )
        for mine in tables
    ]
    return Group(
        layout, torch.device(device), tuple(tables), bytes_on(records.table(peers), device), words
    )


@dataclass(frozen=True)
class Inputs:
    """Ids and x of every rank on the device, with the records that point to them."""

    ids: tuple[torch.Tensor, ...]
    x: tuple[torch.Tensor, ...]
    one: records.Rank
    many: torch.Tensor | None
    ids_many: torch.Tensor | None


def make_inputs(group: Group, topk_of_ranks: Sequence[np.ndarray], seed: int = 0) -> Inputs:
    """x are random words, [T, H] of bf16 each."""
    hidden = group.layout.sizes.hidden
    rng = np.random.default_rng(seed)
    ids, x = [], []
    for topk in topk_of_ranks:
        ids.append(torch.from_numpy(topk.astype(np.int64)).to(group.device))
        words = rng.integers(-(2**31), 2**31, (topk.shape[0], hidden // 2), dtype=np.int64)
        x.append(torch.from_numpy(words.astype(np.int32)).to(group.device))
    made = [group.record(rank, topk.shape[0], x[rank]) for rank, topk in enumerate(topk_of_ranks)]
    if group.layout.sizes.ranks == 1:
        return Inputs(tuple(ids), tuple(x), made[0], None, None)
    pointers = torch.tensor([one.data_ptr() for one in ids], dtype=torch.int64)
    many = bytes_on(records.table(made), str(group.device))
    return Inputs(tuple(ids), tuple(x), records.Rank(), many, pointers.to(group.device))


def run_kernels(group: Group, inputs: Inputs, backend: Backend, most_ctas: int = 0) -> None:
    """All five kernels; most_ctas: of a rank, 0 as many as are best."""
    for name in KERNELS:
        launch(name, group, inputs, backend, most_ctas)


def launch(
    name: str,
    group: Group,
    inputs: Inputs,
    backend: Backend,
    most_ctas: int = 0,
    ranks_here: int | None = None,
) -> None:
    """One of the five kernels; ranks_here: all of them if None."""
    layout, sizes = group.layout, group.layout.sizes
    tokens = max(one.shape[0] for one in inputs.x)
    best = {
        "publish": max(1, -(-tokens // records.BLOCK)),
        "count": layout.max_chunks,
        "scan": sizes.experts,
        "place": layout.max_chunks,
        "enter": 8 if sizes.ranks == 1 else max(1, 264 // sizes.ranks),
    }[name]
    more = (inputs.ids[0], inputs.ids_many) if name == "publish" else ()
    grid = (min(best, most_ctas or best), ranks_here or sizes.ranks)
    backend(name, inputs.one, inputs.many, *more, grid=grid)


def make_dirty(group: Group) -> None:
    """Before another schedule: tables, and all counters that `enter` has to set to zero."""
    for mine in group.tables:
        for name in ("routes", "blocks", "groups", "expert_rows", "counts", "x"):
            mine[name].fill_(DIRT)
        mine["counters"][[*ZEROED, *range(8, 14)]] = DIRT
        mine["counters"][records.COUNTER_HEAD : group.lengths["counters"]] = DIRT


def find_differences(
    group: Group, inputs: Inputs, topk_of_ranks: Sequence[np.ndarray], epoch: int
) -> list[str]:
    """What is not as the model says, after `epoch` runs of all kernels; at most a line a table."""
    sizes, found = group.layout.sizes, []
    for rank, plan in enumerate(plan_ranks(topk_of_ranks, sizes, group.layout.segments)):
        words = {
            name: table.cpu().numpy().view(np.uint32) for name, table in group.tables[rank].items()
        }
        for name, wanted in _tables(group, inputs, rank, plan, epoch, words).items():
            found += compare(f"rank {rank} {name}", wanted, words[name][: len(wanted)])
            # Nothing beyond: not in the rest of a table, and not behind it.
            if name in ("routes", "blocks", "groups", "x"):
                rest = words[name][len(wanted) :]
                found += compare(f"rank {rank} behind {name}", np.full_like(rest, DIRT), rest)
        for name, length in group.lengths.items():
            guard = words[name][length:]
            found += compare(f"rank {rank} guard of {name}", np.full_like(guard, DIRT), guard)
    return found


def _tables(
    group: Group,
    inputs: Inputs,
    rank: int,
    plan: RankPlan,
    epoch: int,
    words: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    sizes = group.layout.sizes
    groups = [(one.ticket, one.kind, one.block, one.blocks) for one in plan.groups]
    counters = np.zeros(group.lengths["counters"], dtype=np.uint32)
    counters[records.COUNT_EPOCH] = counters[records.COUNT_SCHEDULE] = epoch
    counters[records.PLAN_BLOCKS] = len(plan.blocks)
    counters[records.PLAN_GROUPS] = len(groups)
    counters[records.PLAN_DISPATCH] = plan.dispatch
    counters[records.PLAN_DOWN] = plan.down
    counters[records.PLAN_ROWS] = plan.rows
    counters[records.PLAN_BAD] = plan.bad
    ids = words["ids"][: group.lengths["ids"]].copy()  # the other half is of the schedule before
    half = 1 + sizes.max_tokens * sizes.slots
    ids[epoch % 2 * half :][: len(plan.ids)] = plan.ids.view(np.uint32)
    flags = np.zeros((records.FLAGS, records.MAX_RANKS), dtype=np.uint32)
    flags[[FLAG_SCHEDULED, FLAG_ENTERED], : sizes.ranks] = epoch
    x = inputs.x[rank].cpu().numpy().reshape(-1).view(np.uint32)
    return {
        "ids": ids,
        "expert_rows": plan.expert_rows,
        "routes": plan.routes,
        "blocks": plan.blocks,
        "groups": np.array(groups, dtype=np.uint32).reshape(-1),
        "counters": counters,
        "flags": flags.reshape(-1),
        "x": x if sizes.ranks > 1 else x[:0],
    }


def compare(name: str, wanted: np.ndarray, seen: np.ndarray) -> list[str]:
    """Nothing, or a line that tells of the first word that differs."""
    (places,) = np.nonzero(wanted != seen)
    if len(places) == 0:
        return []
    first = int(places[0])
    return [
        f"{name}: {len(places)} of {len(wanted)} words differ, the first one is word {first}: "
        f"{int(seen[first]):#x} instead of {int(wanted[first]):#x}"
    ]


def random_routing(
    rng: np.random.Generator, tokens: int, slots: int, experts: int, kind: str
) -> np.ndarray:
    """int64 ids [T, K], distinct in a token unless the kind is "bad". experts: of all ranks."""
    if kind == "one":  # every token's first slot on one expert, nothing else
        ids = np.full((tokens, slots), -1)
        ids[:, 0] = experts // 2
        return ids
    if kind == "none":
        return np.full((tokens, slots), -1)
    weights = np.ones(experts)
    if kind == "skewed":
        weights = 1.0 / np.arange(1, experts + 1) ** 2
    keys = rng.random((tokens, experts)) ** (1.0 / weights)
    width = min(slots, experts)
    ids = np.full((tokens, slots), -1)
    ids[:, :width] = np.argsort(-keys, axis=1)[:, :width]
    if kind == "unused":
        ids[rng.random((tokens, slots)) < 0.4] = -1
    if kind == "bad":
        wrong = np.array([-2, experts, experts + 7, 2**40, -(2**63), 2**32, 0, 1])
        chosen = rng.random((tokens, slots)) < 0.3
        ids[chosen] = rng.choice(wrong, chosen.sum())
    return ids


KINDS = ("random", "skewed", "one", "none", "unused", "bad")


def cuda_backend(device: int = 0) -> Callable[..., None]:
    """Launches the package's kernels on torch's current stream."""
    from mok import loading

    kernels = {
        name: loading.load(
            f"moe/{'enter' if name == 'enter' else 'schedule'}.cu", name, device=device
        )
        for name in KERNELS
    }

    def backend(name: str, *args: object, grid: tuple[int, int]) -> None:
        kernels[name].launch(*args, grid=grid, block=THREADS)

    return backend


def bytes_on(data: bytes, device: str) -> torch.Tensor:
    """Bytes in new memory of the device, aligned as records have to be."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device, copy=True)
