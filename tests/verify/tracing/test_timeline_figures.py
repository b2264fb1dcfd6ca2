"""Where things are drawn: every step has one column, and the first to look at its own."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from verify.tracing.timeline import Row
from verify.tracing.timeline_events import State
from verify.tracing.timeline_figures import COLUMNS, columns, figure, shared_rows

PATH = re.compile(r"M(\d+) (\d+)h(\d+)v(\d+)h-(\d+)z")


@settings(max_examples=60)
@given(
    count=st.integers(0, 3000),
    start=st.sampled_from([-1, 0, 7]),
    at=st.none() | st.integers(0, 3000),
)
def test_columns_hold_every_step_once_and_the_first_has_its_own(count, start, at):
    steps = range(start, start + count)
    first = None if at is None or at >= count else steps[at]
    found = columns(steps, first)
    assert [place for one in found for place in range(one.start, one.stop)] == list(range(count))
    assert len(found) <= COLUMNS + 3
    for one, other in pairwise(found):
        assert one.x + one.width <= other.x
    if found:
        assert found[-1].x + found[-1].width <= 1100
    if first is not None:
        (own,) = (one for one in found if one.start <= steps.index(first) < one.stop)
        assert own.stop - own.start == 1
        assert own.width >= 8
    if start == -1 and count:
        assert found[0].stop == 1


def test_a_cell_shows_the_worst_of_its_steps_and_a_gap_is_not_hidden():
    states = [State.EQUAL] * 960
    states[100], states[500], states[501] = State.NONE, State.ONLY, State.DIFFERS
    drawn = figure(range(960), [("", "rank 0", "told", states)], 501)
    assert drawn.shared == 4
    (line,) = drawn.lines
    paths = dict(line.paths)
    cells = {
        state: [tuple(map(int, one)) for one in PATH.findall(path)] for state, path in paths.items()
    }
    assert {state: len(one) for state, one in cells.items()} == {
        "equal": 3,  # before the gap, behind it, and behind the difference
        "differs": 1,
        "only": 1,
        "none": 1,
    }
    assert cells["differs"][0][0] == drawn.mark
    assert cells["only"][0][0] < drawn.mark
    assert "".join(f"M{x} {y}h{w}v{h}h-{v}z" for x, y, w, h, v in cells["equal"]) == paths["equal"]
    assert (drawn.mark_label, line.about) == ("step 501", "told")


def test_states_differ_in_more_than_colour():
    steps, states = range(len(State)), list(State)
    (line,) = figure(steps, [("", "rank 0", "", states)], None).lines
    shapes = {state: PATH.fullmatch(path).group(2, 4) for state, path in line.paths}
    rings = {group[0] for group in PATH.findall(line.rings)}
    assert len(set(shapes.values())) == len(State) - 1
    assert shapes["origin"] == shapes["differs"]
    assert rings == {PATH.fullmatch(dict(line.paths)["origin"]).group(1)}


def test_headings_stand_where_they_change():
    rows = [(name, name, "", [State.EQUAL]) for name in ("forward", "forward", "backward")]
    drawn = figure([0], rows, None)
    assert [text for _, text in drawn.headings] == ["forward", "backward"]
    (one, other), ys = [y for y, _ in drawn.headings], [line.y for line in drawn.lines]
    assert one < ys[0] < ys[1] < other < ys[2] < drawn.height


def test_many_ranks_share_rows():
    rows = [Row(rank, (State.DIFFERS if rank == 70 else State.EQUAL,)) for rank in range(200)]
    found = shared_rows(rows)
    assert len(found) == 50
    assert [name for name, states in found if states == (State.DIFFERS,)] == ["rank 68 to rank 71"]
    assert shared_rows(rows[:64])[3] == ("rank 3", (State.EQUAL,))
