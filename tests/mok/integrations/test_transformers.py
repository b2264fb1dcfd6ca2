"""`mok` as an experts implementation of transformers: its numbers, its bits, what it refuses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_models as tiny  # skips this file where transformers is missing
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import mok.integrations.transformers as integration
from mok import reference
from mok.errors import InputError, UnsupportedError
from mok.exact import same_bits

MODELS = {"qwen3": tiny.qwen3, "deepseek": tiny.deepseek}
Results = dict[str, Tensor]


def step(model: nn.Module, lr: float = 0.5, length: int = 12) -> Results:
    """Logits, gradients and parameters of one training step; gradients arrive in the model's own
    parameters, or this fails."""
    batch = tiny.tokens(length=length)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    out = model(input_ids=batch, labels=batch, use_cache=False)
    out.loss.backward()
    found = {"logits": out.logits.detach(), "loss": out.loss.detach().reshape(1)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[f"gradient {name}"] = parameter.grad.clone()
    optimizer.step()
    after = {f"new {name}": one.detach().clone() for name, one in model.named_parameters()}
    return {**found, **after}


def different(one: Results, other: Results) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not same_bits(one[name], other[name])]


@functools.cache
def stepped(name: str, experts: str, dtype: torch.dtype = torch.bfloat16) -> Results:
    return step(MODELS[name](experts, dtype, initializer_range=0.1))


def error(got: Results, true: Results, kind: str) -> float:
    """The norm of the error of all tensors of a kind together."""
    names = [name for name in true if name.startswith(kind)]
    parts = [float((got[name].double() - true[name].double()).norm()) for name in names]
    assert parts
    return sum(part**2 for part in parts) ** 0.5


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_no_further_from_float64_than_the_librarys_own(name: str) -> None:
    """mok rounds in fewer places than eager, so it may not be further from the truth, up to chance.
    An exchanged gate and up, or a router weight in bf16 twice, is further by a multiple."""
    true = stepped(name, "eager", torch.float64)
    for kind in ("logits", "gradient", "new"):
        own = error(stepped(name, "eager"), true, kind)
        assert 0.0 < error(stepped(name, "mok"), true, kind) <= 1.1 * own, kind


@pytest.mark.parametrize("name", MODELS)
def test_the_experts_are_within_the_budget_of_float64(name: str) -> None:
    """Rigorous budget, and rounding places: out and all gradients, at what a model sends there."""
    model = MODELS[name](initializer_range=0.1)
    module = tiny.experts_of(model)[-1]
    with tiny.seen_by(module) as seen, torch.no_grad():
        model(input_ids=tiny.tokens())
    x, experts, weights = seen[0]
    d_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    x.requires_grad_()
    weights.requires_grad_()
    out = module(x, experts, weights)
    out.backward(d_out)
    gate_up, down = module.gate_up_proj, module.down_proj
    d_gate, d_up = gate_up.grad.chunk(2, dim=1)
    got = {"out": out, "d_x": x.grad, "d_w_gate": d_gate, "d_w_up": d_up, "d_w_down": down.grad}
    if weights.dtype == torch.float32:  # else it was rounded on its way back
        got["d_router_weights"] = weights.grad
    gate, up = gate_up.detach().chunk(2, dim=1)
    inputs = reference.MoEInputs(
        x.detach(), experts, weights.detach(), gate, up, down.detach(), None, None
    )
    exact = reference.moe(inputs, d_out, "exact")
    rounded = reference.moe(inputs, d_out, "rounded")
    for key, value in got.items():
        if not key.startswith("d_w"):  # autograd rounds those to bf16, which is no part of these
            assert reference.budget_used(exact[key], value) <= 1.0, key
        assert reference.agreement(rounded[key], value).outside == 0, key
    assert same_bits(out, module(x, experts, weights))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_same_bits_again(name: str) -> None:
    again = step(MODELS[name](initializer_range=0.1))
    assert different(stepped(name, "mok"), again) == []


def test_steps_of_training_have_the_same_bits_again_and_under_checkpointing() -> None:
    states = []
    for checkpointing in (False, False, True):
        model = tiny.qwen3()
        model.train()
        if checkpointing:
            named = getattr(model, "activation_checkpointing_enable", None)  # since 5.23
            (named or model.gradient_checkpointing_enable)()
        tiny.train(model)
        states.append(model.state_dict())
    assert different(states[0], states[1]) == []
    assert different(states[0], states[2]) == []


def routed(count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, tiny.HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(count, tiny.EXPERTS, generator=generator)
    weights, experts = scores.topk(tiny.SLOTS, dim=-1)
    return x, experts, weights


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    module = tiny.experts_of(tiny.qwen3())[0]
    x, experts, weights = routed()
    with torch.no_grad():
        whole = module(x, experts, weights)
        for rows in (slice(0, 1), slice(3, 10), slice(39, 40), slice(5, 38)):
            assert same_bits(whole[rows], module(x[rows], experts[rows], weights[rows]))
        back = torch.arange(len(x)).flip(0)
        assert same_bits(whole[back], module(x[back], experts[back], weights[back]))
        assert module(x[:0], experts[:0], weights[:0]).shape == (0, tiny.HIDDEN)


def test_the_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.experts_of(tiny.qwen3())[0]
    given: list[Tensor] = []
    real = integration.moe
    monkeypatch.setattr(integration, "moe", lambda *a, **k: given.extend(a[3:6]) or real(*a, **k))
    module(*routed())
    storages = {one.untyped_storage().data_ptr() for one in given}
    assert storages == {one.untyped_storage().data_ptr() for one in module.parameters()}


def test_generating_with_a_cache_calls_mok_and_has_the_same_bits_again() -> None:
    model = tiny.qwen3().eval()
    module = tiny.experts_of(model)[0]
    found = []
    for _ in range(2):
        with tiny.seen_by(module) as seen:
            out = model.generate(
                tiny.tokens(length=5),
                attention_mask=torch.ones(2, 5, dtype=torch.int64),
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        assert [len(x) for x, _, _ in seen] == [10, 2, 2, 2]
        found.append({"tokens": out.sequences, "logits": torch.stack(out.logits)})
    assert different(*found) == []
    assert model.config._experts_implementation == "mok"


def test_the_choice_is_not_saved_with_the_model_and_is_given_when_it_is_loaded(
    tmp_path: Path,
) -> None:
    model = tiny.qwen3()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="mok"
    )
    batch = tiny.tokens()
    with torch.no_grad():
        assert same_bits(model(input_ids=batch).logits, loaded(input_ids=batch).logits)
    assert different(model.state_dict(), loaded.state_dict()) == []
    config = type(model.config).from_pretrained(tmp_path)
    assert config._experts_implementation is None


def test_a_config_that_says_mok_makes_such_a_model() -> None:
    config = copy.deepcopy(tiny.qwen3("eager").config)
    config._experts_implementation = "mok"
    model = tiny.Qwen3MoeForCausalLM(config).bfloat16()
    assert integration.check(model) == 2
    with tiny.seen_by(tiny.experts_of(model)[0]) as seen:
        model(input_ids=tiny.tokens())
    assert len(seen) == 1
    with pytest.raises(ValueError, match="mok-other"):
        model.set_experts_implementation("mok-other")
    without_memory = model.to("meta")(input_ids=tiny.tokens().to("meta"))
    assert without_memory.logits.shape == (2, 12, tiny.VOCABULARY)


def test_float32_weights_under_autocast() -> None:
    found = {}
    for experts in ("mok", "eager"):
        model = tiny.qwen3(experts, torch.float32, initializer_range=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            x, ids, weights = routed(4)
            assert tiny.experts_of(model)[0](x.float(), ids, weights).dtype == torch.float32
            found[experts] = step(model)
    assert found["mok"]["gradient model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.float32
    true = stepped("qwen3", "eager", torch.float64)
    for kind in ("logits", "gradient", "new"):
        own = error(found["eager"], true, kind)
        assert 0.0 < error(found["mok"], true, kind) <= 1.1 * own, kind


def test_compiled_without_a_graph_break_it_has_the_same_bits() -> None:
    module = tiny.experts_of(tiny.qwen3())[0]
    x, experts, weights = routed(6)

    def call(run: Callable[..., Tensor]) -> Results:
        given = x.clone().requires_grad_()
        module.zero_grad()
        out = run(given, experts, weights)
        out.float().square().sum().backward()
        assert given.grad is not None
        gradients = {name: one.grad.clone() for name, one in module.named_parameters()}
        return {"out": out.detach(), "d_x": given.grad, **gradients}

    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert different(call(module), call(compiled)) == []


@pytest.mark.parametrize("marked", [True, False])
def test_experts_that_transformers_split_over_ranks(marked: bool) -> None:
    """Half of the experts, ids from there on mean another rank; the parts add up to the whole.
    Before 5.18 modules do not say that they are split."""
    module = tiny.experts_of(tiny.qwen3())[0]
    x, experts, weights = routed()
    half = tiny.EXPERTS // 2
    parts = []
    with torch.no_grad():
        whole = module(x, experts, weights)
        for rank in range(2):
            part = copy.deepcopy(module)
            own = slice(rank * half, (rank + 1) * half)
            part.gate_up_proj = nn.Parameter(module.gate_up_proj[own].clone())
            part.down_proj = nn.Parameter(module.down_proj[own].clone())
            part.num_experts, part._is_expert_parallel = half, True
            if not marked:
                del part._is_expert_parallel
            away = experts // half != rank
            local = torch.where(away, half, experts % half)
            parts.append(part(x, local, weights.masked_fill(away, 0.0)).double())
    assert (parts[0].abs().sum(), parts[1].abs().sum()) > (0.0, 0.0)
    # each part is rounded to bf16 once, the whole too: half an ulp, 2^-9 of the value, for each
    bound = (parts[0].abs() + parts[1].abs() + whole.abs().double()) * 2.0**-8
    assert bool(((parts[0] + parts[1] - whole.double()).abs() <= bound).all())


def test_gpt_oss_is_refused_in_words_and_nothing_else_runs_it() -> None:
    model = tiny.gpt_oss()
    told = r"transposed.*alternate.*biases.*sigmoid\(1\.702 gate\) \* \(up \+ 1\), clamped at 7"
    for call in (lambda: model(input_ids=tiny.tokens()), lambda: integration.check(model)):
        with pytest.raises(UnsupportedError, match=told):
            call()
    model.set_experts_implementation("grouped_mm")
    model(input_ids=tiny.tokens())


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: tiny.qwen3(dtype=torch.float32), r"gate_up_proj is torch\.float32.*dtype=torch"),
        (lambda: tiny.qwen3(hidden_act="gelu"), "GELUActivation|not silu"),
    ],
)
def test_other_weights_and_activations_are_refused(made: Callable[[], Any], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        made()(input_ids=tiny.tokens())


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no experts module"):
        integration.check(nn.Linear(2, 2))


def test_other_names_have_other_settings() -> None:
    integration.register("mok-portable", backend="portable")
    integration.register("mok-hopper", backend="hopper")
    try:
        model = tiny.qwen3("mok-portable", initializer_range=0.1)
        assert different(stepped("qwen3", "mok"), step(model)) == []
        model.set_experts_implementation("mok-hopper")
        with pytest.raises(UnsupportedError, match="backend='hopper' cannot run"):
            model(input_ids=tiny.tokens())
    finally:
        for name in ("mok-portable", "mok-hopper"):
            ALL_EXPERTS_FUNCTIONS._global_mapping.pop(name)
    with pytest.raises(InputError, match="backend = 'x'"):
        integration.register(backend="x")
    for name in ("grouped_mm", "eager"):
        with pytest.raises(InputError, match="not mok's"):
            integration.register(name)
