"""Which steps are recorded in full: what the choice means, and what two choices have in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify import UnsupportedError
from verify.tracing.choices import Gaps, chosen, has_border, in_full, in_words
from verify.tracing.definitions import START

CHOICES = st.builds(
    lambda start, size, step: range(start, start + size, step),
    *(st.integers(0, 6), st.integers(1, 30), st.integers(1, 5)),
)


def test_every_step_is_no_choice() -> None:
    assert chosen(1, None) is None
    assert chosen(10, None) == range(0, 2**63 - 1, 10)
    assert chosen(1, range(3, 9, 2)) == range(3, 9, 2)


@pytest.mark.parametrize(
    ("every", "steps", "said"),
    [
        (0, None, "every is 0; allowed is a whole number from 1"),
        (-3, None, "every is -3"),
        (True, None, "every is True"),
        (2.0, None, "every is 2.0"),
        ("2", None, "every is '2'"),
        (2, range(5), "every=2 and steps=range(0, 5) are two choices of the same"),
        (1, range(5, 5), r"steps is range(5, 5); allowed is a range"),
        (1, range(-1, 5), "steps is range(-1, 5)"),
        (1, range(5, 0, -1), "steps is range(5, 0, -1)"),
        (1, [1, 2], "steps is [1, 2]"),
        (1, 7, "steps is 7"),
        (1, range(2**63, 2**63 + 5), "steps is range(9223372036854775808"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(every: int, steps: range, said: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        chosen(every, steps)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (None, "every step"),
        (range(0, 2**63 - 1, 10), "every 10th step"),
        (range(0, 2**63 - 1, 2), "every 2nd step"),
        (range(0, 2**63 - 1, 13), "every 13th step"),
        (range(5, 2**63 - 1, 3), "every 3rd step from 5 on"),
        (range(5, 2**63 - 1), "every step from 5 on"),
        (range(7, 8), "step 7"),
        (range(7, 10), "steps 7 to 9"),
        (range(100, 200, 21), "steps 100 to 184, each 21st"),
    ],
)
def test_a_choice_in_words(choice: range | None, said: str) -> None:
    assert in_words(choice) == said


@given(CHOICES, st.integers(0, 40))
def test_a_chosen_step_begins_with_state_that_is_known(choice: range, number: int) -> None:
    assert in_full(choice, START)
    if in_full(choice, number):
        assert has_border(choice, number)
        assert has_border(choice, number - 1)
    assert in_full(None, number)


@given(st.lists(CHOICES | st.none(), min_size=2, max_size=2), st.integers(1, 40))
def test_gaps_hold_the_steps_that_not_all_have_in_full(choices: list[range], last: int) -> None:
    """Asked at every step that both have; between two of those nothing is hidden but gaps."""
    gaps, seen = Gaps(*choices), set()
    common = [
        number
        for number in range(START, last + 1)
        if all(has_border(one, number) for one in choices)
    ]
    for number in common:
        before = [in_full(one, number - 1) for one in choices]
        assert gaps.follows(number) == (not all(before))
        assert gaps.saw_alone(number) == {(True, False): "a", (False, True): "b"}.get(
            (before[0], before[1]), ""
        )
        gap = gaps.before(number)
        assert set(gap) == {
            one
            for one in range(max(seen, default=START) + 1, number + 1)
            if one != START and (one != number or not all(in_full(c, one) for c in choices))
        }
        seen.add(number)


def test_without_a_choice_there_are_no_gaps() -> None:
    gaps = Gaps(None, None)
    assert not any(gaps.before(number) for number in (START, 0, 1, 5))
