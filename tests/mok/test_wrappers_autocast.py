"""mok.MoE in autocast regions: the bits of casting by hand, and errors where nothing is cast."""

from functools import partial

import pytest
import torch
from moe_block import EXPERTS, HIDDEN, SHARED, SLOTS, WIDTH, Block, batch, different, step
from torch.utils.checkpoint import checkpoint

import mok
from mok.errors import InputError
from mok.exact import exact_routes, same_bits

TOKENS = 30
BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Routed(torch.nn.Module):
    """The layer alone as a function of x; router weights are a parameter, to have a gradient."""

    def __init__(self, shared=SHARED):
        super().__init__()
        torch.manual_seed(3)
        self.moe = mok.MoE(EXPERTS, HIDDEN, WIDTH, shared_size=shared)
        self.weights = torch.nn.Parameter(torch.rand(TOKENS, SLOTS))
        self.experts = exact_routes("unused-slots", TOKENS, EXPERTS, SLOTS)

    def forward(self, x):
        return self.moe(x, self.experts, self.weights)


def _master_weights(model):
    """fp32 values that are no bf16 values, so that a cast does something."""
    model.float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    return model


def _by_hand(model, x, d_out):
    """What a user without autocast writes; gradients in the dtype of the fp32 model."""
    hand = Routed(None if model.moe.w_shared_gate is None else SHARED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wanted = hand.get_parameter(name)
            wanted.copy_(parameter.to(wanted.dtype))
    results = step(hand, hand, x.bfloat16(), d_out)
    return {name: t if name == "out" else t.float() for name, t in results.items()}


def _inside(model):
    def call(x):
        with BF16():
            return model(x)

    return call


@pytest.fixture
def problem():
    x, d_out = batch(TOKENS, dtype=torch.float32), batch(TOKENS, 2)
    model = _master_weights(Routed())
    return model, x, d_out, _by_hand(model, x, d_out)


def test_it_casts_as_a_user_would(problem):
    model, x, d_out, expected = problem
    got = step(_inside(model), model, x, d_out)
    assert got["out"].dtype == torch.bfloat16
    assert {t.dtype for name, t in got.items() if name != "out"} == {torch.float32}
    assert different(expected, got) == []


def test_without_a_shared_expert():
    x, d_out = batch(TOKENS, dtype=torch.float32), batch(TOKENS, 2)
    model = _master_weights(Routed(shared=None))
    expected = _by_hand(model, x, d_out)
    assert different(expected, step(_inside(model), model, x, d_out)) == []


def test_router_weights_stay_in_fp32(problem):
    model, x, _, expected = problem
    with torch.no_grad(), BF16():
        rounded = model.moe(x, model.experts, model.weights.bfloat16())
        widened = model.moe(x, model.experts, model.weights.bfloat16().float())
        kept = model(x)
    assert same_bits(rounded, widened), (
        "bf16 router weights, as autocast softmax gives, are widened"
    )
    assert same_bits(kept, expected["out"])
    assert not same_bits(kept, rounded), "fp32 router weights are not rounded"


def test_a_bf16_layer_runs_as_it_does_outside():
    model, x, d_out = Routed(), batch(TOKENS), batch(TOKENS, 2)
    expected = step(model, model, x, d_out)
    assert different(expected, step(_inside(model), model, x, d_out)) == []


def test_a_disabled_region_inside_is_outside(problem):
    model, x, d_out, _ = problem

    def call(x):
        with BF16(), torch.autocast("cpu", enabled=False):
            return model(x)

    with pytest.raises(InputError, match=r"x has dtype torch.float32; allowed: torch.bfloat16"):
        call(x)
    with pytest.raises(InputError, match=r"w_routed_gate has dtype torch.float32"):
        call(x.bfloat16())
    model = Routed()
    expected = step(model, model, x.bfloat16(), d_out)
    assert different(expected, step(call, model, x.bfloat16(), d_out)) == []


def test_outside_and_in_other_regions_nothing_is_cast(problem):
    model, x, _, _ = problem
    with pytest.raises(InputError, match=r"x has dtype torch.float32"):
        model(x)
    with (
        pytest.raises(InputError, match=r"x has dtype torch.float32"),
        torch.autocast("cpu", dtype=torch.float16),
    ):
        model(x)
    with pytest.raises(InputError, match=r"x has dtype torch.float64"), BF16():
        model(x.double())
    model.moe.double()
    with pytest.raises(InputError, match=r"w_routed_gate has dtype torch.float64"), BF16():
        model(x)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_checkpointed(problem, kind):
    model, x, d_out, expected = problem

    def call(x):
        with BF16():
            return checkpoint(model, x, use_reentrant=kind == "reentrant")

    assert different(expected, step(call, model, x, d_out)) == []


@pytest.mark.parametrize("region", ["around", "inside"])
def test_compiled(problem, region):
    model, x, d_out, expected = problem
    torch._dynamo.reset()
    options = {"backend": "aot_eager", "fullgraph": True}
    call = torch.compile(_inside(model) if region == "inside" else model, **options)
    got = step(call if region == "inside" else _inside(call), model, x, d_out)
    assert different(expected, got) == []


def test_backward_inside_the_region(problem):
    model, x, d_out, expected = problem
    with BF16():
        assert different(expected, step(model, model, x, d_out)) == []


def test_a_whole_model_in_fp32():
    """Router, softmax and layer under autocast: gradients in fp32, the layer in bf16."""
    model = _master_weights(Block())
    x, d_out = batch(TOKENS, dtype=torch.float32), batch(TOKENS, 2, dtype=torch.float32)
    got = step(_inside(model), model, x, d_out)
    assert {t.dtype for t in got.values()} == {torch.float32}, "the residual is fp32"
    assert all(t.isfinite().all() for t in got.values())
    assert all(t.abs().max() > 0 for t in got.values())
    assert different(got, step(_inside(model), model, x, d_out)) == []
