"""What came back as named tensors: names, copies that keep bits and strides, what can be known."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from verify.captures import Layout, digest_at, facts_of, flatten, fresh_copy, same_bits
from verify.errors import CaseError
from verify.evidence import Facts

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    *FP8,
]


@dataclass
class Pair:
    left: Any
    right: Any


def test_names() -> None:
    t = [torch.full((1,), float(i)) for i in range(9)]
    named = namedtuple("named", "p q")
    value = OrderedDict(
        a=t[0],
        b=[t[1], (t[2], None)],
        c={"d": t[3], 7: t[4]},
        e=Pair(t[5], "text"),
        f=named(t[6], 3),
    )
    tensors, ignored = flatten(value)
    assert list(tensors) == ["a", "b.0", "b.1.0", "c.d", "c.7", "e.left", "f.0", "f.1"]
    assert ignored == ["e.right (str)"]
    assert tensors["b.1.0"] is t[2]
    assert list(flatten(t[0])[0]) == ["out"]
    assert list(flatten((t[0], t[1]))[0]) == ["out.0", "out.1"]
    assert flatten(None) == ({}, [])
    assert flatten({1, 2})[1] == ["out (set)"]


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (True, torch.bool),
        (2**40, torch.int64),
        (0.1, torch.float64),
        (np.float64(0.1), torch.float64),
        (1j, torch.complex128),
    ],
)
def test_numbers_are_tensors(number: Any, dtype: torch.dtype) -> None:
    tensor = flatten(number)[0]["out"]
    assert (tensor.dtype, tensor.shape, tensor.item()) == (dtype, (), number)


def test_arrays_are_tensors() -> None:
    array = np.arange(3, dtype=np.int16)
    assert flatten({"a": array})[0]["a"].dtype is torch.int16


@pytest.mark.parametrize("value", [{"a.b": 1, "a": {"b": 2}}, {1: 1, "1": 2}])
def test_two_outputs_of_one_name_are_refused_not_dropped(value: Any) -> None:
    with pytest.raises(CaseError, match="two outputs are called"):
        flatten(value)


def test_tensors_without_bits_of_their_own_are_named_as_not_compared() -> None:
    meta = torch.empty(2, device="meta")
    tensors, ignored = flatten({"s": torch.eye(2).to_sparse(), "m": meta, "d": torch.eye(2)})
    assert list(tensors) == ["s.indices", "s.values", "d"]
    assert ignored == ["m (meta tensor that cannot be compared; return its parts)"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_facts_of_every_dtype(dtype: torch.dtype) -> None:
    ones = torch.ones(4).to(dtype)
    assert facts_of(ones) == Facts(4, True, 0)
    ones[2] = 0
    assert facts_of(ones) == Facts(4, False, 0)
    assert facts_of(ones[:1]) == Facts(1, False, 0), "one element is not a constant tensor"
    assert facts_of(ones[:0]) == Facts(0, True, 0)
    assert facts_of(ones[0]) == Facts(1, False, 0)


def test_facts_of_nonfinite() -> None:
    nan, inf = float("nan"), float("inf")
    assert facts_of(torch.tensor([nan, 1.0, inf, -inf])) == Facts(4, False, 3)
    assert facts_of(torch.full((4,), nan)) == Facts(4, True, 4)
    assert facts_of(torch.tensor([complex(nan, 1), 1j, complex(0, inf)])).nonfinite == 2
    assert facts_of(torch.tensor([nan, nan, 1.0])) == Facts(3, False, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_keep_bits_and_strides_in_memory_of_their_own(dtype: torch.dtype) -> None:
    whole = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
    for view in (whole, whole.t(), whole[::2, 1::2], whole[1:, 2:], whole[0, 0], whole[:0]):
        copied = fresh_copy(view)
        assert copied.stride() == view.stride()
        assert copied.storage_offset() == view.storage_offset() or copied.is_contiguous()
        assert same_bits(copied, view)
        assert copied.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or not len(
            view.shape and view
        )
    before = whole.t().clone()
    copied = fresh_copy(whole.t())
    copied[0, 0] = 1
    assert same_bits(whole.t(), before)


def test_expanded_and_conjugated_views() -> None:
    expanded = torch.arange(3.0)[:, None].expand(3, 4)
    copied = fresh_copy(expanded)
    assert copied.stride() == expanded.stride()
    assert torch.equal(copied, expanded)
    lazy = torch.tensor([[1 + 2j, 3j], [4.0, 5 - 1j], [1j, 2j]]).conj().t()
    assert lazy.is_conj()
    assert same_bits(fresh_copy(lazy), lazy.resolve_conj())
    assert same_bits(fresh_copy(lazy.imag), lazy.imag.resolve_neg())


def test_a_small_view_of_a_huge_tensor_does_not_copy_all_of_it() -> None:
    view = torch.zeros(2**20, 4)[:, 0][:8]
    copied = fresh_copy(view)
    assert copied.untyped_storage().nbytes() < 2**12
    assert same_bits(copied, view)


def test_same_bits_sees_every_bit() -> None:
    def f(bits: int) -> torch.Tensor:
        return torch.tensor([bits], dtype=torch.int32).view(torch.float32)

    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(f(0x7FC00000), f(0x7FC00001)), "NaN payloads"
    assert same_bits(f(0x7FC00001), f(0x7FC00001)), "NaN equals itself"
    assert not same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not same_bits(torch.ones(2), torch.ones(1, 2))
    assert not same_bits(torch.ones(2, dtype=torch.int32), torch.ones(2))
    assert not same_bits(torch.tensor([1j]), torch.tensor([1j]).conj())
    assert same_bits(torch.eye(3).t(), torch.eye(3))
    # signalling NaN in a 16-bit type
    raw = torch.tensor([0x7F81, 0x7F82], dtype=torch.int16).view(torch.bfloat16)
    assert not same_bits(raw[:1], raw[1:])


def test_digest_of_a_part_needs_its_place() -> None:
    t = torch.arange(6.0)
    whole = digest_at(t, None)
    assert digest_at(t[:2], Layout(0, 0, (6,))) + digest_at(t[2:], Layout(0, 2, (6,))) == whole
    assert digest_at(t[:2], Layout(0, 1, (6,))) + digest_at(t[2:], Layout(0, 2, (6,))) != whole
