"""Recordings of a real (tiny) model with faults planted where people have them: all located."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import verify
from verify.reasons import Verdict
from verify.tracing.causes import Cause
from verify.tracing.divergence import diff
from verify.tracing.sentences import sentence

HIDDEN, TOKENS, TOPK = 16, 8, 4


class Combine(nn.Module):
    """Adds the rows of each token's experts; unordered, it adds them as atomics do."""

    unordered = False
    unwritten = False

    def forward(self, rows):
        token = torch.arange(TOKENS).repeat_interleave(TOPK)
        if self.unordered:
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(7))
            token, rows = token[order], rows[order]
        out = torch.zeros(TOKENS, HIDDEN).index_add(0, token, rows)
        if self.unwritten:
            out[-1] = float("nan")
        return out


class Scale(torch.autograd.Function):
    """Twice the input; `wrong` gradients are those of another factor."""

    wrong = False

    @staticmethod
    def forward(_, x):
        return x * 2

    @staticmethod
    def backward(_, gradient):
        return gradient * (2.0000002 if Scale.wrong else 2)


class Block(nn.Module):
    offset = 0.0

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.experts = nn.Linear(HIDDEN, HIDDEN * TOPK)
        self.combine = Combine()
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        rows = self.experts(self.norm(x)).reshape(-1, HIDDEN)
        rows = verify.probe("rows", rows + self.offset)
        return x + self.dropout(Scale.apply(self.combine(rows)))


def train(folder, plant=None, *, steps=3, optimizer=None, level="module", data=None):
    """Records a training run; `plant(step, model, optimizer)` comes before each step."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(HIDDEN, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with verify.record(folder, model, level=level):
        for step in range(steps):
            x = torch.randn(TOKENS, HIDDEN)
            if data is not None:
                x = data(step, x)
            if plant is not None:
                plant(step, model, optimizer)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            Scale.wrong = False
    return folder


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return train(tmp_path_factory.mktemp("clean") / "run")


def at(number, change):
    """A plant that changes something at one step."""
    return lambda step, model, optimizer: change(model, optimizer) if step == number else None


def unordered(model, _):
    model[1].combine.unordered = True


def unwritten(model, _):
    model[0].combine.unwritten = True


def dropout_off(model, _):
    model[0].dropout.eval()


def own_code(model, _):
    model[1].offset = 1e-3


def wrong_gradient(_model, _optimizer):
    Scale.wrong = True


def other_rate(_, optimizer):
    optimizer.param_groups[0]["lr"] = 0.02


def stale_weight(model, optimizer):
    group = optimizer.param_groups[0]
    group["params"] = [one for one in group["params"] if one is not model[0].experts.weight]


PLANTED = {
    unordered: (Cause.FORWARD, "module 1.combine (Combine)", "1.combine"),
    unwritten: (Cause.FORWARD, "module 0.combine (Combine)", "0.combine"),
    dropout_off: (Cause.FORWARD, "module 0.dropout (Dropout)", "0.dropout"),
    own_code: (Cause.BETWEEN, "code of module 1 (Block), after output of 1.experts", "rows"),
    other_rate: (Cause.OPTIMIZER, "learning rate", "0.norm.weight"),
    stale_weight: (Cause.OPTIMIZER, "parameter 0.experts.weight", "0.experts.weight"),
}


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("step", [0, 1])
def test_a_planted_fault_is_located(clean, tmp_path, plant, step):
    cause, said, name = PLANTED[plant]
    found = diff(clean, train(tmp_path / "b", at(step, plant)))
    assert found.verdict is Verdict.MISMATCH
    assert (found.culprit.cause, found.culprit.place.step) == (cause, step)
    assert said in sentence(found.culprit, found)
    assert name in found.culprit.names


def test_a_run_repeated_is_equal_although_other_generators_differ(clean, tmp_path):
    found = diff(clean, train(tmp_path / "b"))
    assert (found.verdict, found.differing) == (Verdict.VERIFIED, 0)
    assert found.compared > 300


def test_a_wrong_gradient_is_located_in_the_code_that_made_it(clean, tmp_path):
    found = diff(clean, train(tmp_path / "b", at(1, wrong_gradient)))
    assert found.culprit.place.kind in ("grad_output", "grad_input")
    assert found.culprit.place.name == "1.combine"
    assert (found.culprit.cause, found.culprit.place.step) == (Cause.BETWEEN, 1)
    assert "code of module 1 (Block), after" in sentence(found.culprit, found)


def test_hints_name_the_setting_and_the_generator(clean, tmp_path):
    rate = diff(clean, train(tmp_path / "b", at(1, other_rate)))
    assert rate.culprit.hints == ("settings of the optimizer differ: lr of (group 0)",)
    dropout = diff(clean, train(tmp_path / "c", at(1, dropout_off)))
    assert "drew other random numbers" in dropout.culprit.hints[0]


def test_other_data_and_another_seed(clean, tmp_path):
    found = diff(clean, train(tmp_path / "b", data=lambda step, x: x.flip(0) if step == 1 else x))
    assert (found.culprit.cause, found.culprit.place.step) == (Cause.DATA, 1)
    assert "input 0 of the model" in sentence(found.culprit, found)


def test_a_generator_that_was_drawn_from_once_more(clean, tmp_path):
    found = diff(clean, train(tmp_path / "b", at(0, lambda *_: torch.rand(()))))
    assert found.culprit.cause is Cause.FORWARD
    assert found.culprit.names == ("0.dropout",)
    assert "drew other random numbers" in found.culprit.hints[0]


def test_op_level_names_the_operation(tmp_path):
    a = train(tmp_path / "a", level="op", steps=2)
    b = train(tmp_path / "b", at(1, unordered), level="op", steps=2)
    found = diff(a, b)
    assert found.verdict is Verdict.MISMATCH
    assert found.culprit.cause is Cause.OP
    assert found.culprit.place.name.startswith("1.combine/aten.")
    assert diff(a, train(tmp_path / "c", level="op", steps=2)).verdict is Verdict.VERIFIED


def test_a_forward_that_is_run_again_with_other_numbers(tmp_path):
    """Checkpointing that does not keep the generators: the second run drops other elements."""
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Sequential):
        keep = True

        def forward(self, x):
            for block in self:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.keep)
            return x

    for side, keep in (("a", True), ("b", True), ("c", False)):
        torch.manual_seed(0)
        model = Again(Block(), Block())
        model.keep = keep
        with verify.record(tmp_path / side, model):
            model(torch.randn(TOKENS, HIDDEN)).square().mean().backward()
    assert diff(tmp_path / "a", tmp_path / "b").verdict is Verdict.VERIFIED
    found = diff(tmp_path / "a", tmp_path / "c")
    assert (found.culprit.cause, found.culprit.names) == (Cause.BACKWARD, ("1.dropout",))
    assert "a forward run again with others" in found.culprit.hints[0]
