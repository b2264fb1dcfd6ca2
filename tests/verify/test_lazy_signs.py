"""Lazily conjugated and negated tensors: the digest is that of their bits with signs inverted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verify.captures import fresh_copy, same_bits
from verify.hashing import digest_on_host, digest_tensor, settled

COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def lazy_views(t: torch.Tensor) -> list[torch.Tensor]:
    """Lazily conjugated and negated views of a complex matrix: dense, strided, by parts."""
    conjugated, real = t.conj(), torch.view_as_real(t)
    some = [conjugated, t.t().conj(), conjugated[:, 1:-1], conjugated[1:, ::2], conjugated[3:, 5]]
    some += [conjugated.imag, t.t().conj().imag, torch._neg_view(conjugated)]
    return [
        *some,
        torch._neg_view(t.t()),
        torch._neg_view(real),
        torch._neg_view(real.permute(2, 1, 0)),
    ]


def flipped(t: torch.Tensor, imaginary: bool, real: bool) -> torch.Tensor:
    """Signs of a resolved complex tensor inverted by integers: NaNs keep their other bits."""
    bits = torch.view_as_real(t.cpu().contiguous())
    bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]).clone()
    bits[..., 1] ^= torch.iinfo(bits.dtype).min * imaginary
    bits[..., 0] ^= torch.iinfo(bits.dtype).min * real
    return bits


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("shape", [(6, 7), (300, 100)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_lazy_signs_are_bits_in_nans_too(
    dtype: torch.dtype, shape: tuple[int, int], device: str
) -> None:
    """Torch's own resolve_conj quiets NaNs on a GPU, and those of complex32 anywhere."""
    item = torch.empty((), dtype=dtype).element_size()
    raw = np.random.default_rng(3).integers(0, 256, (math.prod(shape) + 1) * item, np.uint8)
    there = torch.from_numpy(raw).to(device).view(dtype)
    for first in (0, 1):
        t = there[first : first + math.prod(shape)].view(shape)
        for view in lazy_views(t):
            assert digest_tensor(view) == digest_on_host(view), (view.shape, view.stride(), first)
        dense, turned = t.cpu().contiguous(), t.cpu().t().contiguous()
        for view, plain, signs in (
            (t.conj(), dense, (True, False)),
            (t.t().conj(), turned, (True, False)),
            (torch._neg_view(t.t()), turned, (True, True)),
            (torch._neg_view(t.conj()), dense, (False, True)),
        ):
            assert digest_tensor(view).lanes == digest_on_host(flipped(plain, *signs)).lanes
        imaginary = digest_on_host(flipped(dense, True, False)[..., 1].contiguous())
        assert digest_tensor(t.conj().imag).lanes == imaginary.lanes


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_copies_and_comparisons_keep_the_bits_of_nans(dtype: torch.dtype) -> None:
    item = torch.empty((), dtype=dtype).element_size()
    raw = np.random.default_rng(4).integers(0, 256, 6 * 50 * item, np.uint8)
    t = torch.from_numpy(raw).view(dtype).view(6, 50)
    for view in lazy_views(t):
        plain = settled(view)
        assert not plain.is_conj()
        assert not plain.is_neg()
        assert digest_tensor(plain).lanes == digest_tensor(view).lanes
        for copy in (plain, fresh_copy(view)):
            assert same_bits(copy, view)
            assert digest_tensor(copy).lanes == digest_tensor(view).lanes
        if plain.numel():
            other = plain.clone(memory_format=torch.contiguous_format)
            other.view(torch.uint8)[..., 0] ^= 1
            assert not same_bits(other, view)
    assert settled(t) is t
