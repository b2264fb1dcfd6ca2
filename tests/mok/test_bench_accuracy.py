"""The benchmark's float64 reference against autograd, whole and sampled, and what it notices."""

import pytest
import torch

from mok.bench import accuracy, ours
from mok.bench.layer_inputs import make_inputs
from mok.bench.shapes import Shape

SHAPE = Shape("test", 60, 6, 32, 16, 2)


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(SHAPE, "gaussian", "cpu")


def _autograd(inputs):
    """The layer as a sum over all experts with a mask, differentiated by torch."""
    x, gate_up, down, router = (
        t.double().requires_grad_()
        for t in (inputs.x, inputs.w_gate_up, inputs.w_down, inputs.router_weights)
    )
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        share = (router * (inputs.topk_experts == expert)).sum(1, keepdim=True)
        gate, up = (x @ gate_up[expert].t()).chunk(2, 1)
        hidden = torch.nn.functional.silu(gate) * up
        out = out + share * (hidden @ down[expert].t())
    found = torch.autograd.grad(out, (x, gate_up, down, router), inputs.d_out.double())
    return {"out": out.detach(), **dict(zip(accuracy.OUTPUTS[1:], found, strict=True))}


def test_the_reference_is_what_autograd_gives(inputs):
    expected = _autograd(inputs)
    found = accuracy.reference(inputs, accuracy.everything(inputs))
    for name in accuracy.OUTPUTS:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


def test_a_sample_is_part_of_the_whole(inputs):
    whole = accuracy.reference(inputs, accuracy.everything(inputs))
    part = accuracy.sample(inputs, 7, 2)
    assert (part.tokens.numel(), part.experts.numel()) == (7, 2)
    found = accuracy.reference(inputs, part)
    for name in accuracy.OUTPUTS:
        torch.testing.assert_close(found[name], part.of(name, whole[name]), rtol=1e-12, atol=1e-12)
    everything = accuracy.sample(inputs, 1000, 1000)
    assert (everything.tokens.numel(), everything.experts.numel()) == (60, 6)


def test_an_expert_without_tokens_has_zero_gradients():
    inputs = make_inputs(Shape("lonely", 1, 6, 32, 16, 1), "gaussian", "cpu")
    found = accuracy.reference(inputs, accuracy.everything(inputs))
    used = int(inputs.topk_experts[0, 0])
    zero = [bool((found["d_gate_up"][expert] == 0).all()) for expert in range(6)]
    assert zero == [expert != used for expert in range(6)]


def _ours(inputs):
    prepared = ours.prepare(inputs)
    out = prepared.forward()
    return {"out": out, **prepared.arrange(prepared.backward(out, False))}


def test_our_layer_is_within_bf16_and_a_planted_fault_is_not(inputs):
    everything = accuracy.everything(inputs)
    expected = accuracy.reference(inputs, everything)
    outputs = _ours(inputs)
    errors = accuracy.errors(outputs, expected, everything)
    assert set(errors) == set(accuracy.OUTPUTS)
    assert all(1e-4 < error < 6e-3 for error in errors.values()), errors
    swapped = {**outputs, "d_gate_up": torch.cat(outputs["d_gate_up"].chunk(2, 1)[::-1], 1)}
    assert accuracy.errors(swapped, expected, everything)["d_gate_up"] > 0.5


def test_gradients_can_be_taken_twice_from_a_kept_graph(inputs):
    prepared = ours.prepare(inputs)
    out = prepared.forward()
    first = prepared.backward(out, True)
    second = prepared.backward(out, False)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        prepared.backward(out, False)


def test_main_gradients_are_those_of_one_backward_after_a_forward(inputs):
    everything = accuracy.everything(inputs)
    expected = accuracy.reference(inputs, everything)
    prepared = ours.prepare_main(inputs)
    for _ in range(2):
        out = prepared.forward()
        found = prepared.backward(out, True)
        assert found["d_gate"].dtype == found["d_down"].dtype == torch.float32
        errors = accuracy.errors({"out": out, **prepared.arrange(found)}, expected, everything)
        assert all(error < 6e-3 for error in errors.values()), errors
    once = {name: value.clone() for name, value in found.items()}
    again = prepared.backward(out, True)
    for name in ("d_gate", "d_up", "d_down"):
        assert torch.equal(again[name], 2 * once[name])
    assert torch.equal(again["d_x"], once["d_x"])


def test_nan_is_an_infinite_error():
    nothing = torch.tensor([float("nan"), 1.0])
    assert accuracy.relative_l2(nothing, torch.ones(2).double()) == float("inf")
    assert accuracy.relative_l2(torch.ones(2), torch.ones(2).double()) == 0.0
