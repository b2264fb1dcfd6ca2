"""Parts of tensors: digests that add up, entries that are picked, wholes that are put together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.assembly import Part, _whole, add_up, digest_parts, pick
from verify.captures import Layout, digest_at, same_bits
from verify.inputs import generate

N = 7
shapes = st.sampled_from([((N, 3), 0), ((2, N), 1), ((2, N, 2), 1), ((N,), 0)])
dtypes = st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.float8_e5m2])
cuts = st.lists(st.integers(0, N), max_size=3).map(lambda p: [0, *sorted(p), N])
orders = st.lists(st.integers(0, N - 1), min_size=1, max_size=N, unique=True)


def pieces(whole: torch.Tensor, dim: int, borders: list[int]) -> list[tuple[torch.Tensor, Layout]]:
    return [
        (whole.narrow(dim, a, b - a), Layout(dim, a, tuple(whole.shape)))
        for a, b in pairwise(borders)
    ]


def sum_of(parts: list[Part]) -> str | None:
    return add_up([str(digest_parts({"": part})[""]) for part in parts])


def made(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    kind = "uniform" if dtype.is_floating_point else "integers"
    low, high = (-1, 1) if kind == "uniform" else (-(2**40), 2**40)
    return generate("t", shape, dtype, kind=kind, low=low, high=high)


@given(shapes, dtypes, cuts, cuts, orders, st.data())
def test_picked_entries_agree_wherever_they_lie(
    shape_dim: tuple[tuple[int, ...], int],
    dtype: torch.dtype,
    here: list[int],
    there: list[int],
    order: list[int],
    data: st.DataObject,
) -> None:
    """The base, cut one way, against the chosen entries, cut another way: as `batch` compares."""
    shape, dim = shape_dim
    whole = made(shape, dtype)
    index = torch.tensor(order)
    keep = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    )
    expected = [pick(t, layout, dim, index, keep) for t, layout in pieces(whole, dim, here)]
    chosen = whole.view(torch.uint8 if dtype.itemsize == 1 else dtype).index_select(dim, index)
    chosen = chosen.view(dtype)
    borders = sorted({min(b, len(order)) for b in there})
    places = torch.arange(len(order))
    actual = [pick(t, layout, dim, places, keep) for t, layout in pieces(chosen, dim, borders)]
    assert sum_of(expected) == sum_of(actual) is not None
    entry = whole.numel() // N
    assert sum(digest_parts({"": part})[""].count for part in expected) == int(keep.sum()) * entry
    assert same_bits(_whole([*expected]), _whole([*actual]))
    if keep.any():
        wrong = chosen.clone()
        at = int(keep.nonzero()[0])
        raw = wrong.select(dim, at)
        raw.copy_(raw.float().neg().sub(1).to(dtype))
        changed = [pick(t, layout, dim, places, keep) for t, layout in pieces(wrong, dim, borders)]
        assert sum_of(changed) != sum_of(expected)


def test_a_missing_part_is_not_made_up_by_zeros() -> None:
    whole = torch.zeros(4, 2)
    index, keep = torch.arange(4), torch.ones(4, dtype=torch.bool)
    (a, la), (b, lb) = pieces(whole, 0, [0, 3, 4])
    one, two = (pick(t, layout, 0, index, keep) for t, layout in ((a, la), (b, lb)))
    assert sum_of([one]) != sum_of([one, two]), "all contents are zero, the counts still differ"
    assert sum_of([one, two]) == str(digest_at(whole, None))


def test_add_up_refuses_what_does_not_fit() -> None:
    whole = torch.arange(4.0)
    text = str(digest_at(whole, None))
    assert add_up([text]) == text
    assert add_up([text, text]) is None
    assert add_up([text, str(digest_at(whole.double(), None))]) is None
    assert add_up(["not a digest"]) is None


@pytest.mark.parametrize("replicated", [True, False])
def test_whole_of_shards_or_of_a_replica(replicated: bool) -> None:
    whole = generate("w", (5, 3), torch.bfloat16)
    if replicated:
        found = _whole([None, Part(whole, None, replicated=True)])
    else:
        found = _whole([Part(t, layout) for t, layout in pieces(whole, 0, [0, 0, 2, 5])])
    assert same_bits(found, whole)
