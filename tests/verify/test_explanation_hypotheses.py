"""Every change of the inputs is named when it is what happened, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor

from verify.captures import same_bits
from verify.explanation.changed_inputs import Hypothesis, hypotheses
from verify.explanation.hypotheses import common_rows, fitting, repeated, too_coarse
from verify.inputs import generate

Inputs = Mapping[str, Tensor]


def inputs() -> dict[str, Tensor]:
    """One input of every kind; the sizes of dimensions differ where nothing else is meant."""
    ids = generate("ids", (6,), torch.int64, kind="integers", low=0, high=4)
    ids[2] = -1
    return {
        "a": generate("a", (6, 10)),
        "b": generate("b", (6, 10)),
        "square": generate("square", (12, 12), torch.bfloat16),
        "experts": generate("experts", (4, 3, 14), torch.bfloat16),
        "weights": generate("weights", (6, 3), torch.float16),
        "view": generate("view", (10, 14), torch.float64).t(),
        "mask": torch.arange(6) % 3 == 0,
        "ids": ids,
        "table": torch.arange(4),
    }


@cache
def factors(index: int, count: int) -> Tensor:
    return generate(f"of {index}", (count, 5), torch.float64)


def output(given: Inputs) -> Tensor:
    """Every input counts, and every element of it in its own way."""
    total = torch.zeros((), dtype=torch.float64)
    parts = []
    for index, value in enumerate(given.values()):
        wide = value.double().flatten()
        own = factors(index, len(wide))
        parts.append(wide @ own)
        total = total + parts[-1].sum()
    return torch.cat([*parts, total[None]])


def explained(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> list[str]:
    """What is said of an output that was computed from changed inputs."""
    given = inputs()
    wrong = output({**given, **change(inputs())})

    def fits(other: Inputs) -> dict[str, str]:
        near = torch.allclose(output(other), wrong, rtol=1e-12, atol=1e-12)
        return {"out": "well"} if near else {}

    return fitting(given, fits, limit=200).get("out", [])


def columnwise(value: Tensor) -> Tensor:
    return value.transpose(-1, -2).reshape(value.shape)


def rotated(value: Tensor, by: int) -> Tensor:
    return value.roll(by, 0)


def without(value: Tensor, column: int) -> Tensor:
    value = value.clone()
    value[:, column] = 0
    return value


CHANGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "a and b exchanged": lambda i: {"a": i["b"], "b": i["a"]},
    "view read in storage order, its strides ignored": lambda i: {
        "view": i["view"].t().contiguous().view(14, 10)
    },
    "mask ignored, all False": lambda i: {"mask": torch.zeros(6, dtype=torch.bool)},
    "mask ignored, all True": lambda i: {"mask": torch.ones(6, dtype=torch.bool)},
    "mask inverted": lambda i: {"mask": ~i["mask"]},
    "negative ids used as an index from the end of 4": lambda i: {
        "ids": torch.where(i["ids"] < 0, i["ids"] + 4, i["ids"])
    },
    "table ignored, all 0": lambda i: {"table": torch.zeros(4, dtype=torch.int64)},
    "the last column of weights left out": lambda i: {"weights": without(i["weights"], -1)},
    "the first column of weights left out": lambda i: {"weights": without(i["weights"], 0)},
    "square transposed": lambda i: {"square": i["square"].t()},
    "a read in column-major order": lambda i: {"a": columnwise(i["a"])},
    "b stored in column-major order": lambda i: {"b": i["b"].reshape(10, 6).t()},
    "the halves of dim 1 of a exchanged": lambda i: {"a": i["a"].roll(5, 1)},
    "the halves of dim 1 of a interleaved": lambda i: {
        "a": torch.stack([i["a"][:, :5], i["a"][:, 5:]], dim=2).reshape(6, 10)
    },
    "interleaved rows of dim 0 of b taken for halves": lambda i: {
        "b": torch.cat([i["b"][0::2], i["b"][1::2]])
    },
    "experts in reversed order of dim 0": lambda i: {"experts": i["experts"].flip(0)},
    "experts moved on by one of dim 0": lambda i: {"experts": rotated(i["experts"], 1)},
    "experts moved back by one of dim 0": lambda i: {"experts": rotated(i["experts"], -1)},
    "a rounded to bfloat16: 60 distinct values become": lambda i: {"a": i["a"].bfloat16().float()},
}


@pytest.mark.parametrize("text", CHANGES)
def test_a_change_is_named(text: str) -> None:
    found = explained(CHANGES[text])
    assert [one.startswith(text) for one in found] == [True], found
    assert found[0].endswith("(well)")


def test_silent_when_nothing_fits_and_when_nothing_is_wrong() -> None:
    assert explained(lambda i: {"a": i["a"] + 1}) == []
    assert explained(lambda i: {"a": i["a"].roll(2, 0)}) == []
    assert explained(lambda i: {}) == [], "the inputs as they are, are no change of them"


def test_changes_that_change_no_bit_are_not_tried() -> None:
    same = {"a": torch.ones(4, 4), "b": torch.ones(4, 4), "mask": torch.zeros(3, dtype=torch.bool)}
    texts = [one.text for one in hypotheses(same)]
    assert "mask ignored, all False" in texts
    assert "a and b exchanged" in texts
    tried = []

    def fits(other: Inputs) -> dict[str, str]:
        tried.append(other)
        return {f"change {len(tried)}": "well"}

    found = fitting(same, fits)
    assert [said[0] for said in found.values()] == [
        "mask ignored, all True (well)",
        "mask inverted (well)",
        "the last column of a left out (well)",
        "the first column of a left out (well)",
        "the last column of b left out (well)",
        "the first column of b left out (well)",
    ]
    for other in tried:
        assert any(not same_bits(other[name], same[name]) for name in same)


def test_number_and_time_are_bounded() -> None:
    given, calls = inputs(), 0

    def raises(other: Inputs) -> dict[str, str]:
        nonlocal calls
        calls += 1
        raise ValueError("such inputs make no sense")

    assert fitting(given, raises, limit=7) == {}
    assert calls == 7
    assert fitting(given, raises, seconds=0.0) == {}
    assert calls == 7


@pytest.mark.parametrize(("tried", "count"), [(True, 2), (False, 3)])
def test_the_time_that_making_a_change_takes_counts(
    tried: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds each here, and no time for the call; whether a bit is changed or not."""
    clock, made = [0.0], []

    def slow() -> Inputs:
        clock[0] += 2.0
        made.append(clock[0])
        return {"x": torch.ones(3) if tried else torch.zeros(3)}

    def endless(tensors: Inputs) -> Iterator[Hypothesis]:
        return repeat(Hypothesis("slow", slow), 100)

    monkeypatch.setattr("verify.explanation.hypotheses.hypotheses", endless)
    monkeypatch.setattr("verify.explanation.hypotheses.time.monotonic", lambda: clock[0])
    assert fitting({"x": torch.zeros(3)}, lambda other: {}, seconds=5.0) == {}
    assert len(made) == count, "one more would not end in time"


def test_nothing_is_made_before_its_turn_nor_sorted_without_a_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not asked for")

    given = inputs()
    with monkeypatch.context() as patched:
        for name in ("clone", "index_select", "any", "unique", "reshape", "contiguous"):
            patched.setattr(Tensor, name, never)
        texts = [one.text for one in hypotheses(given)]
    assert len(texts) > 40
    sorts = 0
    unique = Tensor.unique

    def counted(value: Tensor) -> Any:
        nonlocal sorts
        sorts += 1
        return unique(value)

    monkeypatch.setattr(Tensor, "unique", counted)
    assert fitting({"a": inputs()["a"]}, lambda other: {}, limit=200) == {}
    assert sorts == 0
    assert explained(CHANGES["a rounded to bfloat16: 60 distinct values become"])
    assert sorts == 2


def test_inputs_are_not_copied_to_be_tried() -> None:
    given, seen = inputs(), []

    def fits(other: Inputs) -> dict[str, str]:
        seen.append({name for name in other if other[name].data_ptr() == given[name].data_ptr()})
        return {}

    fitting(given, fits)
    assert all(len(kept) >= len(given) - 2 for kept in seen)


def test_no_more_than_three_for_an_output() -> None:
    found = fitting(inputs(), lambda other: {"out": "well", "more": "well"})
    assert {name: len(said) for name, said in found.items()} == {"out": 3, "more": 3}


def test_an_expanded_input_has_no_storage_order() -> None:
    given: dict[str, Any] = {"x": torch.arange(3.0).expand(4, 3)}
    found = fitting(given, lambda other: {str(id(other)): "well"})
    assert found
    assert not any("storage" in said[0] for said in found.values())


def rows(*indices: int, count: int = 40, columns: int = 3) -> Tensor:
    mask = torch.zeros(count, columns, dtype=torch.bool)
    mask[list(indices), 1] = True
    return mask


def special(*indices: int) -> dict[str, Tensor]:
    scores, ids = generate("s", (40, 5)), torch.ones(40, 2, dtype=torch.int64)
    scores[list(indices), 2] = float("nan")
    ids[list(indices), 0] = -1
    return {"scores": scores, "ids": ids, "other": torch.zeros(7, 40), "flag": torch.tensor(True)}


def test_what_wrong_rows_have_in_common() -> None:
    said = common_rows(rows(3, 20), special(3, 20))
    assert said == [
        "every wrong row (3, 20) is one in which the input scores holds NaN or infinity: look at"
        " what is done with it",
        "every wrong row (3, 20) is one in which the input ids holds a negative number: look at"
        " what is done with it",
    ]
    # one row of many: a coincidence of 1 in 40 is enough for a NaN, not for an id
    assert len(common_rows(rows(3), special(3))) == 1
    assert len(common_rows(rows(3, 20), special(3, 20, 30))) == 2


def test_rows_with_nothing_in_common_are_not_explained() -> None:
    assert common_rows(rows(3, 20, 21), special(3, 20)) == []
    assert common_rows(rows(3), special(*range(40))) == []
    assert common_rows(rows(3, 20), special(*range(30))) == []
    assert common_rows(rows(), special(3)) == []
    assert common_rows(torch.tensor(True), special(3)) == []


def test_an_index_that_stands_twice_in_a_row() -> None:
    expected = torch.tensor([[0, 1, 2], [3, 1, 0], [2, 0, 1]])
    wrong = expected.clone()
    wrong[1] = 0
    text = repeated(expected, wrong)
    assert text is not None
    assert "row 1: 0, 0, 0" in text
    assert repeated(expected, expected.flip(1)) is None
    assert repeated(wrong, wrong.flip(0)) is None, "expected ones are no selection, either"
    assert repeated(expected.float(), wrong.float()) is None
    assert repeated(expected[0], wrong[1]) is None


def test_values_that_their_dtype_cannot_tell_apart() -> None:
    bias = torch.linspace(6.817, 7.063, 238)
    assert too_coarse({"bias": bias.bfloat16(), "n": torch.arange(99)}) == [
        "bias holds 9 distinct values in 238 elements, a spread of 8 steps of bfloat16: too coarse"
        " to tell them apart"
    ]
    fine = {
        "enough bits": bias,
        "wide": generate("w", (40, 40), torch.bfloat16),
        "constant": torch.full((50,), 7.0).bfloat16(),
        "distinct": torch.linspace(6, 7, 9).bfloat16().repeat(1)[:9],
        "shares": (torch.arange(60) % 2).bfloat16(),
        "infinite": (bias / 0).bfloat16(),
        "narrow format": bias.to(torch.float8_e4m3fn),
        "empty": torch.zeros(0),
    }
    assert too_coarse(fine) == []


def test_large_inputs_are_not_sorted_to_count_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("sorted")

    monkeypatch.setattr(Tensor, "unique", never)
    monkeypatch.setattr(Tensor, "double", never)
    negative = -torch.linspace(6.817, 7.063, 238).half()
    assert too_coarse({"wide": generate("w", (40, 40))}) == []
    distinct = len({float(value) for value in negative})
    text = too_coarse({"bias": negative})
    assert [f"bias holds {distinct} distinct values in 238 elements" in one for one in text] in (
        [True],
        [],
    )
    coarse = -torch.linspace(6.817, 7.063, 238).bfloat16()
    assert "bias holds 9 distinct values" in too_coarse({"bias": coarse})[0]
