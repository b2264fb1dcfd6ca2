"""Pairing the events of two programs: extra, missing and moved ones, whichever run is called A."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verify.tracing.alignment import align, align_keys
from verify.tracing.definitions import Definition, Program

UNIQUE = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.just("output"), st.just(""), st.integers(0, 2)),
    unique=True,
    max_size=16,
)


def program(*names: str) -> Program:
    return Program(
        tuple(
            Definition(index, name, "output", "", "float32", (2,))
            for index, name in enumerate(names)
        )
    )


def test_equal_programs_pair_one_to_one():
    found = align(program(*"aba"), program(*"aba"))
    assert found.pairs == ((0, 0), (1, 1), (2, 2))
    assert found.same


def test_extra_and_missing_events():
    found = align(program(*"abcd"), program(*"axcd"))
    assert found.pairs == ((0, 0), (2, 2), (3, 3))
    assert (found.only_a, found.only_b, found.moved) == ((1,), (1,), ())
    assert not found.same


def test_an_extra_call_takes_the_last_occurrence():
    found = align(program(*"aab"), program(*"aaab"))
    assert found.pairs == ((0, 0), (1, 1), (2, 3))
    assert found.only_b == (2,)


def test_a_moved_event_is_told_and_paired():
    found = align(program(*"abcd"), program(*"dabc"))
    assert dict(found.pairs) == {0: 1, 1: 2, 2: 3, 3: 0}
    assert found.moved == ((3, 0),)
    assert (found.only_a, found.only_b) == ((), ())


def test_nothing_in_common():
    found = align(program(*"ab"), program(*"cd"))
    assert (found.pairs, found.only_a, found.only_b) == ((), (0, 1), (0, 1))
    assert align(program(), program()).pairs == ()


@given(UNIQUE, UNIQUE)
def test_alignment_is_complete_and_symmetric(a, b):
    one, other = align_keys(a, b), align_keys(b, a)
    assert all(a[i] == b[j] for i, j in one.pairs)
    assert sorted([i for i, _ in one.pairs] + list(one.only_a)) == list(range(len(a)))
    assert sorted([j for _, j in one.pairs] + list(one.only_b)) == list(range(len(b)))
    assert {(j, i) for i, j in other.pairs} == set(one.pairs)
    assert (other.only_a, other.only_b) == (one.only_b, one.only_a)
    assert len(one.moved) == len(other.moved)
    assert one.same == other.same == (a == b)


@given(UNIQUE, UNIQUE)
def test_what_did_not_move_is_in_order_and_as_long_as_can_be(a, b):
    found = align_keys(a, b)
    kept = [pair for pair in found.pairs if pair not in found.moved]
    assert kept == sorted(kept)
    assert [j for _, j in kept] == sorted(j for _, j in kept)
    assert len(kept) == _longest_common(a, b)


@given(UNIQUE.filter(len), st.data())
def test_an_event_taken_out_is_the_only_thing_found(a, data):
    gone = data.draw(st.integers(0, len(a) - 1))
    found = align_keys(a, a[:gone] + a[gone + 1 :])
    assert (found.only_a, found.only_b, found.moved) == ((gone,), (), ())


def _longest_common(a, b):
    """By the textbook's table, as a reference."""
    row = [0] * (len(b) + 1)
    for one in a:
        above = row[:]
        for index, other in enumerate(b):
            longer = above[index] + 1
            row[index + 1] = longer if one == other else max(above[index + 1], row[index])
    return row[-1]
