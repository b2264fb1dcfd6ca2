"""Random routings and settings for the simulation of the protocol, small enough to run in bulk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st
from protocol_scheduler import Broken
from protocol_settings import BLOCK_ROWS, BackwardSetting, Routing, Rules, Setting
from protocol_simulation import Simulation

from mok.hopper.backward_protocol import Columns
from mok.hopper.layout import Segments

POLICIES = ("random", "random", "newest", "oldest", "starve", "favour")


def make_routing(
    rng: random.Random,
    ranks: int,
    slots: int,
    most: int,
    *,
    launches: int,
    tokens: int = 5,
    most_experts: int = 3,
) -> Routing:
    """One schedule: up to `tokens` tokens a rank, spread or on one expert, some unused."""
    experts = rng.randint(1, most_experts)
    counts = [rng.choice((0, 1, tokens, rng.randint(0, tokens))) for _ in range(ranks)]
    hot = rng.choice((0.0, 0.0, 0.7, 1.0))
    unused = rng.choice((0.0, 0.0, 0.3, 1.0))
    target = (rng.randrange(ranks), rng.randrange(experts))
    found: dict[tuple[int, int], list[tuple[int, int] | None]] = {}
    for owner, count in enumerate(counts):
        for route in range(count * slots):
            if rng.random() < unused:
                continue
            spread = (rng.randrange(ranks), rng.randrange(experts))
            place = target if rng.random() < hot else spread
            found.setdefault(place, []).append((owner, route))
    rows, segments, counts_E = [], [], []
    for rank in range(ranks):
        blocks = []
        counts_E.append(tuple(len(found.get((rank, expert), ())) for expert in range(experts)))
        for expert in range(experts):
            routes = found.get((rank, expert), [])
            padded = [*routes, *[None] * (-len(routes) % BLOCK_ROWS)]
            blocks += [
                tuple(padded[first : first + BLOCK_ROWS])
                for first in range(0, len(padded), BLOCK_ROWS)
            ]
        rows.append(tuple(blocks))
        segments.append(cut(rng, len(blocks), most))
    return Routing(tuple(counts), tuple(rows), tuple(segments), launches, tuple(counts_E))


def cut(rng: random.Random, blocks: int, most: int) -> tuple[int, ...]:
    """`blocks` as segments of 1 to `most`."""
    found = []
    while blocks:
        found.append(rng.randint(1, min(most, blocks)))
        blocks -= found[-1]
    return tuple(found)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    most_ranks: int = 6,
    local: bool | None = None,
    launches: int = 3,
    tokens: int = 5,
    most_experts: int = 3,
) -> tuple[tuple[Routing, ...], Setting]:
    """Schedules with their launches (some are never used), and how they are run."""
    ranks = draw(st.integers(1, most_ranks))
    resident = draw(st.sampled_from((1, 1, 2, 3)))
    together = draw(st.booleans()) if local is None else local
    pattern = draw(st.lists(st.integers(0, 2), min_size=1, max_size=launches))
    while sum(pattern) > launches:
        pattern.pop()
    most = draw(st.integers(1, 3))
    setting = Setting(
        slots=draw(st.integers(1, 2)),
        columns_up=draw(st.integers(1, 2)),
        columns_down=draw(st.integers(1, 2)),
        shared=draw(st.booleans()),
        extra_x=draw(st.sampled_from((0, 0, 1, 4))),
        extra_h=draw(st.sampled_from((0, 0, 1, 4))),
        resident=resident * (ranks if together else 1),
        grid=resident + draw(st.integers(0, 2)),
        movers=draw(st.sampled_from((1, 3))),
        depth=draw(st.sampled_from((1, 1, 4))),
        local=together,
        policy=draw(st.sampled_from(POLICIES)),
        chosen=draw(st.integers(0, ranks - 1)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    rng = random.Random(setting.seed)
    routings = [
        make_routing(
            *(rng, ranks, setting.slots, most),
            launches=count,
            tokens=tokens,
            most_experts=most_experts,
        )
        for count in pattern or [1]
    ]
    return tuple(routings), setting


@st.composite
def backward_cases(
    draw: st.DrawFn, *, most_ranks: int = 4, local: bool | None = None
) -> tuple[tuple[Routing, ...], Setting]:
    """As `cases`, but some of the launches are of the backward, the last one always."""
    larger = {"tokens": 14, "most_experts": 5}
    routings, setting = draw(cases(most_ranks=most_ranks, local=local, launches=2, **larger))
    kinds = draw(st.lists(st.booleans(), min_size=len(routings), max_size=len(routings)))
    kinds[-1] = True
    least = draw(st.integers(1, 3))
    most = least + draw(st.integers(0, 1))
    hidden, shared_hidden = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    columns = Columns(
        again=2 * hidden - draw(st.integers(0, 1)),
        hidden=hidden,
        input=setting.columns_down,
        weights=draw(st.integers(0, 3)),
        shared_again=draw(st.sampled_from((0, 2 * shared_hidden - 1, 2 * shared_hidden))),
        shared_hidden=shared_hidden,
        shared_weights=draw(st.integers(0, 2)),
    )
    backward = BackwardSetting(
        Segments(least, most),
        most + draw(st.sampled_from((0, 0, 1, 9))),
        columns,
        saved_blocks=draw(st.sampled_from((0, 1, 3, 99))),
        extra_ring=draw(st.sampled_from((0, 0, 1, 4))),
    )
    chosen = [
        replace(one, backward=kind, launches=max(1, one.launches) if kind else one.launches)
        for one, kind in zip(routings, kinds, strict=True)
    ]
    return tuple(chosen), replace(setting, backward=backward)


def find_faults(
    rules: Rules,
    setting: Setting,
    *,
    ranks: int = 3,
    runs: int = 50,
    keep_going: bool = False,
    tokens: int = 3,
    backward: Sequence[bool] = (False, False, False),
) -> Counter[str]:
    """What goes wrong in `runs` runs: "deadlock", or kind and subject of a violation.

    backward: of each schedule, whether its launches are of the backward.
    """
    kinds: Counter[str] = Counter()
    for seed in range(runs):
        rng = random.Random(seed)
        launches = [rng.randint(0, 2) for _ in backward]
        routings = tuple(
            replace(
                make_routing(rng, ranks, setting.slots, 2, launches=count, tokens=tokens),
                backward=kind,
            )
            for count, kind in zip(launches, backward, strict=True)
        )
        policy = rng.choice(("random", "starve", "favour", "newest", "oldest"))
        chosen = rng.randrange(ranks)
        simulation = Simulation(
            routings,
            replace(setting, seed=seed, policy=policy, chosen=chosen),
            rules,
            keep_going=keep_going,
        )
        try:
            simulation.run()
        except Broken as error:
            if "deadlock" in str(error):
                kinds["deadlock"] += 1
        kinds.update({f"{v.kind}: {v.where.split()[0]}" for v in simulation.memory.violations})
    return kinds


def check_all_once(routings: tuple[Routing, ...], setting: Setting) -> None:
    """Every launch ends as it should, and every event of its log occurs once."""
    simulation = Simulation(routings, setting).run()
    simulation.check_end()
    for epoch, log in simulation.logs.items():
        events = Counter((who >> 24, what, where >> 24) for who, what, where, _ in log)
        assert set(events.values()) == {1}, epoch
