"""torch.compile and activation checkpointing around mok.MoE, inside a model: the bits of eager."""

import os
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch
from moe_block import SHARED, Block, batch, different, step
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mok import operators

FORWARD = torch.ops.mok.moe_forward.default


class Blocks(nn.Module):
    """Two blocks, each of them called as `call(block, x)` says."""

    def __init__(self, call=lambda block, x: block(x), dropout=0.5):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout, seed=seed) for seed in (1, 2))
        self.call = call

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


@pytest.fixture
def forwards(monkeypatch):
    """A list that grows by one at every forward pass of the layer."""
    calls = []
    original = operators.engine.forward_pass

    def counted(*arguments):
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(operators.engine, "forward_pass", counted)
    return calls


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("shared", [None, SHARED])
def test_a_compiled_model_has_the_eager_bits_at_every_size(shared, forwards):
    model = Block(shared=shared)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for tokens, graphs in ((20, 1), (33, 2), (47, 2)):  # static, dynamic, dynamic again
        x, d_out = batch(tokens), batch(tokens, 2)
        assert different(step(model, model, x, d_out), step(compiled, model, x, d_out)) == []
        assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert len(forwards) == 6


def _has_compiler():
    """What inductor needs for a CPU; no other reason may skip its test."""
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    return bool(found) and Path(sysconfig.get_path("include"), "Python.h").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not _has_compiler(), reason="inductor needs a C++ compiler and Python.h")
@pytest.mark.usefixtures("_fresh_compiler")
def test_inductor_leaves_the_layer_its_bits(monkeypatch, tmp_path):
    """Inductor's own softmax may round otherwise, so eager gets the routes it computed."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    model, x, d_out = Block(), batch(20), batch(20, 2)

    def with_routes(x):
        experts, weights = model.route(x)
        return x + model.moe(x, experts, weights), experts, weights

    routes = []

    def compiled(x):
        out, experts, weights = torch.compile(with_routes, fullgraph=True)(x)
        routes.extend((experts, weights.detach()))
        return out

    got = step(compiled, model, x, d_out)
    assert not counters["graph_break"]
    assert counters["inductor"]
    model.router.requires_grad_(False)
    expected = step(lambda x: x + model.moe(x, *routes), model.moe, x, d_out)
    names = ["out", *(f"moe.{name}" for name, _ in model.moe.named_parameters())]
    eager = [expected[name.removeprefix("moe.")] for name in names]
    assert different(dict(zip(names, eager, strict=True)), {n: got[n] for n in names}) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same_bits_under_dropout(reentrant, forwards):
    x, d_out = batch(40), batch(40, 2)
    plain, again = Blocks(), Blocks(partial(checkpoint, use_reentrant=reentrant))
    expected = step(plain, plain, x, d_out)
    assert len(forwards) == 2
    assert different(expected, step(again, again, x, d_out)) == []
    assert len(forwards) == 2 + 4


def test_without_the_random_state_a_recomputation_drops_others():
    x, d_out = batch(40), batch(40, 2)
    plain = Blocks()
    call = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    forgetful = Blocks(call)
    expected = step(plain, plain, x, d_out)
    wrong = different(expected, step(forgetful, forgetful, x, d_out))
    assert "out" not in wrong
    assert "d_x" in wrong


@pytest.mark.parametrize(
    ("policy", "passes"),
    [(CheckpointPolicy.MUST_SAVE, 2), (CheckpointPolicy.PREFER_RECOMPUTE, 4)],
)
def test_selective_checkpointing_knows_the_operator(policy, passes, forwards):
    def choose(context, operator, *arguments, **options):
        return policy if operator is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, choose)
    call = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    x, d_out = batch(40), batch(40, 2)
    plain, selective = Blocks(), Blocks(call)
    expected = step(plain, plain, x, d_out)
    forwards.clear()
    assert different(expected, step(selective, selective, x, d_out)) == []
    assert len(forwards) == passes


@pytest.mark.usefixtures("_fresh_compiler")
def test_checkpointing_inside_a_compiled_model(forwards):
    x, d_out = batch(30), batch(30, 2)
    plain = Blocks(dropout=0.0)
    again = Blocks(partial(checkpoint, use_reentrant=False), dropout=0.0)
    compiled = torch.compile(again, backend="aot_eager", fullgraph=True)
    expected = step(plain, plain, x, d_out)
    forwards.clear()
    assert different(expected, step(compiled, again, x, d_out)) == []
    assert not counters["graph_break"]
    assert len(forwards) == 4
