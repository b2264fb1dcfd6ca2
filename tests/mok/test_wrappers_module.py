"""mok.MoE as a torch.nn.Module: state_dict, copies, dtypes, frozen weights, functional calls."""

import copy
import io
import pickle

import pytest
import torch
from moe_block import EXPERTS, HIDDEN, SHARED, WIDTH, Block, batch, different, gradients, step
from safetensors.torch import load_file, save_file
from torch.func import functional_call

import mok
from mok import operators
from mok.errors import InputError
from mok.exact import same_bits

NAMES = {
    "w_gate": (EXPERTS, WIDTH, HIDDEN),
    "w_up": (EXPERTS, WIDTH, HIDDEN),
    "w_down": (EXPERTS, HIDDEN, WIDTH),
    "w_shared_gate": (SHARED, HIDDEN),
    "w_shared_up": (SHARED, HIDDEN),
    "w_shared_down": (HIDDEN, SHARED),
}


def _layer(shared=SHARED, seed=0, **options):
    torch.manual_seed(seed)
    return mok.MoE(EXPERTS, HIDDEN, WIDTH, shared_size=shared, **options)


def _routed(layer):
    x, block = batch(20), Block()
    experts, weights = block.route(x)
    return layer(x, experts, weights.detach())


@pytest.mark.parametrize("shared", [None, SHARED])
def test_names_order_shapes_and_dtypes(shared):
    expected = {n: s for n, s in NAMES.items() if shared is not None or "shared" not in n}
    state = _layer(shared).state_dict()
    assert [(n, tuple(t.shape)) for n, t in state.items()] == list(expected.items())
    assert {t.dtype for t in state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("form", ["safetensors", "torch.save"])
def test_a_file_gives_the_same_layer(form, tmp_path):
    layer, other, path = _layer(), _layer(seed=1), tmp_path / "weights"
    if form == "safetensors":
        save_file(layer.state_dict(), path)
        state = load_file(path)
    else:
        torch.save(layer.state_dict(), path)
        state = torch.load(path, weights_only=True)
    assert not same_bits(_routed(layer), _routed(other))
    other.load_state_dict(state)
    assert same_bits(_routed(layer), _routed(other))
    assert different(layer.state_dict(), other.state_dict()) == []


def test_wrong_state_is_refused_by_name():
    layer = _layer()
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "w_shared_gate", '):
        _layer(None).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "w_shared_gate", '):
        layer.load_state_dict(_layer(None).state_dict())
    half = {n: t[: EXPERTS // 2] if t.dim() == 3 else t for n, t in state.items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for w_gate: copying a param with shape"):
        layer.load_state_dict(half)


def test_copies_are_equal_and_apart():
    block, x, d_out = Block(), batch(20), batch(20, 2)
    expected = step(block, block, x, d_out)
    stream = io.BytesIO()
    torch.save(block, stream)
    stream.seek(0)
    copies = (
        copy.deepcopy(block),
        pickle.loads(pickle.dumps(block)),
        torch.load(stream, weights_only=False),
    )
    for other in copies:
        assert different(expected, step(other, other, x, d_out)) == []
        with torch.no_grad():
            other.moe.w_up.zero_()
        assert not same_bits(expected["out"], other(x).detach())
    assert different(expected, step(block, block, x, d_out)) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_other_dtypes_are_refused_at_the_call(dtype):
    layer = _layer().to(dtype)
    with pytest.raises(InputError, match=f"w_routed_gate has dtype {dtype}; allowed: .*bfloat16"):
        _routed(layer)
    layer.to(torch.bfloat16)
    assert _routed(layer).dtype == torch.bfloat16


def test_frozen_experts_get_no_gradient_and_no_work(monkeypatch):
    block, x, d_out = Block(), batch(20), batch(20, 2)
    expected = step(block, block, x, d_out)
    made = []
    original = operators.engine.backward_pass

    def watched(*arguments):
        made.append(original(*arguments))
        return made[-1]

    monkeypatch.setattr(operators.engine, "backward_pass", watched)
    block.zero_grad()
    block.moe.requires_grad_(False)
    x = x.requires_grad_()
    block(x).backward(d_out)
    assert made[0].routed == made[0].shared == (None, None, None)
    assert all(parameter.grad is None for parameter in block.moe.parameters())
    assert x.grad is not None
    got = {"d_x": x.grad, "router.weight": block.router.weight.grad}
    assert different({name: expected[name] for name in got}, got) == []
    block.router.requires_grad_(False)
    out = block(x.detach())
    assert not out.requires_grad
    assert same_bits(out, expected["out"])
    assert len(made) == 1


def test_functional_call_uses_the_given_parameters():
    block, other, x, d_out = Block(), Block(seed=9), batch(20), batch(20, 2)
    expected = step(other, other, x, d_out)
    given = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
    leaf = x.clone().requires_grad_()
    out = functional_call(block, given, (leaf,))
    out.backward(d_out)
    got = {"out": out.detach(), "d_x": leaf.grad, **{n: p.grad for n, p in given.items()}}
    assert different(expected, got) == []
    assert all(parameter.grad is None for parameter in block.parameters())


def test_nothing_is_kept_without_a_backward(monkeypatch):
    kept = []

    def watched(*arguments):
        results = operators.moe_forward(*arguments)
        kept.append([result.numel() for result in results[1:]])
        return results

    monkeypatch.setattr("mok.layer.moe_forward", watched)
    block, x = Block(), batch(20)
    expected = block(x).detach()
    with torch.inference_mode():
        out = block(x.clone())
    assert out.is_inference()
    assert same_bits(out.clone(), expected)
    with torch.no_grad():
        assert same_bits(block(x), expected)
    assert same_bits(block.requires_grad_(False)(x), expected)
    assert min(kept[0]) > 0
    assert kept[1:] == [[0, 0, 0, 0]] * 3


def test_made_on_the_meta_device_then_given_memory():
    layer = _layer(device="meta")
    with torch.device("meta"):
        assert mok.MoE(EXPERTS, HIDDEN, WIDTH).w_gate.is_meta
    assert all(parameter.is_meta for parameter in layer.parameters())
    experts = torch.empty(20, 2, dtype=torch.int64, device="meta")
    weights = torch.empty(20, 2, device="meta")
    out = layer(torch.empty(20, HIDDEN, dtype=torch.bfloat16, device="meta"), experts, weights)
    assert (out.device.type, tuple(out.shape), out.dtype) == ("meta", (20, HIDDEN), torch.bfloat16)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    assert different(_layer().state_dict(), layer.state_dict()) == []
    assert same_bits(_routed(_layer()), _routed(layer))


def test_accumulation_adds_in_the_dtype_of_the_parameters():
    block, x, d_out = Block(), batch(20), batch(20, 2)
    once = step(block, block, x, d_out)
    block(x).backward(d_out)
    twice = gradients(block)
    assert different({n: once[n] + once[n] for n in twice}, twice) == []
