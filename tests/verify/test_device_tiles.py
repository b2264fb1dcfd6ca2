"""Tile digests find the place of a difference and add up to the digest of the tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.device_tiles import differing_tiles, tile_digests
from verify.digests import Digest
from verify.hashing import digest_tensor


@given(st.integers(0, 300), st.integers(1, 350))
def test_tiles_add_up_and_name_their_elements(count: int, elements: int) -> None:
    t = torch.arange(count, dtype=torch.int16)
    tiles = tile_digests(t, elements)
    assert tiles.total() == digest_tensor(t)
    total = Digest.zero("int16", (count,))
    for at in range(len(tiles)):
        total += tiles.digest(at)
    assert total == digest_tensor(t)
    assert [i for at in range(len(tiles)) for i in tiles.elements(at)] == list(range(count))


@given(st.integers(0, 20 * 30 - 1), st.integers(1, 100), st.booleans())
def test_a_flipped_bit_is_found_in_its_tile_and_no_other(
    at: int, elements: int, transposed: bool
) -> None:
    a = torch.arange(600).reshape(20, 30)
    a = a.t() if transposed else a
    b = a.clone()
    b[at // a.shape[1], at % a.shape[1]] ^= 1
    assert differing_tiles(a, b, elements) == [at // elements]
    assert differing_tiles(a, a.clone(), elements) == []


def test_tiles_of_other_tensors_are_refused() -> None:
    tiles = tile_digests(torch.zeros(10), 4)
    for other in (
        tile_digests(torch.zeros(10), 5),
        tile_digests(torch.zeros(2, 5), 4),
        tile_digests(torch.zeros(10, dtype=torch.int32), 4),
        tile_digests(torch.zeros(10), 4, seed=1),
    ):
        with pytest.raises(ValueError, match="tiles can be compared when"):
            tiles.differing(other)
    with pytest.raises(ValueError, match="at least one element"):
        tile_digests(torch.zeros(10), 0)
    with pytest.raises(IndexError, match="tile 3 of 3"):
        tiles.elements(3)


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [1, 777, 8192, 10**9])
def test_tiles_on_a_device_are_those_of_the_host(elements: int) -> None:
    flat = torch.randn(90_001).bfloat16()
    for here in (flat if elements > 1 else flat[:99], flat[1:60_001].view(200, 300).t()[:, :5]):
        there = torch.empty_strided(here.shape, here.stride(), dtype=here.dtype, device="cuda")
        there.copy_(here)
        tiles = tile_digests(there, elements)
        assert tiles.differing(tile_digests(here, elements)) == []
        assert tiles.total() == digest_tensor(here)


@pytest.mark.gpu
def test_a_flip_is_found_on_a_device() -> None:
    a = torch.randn(3_000_017, device="cuda")
    b = a.clone()
    b.view(torch.int32)[2_345_678] ^= 1
    assert differing_tiles(a, b, 4096) == [2_345_678 // 4096]
    assert differing_tiles(a, a.clone(), 4096) == []
