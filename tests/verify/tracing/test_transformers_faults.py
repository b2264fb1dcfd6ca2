"""Faults planted at five places of a transformers model, each located to its module and stage; and
the guide's example. Every fault has a twin that is clean."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_models as tiny  # skips this file where transformers is missing
from click.testing import CliRunner
from torch import Tensor, nn
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    ExpertsInterface,
    grouped_mm_experts_forward,
)

import verify
from verify.cli import main
from verify.reasons import Verdict
from verify.tracing.causes import Cause
from verify.tracing.divergence import diff
from verify.tracing.findings import TraceDiff
from verify.tracing.sentences import sentence

EXAMPLE = Path(__file__).parents[3] / "examples" / "transformers_culprit" / "train.py"
TILE = 16  # rows; a batch of 24 tokens has a tail of 8


@pytest.fixture(autouse=True)
def _implementations() -> Iterator[None]:
    """Takes back what a test registers."""
    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    yield
    ALL_EXPERTS_FUNCTIONS._global_mapping.clear()
    ALL_EXPERTS_FUNCTIONS._global_mapping.update(before)


def chance() -> torch.Generator:
    """What no seed of a run decides: the order of atomics, what memory held."""
    dice = torch.Generator()
    dice.seed()
    return dice


def model_with(layer: int, run: Callable[..., Tensor], **config: Any) -> nn.Module:
    """A float32 model of which one layer's experts are run by a function."""
    model = tiny.qwen3("eager", torch.float32, **config)
    ExpertsInterface.register("planted", run)
    experts = tiny.experts_of(model)[layer]
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = "planted"
    return model


def atomic_sum(folder: Path, fault: bool) -> None:
    """A token's rows are added up in the order in which they happen to come."""

    def experts(self: nn.Module, x: Tensor, topk: Tensor, weights: Tensor) -> Tensor:
        rows = torch.stack(
            [
                grouped_mm_experts_forward(self, x, topk[:, [k]], weights[:, [k]])
                for k in range(topk.shape[1])
            ]
        )
        if fault:
            order = torch.rand(rows.shape[:2], generator=chance()).argsort(0)
            rows = rows.gather(0, order[..., None].expand_as(rows))
        return sum(rows.unbind(), torch.zeros_like(x))

    model = model_with(1, experts, num_experts_per_tok=4)
    with verify.record(folder, model):
        tiny.train(model)


class Tail(torch.autograd.Function):
    """x, whose whole tiles are written forward and backward, and whose tail only where asked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.whole = backward
        return written(x, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return written(gradient, ctx.whole), None, None


def written(x: Tensor, whole: bool) -> Tensor:
    out = torch.randn(x.shape, generator=chance())  # what the memory held
    rows = len(x) if whole else len(x) // TILE * TILE
    out[:rows] = x[:rows]
    return out


def unwritten_tail(folder: Path, fault: bool) -> None:
    def experts(self: nn.Module, x: Tensor, topk: Tensor, weights: Tensor) -> Tensor:
        return Tail.apply(grouped_mm_experts_forward(self, x, topk, weights), not fault, True)

    model = model_with(0, experts)
    with verify.record(folder, model):
        tiny.train(model)


def unwritten_gradient(folder: Path, fault: bool) -> None:
    def experts(self: nn.Module, x: Tensor, topk: Tensor, weights: Tensor) -> Tensor:
        return grouped_mm_experts_forward(self, Tail.apply(x, True, not fault), topk, weights)

    model = model_with(1, experts)
    with verify.record(folder, model):
        tiny.train(model)


def dropout_left_on(folder: Path, fault: bool) -> None:
    """Scoring in which one layer was not put into eval mode."""
    model = tiny.qwen3("eager", torch.float32, attention_dropout=0.2).eval()
    model.model.layers[1].self_attn.train(fault)
    torch.manual_seed(1)
    with verify.record(folder, model) as recording, torch.no_grad():
        for number in range(2):
            model(input_ids=tiny.tokens(seed=number))
            recording.step()


def stale_weight(folder: Path, fault: bool) -> None:
    """A sampler takes over the trainer's weights, but not all."""
    trainer = tiny.qwen3("eager", torch.float32)
    sampler = copy.deepcopy(trainer).eval()
    tiny.train(trainer, steps=1)
    with verify.record(folder, sampler) as recording, torch.no_grad():
        for number in range(3):
            if number == 1:
                new = trainer.state_dict()
                if fault:
                    del new["model.layers.1.self_attn.k_proj.weight"]
                sampler.load_state_dict(new, strict=False)
            sampler(input_ids=tiny.tokens(seed=number))
            recording.step()


def resume_without_rng(folder: Path, fault: bool) -> None:
    """Two steps, a checkpoint, and two steps of what was made anew from it; dropout draws."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = tiny.qwen3("eager", torch.float32, attention_dropout=0.2).train()
        torch.manual_seed(1)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    model, optimizer = begin()
    tiny.train(model, optimizer=optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    generator = torch.get_rng_state()
    model, optimizer = begin()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if not fault:
        torch.set_rng_state(generator)
    with verify.record(folder, model):
        tiny.train(model, optimizer=optimizer, first=2)


@dataclass(frozen=True)
class Planted:
    """run: writes a recording. both: whether the fault is in both runs, else in the second. said:
    in the sentence."""

    run: Callable[[Path, bool], None]
    both: bool
    cause: Cause
    name: str
    step: int
    said: tuple[str, ...]


PLANTED = [
    Planted(
        atomic_sum,
        True,
        Cause.FORWARD,
        "model.layers.1.mlp.experts",
        0,
        ("step 0, forward: module model.layers.1.mlp.experts (Qwen3MoeExperts) has equal inputs",),
    ),
    Planted(
        unwritten_tail,
        True,
        Cause.FORWARD,
        "model.layers.0.mlp.experts",
        0,
        ("step 0, forward: module model.layers.0.mlp.experts (Qwen3MoeExperts) has equal inputs",),
    ),
    Planted(
        unwritten_gradient,
        True,
        Cause.BACKWARD,
        "model.layers.1.mlp.experts",
        0,
        ("step 0, backward: module model.layers.1.mlp.experts (Qwen3MoeExperts) has equal grad",),
    ),
    Planted(
        dropout_left_on,
        False,
        Cause.BETWEEN,
        "model.layers.1.self_attn.o_proj",
        0,
        (
            "code of module model.layers.1.self_attn (Qwen3MoeAttention), after output of "
            "model.layers.1.self_attn.v_proj",
        ),
    ),
    Planted(
        stale_weight,
        False,
        Cause.SET,
        "model.layers.1.self_attn.k_proj.weight",
        1,
        (
            "step 1: parameter model.layers.1.self_attn.k_proj.weight differs after it",
            "weights that were loaded or synchronised",
        ),
    ),
    Planted(
        resume_without_rng,
        False,
        Cause.START,
        "torch",
        -1,
        (
            "before the first step generator torch differs already",
            "a resume that did not restore it",
            "the first to differ after it: input 0 of model.layers.0.self_attn.o_proj, step 0",
        ),
    ),
]


def compared(folder: Path, planted: Planted, fault: bool) -> TraceDiff:
    planted.run(folder / "a", fault and planted.both)
    planted.run(folder / "b", fault)
    return diff(folder / "a", folder / "b")


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.run.__name__)
def test_a_fault_is_located_to_its_module_and_stage(tmp_path: Path, planted: Planted) -> None:
    found = compared(tmp_path, planted, True)
    assert found.verdict is Verdict.MISMATCH
    culprit = found.culprit
    assert culprit is not None
    assert (culprit.cause, culprit.place.name) == (planted.cause, planted.name)
    assert culprit.place.step == planted.step
    told = sentence(culprit, found)
    assert all(part in told for part in planted.said), told
    assert found.inherits_count > 20  # and nothing of that is blamed
    assert [one.place.name for one in found.others] == []
    if planted.run is dropout_left_on:
        assert "dropout on in one run" in culprit.hints[0]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.run.__name__)
def test_its_twin_is_clean(tmp_path: Path, planted: Planted) -> None:
    found = compared(tmp_path, planted, False)
    assert (found.verdict, found.differing) == (Verdict.VERIFIED, 0)
    assert found.compared > 250


def test_the_guide_names_the_experts_that_add_up_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = {}
    for experts in ("atomic_sum", "mok"):
        folders = [f"{experts}_a", f"{experts}_b"]
        for folder in folders:
            monkeypatch.setattr(sys, "argv", ["train.py", folder, experts])
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        outputs[experts] = CliRunner().invoke(main, ["trace", "diff", *folders])
    assert outputs["atomic_sum"].exit_code == 1
    assert (
        "culprit: rank 0, step 0, forward: module model.layers.0.mlp.experts (Qwen3MoeExperts) has "
        "equal inputs, parameters and buffers, and its output differs"
    ) in outputs["atomic_sum"].output
    assert outputs["mok"].exit_code == 0, outputs["mok"].output
    assert outputs["mok"].output.startswith("verdict=VERIFIED 0 of ")
