"""Runs `enter_backward` for a group of ranks on one device, and compares with the model.

The tables that the schedule's kernels leave are written by the host here, from the model, so that
one kernel runs and any number of experts' rows can be given. Otherwise as tests/support/
device_schedules.py: guards behind all tables, dirt everywhere, and a backend that launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np
import torch
from device_schedules import DIRT, FLAG_ENTERED, GUARD, THREADS, bytes_on, compare

from mok.hopper import gradient_records, records
from mok.hopper.backward_model import Aims, BackwardPlan, plan_backward
from mok.hopper.layout import Segments, Sizes, ceil_div
from mok.hopper.schedule_model import RankPlan

_MAINS = dict(zip((1, 2, 4, 8, 16, 32), gradient_records.MAINS, strict=True))  # by WANT_*
_ZEROED = (0, 1, 3)


class Backend(Protocol):
    """Launches the kernel. regions: by name, all memory that it may use."""

    def __call__(
        self, *args: object, grid: tuple[int, int], regions: list[tuple[str, torch.Tensor]]
    ) -> None: ...


@dataclass(frozen=True)
class Case:
    """Ranks with the rows of their experts. x, d_out and router weights are random words.

    fresh: WANT_* of gradients that are fp32, but not added to.
    """

    tokens: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]  # of each expert of each rank
    hidden: int
    width: int
    shared_width: int
    segments: Segments
    uncut: int
    aims: Aims
    slots: int = 2
    fresh: int = 0

    @property
    def sizes(self) -> Sizes:
        shape = (self.slots, len(self.rows[0]), self.hidden, self.width, self.shared_width)
        return Sizes(max(self.tokens), *shape, ranks=len(self.rows))

    def plan(self, rank: int) -> tuple[RankPlan, BackwardPlan]:
        """What the schedule and the model say of a rank."""
        rows = self.rows[rank]
        words = [
            expert << 16 | min(records.BLOCK, count - first)
            for expert, count in enumerate(rows)
            for first in range(0, count, records.BLOCK)
        ]
        nothing = np.zeros(0, dtype=np.uint32)
        schedule = RankPlan(
            ids=np.array([self.tokens[rank]], dtype=np.int32),
            bad=0,
            expert_rows=np.array(rows, dtype=np.uint32),
            routes=nothing,
            blocks=np.array(words, dtype=np.uint32),
            rows=sum(rows),
            dispatch=0,
            down=0,
            groups=(),
        )
        return schedule, plan_backward(schedule, self.sizes, self.segments, self.uncut, self.aims)


@dataclass(frozen=True)
class Tables:
    """Memory of the ranks: by name, int32 with a guard; and the records that point to it."""

    case: Case
    plans: tuple[tuple[RankPlan, BackwardPlan], ...]
    ranks: tuple[dict[str, torch.Tensor], ...]
    words: tuple[dict[str, int], ...]
    arguments: tuple[object, ...]


def make_tables(case: Case, device: str, seed: int = 0) -> Tables:
    """Everything that `enter_backward` has to write is dirty; epochs and flags are zero."""
    rng = np.random.default_rng(seed)
    plans = tuple(case.plan(rank) for rank in range(len(case.rows)))
    ranks, words = [], []
    for index, (schedule, _) in enumerate(plans):
        mine = _sizes(case, index, schedule)
        tables = {
            name: torch.full((length + GUARD,), DIRT, dtype=torch.int32)
            for name, length in mine.items()
        }
        for name in ("own_x", "own_d_out", "own_router"):
            given = rng.integers(-(2**31), 2**31, mine[name], dtype=np.int64).astype(np.int32)
            tables[name][: mine[name]] = torch.from_numpy(given)
        for name in ("blocks", "expert_rows"):
            given = getattr(schedule, name).view(np.int32)
            tables[name][: len(given)] = torch.from_numpy(given)
        tables["flags"][: mine["flags"]] = 0
        tables["counters"][: records.COUNTER_HEAD] = 0
        tables["counters"][[*_ZEROED, records.PLAN_GROUPS, records.PLAN_DOWN]] = DIRT
        ranks.append({name: table.to(device) for name, table in tables.items()})
        words.append(mine)
    peers = bytes_on(_peers(ranks), device)
    back_peers = bytes_on(_back_peers(ranks), device)
    made = [_rank(case, index, tables, peers) for index, tables in enumerate(ranks)]
    grads = [_gradient(case, tables, back_peers) for tables in ranks]
    if len(ranks) == 1:
        arguments: tuple[object, ...] = (made[0], None, grads[0], None)
    else:
        many = (bytes_on(records.table(made), device), bytes_on(records.table(grads), device))
        arguments = (records.Rank(), many[0], gradient_records.Gradient(), many[1])
    keep = {"peers": peers, "back_peers": back_peers}
    ranks[0] |= keep
    return Tables(case, plans, tuple(ranks), tuple(words), arguments)


def _sizes(case: Case, rank: int, schedule: RankPlan) -> dict[str, int]:
    """Words of each table of a rank."""
    sizes, blocks = case.sizes, max(1, len(schedule.blocks))
    parts = blocks // case.segments.most
    rows = case.tokens[rank] * case.hidden // 2
    routes = case.tokens[rank] * case.slots
    return {
        "counters": records.COUNTER_HEAD,
        "expert_rows": sizes.experts,
        "blocks": blocks,
        "counts": blocks,
        "flags": records.FLAGS * records.MAX_RANKS,
        "groups": 8 * (4 * (sizes.experts + parts) + 6),
        "back_counters": gradient_records.BACK_HEAD + gradient_records.BACK_TABLES * blocks,
        "segment_of": blocks,
        "used_target": blocks,
        **dict.fromkeys(("own_x", "own_d_out", "x", "d_out"), rows),
        **dict.fromkeys(("own_router", "router"), routes),
    }


def _peers(ranks: Sequence[dict[str, torch.Tensor]]) -> bytes:
    return records.table([records.Peer(flags=one["flags"].data_ptr()) for one in ranks])


def _back_peers(ranks: Sequence[dict[str, torch.Tensor]]) -> bytes:
    return records.table(
        [
            gradient_records.BackPeer(
                **{name: one[name].data_ptr() for name in ("x", "d_out", "router")}
            )
            for one in ranks
        ]
    )


def _rank(
    case: Case, index: int, tables: dict[str, torch.Tensor], peers: torch.Tensor
) -> records.Rank:
    sizes, blocks = case.sizes, max(1, len(case.plan(index)[0].blocks))
    found = records.Rank()
    for name in ("blocks", "counters", "expert_rows", "counts", "own_x"):
        setattr(found, name, tables[name].data_ptr())
    found.router, found.peers = tables["own_router"].data_ptr(), peers.data_ptr()
    numbers = {
        "rank": index,
        "ranks": sizes.ranks,
        "experts": sizes.experts,
        "slots": sizes.slots,
        "tokens": case.tokens[index],
        "max_tokens": sizes.max_tokens,
        "hidden_size": sizes.hidden,
        "width": sizes.width,
        "shared_width": sizes.shared_width,
        "max_blocks": blocks,
        "segment_least": case.segments.least,
        "segment_most": case.segments.most,
    }
    for name, value in numbers.items():
        setattr(found, name, value)
    return found


def _gradient(
    case: Case, tables: dict[str, torch.Tensor], peers: torch.Tensor
) -> gradient_records.Gradient:
    aims, found = case.aims, gradient_records.Gradient()
    for name in ("groups", "segment_of", "used_target"):
        setattr(found, name, tables[name].data_ptr())
    found.counters, found.peers = tables["back_counters"].data_ptr(), peers.data_ptr()
    found.own_d_out = tables["own_d_out"].data_ptr()
    for want, name in _MAINS.items():
        if (aims.added | case.fresh) & want:
            setattr(found, name, tables["own_x"].data_ptr())  # not null; nobody writes there
    found.saved_blocks, found.shared_again = aims.saved_blocks, int(aims.shared_again)
    found.wants, found.fresh, found.uncut = aims.wants, case.fresh, case.uncut
    return found


def find_differences(tables: Tables) -> list[str]:
    """What is not as the model says after one run; at most a line a table."""
    found = []
    case = tables.case
    for rank, (mine, lengths) in enumerate(zip(tables.ranks, tables.words, strict=True)):
        seen = {name: mine[name].cpu().numpy().view(np.uint32) for name in lengths}
        for name, wanted in _wanted(tables, rank, seen).items():
            found += compare(f"rank {rank} {name}", wanted, seen[name][: len(wanted)])
            if name in ("groups", "segment_of", "used_target"):
                rest = seen[name][len(wanted) :]
                found += compare(f"rank {rank} behind {name}", np.full_like(rest, DIRT), rest)
        for name, length in lengths.items():
            guard = seen[name][length:]
            found += compare(f"rank {rank} guard of {name}", np.full_like(guard, DIRT), guard)
        if case.sizes.ranks > 1:
            for name in ("x", "d_out", "router"):
                found += compare(f"rank {rank} {name}", seen[f"own_{name}"], seen[name])
    return found


def _wanted(tables: Tables, rank: int, seen: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    plan = tables.plans[rank][1]
    counters = np.zeros(records.COUNTER_HEAD, dtype=np.uint32)
    counters[records.COUNT_EPOCH] = 1
    counters[records.PLAN_GROUPS], counters[records.PLAN_DOWN] = len(plan.groups), plan.down
    flags = np.zeros((records.FLAGS, records.MAX_RANKS), dtype=np.uint32)
    flags[FLAG_ENTERED, : tables.case.sizes.ranks] = 1
    return {
        "groups": np.array([astuple(one) for one in plan.groups], dtype=np.uint32).reshape(-1),
        "segment_of": plan.segment_of,
        "used_target": plan.used_target,
        "counters": counters,
        "back_counters": np.zeros(tables.words[rank]["back_counters"], dtype=np.uint32),
        "flags": flags.reshape(-1),
    }


def launch(tables: Tables, backend: Backend, ctas: int = 1) -> None:
    """One launch for all ranks; ctas: of each."""
    regions = [
        (f"rank {rank} {name}", table)
        for rank, mine in enumerate(tables.ranks)
        for name, table in mine.items()
    ]
    backend(*tables.arguments, grid=(ctas, len(tables.ranks)), regions=regions)


def check(case: Case, backend: Backend, device: str, ctas: int = 1) -> list[str]:
    """Runs one case, and what differs from the model."""
    tables = make_tables(case, device)
    launch(tables, backend, ctas)
    return find_differences(tables)


def random_case(rng: np.random.Generator) -> Case:
    """Small ranks: experts without rows, alone, cut; anything wanted, kept or added."""
    ranks = int(rng.choice([1, 1, 1, 2, 3]))
    experts = int(rng.choice([1, 2, 5, 9, 40, 300], p=[0.1, 0.2, 0.25, 0.25, 0.15, 0.05]))
    least = int(rng.integers(1, 6))
    most = least + int(rng.integers(0, 5))
    uncut = most + int(rng.choice([0, 0, 1, 3, 1000]))
    largest = int(rng.choice([1, 130, 128 * most, 128 * 3 * most]))
    sizes = (64, 192, 256, 320)
    rows = []
    for _ in range(ranks):
        counts = rng.integers(0, largest + 1, experts) * (
            rng.random(experts) < rng.choice([0, 0.5, 1, 1, 1])
        )
        some = rng.random(experts) < 0.3
        counts[some] = np.minimum(counts[some], 128 * rng.integers(0, 4))  # ties
        rows.append(tuple(int(count) for count in counts))
    wants = int(rng.choice([63, 7, 0, int(rng.integers(0, 64))]))
    added = int(rng.choice([0, wants, int(rng.integers(0, 64)) & wants]))
    fresh = int(rng.choice([0, 63, int(rng.integers(0, 64))])) & wants & ~added
    blocks = max(sum(ceil_div(count, 128) for count in one) for one in rows)
    saved = int(rng.choice([0, blocks, 10**6, int(rng.integers(0, blocks + 1))]))
    return Case(
        tokens=tuple(int(rng.choice([0, 1, 128, 200])) for _ in range(ranks)),
        rows=tuple(rows),
        hidden=int(rng.choice(sizes)),
        width=int(rng.choice(sizes)),
        shared_width=int(rng.choice([0, *sizes])),
        segments=Segments(least, most),
        uncut=uncut,
        aims=Aims(wants, added, saved, bool(rng.random() < 0.5)),
        fresh=fresh,
    )


def cuda_backend(device: int = 0) -> Callable[..., None]:
    """Launches the package's kernel on torch's current stream."""
    from mok import loading

    kernel = loading.load("moe/enter_backward.cu", "enter_backward", device=device)

    def backend(*args: object, grid: tuple[int, int], regions: object) -> None:
        kernel.launch(*args, grid=grid, block=THREADS)

    return backend
