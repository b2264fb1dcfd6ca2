"""mok.moe and mok.MoE: autograd, torch.compile, checkpointing, opcheck; the functional bits."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mok
from mok import operators
from mok.errors import InputError, MoKError, RoutingError
from mok.exact import exact_case, same_bits

WEIGHTS = ("w_gate", "w_up", "w_down")
SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")


def _layer(inputs, **options):
    experts, width, hidden = inputs.w_gate.shape
    shared = None if inputs.shared is None else inputs.shared[0].shape[0]
    layer = mok.MoE(
        experts, hidden, width, shared_size=shared, swiglu_limit=inputs.swiglu_limit, **options
    )
    with torch.no_grad():
        for name in WEIGHTS:
            getattr(layer, name).copy_(getattr(inputs, name))
        for name, weight in zip(SHARED, inputs.shared or (), strict=False):
            getattr(layer, name).copy_(weight)
    return layer


def _step(call, layer, inputs, d_out):
    layer.zero_grad()
    x = inputs.x.clone().requires_grad_()
    router = inputs.router_weights.clone().requires_grad_()
    out = call(x, inputs.topk_experts, router)
    out.backward(d_out)
    grads = {f"d_{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "d_x": x.grad, "d_router_weights": router.grad, **grads}


def _as_parameters(results):
    """Weight gradients as autograd hands them on: rounded to bf16 once."""
    return {n: v.bfloat16() if n.startswith("d_w_") else v for n, v in results.items()}


def _different(expected, got):
    assert set(expected) == set(got)
    return [name for name in expected if not same_bits(expected[name], got[name])]


@pytest.fixture
def problem(make_inputs, make_uniform, run):
    inputs = make_inputs(50, 64, 48, 4, 2, shared_width=32, limit=1.5)
    d_out = make_uniform("d", (50, 64)).bfloat16()
    return inputs, d_out, _as_parameters(run(inputs, d_out))


def test_the_module_has_the_functional_bits(problem):
    inputs, d_out, expected = problem
    layer = _layer(inputs)
    assert _different(expected, _step(layer, layer, inputs, d_out)) == []


def test_checkpointing_has_the_same_bits(problem):
    inputs, d_out, expected = problem
    layer = _layer(inputs)

    def call(*arguments):
        return checkpoint(layer, *arguments, use_reentrant=False)

    assert _different(expected, _step(call, layer, inputs, d_out)) == []


@pytest.mark.parametrize("shared", [None, 24])
def test_compile_without_graph_break_has_the_same_bits(shared, make_inputs, make_uniform, run):
    inputs = make_inputs(30, 32, 24, 4, 2, shared_width=shared)
    d_out = make_uniform("d", (30, 32)).bfloat16()
    expected = _as_parameters(run(inputs, d_out))
    layer = _layer(inputs)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert _different(expected, _step(compiled, layer, inputs, d_out)) == []


def test_an_exact_case_through_autograd():
    case = exact_case(60, 32, 16, 4, 2, shared_width=8, clamped=True)
    layer = _layer(case.inputs)
    got = _step(layer, layer, case.inputs, case.d_out)
    assert _different(_as_parameters(case.expected), got) == []


def test_only_needed_gradients_are_made(problem, monkeypatch):
    inputs, d_out, expected = problem
    calls = []
    original = operators.engine.backward_pass

    def watched(*arguments):
        result = original(*arguments)
        calls.append(result)
        return result

    monkeypatch.setattr(operators.engine, "backward_pass", watched)
    layer = _layer(inputs).requires_grad_(False)
    x = inputs.x.clone().requires_grad_()
    layer(x, inputs.topk_experts, inputs.router_weights).backward(d_out)
    assert same_bits(x.grad, expected["d_x"])
    assert calls[0].routed == calls[0].shared == (None, None, None)
    layer.w_up.requires_grad_(True)
    layer(inputs.x, inputs.topk_experts, inputs.router_weights).backward(d_out)
    assert same_bits(layer.w_up.grad, expected["d_w_up"])
    assert layer.w_gate.grad is None
    assert calls[1].shared == (None, None, None)


def test_inference_saves_nothing(problem):
    inputs, _, expected = problem
    layer = _layer(inputs)
    with torch.no_grad():
        out = layer(inputs.x, inputs.topk_experts, inputs.router_weights)
    assert same_bits(out, expected["out"])
    assert not out.requires_grad


def test_two_backwards_through_a_retained_graph_are_equal(problem):
    inputs, d_out, _ = problem
    x = inputs.x.clone().requires_grad_()
    out = _layer(inputs)(x, inputs.topk_experts, inputs.router_weights)
    first, second = (torch.autograd.grad(out, x, d_out, retain_graph=True)[0] for _ in range(2))
    assert same_bits(first, second)


@pytest.mark.parametrize("shared_width", [None, 8])
def test_opcheck(shared_width):
    case = exact_case(10, 16, 8, 4, 2, shared_width=shared_width)
    i = case.inputs
    x, router = i.x.requires_grad_(), i.router_weights.requires_grad_()
    weights = tuple(getattr(i, name).requires_grad_() for name in WEIGHTS)
    shared = i.shared or (None, None, None)
    forward = (x, i.topk_experts, router, *weights, *shared, None, "", 4096, True)
    torch.library.opcheck(operators.moe_forward, forward)
    kept = [t.detach() for t in operators.moe_forward(*forward)[1:]]
    plain = [t.detach() if t is not None else None for t in forward[:9]]
    backward = (case.d_out, *plain, kept, None, "", 4096, True, True)
    torch.library.opcheck(operators.moe_backward, backward)


def test_a_bad_id_is_raised_at_the_next_call(problem, monkeypatch):
    inputs, _, _ = problem
    bad = inputs.topk_experts.clone()
    bad[2, 0] = 77
    layer = _layer(inputs)
    with torch.no_grad():
        layer(inputs.x, bad, inputs.router_weights)
        with pytest.raises(RoutingError, match="= 77"):
            layer(inputs.x, inputs.topk_experts, inputs.router_weights)
        layer(inputs.x, inputs.topk_experts, inputs.router_weights)
        monkeypatch.setenv("MOK_CHECK", "1")
        with pytest.raises(RoutingError, match="= 77"):
            layer(inputs.x, bad, inputs.router_weights)


def test_wrong_arguments_are_refused(problem):
    inputs, _, _ = problem
    layer = _layer(inputs)
    with pytest.raises(InputError, match=r"x has shape \[64\]; allowed: \[any, any\], \[T, H\]"):
        layer(inputs.x[0], inputs.topk_experts, inputs.router_weights)
    with pytest.raises(InputError, match=r"router_weights has dtype torch.bfloat16"):
        layer(inputs.x, inputs.topk_experts, inputs.router_weights.bfloat16())
    with pytest.raises(InputError, match="num_experts = 0"):
        mok.MoE(0, 8, 8)


def test_a_backward_needs_a_saving_forward(problem):
    inputs, d_out, _ = problem
    x = inputs.x.clone().requires_grad_()
    weights = (inputs.w_gate, inputs.w_up, inputs.w_down, *inputs.shared, None, "", 4096, False)
    out = operators.moe_forward(x, inputs.topk_experts, inputs.router_weights, *weights)[0]
    with pytest.raises(MoKError, match="save=True"):
        out.backward(d_out)


def test_parameters_and_repr():
    layer = mok.MoE(4, 32, 16, shared_size=8)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes == {
        "w_gate": (4, 16, 32),
        "w_up": (4, 16, 32),
        "w_down": (4, 32, 16),
        "w_shared_gate": (8, 32),
        "w_shared_up": (8, 32),
        "w_shared_down": (32, 8),
    }
    assert "hidden_size=32" in repr(layer)
    assert {name for name, _ in mok.MoE(4, 32, 16).named_parameters()} == set(WEIGHTS)
