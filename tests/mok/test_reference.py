"""The reference is right (autograd, differences), the backend is inside, faults are outside."""

from dataclasses import replace

import pytest
import torch

from mok import activations, portable, reference

SHAPES = [
    pytest.param((96, 96, 80, 4, 2, 48, None), id="shared"),
    pytest.param((80, 64, 64, 4, 3, None, 0.7), id="clamped"),
    pytest.param((70, 256, 130, 3, 2, 64, 1.5), id="shared-clamped"),
]


def _layer(inputs):
    """The layer in float64 by torch operations, differentiable."""
    limit = inputs.swiglu_limit
    limit = None if limit is None else torch.tensor(limit).item()

    def expert(x, gate, up, down):
        g, u = x @ gate.t(), x @ up.t()
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return (g * torch.sigmoid(g) * u) @ down.t()

    out = torch.zeros_like(inputs.x) if inputs.shared is None else expert(inputs.x, *inputs.shared)
    for index in range(inputs.w_gate.shape[0]):
        token, slot = torch.nonzero(inputs.topk_experts == index, as_tuple=True)
        weights = (inputs.w_gate[index], inputs.w_up[index], inputs.w_down[index])
        y = inputs.router_weights[token, slot, None] * expert(inputs.x[token], *weights)
        out = out.index_add(0, token, y)
    return out


def _leaves(inputs):
    def leaf(tensor):
        return tensor.detach().double().requires_grad_()

    names = ("x", "router_weights", "w_gate", "w_up", "w_down")
    doubled = replace(
        inputs,
        **{name: leaf(getattr(inputs, name)) for name in names},
        shared=None if inputs.shared is None else tuple(leaf(w) for w in inputs.shared),
    )
    leaves = {f"d_{name}": getattr(doubled, name) for name in names}
    for name, weight in zip(("gate", "up", "down"), doubled.shared or (), strict=False):
        leaves[f"d_w_shared_{name}"] = weight
    return doubled, leaves


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_mode_is_autograd_in_float64(shape, make_inputs, make_uniform):
    inputs = make_inputs(*shape)
    d_out = make_uniform("d", inputs.x.shape).bfloat16()
    doubled, leaves = _leaves(inputs)
    out = _layer(doubled)
    gradients = torch.autograd.grad(out, list(leaves.values()), d_out.double())
    expected = {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}
    got = reference.moe(inputs, d_out, "exact")
    assert set(got) == set(expected)
    for name, value in expected.items():
        error = (got[name].v - value).abs().max()
        assert error <= 1e-12 * value.abs().max(), name


def test_exact_mode_agrees_with_central_differences(make_inputs, make_uniform):
    inputs = make_inputs(9, 16, 12, 3, 2, 8, None)
    d_out = make_uniform("d", inputs.x.shape).double()
    doubled, leaves = _leaves(inputs)
    leaves = {name: leaf.detach() for name, leaf in leaves.items()}
    fields = {f"d_{n}": n for n in ("x", "router_weights", "w_gate", "w_up", "w_down")}
    doubled = replace(
        doubled,
        **{fields[n]: leaves[n] for n in fields},
        shared=tuple(leaves[f"d_w_shared_{n}"] for n in ("gate", "up", "down")),
    )
    got = reference.moe(doubled, d_out, "exact")
    step = 1e-5
    for name, leaf in leaves.items():
        direction = make_uniform(f"dir{name}", tuple(leaf.shape)).double()
        losses = []
        for sign in (1.0, -1.0):
            leaf.add_(direction, alpha=sign * step)
            losses.append((reference.moe(doubled, None, "exact")["out"].v * d_out).sum())
            leaf.add_(direction, alpha=-sign * step)
        slope = (losses[0] - losses[1]) / (2 * step)
        assert torch.isclose((got[name].v * direction).sum(), slope, rtol=1e-7), name


@pytest.mark.parametrize("shape", SHAPES)
def test_the_portable_backend_is_inside_both_bounds(shape, run, make_inputs, make_uniform):
    inputs = make_inputs(*shape)
    d_out = make_uniform("d", inputs.x.shape).bfloat16()
    got = run(inputs, d_out)
    exact = reference.moe(inputs, d_out, "exact")
    rounded = reference.moe(inputs, d_out, "rounded")
    assert set(got) == set(exact) == set(rounded)
    for name, tensor in got.items():
        assert reference.budget_used(exact[name], tensor) <= 1.0, name
        assert reference.agreement(rounded[name], tensor).outside == 0, name
        as_bf16 = reference.agreement(rounded[name], tensor.bfloat16())
        assert as_bf16.outside == 0, name
        assert as_bf16.different < 0.01 * as_bf16.count, name


def test_the_bound_is_not_vacuous(make_inputs, make_uniform):
    """One bf16 step away is outside for most elements, and NaN is outside everywhere."""
    inputs = make_inputs(96, 96, 80, 4, 2, 48)
    value = reference.moe(inputs, None, "rounded")["out"]
    bits = value.v.bfloat16().view(torch.int16)
    moved = (bits + 1).view(torch.bfloat16)
    got = reference.agreement(value, moved)
    assert got.outside > 0.7 * got.count
    nan = reference.agreement(value, torch.full_like(moved, float("nan")))
    assert nan.outside == nan.count
    assert reference.budget_used(value, torch.full_like(moved, float("nan"))) == float("inf")


def test_shared_rows_are_a_ranks_own_partial_sums(make_inputs, make_uniform):
    inputs = make_inputs(40, 32, 24, 2, 1, 16)
    d_out = make_uniform("d", inputs.x.shape).bfloat16()
    whole = reference.moe(inputs, d_out, "exact")
    parts = [
        reference.moe(inputs, d_out, "exact", shared_rows=rows)
        for rows in (slice(0, 15), slice(15, 40))
    ]
    for name in ("d_w_shared_gate", "d_w_shared_up", "d_w_shared_down"):
        assert torch.allclose(parts[0][name].v + parts[1][name].v, whole[name].v, rtol=1e-12)


def _early_rounding(gate, up, limit):
    return activations.swiglu(gate.bfloat16().float(), up.bfloat16().float(), limit)


def _truncated_hidden(gate, up, limit):
    hidden = gate / (torch.exp(-gate) + 1.0) * up
    return (hidden.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def _dropped_derivative(product, gate, up, weight, limit):
    right = activations.swiglu_backward(product, gate, up, weight, limit)
    sigmoid = 1.0 / (torch.exp(-gate.float()) + 1.0)
    return replace(right, d_gate=(weight[:, None] * product * up.float() * sigmoid).bfloat16())


def _forwards_hidden(product, gate, up, weight, limit):
    right = activations.swiglu_backward(product, gate, up, weight, limit)
    hidden = activations.swiglu(gate, up, limit).float()
    return replace(
        right,
        weighted_hidden=(weight[:, None] * hidden).bfloat16(),
        d_router=activations.router_dot(product, hidden),
    )


@pytest.mark.parametrize(
    ("place", "fault", "outputs"),
    [
        pytest.param("swiglu", _early_rounding, ["out"], id="early-rounding"),
        pytest.param("swiglu", _truncated_hidden, ["out"], id="truncated-h"),
        pytest.param("swiglu_backward", _dropped_derivative, ["d_x", "d_w_gate"], id="derivative"),
        pytest.param(
            "swiglu_backward", _forwards_hidden, ["d_router_weights", "d_w_down"], id="forward-h"
        ),
    ],
)
def test_planted_faults_are_outside(
    place, fault, outputs, run, make_inputs, make_uniform, monkeypatch
):
    inputs = make_inputs(96, 96, 80, 4, 2)
    d_out = make_uniform("d", inputs.x.shape).bfloat16()
    rounded = reference.moe(inputs, d_out, "rounded")
    if fault is _forwards_hidden:
        # forward's h is made from fp32 g and u, which a faulty backend would have kept.
        monkeypatch.setattr(portable, "_saved_rows", _saved_in_fp32)
    monkeypatch.setattr(portable, place, fault)
    got = run(inputs, d_out)
    for name in outputs:
        judged = reference.agreement(rounded[name], got[name])
        assert judged.outside > 0.05 * judged.count, name


def _saved_in_fp32(x, width):
    shape = (x.shape[0], width)
    return portable.SavedRows(torch.zeros(shape), torch.zeros(shape))
