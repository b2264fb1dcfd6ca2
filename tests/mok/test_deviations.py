"""Rounding from float64 is single and correct; deviations hold and are not vacuous."""

import numpy as np
import pytest
import torch

from mok.deviations import Arithmetic, Pair, given, round_bf16


def test_every_bf16_value_and_every_tie_between_neighbours():
    bits = torch.arange(0, 0x7F80, dtype=torch.int32)
    values = (bits << 16).view(torch.float32).double()
    assert torch.equal(round_bf16(values), values)
    middle = (values[:-1] + values[1:]) / 2
    even = torch.where(bits[:-1] % 2 == 0, values[:-1], values[1:])
    assert torch.equal(round_bf16(middle), even)
    assert torch.equal(round_bf16(-middle), -even)
    above = torch.from_numpy(np.nextafter(middle.numpy(), np.inf))
    below = torch.from_numpy(np.nextafter(middle.numpy(), -np.inf))
    assert torch.equal(round_bf16(above), values[1:])
    assert torch.equal(round_bf16(below), values[:-1])


def test_one_rounding_where_fp32_first_would_round_twice():
    value = torch.tensor([1.0 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_bf16(value).item() == 1.0 + 2.0**-7
    assert value.float().bfloat16().item() == 1.0


def test_special_values():
    largest = float(torch.finfo(torch.bfloat16).max)
    value = torch.tensor(
        [0.0, -0.0, largest, 3.4e38, -1e300, float("inf"), 2.0**-134, 1.1 * 2.0**-134, 5e-324],
        dtype=torch.float64,
    )
    got = round_bf16(value)
    assert got.tolist()[2:] == [
        largest,
        float("inf"),
        -float("inf"),
        float("inf"),
        0.0,
        2.0**-133,
        0.0,
    ]
    assert torch.signbit(got[1]).item()
    assert torch.isnan(round_bf16(torch.tensor([float("nan")], dtype=torch.float64))).all()


@pytest.mark.parametrize("name", ["sigmoid", "silu", "silu_slope"])
@pytest.mark.parametrize("mode", ["exact", "rounded"])
def test_fp32_activations_stay_inside(name, mode):
    g = torch.cat([torch.linspace(-130, 130, 20001), torch.linspace(-1, 1, 5001) ** 3])
    s = 1.0 / (torch.exp(-g) + 1.0)
    got = {
        "sigmoid": s,
        "silu": g / (torch.exp(-g) + 1.0),
        "silu_slope": s * (g * (1.0 - s) + 1.0),
    }[name]
    pair = getattr(Arithmetic(mode), name)(given(g))
    assert ((got.double() - pair.v).abs() <= pair.m).all()
    used = (got.double() - pair.v).abs() / pair.m
    assert used[g.abs() < 80].max() > 0.1


@pytest.mark.parametrize("name", ["sigmoid", "silu", "silu_slope"])
def test_a_deviation_of_the_argument_is_carried(name):
    arithmetic = Arithmetic("exact")
    g = torch.linspace(-30, 30, 4001, dtype=torch.float64)
    for m in (1e-6, 0.01, 0.5, 3.0):
        pair = getattr(arithmetic, name)(Pair(g, torch.full_like(g, m)))
        for shift in (-m, m, m / 2):
            moved = getattr(arithmetic, name)(given(g + shift))
            assert ((moved.v - pair.v).abs() <= pair.m).all()


def test_matmul_deviation_holds_for_fp32_and_for_moved_operands(make_uniform):
    a, b = make_uniform("a", (40, 200)), make_uniform("b", (200, 30))
    a, b = a.bfloat16().float(), b.bfloat16().float()
    for mode in ("exact", "rounded"):
        pair = Arithmetic(mode).matmul(given(a), given(b))
        assert (((a @ b).double() - pair.v).abs() <= pair.m).all()
    moved = make_uniform("move", (40, 200), 1e-3).double()
    pair = Arithmetic("exact").matmul(Pair(a.double(), moved.abs()), given(b))
    assert (((a.double() + moved) @ b.double() - pair.v).abs() <= pair.m).all()


def test_a_rounding_place_forgets_deviations_away_from_borders():
    tie = 1.0 + 2.0**-8
    pair = Pair(
        torch.tensor([1.001, tie + 1e-6, tie - 1e-6], dtype=torch.float64),
        torch.tensor([1e-5, 1e-5, 1e-7], dtype=torch.float64),
    )
    got = Arithmetic("rounded").round(pair)
    assert got.v.tolist() == [1.0, 1.0 + 2.0**-7, 1.0]
    assert got.m.tolist() == [0.0, 2.0**-7, 0.0]
