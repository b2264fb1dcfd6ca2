"""Any two recordings of one rank: whatever is in them, what differs is told once, and both ways."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from trace_toy import header, lanes

from verify.tracing.definitions import KINDS, Definition, Program, Recording, Step
from verify.tracing.rank_diffs import compare_rank
from verify.tracing.shards import _disjoint

ALL = (None, None)
NAMES = st.sampled_from(["", "(root)", "a", "a.b", "a.b.c", "d", "a/aten.add", "(group 0)"])
ENTRY = st.tuples(NAMES, st.sampled_from(KINDS), st.sampled_from(["", "0", "1", "grad"]))
ENTRIES = st.lists(ENTRY, max_size=14)
VALUES = st.lists(st.integers(0, 2), min_size=14, max_size=14)


def recording(steps):
    """From steps of (entries, values), the first one being the start."""
    made = []
    for number, (entries, values) in enumerate(steps, -1):
        definitions = tuple(
            Definition(index, name, kind, path, "float32", (2,))
            for index, (name, kind, path) in enumerate(entries)
        )
        content = b"".join(lanes(str(value)) for value, _ in zip(values, entries, strict=False))
        made.append(Step(number, Program(definitions), content))
    return Recording(header(), tuple(made), complete=True)


RECORDINGS = st.lists(st.tuples(ENTRIES, VALUES), min_size=1, max_size=4).map(recording)


@given(RECORDINGS)
def test_equal_recordings_give_no_finding(one):
    found = compare_rank(0, one, one, ALL, {})
    assert (found.differing, found.first, found.culprits, found.inherits) == (0, None, [], [])
    assert (found.forms, found.unmatched, found.moved, found.still) == ({}, {}, 0, {})
    assert found.compared == sum(map(len, one.steps))


@settings(max_examples=200)
@given(RECORDINGS, RECORDINGS)
def test_what_differs_is_told_once_and_the_same_both_ways(a, b):
    found, turned = compare_rank(0, a, b, ALL, {}), compare_rank(0, b, a, ALL, {})
    assert found.differing == turned.differing
    assert found.compared == turned.compared
    assert found.moved == turned.moved
    assert found.still == turned.still
    assert {key[1:] for key in found.unmatched} == {key[1:] for key in turned.unmatched}
    assert (found.first is None) == (found.differing == 0)
    assert found.inherits_count + found.culprits_count <= found.differing
    for one in found.culprits:
        assert (one.place.step, one.place.index) >= (found.first.step, found.first.index)


@given(RECORDINGS, st.data())
def test_one_changed_event_is_found_where_it_is(a, data):
    places = [
        (number, index)
        for number, step in enumerate(a.steps)
        for index, one in enumerate(step.program.definitions)
        if one.kind != "rng"
    ]
    if not places:
        return
    number, index = data.draw(st.sampled_from(places))
    steps = list(a.steps)
    step = steps[number]
    changed = step.lanes[: index * 32] + lanes("other") + step.lanes[index * 32 + 32 :]
    steps[number] = Step(step.number, step.program, changed)
    found = compare_rank(0, a, Recording(a.header, tuple(steps), complete=True), ALL, {})
    assert found.differing == 1
    assert (found.first.step, found.first.index) == (step.number, index)
    assert found.inherits_count == 0
    assert found.culprits_count == 1


BOXES = st.sets(
    st.tuples(
        *(st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda two: tuple(sorted(two))),) * 2
    ),
    max_size=5,
)


@given(BOXES)
def test_disjoint_boxes_by_counting_cells(boxes):
    cells = [
        (row, column)
        for rows, columns in boxes
        for row in range(*rows)
        for column in range(*columns)
    ]
    assert _disjoint(boxes) == (len(cells) == len(set(cells)))
