"""A tiny Qwen3-MoE of transformers from a folder: sampled, scored, located, its experts on mok."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers_models
from torch import Tensor

from verify.errors import InputFileError, UnsupportedError
from verify.onpolicy.live import models
from verify.onpolicy.live.calling import convention
from verify.onpolicy.live.conditions import Request
from verify.onpolicy.live.examining import examine
from verify.onpolicy.live.layouts import LAYOUTS
from verify.reasons import Verdict

REQUEST = Request(tokens=3, samples=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    transformers_models.qwen3("eager").save_pretrained(path)
    return path


def test_experts_on_mok_have_equal_bits_and_what_differs_is_attention(folder):
    """Whether attention rounds otherwise at these sizes is up to the machine."""
    live = models.load(str(folder), experts="mok", device="cpu")
    facts = live.facts()
    assert (facts["class"], facts["experts"]) == ("Qwen3MoeForCausalLM", "mok")
    assert (facts["dtype"], live.ends) == ("bfloat16", (2,))
    found = examine(live, REQUEST)
    assert found.analysis.verdict.verdict is not Verdict.MISMATCH
    assert [one.name for one in found.report.conditions] == ["decode", *LAYOUTS]
    for one in found.report.conditions:
        assert one.problem == ""
        (experts,) = [kind for kind in one.rows if kind.experts]
        assert (experts.type, experts.modules, experts.other) == ("Qwen3MoeExperts", 2, 0)
        assert experts.rows > 0
        if one.parted is not None:
            assert "experts" not in one.parted.module
        if one.differing:
            assert one.wide is not None
            assert one.wide.problem == ""
            assert one.wide.largest is not None
            assert one.wide.largest < 1e-4
    if any(one.differing for one in found.report.conditions):
        assert "experts were computed by transformers, not by mok" in found.report.notes[0]
    assert found.analysis.routing is not None
    assert [one.layer for one in found.analysis.routing.layers] == [0, 1]
    assert found.rollout.samples[0].routing["rollout"].margins is not None


def test_a_fault_of_single_tokens_is_named(folder):
    live = models.load(str(folder), dtype="float32", device="cpu", experts="eager")
    attention = live.model.model.layers[1].self_attn  # type: ignore[union-attr]

    class Forgetful(type(attention)):  # type: ignore[misc]
        """A planted fault: single tokens take another way."""

        def forward(self, hidden_states: Tensor, *rest: object, **named: object) -> object:
            out, weights = super().forward(hidden_states, *rest, **named)
            return (out * 0.9 if hidden_states.shape[1] == 1 else out), weights

    attention.__class__ = Forgetful
    found = examine(live, Request(tokens=3, samples=2, layouts=("padded-left",)))
    decode, left = found.report.conditions
    assert decode.verdict is Verdict.MISMATCH
    assert decode.wide is not None
    assert decode.wide.parted is not None
    assert decode.wide.parted.module == "model.layers.1.self_attn"
    assert decode.wide.parted.type == "Forgetful"
    assert left.verdict is not Verdict.MISMATCH


def test_the_activation_of_each_expert_is_not_taken_for_one_of_tokens():
    """In float64 experts are computed one by one: whichever gets every token has as many rows."""
    model = transformers_models.qwen3("grouped_mm", initializer_range=0.3, num_experts_per_tok=4)
    request = Request(tokens=8, samples=3, layouts=("packed",))
    for one in examine(models.described("large weights", model), request).report.conditions:
        assert one.verdict is not Verdict.MISMATCH
        assert one.wide is None or one.wide.problem == ""


def test_left_padding_of_an_eager_attention_is_judged_in_float64():
    model = transformers_models.qwen3("eager", torch.float32)
    model.set_attn_implementation("eager")
    request = Request(tokens=3, samples=2, layouts=("padded-left",))
    left = examine(models.described("eager", model), request).report.conditions[1]
    assert left.verdict is not Verdict.MISMATCH
    assert left.wide is None or left.wide.problem == ""


def test_a_folder_is_read_from_the_disk_alone(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputFileError, match="transformers cannot load it"):
        models.load(str(tmp_path))


def test_a_transformers_that_mok_cannot_use_is_named(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "mok.integrations.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(UnsupportedError, match=r"^--experts mok: .* cannot use transformers 5\."):
        models.load(str(folder), experts="mok", device="cpu")


def test_every_architecture_is_called_alike():
    for model in (transformers_models.deepseek("eager"), transformers_models.gpt_oss("eager")):
        how = convention(model)
        assert how.cache in ("cache", "past_key_values")
        assert how.mask
        assert how.positions
        assert how.use_cache


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_on_a_gpu_experts_on_mok_have_equal_bits_in_every_layout(tmp_path, attention):
    transformers_models.qwen3("eager", moe_intermediate_size=64).save_pretrained(tmp_path)
    live = models.load(str(tmp_path), experts="mok", attention=attention, device="cuda")
    assert models.promises_equal_rows(live.model)
    found = examine(live, Request(tokens=8, samples=4))
    for one in found.report.conditions:
        (experts,) = [kind for kind in one.rows if kind.experts]
        assert experts.rows > 0
        assert experts.other == 0
        assert one.verdict is not Verdict.MISMATCH
