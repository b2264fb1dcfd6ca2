"""Bits of a row depend on that row and the weights: measured facts as properties."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mok import portable
from mok.exact import same_bits
from mok.tiles import padded


def _changed(base, other):
    return [name for name in base if not same_bits(base[name], other[name])]


def _rows(inputs, index):
    return replace(
        inputs,
        x=inputs.x[index],
        topk_experts=inputs.topk_experts[index],
        router_weights=inputs.router_weights[index],
    )


@pytest.mark.parametrize("shape", [(64, 48), (128, 96), (320, 160)])
def test_rows_have_the_same_bits_in_any_batch_and_at_any_position(
    shape, run, make_inputs, make_uniform
):
    hidden, width = shape
    inputs = make_inputs(150, hidden, width, 2, 1, shared_width=32)
    d_out = make_uniform("d", (150, hidden)).bfloat16()
    base = run(inputs, d_out)
    for size in (1, 2, 3, 5, 7, 64):
        for start in (0, 1, 63, 150 - size):
            index = torch.arange(start, start + size)
            part = run(_rows(inputs, index), d_out[index])
            for name in ("out", "d_x", "d_router_weights"):
                assert same_bits(part[name], base[name][index]), (name, size, start)
    backwards = torch.arange(149, -1, -1)
    reverse = run(_rows(inputs, backwards), d_out[backwards])
    for name in ("out", "d_x", "d_router_weights"):
        assert same_bits(reverse[name], base[name][backwards]), name


def test_thread_count_changes_no_bit(run, make_inputs, make_uniform, threads):
    inputs = make_inputs(300, 128, 96, 4, 2, shared_width=64, limit=1.0)
    d_out = make_uniform("d", (300, 128)).bfloat16()
    torch.set_num_threads(1)
    base = run(inputs, d_out)
    for count in (2, 3):
        torch.set_num_threads(count)
        assert _changed(base, run(inputs, d_out)) == []
        assert torch.get_num_threads() == count


def test_callers_at_once_get_the_same_bits(run, make_inputs, make_uniform):
    inputs = make_inputs(130, 64, 48, 4, 2)
    d_out = make_uniform("d", (130, 64)).bfloat16()
    base = run(inputs, d_out)
    with ThreadPoolExecutor(3) as callers:
        results = list(callers.map(lambda _: run(inputs, d_out), range(6)))
    assert [_changed(base, result) for result in results] == [[]] * 6


def test_dirty_memory_changes_no_bit(run, make_inputs, make_uniform):
    inputs = make_inputs(90, 64, 48, 4, 2, shared_width=32)
    d_out = make_uniform("d", (90, 64)).bfloat16()
    base = run(inputs, d_out)
    for fill in (float("nan"), float("inf"), -1.0):
        dirty = [torch.full((size,), fill) for size in (64 * 64, 128 * 64, 90 * 64, 4096, 100)]
        del dirty
        assert _changed(base, run(inputs, d_out)) == []


def test_ambient_modes_change_no_bit(run, make_inputs, make_uniform):
    inputs = make_inputs(40, 64, 48, 4, 2)
    d_out = make_uniform("d", (40, 64)).bfloat16()
    base = run(inputs, d_out)
    with torch.inference_mode():
        assert _changed(base, run(inputs, d_out)) == []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _changed(base, run(inputs, d_out)) == []
    torch.use_deterministic_algorithms(True)
    try:
        assert _changed(base, run(inputs, d_out)) == []
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    try:
        assert _changed(base, run(inputs, d_out)) == []
    finally:
        torch.set_default_dtype(torch.float32)


def test_recomputed_rows_give_the_same_bits(run_with, make_inputs, make_uniform):
    inputs = make_inputs(100, 64, 48, 4, 2, shared_width=32, limit=0.5)
    d_out = make_uniform("d", (100, 64)).bfloat16()
    assert _changed(run_with()(inputs, d_out), run_with(recompute=True)(inputs, d_out)) == []


def test_a_weight_gradient_is_one_gemm_over_all_rows_of_its_expert(threads, make_uniform):
    left = make_uniform("left", (700, 64)).bfloat16()
    right = make_uniform("right", (700, 64)).bfloat16()
    rows = (450, 250)
    got = portable._weight_gradients([(left, right)], [torch.zeros(2, 64, 64)], rows)[0]
    torch.set_num_threads(1)
    for expert, (start, stop) in enumerate(((0, 450), (450, 700))):
        whole = padded(left[start:stop]).t() @ padded(right[start:stop])
        assert same_bits(got[expert], whole)
