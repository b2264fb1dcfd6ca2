"""Exact cases: equal bits whatever the order, and a wrong bit for every planted mutation."""

import zlib
from dataclasses import replace

import pytest
import torch

from mok import dispatch, exact, portable
from mok.activations import swiglu, swiglu_backward
from mok.errors import InputError
from mok.exact import exact_case, same_bits

CASES = [
    (96, 64, 48, 4, 2, "balanced"),
    (200, 96, 64, 8, 3, "skewed"),
    (70, 64, 48, 4, 2, "one-expert"),
    (64, 66, 34, 8, 2, "empty-experts"),
    (64, 128, 64, 4, 1, "k1"),
    (90, 64, 32, 4, 4, "unused-slots"),
    (0, 64, 32, 4, 2, "balanced"),
    (1, 64, 32, 4, 1, "k1"),
]


def _different(case, got):
    assert set(got) == set(case.expected)
    return {name for name in got if not same_bits(got[name], case.expected[name])}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[-1]}-{case[0]}")
@pytest.mark.parametrize("shared_width", [None, 40])
@pytest.mark.parametrize("clamped", [False, True])
def test_output_and_every_gradient_are_equal(case, shared_width, clamped, run):
    built = exact_case(*case, shared_width=shared_width, clamped=clamped)
    assert _different(built, run(built.inputs, built.d_out)) == set()


def test_a_case_covers_what_it_claims():
    case = exact_case(300, 64, 48, 4, 2, shared_width=40, clamped=True)
    inputs = case.inputs
    assert len(inputs.x.unique(dim=0)) == 300
    assert len(case.d_out.unique(dim=0)) == 300
    gate = (inputs.x.double() @ inputs.w_gate[0].double().t()).unique().tolist()
    assert gate == [-256.0, -128.0, 0.0, 64.0, 128.0, 256.0]
    up = (inputs.x.double() @ inputs.w_up[0].double().t()).unique().tolist()
    assert up == [-144.0, -72.0, -2.0, -1.0, 0.0, 1.0, 2.0, 72.0, 144.0]
    assert inputs.router_weights.unique().tolist() == [0.25, 0.5, 1.0, 2.0]
    for name, value in case.expected.items():
        assert not torch.signbit(value[value == 0]).any(), name
        assert (value != 0).any(), name
        assert value.isfinite().all(), name


def test_it_is_the_same_case_every_time_and_another_with_another_seed():
    first, again, other = (exact_case(40, 32, 16, 4, 2, seed=seed) for seed in (3, 3, 4))
    assert same_bits(first.inputs.w_gate, again.inputs.w_gate)
    assert not same_bits(first.inputs.w_gate, other.inputs.w_gate)
    assert exact.integers("a", (3,)).tolist() == exact.integers("a", (3, 1)).ravel().tolist()


def test_the_generator_is_splitmix64():
    def splitmix64(state: int) -> int:
        mask = 2**64 - 1
        z = state & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    start = (zlib.crc32(b"x") << 32) ^ (7 * 0x9E3779B9)
    expected = [splitmix64(index * 0x9E3779B97F4A7C15 + start) for index in range(1, 6)]
    assert exact.integers("x", (5,), 7).tolist() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 4}, "H = 4"),
        ({"width": 7}, "I = 7"),
        ({"slots": 5}, "K = 5"),
        ({"routing": "k1"}, "K = 2"),
        ({"routing": "none"}, "allowed: balanced"),
    ],
)
def test_impossible_cases_are_refused(change, message):
    wanted = {"tokens": 8, "hidden": 16, "width": 8, "experts": 4, "slots": 2} | change
    with pytest.raises(InputError, match=message):
        exact_case(**wanted)


def test_the_builder_asserts_exactness():
    with pytest.raises(InputError, match="8 significant bits"):
        exact._assert_rounding_exact(torch.tensor([257.0], dtype=torch.float64))
    exact._assert_rounding_exact(torch.tensor([255.0, 256.0, 0.0], dtype=torch.float64))
    wide = torch.full((1, 2), 4096.0, dtype=torch.float64)
    wide[0, 0] = 1.0
    with pytest.raises(InputError, match="2\\^24"):
        exact._assert_sum_exact(wide, wide.t())
    exact._assert_sum_exact(wide * 0.0, wide.t())


def _identity_silu(gate, up, limit):
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * up).bfloat16()


def _unit_slope(product, gate, up, weight, limit):
    right = swiglu_backward(product, gate, up, weight, limit)
    clamped = up.float() if limit is None else up.float().clamp(-limit, limit)
    d_gate = weight[:, None] * product * clamped
    if limit is not None:
        d_gate = torch.where(gate > limit, 0.0, d_gate)
    return replace(right, d_gate=d_gate.bfloat16())


def _drop_route(topk, num_experts):
    cleaned, bad = dispatch.clean_topk(topk, num_experts)
    token, slot = torch.nonzero(cleaned >= 0)[7]
    cleaned[token, slot] = -1
    return cleaned, bad


@pytest.mark.parametrize(
    ("where", "name", "mutation", "wrong"),
    [
        pytest.param(portable, "swiglu", _identity_silu, {"out"}, id="silu-identity"),
        pytest.param(portable, "swiglu_backward", _unit_slope, {"d_w_gate", "d_x"}, id="slope-one"),
        pytest.param(
            portable, "swiglu", lambda g, u, limit: swiglu(g, u, None), {"out"}, id="forward-clamp"
        ),
        pytest.param(
            portable,
            "swiglu_backward",
            lambda p, g, u, w, limit: swiglu_backward(p, g, u, w, None),
            {"d_x", "d_router_weights", "d_w_gate", "d_w_up", "d_w_down"},
            id="backward-clamp",
        ),
        pytest.param(
            portable, "swiglu", lambda g, u, limit: swiglu(u, g, limit), {"out"}, id="swapped"
        ),
        pytest.param(
            "engine", "clean_topk", _drop_route, {"out", "d_x", "d_router_weights"}, id="lost-route"
        ),
    ],
)
def test_a_mutation_shows_as_a_wrong_bit(where, name, mutation, wrong, run, monkeypatch):
    from mok import engine

    case = exact_case(120, 64, 48, 4, 2, shared_width=32, clamped=True)
    monkeypatch.setattr(engine if where == "engine" else where, name, mutation)
    assert wrong <= _different(case, run(case.inputs, case.d_out))


def test_swapped_weights_show_as_a_wrong_bit(run):
    case = exact_case(120, 64, 48, 4, 2)
    swapped = replace(case.inputs, w_gate=case.inputs.w_up, w_up=case.inputs.w_gate)
    assert {"out", "d_x", "d_w_gate", "d_w_up"} <= _different(case, run(swapped, case.d_out))


def test_same_bits_sees_signed_zeros_and_dtypes():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
