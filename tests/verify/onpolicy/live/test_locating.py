"""The first module that gives other rows for equal ones, on small modules and hand-made rows."""

from __future__ import annotations

import pytest
import torch
from live_parts import Outer, Sometimes, X, seen
from torch import Tensor

from verify.onpolicy.live.capturing import INPUT, OUTPUT, Capture, Event, Rows, Seen
from verify.onpolicy.live.locating import Parted, first_difference
from verify.onpolicy.live.rowwise import by_type, leaves
from verify.onpolicy.live.sequences import NOWHERE, places


def parted(a: Seen, b: Seen, **options: object) -> Parted:
    found = first_difference(a, b, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_equal_runs_part_nowhere():
    assert first_difference(seen(Outer(), X), seen(Outer(), X)) is None


def test_the_module_whose_output_differs_is_named():
    found = parted(seen(Outer(), X), seen(Outer(gain=1.25), X))
    assert (found.module, found.type, found.before) == ("first", "Scaled", "")
    assert (found.differing, found.compared) == (3, 3)
    assert found.largest == 1.5
    assert found.relative == pytest.approx(0.2)


def test_a_module_is_named_for_what_its_own_code_does_between_its_parts():
    found = parted(seen(Outer(), X), seen(Outer(shift=0.5), X))
    assert (found.module, found.type, found.before) == ("middle", "Inner", "middle.two")
    assert (found.differing, found.sequence, found.position) == (1, 0, 1)


def test_rows_are_found_again_in_another_batch():
    """Two sequences in a batch with left padding, against each of them alone."""
    model = Outer()
    capture = Capture(model)
    with capture.listening():
        for number, length in ((0, 3), (1, 2)):
            capture.begin(places(number, 0, length)[None])
            model(X[:, :length] + 10 * number)
    alone = capture.taken()
    grid = torch.stack([places(0, 0, 3), torch.cat([torch.tensor([NOWHERE]), places(1, 0, 2)])])
    padded = torch.cat([X, torch.cat([torch.zeros(1, 1, 2), X[:, :2] + 10], dim=1)])
    assert first_difference(alone, seen(model, padded, grid)) is None
    padded[1, 2, 0] += 1
    found = parted(alone, seen(model, padded, grid))
    assert (found.before, found.sequence, found.position) == ("first", 1, 1)


def test_tolerance_is_of_the_row():
    a, b = seen(Outer(), X), seen(Outer(gain=1.0 + 2.0**-14), X)
    assert first_difference(a, b) is not None
    assert first_difference(a, b, 2.0**-12) is None
    assert parted(a, seen(Outer(gain=1.0 + 2.0**-10), X), tolerance=2.0**-12).module == "first"


def rows(values: Tensor, kind: str = OUTPUT, module: str = "m") -> Seen:
    event = Event(module, 0, kind, "", "M", "(root)")
    return Seen({event: Rows(torch.arange(len(values)), values)})


@pytest.mark.parametrize("tolerance", [0.0, 2.0**-12])
def test_nan_differs_from_numbers_and_equals_itself(tolerance):
    nan = torch.tensor([[1.0, float("nan")]])
    assert first_difference(rows(nan), rows(nan), tolerance) is None
    assert first_difference(rows(nan), rows(torch.ones(1, 2)), tolerance) is not None


def test_signs_of_zero_are_bits_and_no_difference_of_size():
    a, b = rows(torch.zeros(1, 1)), rows(-torch.zeros(1, 1))
    assert first_difference(a, b) is not None
    assert first_difference(a, b, 2.0**-12) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_one_bit_is_seen_in_every_dtype(dtype):
    a = torch.ones(4, 3, dtype=dtype)
    b = a.clone()
    b[2, 1] += torch.finfo(dtype).eps if dtype.is_floating_point else 1
    found = parted(rows(a), rows(b))
    assert (found.differing, found.position) == (1, 2)


def test_a_choice_of_a_router_is_told_from_other_integers():
    a, b = rows(torch.tensor([[0, 1]])), rows(torch.tensor([[0, 2]]))
    assert not parted(a, b).choice
    assert parted(a, b, chosen=set(a.rows)).choice


def test_other_forms_are_not_compared():
    assert first_difference(rows(torch.ones(2, 2)), rows(torch.ones(2, 3))) is None
    assert (
        first_difference(rows(torch.ones(2, 2)), rows(torch.ones(2, 2, dtype=torch.int32))) is None
    )


def test_a_module_that_one_side_calls_more_often_is_not_compared():
    a, b = seen(Sometimes(), X), seen(Sometimes(), X + torch.tensor([0.0, 1.0]))
    c = seen(Sometimes(), X + torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0]]))
    assert "part.one" in {event.module for event in a.rows}
    assert parted(a, b).before == "part"
    assert parted(a, c).before == "after"


def test_row_wise_modules_are_judged_where_their_inputs_are_equal():
    """`last` differs everywhere that `middle` differs; it alone is not to blame."""
    a, b = seen(Outer(), X), seen(Outer(shift=0.5), X)
    names = leaves(Outer())
    assert names == {"first", "middle.one", "middle.two", "last"}
    found = {one.type: one for one in by_type(a, b, names, ())}
    assert (found["Scaled"].modules, found["Scaled"].rows, found["Scaled"].other) == (2, 5, 0)
    experts, *others = by_type(a, seen(Outer(gain=2.0), X), names, {"first"})
    assert (experts.type, experts.experts) == ("Scaled", True)
    assert (experts.rows, experts.other, experts.first) == (3, 3, "first")
    assert not any(one.experts or one.other for one in others)


def test_what_the_model_itself_is_given_is_ours():
    """Its code runs between its input and its first part."""
    a, b = seen(Outer(), X), seen(Outer(), X + 1)
    found = parted(a, b)
    assert (found.module, found.before) == ("(root)", "first")
    event = next(iter(a.rows))
    assert (event.kind, event.around) == (INPUT, None)
