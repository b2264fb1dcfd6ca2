"""What the picture of a comparison says: the verdict's own, by rank, module, step and event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_toy import header, record_toy, write_step
from trace_toy import lanes as lanes_of

from verify.errors import InputFileError
from verify.tracing.definitions import Definition, Program, Whole
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter, file_name
from verify.tracing.timeline import timeline
from verify.tracing.timeline_events import Folded, State, events_of, fewer
from verify.tracing.timeline_lanes import COMPUTED, REST, lanes, spot
from verify.tracing.timeline_marks import walk
from verify.tracing.timeline_sides import read_pairs

EQUAL, DIFFERS, ORIGIN, ONLY, NONE = (
    State.EQUAL,
    State.DIFFERS,
    State.ORIGIN,
    State.ONLY,
    State.NONE,
)
FAULTS = [
    (1, "forward", "blocks.0.mlp"),
    (1, "between", "blocks.1"),
    (1, "probe", "blocks.0.mlp"),
    (0, "data", ""),
    (2, "loss", ""),
    (1, "backward", "head"),
    (1, "gradient", "embed"),
    (0, "optimizer", "head"),
    (1, "rng", ""),
    (1, "buffer", "blocks.1.norm"),
    (-1, "start", "head.weight"),
    (-1, "seed", ""),
]


def drawn(a, b, steps=(None, None), **options):
    found = diff(a, b, steps)
    return found, timeline(found, read_pairs(a, b, found), **options)


def record(folder, *steps, world=1, rank=0, **fields):
    """Steps of (name, kind, path, value) from number 0 on."""
    writer = TraceWriter(folder, header(rank, world, **fields))
    for number, entries in enumerate(steps):
        write_step(writer, number, entries)
    writer.close()
    return folder


def module(name, value="x"):
    return [(name, "input", "0", value), (name, "output", "", f"{name}({value})")]


def lane(picture, phase, name):
    (row,) = (row for row in picture.lanes if (row.name.phase, row.name.name) == (phase, name))
    return row.states


def test_a_fault_in_a_module(tmp_path):
    a = record_toy(tmp_path / "a")
    b = record_toy(tmp_path / "b", [(1, "forward", "blocks.0.mlp")])
    _, picture = drawn(a, b)
    assert picture.steps == (-1, 0, 1, 2)
    assert [row.states for row in picture.ranks] == [(EQUAL, EQUAL, ORIGIN, DIFFERS)]
    assert (picture.rank, picture.first) == (0, 1)
    forward = [row for row in picture.lanes if row.name.phase == "forward"]
    at = [row.name.name for row in forward].index("blocks.0.mlp")
    assert forward[at].states == (NONE, EQUAL, ORIGIN, DIFFERS)
    assert all(row.states == (NONE, EQUAL, EQUAL, DIFFERS) for row in forward[:at])
    assert all(row.states == (NONE, EQUAL, DIFFERS, DIFFERS) for row in forward[at + 1 :])
    assert forward[-1].name.name == ""
    assert lane(picture, "parameters", "") == (EQUAL, EQUAL, DIFFERS, DIFFERS)
    (origin,) = (one for one in picture.events.shown if one.state is ORIGIN)
    assert (origin.a, origin.b, origin.cause) == (8, 8, "forward")
    assert origin.digest_a != origin.digest_b
    assert picture.events.counts == {ORIGIN: 1, DIFFERS: 54, EQUAL: 10}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[1])
def test_the_picture_has_the_culprit_where_the_verdict_has_it(tmp_path, fault):
    a, b = record_toy(tmp_path / "a"), record_toy(tmp_path / "b", [fault])
    found, picture = drawn(a, b)
    place = found.culprit.place
    (row,) = picture.ranks
    assert picture.first == place.step == fault[0]
    assert row.states[picture.steps.index(place.step)] is ORIGIN
    assert set(row.states[: picture.steps.index(place.step)]) <= {EQUAL}
    guilty = [one for one in picture.events.shown if one.state is ORIGIN]
    assert guilty[0].a == place.index
    assert {one.cause for one in guilty} == {
        one.cause for one in (found.culprit, *found.others) if one.place.step == place.step
    }
    rows = [row.states[picture.steps.index(place.step)] for row in picture.lanes]
    assert ORIGIN in rows


def test_equal_runs_have_nothing_to_look_at(tmp_path):
    _, picture = drawn(record_toy(tmp_path / "a"), record_toy(tmp_path / "b"))
    assert picture.events is picture.first is None
    assert {state for row in picture.ranks for state in row.states} == {EQUAL}
    assert {state for row in picture.lanes for state in row.states} == {EQUAL, NONE}


def test_recordings_that_changed_meanwhile_are_refused(tmp_path):
    a, b = record_toy(tmp_path / "a"), record_toy(tmp_path / "b", [(1, "loss", "")])
    found = diff(a, b)
    with pytest.raises(InputFileError, match="has changed while it was compared"):
        timeline(found, read_pairs(a, a, found))
    with pytest.raises(InputFileError, match="has changed"):
        timeline(found, [])
    assert timeline(found, read_pairs(a, b, found)).first == 1


def test_ranks_and_what_one_run_lacks(tmp_path):
    for rank in range(4):
        record_toy(tmp_path / "a", rank=rank, world=4, steps=4)
        if rank != 3:
            faults = [(1, "loss", "")] if rank == 1 else []
            steps, close = (2, False) if rank == 2 else (4, True)
            record_toy(tmp_path / "b", faults, rank=rank, world=4, steps=steps, close=close)
    _, picture = drawn(tmp_path / "a", tmp_path / "b")
    assert [row.name for row in picture.ranks] == [0, 1, 2, 3]
    assert [row.states for row in picture.ranks] == [
        (EQUAL, EQUAL, EQUAL, EQUAL, EQUAL),
        (EQUAL, EQUAL, ORIGIN, DIFFERS, DIFFERS),
        (EQUAL, EQUAL, EQUAL, ONLY, ONLY),
        (ONLY, ONLY, ONLY, ONLY, ONLY),
    ]
    assert picture.rank == 1
    assert list(picture.ranks[2].runs(picture.steps)) == [(EQUAL, -1, 1), (ONLY, 2, 3)]


def test_a_range_of_steps_shows_these_and_blames_nobody_for_what_was_before(tmp_path):
    a, b = record_toy(tmp_path / "a"), record_toy(tmp_path / "b", [(0, "loss", "")])
    found, picture = drawn(a, b, (1, 3))
    assert found.culprit is None
    assert picture.steps == (1, 2)
    assert picture.ranks[0].states == (DIFFERS, DIFFERS)
    assert (picture.first, picture.events.counts[ORIGIN]) == (1, 0)


def test_files_of_ranks(tmp_path):
    for rank in range(2):
        record_toy(tmp_path / "a", rank=rank, world=2)
        record_toy(tmp_path / "b", [(rank, "loss", "")], rank=rank, world=2)
    one, other = (tmp_path / side / file_name(1) for side in "ab")
    assert drawn(one, other)[1].ranks[0].states == (EQUAL, EQUAL, ORIGIN, DIFFERS)
    assert [row.name for row in drawn(one, tmp_path / "b")[1].ranks] == [1]
    crossed = tmp_path / "b" / file_name(0)
    assert [row.name for row in drawn(crossed, one)[1].ranks] == [0]


def test_sums_over_ranks(tmp_path):
    record_toy(tmp_path / "a")
    for rank in range(2):
        record_toy(tmp_path / "two", [(1, "optimizer", "head")], rank=rank, world=2, shards=2)
    found, picture = drawn(tmp_path / "a", tmp_path / "two")
    assert picture.rank is None
    assert [(row.name, row.states) for row in picture.ranks] == [
        (None, (EQUAL, EQUAL, ORIGIN, DIFFERS))
    ]
    assert found.culprit.place.rank is None
    assert {row.name.phase for row in picture.lanes}.isdisjoint(COMPUTED)
    assert lane(picture, "parameters", "head") == (EQUAL, EQUAL, ORIGIN, DIFFERS)


def test_shards_that_lie_elsewhere_are_a_row_of_sums_beside_the_ranks(tmp_path):
    halves = [Whole((4, 6), ((start, start + 2), (0, 6))) for start in (0, 2)]
    for side, order in (("a", (0, 1)), ("b", (1, 0))):
        for rank, part in enumerate(order):
            writer = TraceWriter(tmp_path / side, header(rank, 2))
            entry = writer.define("w", "parameter", "", "float32", (2, 6), whole=halves[part])
            other = writer.define("m", "output", "", "float32", (4, 6))
            writer.step(0, [entry, other], lanes_of(f"part {part}") + lanes_of("m"))
            writer.close()
    found, picture = drawn(tmp_path / "a", tmp_path / "b")
    assert found.differing == 0
    assert [(row.name, row.states) for row in picture.ranks] == [
        (0, (EQUAL,)),
        (1, (EQUAL,)),
        (None, (EQUAL,)),
    ]
    assert lane(picture, "parameters", "") == (NONE,)


def test_replicas_that_disagree_are_drawn(tmp_path):
    record(tmp_path / "a", [("w", "parameter", "", "1")])
    for rank, value in enumerate("12"):
        record(tmp_path / "b", [("w", "parameter", "", value)], rank=rank, world=2)
    found, picture = drawn(tmp_path / "a", tmp_path / "b")
    assert found.culprit.place.difference == "replicas"
    assert picture.ranks[0].states == (ORIGIN,)
    (shown,) = picture.events.shown
    assert shown.difference == "replicas"
    _, turned = drawn(tmp_path / "b", tmp_path / "a")
    assert turned.ranks[0].states == (ORIGIN,)


def test_events_of_one_run_stand_where_they_came(tmp_path):
    a = record(tmp_path / "a", module("m") + module("old") + module("n"))
    b = record(tmp_path / "b", module("new") + module("m") + module("n") + module("end"))
    _, picture = drawn(a, b)
    assert picture.ranks[0].states == (ONLY,)
    shown = [(one.a, one.b, one.state) for one in picture.events.shown]
    assert shown == [
        (None, 0, ONLY),
        (None, 1, ONLY),
        (0, 2, EQUAL),
        (1, 3, EQUAL),
        (2, None, ONLY),
        (3, None, ONLY),
        (4, 4, EQUAL),
        (5, 5, EQUAL),
        (None, 6, ONLY),
        (None, 7, ONLY),
    ]
    assert lane(picture, "forward", "new") == (ONLY,)
    assert lane(picture, "forward", "m") == (EQUAL,)


def test_ops_that_one_run_recorded_only_are_not_compared(tmp_path):
    op = [("m/aten.add", "output", "", "1")]
    a = record(tmp_path / "a", module("m") + op, level="op")
    _, picture = drawn(a, record(tmp_path / "b", module("m")))
    assert picture.ranks[0].states == (EQUAL,)
    _, picture = drawn(a, record(tmp_path / "c", module("m"), level="op"))
    assert picture.ranks[0].states == (ONLY,)


def test_generators_that_nobody_draws_from_are_not_compared(tmp_path):
    for side in "ab":
        rng = [("numpy", "rng", "", side)]
        record(tmp_path / side, module("m") + rng, module("m") + rng)
    _, picture = drawn(tmp_path / "a", tmp_path / "b")
    assert picture.ranks[0].states == (EQUAL, EQUAL)
    assert lane(picture, "generators", "numpy") == (NONE, NONE)


def test_digests_of_other_kinds_give_no_picture(tmp_path):
    found = diff(record_toy(tmp_path / "a"), record_toy(tmp_path / "b"))
    assert timeline(replace(found, ranks=()), []).steps == ()


@settings(max_examples=30)
@given(data=st.data())
def test_any_pair_of_recordings_adds_up(tmp_path_factory, data):
    """No picture is refused, and its rows say what the comparison counted."""
    folder = tmp_path_factory.mktemp("pair")
    names = st.sampled_from(["m", "n", "m.a", "m.a/op", "cpu"])
    kinds = st.sampled_from(["input", "output", "grad_output", "grad", "parameter", "rng", "probe"])
    entry = st.tuples(names, kinds, st.sampled_from(["", "0"]), st.sampled_from("123"))
    steps = st.lists(st.lists(entry, max_size=6), max_size=4)
    worlds = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 2)]))
    for side, world in zip("ab", worlds, strict=True):
        for rank in range(world):
            level = data.draw(st.sampled_from(["module", "op"]))
            made = data.draw(steps)
            record(folder / side, *made, rank=rank, world=world, level=level)
    found, picture = drawn(folder / "a", folder / "b")
    told = {one.rank: one for one in found.ranks}
    for row in picture.ranks:
        one = told[row.name]
        differ = [
            number
            for number, state in zip(picture.steps, row.states, strict=True)
            if state in (DIFFERS, ORIGIN)
        ]
        assert (differ[0] if differ else None) == (one.first.step if one.first else None)
    assert (picture.events is None) == (not found.differing and not found.unmatched)


def compared(tmp_path, count, faulty):
    """A step of `count` modules, of which those after `faulty` differ."""
    for side in "ab":
        entries = [
            (f"m{at}", "output", "", f"{at}{side if side == 'b' and at >= faulty else ''}")
            for at in range(count)
        ]
        record(tmp_path / side, entries)
    found = diff(tmp_path / "a", tmp_path / "b")
    ((_, one, other),) = read_pairs(tmp_path / "a", tmp_path / "b", found)
    (step,) = walk(one, other, None)
    return step, {found.culprit.place.index: found.culprit.cause}


def test_a_long_step_is_folded_around_the_culprit_and_nothing_is_lost(tmp_path):
    step, causes = compared(tmp_path, 500, 200)
    events = events_of(step, causes, 41)
    before, *middle, behind = events.items
    assert [one.at for one in middle] == list(range(180, 221))
    assert (before, behind) == (
        Folded(0, 179, ((EQUAL, 180),)),
        Folded(221, 499, ((DIFFERS, 279),)),
    )
    less = fewer(events, 5)
    assert [one.at for one in less.shown] == [198, 199, 200, 201, 202]
    hidden = [one for one in less.items if isinstance(one, Folded)]
    assert [dict(one.counts) for one in hidden] == [{EQUAL: 198}, {DIFFERS: 297}]
    assert less.counts == events.counts == {EQUAL: 200, ORIGIN: 1, DIFFERS: 299}
    assert list(fewer(events, 0).shown) == []
    assert len(list(events_of(step, causes, 500).shown)) == 500


def program(*names, layers=0, kinds=("input", "output")):
    every = [*(f"layers.{at}.{leaf}" for at in range(layers) for leaf in "ab"), *names]
    entries = [(name, kind) for name in every for kind in kinds]
    return Program(tuple(Definition(at, n, k, "", "f", ()) for at, (n, k) in enumerate(entries)))


def test_lanes_unfold_along_the_way_to_the_focus():
    some = program("", "norm", layers=30)
    every = lanes([some], None, 100)
    assert (len(every.shown), every.folded) == (62, 0)
    near = lanes([some], ("forward", ("layers", "7", "b")), 40)
    names = [one.name for one in near.shown]
    assert names[:10] == [
        *(f"layers.{at}" for at in range(7)),
        "layers.7.a",
        "layers.7.b",
        "layers.8",
    ]
    assert near.folded == 58
    assert [one.name for one in lanes([some], None, 40).shown] == [
        *(f"layers.{at}" for at in range(30)),
        "",
        "norm",
    ]
    far = lanes([some], ("forward", ("layers", "20", "a")), 12)
    assert [one.name for one in far.shown] == [
        *("layers.18", "layers.19", "layers.20.a", "layers.20.b", "layers.21"),
        REST,
    ]
    assert sum(one.modules for one in far.shown) == 62


@settings(max_examples=50)
@given(
    names=st.lists(st.lists(st.sampled_from("abcd"), max_size=4).map(".".join), max_size=60),
    kinds=st.lists(
        st.sampled_from(["input", "grad_output", "grad", "parameter", "rng", "probe"]), min_size=1
    ),
    limit=st.integers(8, 30),
    data=st.data(),
)
def test_every_module_has_a_lane_and_the_focus_its_own(names, kinds, limit, data):
    some = program(*names, kinds=kinds)
    spots = sorted({spot(one) for one in some.definitions})
    focus = data.draw(st.sampled_from(spots)) if spots else None
    found = lanes([some], focus, limit)
    assert len(found.shown) <= max(limit, len({one[0] for one in spots}) + limit)
    assert set(found.of) == set(spots)
    assert sum(one.modules for one in found.shown) == len(spots)
    assert all(found.shown[at].phase == one[0] for one, at in found.of.items())
    if focus is not None:
        assert found.shown[found.of[focus]].name == ".".join(focus[1])
