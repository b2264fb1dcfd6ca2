"""Pieces run once each, errors come out, and the caller's threads are left alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from mok.errors import UnsupportedError
from mok.tiles import (
    STRIP_ROWS,
    TILE_ROWS,
    multiply,
    padded,
    require_ieee_matmul,
    run_pieces,
    strips,
)

CPU = torch.device("cpu")


def test_every_piece_runs_once_on_one_blas_thread():
    ran: list[int] = []
    counts: set[int] = set()

    def piece(number: int) -> None:
        counts.add(torch.get_num_threads())
        ran.append(number)

    run_pieces([lambda n=n: piece(n) for n in range(50)], CPU)
    assert sorted(ran) == list(range(50))
    assert counts == {1}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_callers_thread_count_is_unchanged_here_and_in_new_threads(count, threads):
    torch.set_num_threads(count)
    run_pieces([lambda: None] * 8, CPU)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == count
    assert seen == [count]


def test_an_error_of_a_piece_reaches_the_caller():
    def fail() -> None:
        raise ValueError("piece 3")

    with pytest.raises(ValueError, match="piece 3"):
        run_pieces([lambda: None, fail, lambda: None], CPU)


def test_no_pieces_is_no_work():
    run_pieces([], CPU)


def test_several_callers_at_once():
    left, right = torch.ones(640, 32), torch.ones(32, 16)
    results = [torch.zeros(640, 16) for _ in range(8)]

    def call(number: int) -> None:
        run_pieces([lambda: results[number].copy_(multiply(left, right))], CPU)

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(call, range(8)))
    assert all(torch.equal(result, torch.full((640, 16), 32.0)) for result in results)


def test_padding_is_zero_and_goes_to_a_tile_border(make_uniform):
    rows = make_uniform("rows", (70, 5)).bfloat16()
    result = padded(rows)
    assert result.shape == (2 * TILE_ROWS, 5)
    assert torch.equal(result[:70], rows.float())
    assert torch.equal(result[70:], torch.zeros(58, 5))
    assert padded(rows[:0]).shape == (0, 5)


@pytest.mark.parametrize(("width", "depth"), [(512, 512), (272, 200), (160, 96), (32, 64), (3, 7)])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_tile_has_the_bits_of_a_gemm_of_its_own(width, depth, transposed, threads):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(STRIP_ROWS, depth, generator=generator)
    right = torch.randn(width, depth, generator=generator).t()
    if not transposed:
        right = right.contiguous()
    tiles = [tile @ right for tile in left.split(TILE_ROWS)]
    for count in range(len(tiles) + 1):
        assert torch.equal(
            multiply(left[: count * TILE_ROWS], right),
            torch.cat([torch.empty(0, width), *tiles[:count]]),
        )


def test_strips_cover_the_rows_and_start_at_tile_borders():
    covered = list(strips(1000, 2345))
    assert covered[0][0] == 1000
    assert covered[-1][1] == 2345
    assert all(a[1] == b[0] for a, b in pairwise(covered))
    assert all((first - 1000) % TILE_ROWS == 0 for first, _ in covered)


def test_reduced_precision_matmul_is_refused():
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(UnsupportedError, match="set_float32_matmul_precision"):
            require_ieee_matmul(CPU)
    finally:
        torch.set_float32_matmul_precision("highest")
    require_ieee_matmul(CPU)
