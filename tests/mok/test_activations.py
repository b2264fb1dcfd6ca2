"""SwiGLU against autograd in float64, the router tree against its definition, bit for bit."""

import numpy as np
import pytest
import torch

from mok.activations import router_dot, swiglu, swiglu_backward


def _tree(product: np.ndarray, hidden: np.ndarray) -> np.float32:
    """The contract's tree for one row, scalar by scalar."""
    total = np.float32(0)
    for start in range(0, len(product), 64):
        lanes = []
        for lane in range(4):
            acc = np.float32(0)
            for column in sorted(8 * j + 2 * lane + i for j in range(8) for i in (0, 1)):
                if start + column < len(product):
                    acc += product[start + column] * hidden[start + column]
            lanes.append(acc)
        total += (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    return total


@pytest.mark.parametrize("width", [2, 63, 64, 65, 200])
def test_router_tree_has_the_bits_of_its_definition(width, make_uniform):
    product, hidden = make_uniform("p", (3, width)), make_uniform("h", (3, width))
    expected = [_tree(product[r].numpy(), hidden[r].numpy()) for r in range(3)]
    assert router_dot(product, hidden).tolist() == [float(value) for value in expected]


def test_forward_bits_do_not_depend_on_position_or_stride(make_uniform):
    gate, up = make_uniform("g", (64, 96), 9.0), make_uniform("u", (64, 96))
    whole = swiglu(gate, up, None)
    for rows, columns in ((1, 96), (3, 5), (64, 1), (7, 33)):
        part = swiglu(gate[:rows, -columns:], up[:rows, -columns:], None)
        assert torch.equal(part, whole[:rows, -columns:])
    assert torch.equal(swiglu(gate.t(), up.t(), None), whole.t())


@pytest.mark.parametrize("limit", [None, 0.75])
def test_gradients_agree_with_autograd(limit, make_uniform):
    product = make_uniform("p", (16, 32))
    gate = make_uniform("g", (16, 32), 4.0).bfloat16()
    up, weight = make_uniform("u", (16, 32), 2.0).bfloat16(), make_uniform("w", (16,)).abs()
    got = swiglu_backward(product, gate, up, weight, limit)
    g, u = (t.double().requires_grad_() for t in (gate, up))
    gc, uc = (g, u) if limit is None else (g.clamp(max=limit), u.clamp(-limit, limit))
    hidden = gc * torch.sigmoid(gc) * uc
    scaled = weight.double()[:, None]
    d_gate, d_up = torch.autograd.grad(hidden, (g, u), product.double() * scaled)
    for value, exact in (
        (got.d_gate, d_gate),
        (got.d_up, d_up),
        (got.weighted_hidden, hidden.detach() * scaled),
    ):
        assert ((value.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()
    exact_router = (product.double() * hidden.detach()).sum(1)
    assert torch.allclose(got.d_router.double(), exact_router, rtol=0, atol=1e-4)


def test_a_gradient_passes_at_the_limit_and_not_beyond():
    limit = 1.0
    ones = torch.ones(1, 3)
    gate = torch.tensor([[1.0, 1.0078125, 0.5]])
    up = torch.tensor([[1.0, 1.0, -1.0078125]])
    got = swiglu_backward(ones, gate, up, torch.ones(1), limit)
    assert (got.d_gate != 0).tolist() == [[True, False, True]]
    assert (got.d_up != 0).tolist() == [[True, True, False]]
