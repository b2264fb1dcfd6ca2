"""Random routings and settings for the simulation of the protocol, small enough to run in bulk."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from protocol_settings import BLOCK_ROWS, Routing, Setting

POLICIES = ("random", "random", "newest", "oldest", "starve", "favour")


def make_routing(
    rng: random.Random, ranks: int, slots: int, most: int, *, launches: int, tokens: int = 5
) -> Routing:
    """One schedule: up to `tokens` tokens a rank, spread or on one expert, some unused."""
    experts = rng.randint(1, 3)
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
    rows, segments = [], []
    for rank in range(ranks):
        blocks = []
        for expert in range(experts):
            routes = found.get((rank, expert), [])
            padded = [*routes, *[None] * (-len(routes) % BLOCK_ROWS)]
            blocks += [
                tuple(padded[first : first + BLOCK_ROWS])
                for first in range(0, len(padded), BLOCK_ROWS)
            ]
        rows.append(tuple(blocks))
        segments.append(cut(rng, len(blocks), most))
    return Routing(tuple(counts), tuple(rows), tuple(segments), launches)


def cut(rng: random.Random, blocks: int, most: int) -> tuple[int, ...]:
    """`blocks` as segments of 1 to `most`."""
    found = []
    while blocks:
        found.append(rng.randint(1, min(most, blocks)))
        blocks -= found[-1]
    return tuple(found)


@st.composite
def cases(
    draw: st.DrawFn, *, most_ranks: int = 6, local: bool | None = None, launches: int = 3
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
        make_routing(rng, ranks, setting.slots, most, launches=count) for count in pattern or [1]
    ]
    return tuple(routings), setting
