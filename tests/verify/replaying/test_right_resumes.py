"""Right resumes of scripts that do more than train: none is a mismatch; and broken twins."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from replayed_toys import ordered
from torch import nn

import verify
from verify.errors import CaseError
from verify.reasons import Verdict
from verify.replaying import replay_report
from verify.replaying.findings import Kind
from verify.replaying.orders import Orders
from verify.replaying.replays import Replay, judge
from verify.tracing.definitions import START

STEPS, STOP, EVERY = 8, 5, 2
Saved = dict[str, Any]


class Habits:
    """A script with habits, as words. saved: its last checkpoint."""

    def __init__(self, habits: str) -> None:
        self.habits = habits
        self.saved: Saved = {}

    def run(self, resume: Saved | None = None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        optimizers = self.made(model)
        kept = list(optimizers)
        first = 0
        if resume and "inside" not in self.habits:
            first = self.load(model, optimizers, resume)
        with verify.record("run", model):
            if resume and "inside" in self.habits:
                first = self.load(model, optimizers, resume)
            if resume and "checks" in self.habits:
                self.validate(model)
            for step in range(first, STEPS):
                for optimizer in optimizers:
                    for _ in range(2 if "accumulates" in self.habits else 1):
                        model(torch.randn(3, 4)).square().mean().backward()
                    if "skips" not in self.habits or step != 3:  # as for an infinite loss
                        optimizer.step()
                    model.zero_grad()
                if step % EVERY == EVERY - 1:
                    if "validates" in self.habits:
                        self.validate(model)
                    states = [one.state_dict() for one in optimizers]
                    self.saved = copy.deepcopy(
                        {"model": model.state_dict(), "optimizers": states, "step": step + 1}
                    )
                    self.saved["rng"] = torch.get_rng_state()
        del kept

    def made(self, model: nn.Sequential) -> list[torch.optim.Optimizer]:
        parts = [model[:2], model[2:]] if "several" in self.habits else [model]
        return [torch.optim.AdamW(one.parameters(), lr=0.01 * n) for n, one in enumerate(parts, 1)]

    def load(
        self, model: nn.Sequential, optimizers: list[torch.optim.Optimizer], resume: Saved
    ) -> int:
        saved = copy.deepcopy(resume)
        model.load_state_dict(saved["model"])
        if "anew" in self.habits:
            optimizers[:] = self.made(model)
        for one, state in zip(optimizers, saved["optimizers"], strict=True):
            one.load_state_dict(state)
        if "forgets" not in self.habits:
            torch.set_rng_state(saved["rng"])
        return int(saved["step"])

    def validate(self, model: nn.Module) -> None:
        model.train("draws" in self.habits)
        with torch.no_grad():
            model[2:](torch.ones(2, 6))
        model.train()


def replayed(folder: Path, habits: str) -> Replay:
    stopped = Habits(habits)
    for name in ("whole", "stopped"):
        one = stopped if name == "stopped" else Habits(habits)
        stop = STOP if name == "stopped" else None
        with ordered(folder / name, Orders("", stop, states=True)):
            one.run()
    (folder / "again").symlink_to(folder / "whole")
    with ordered(folder / "resumed", Orders("", states=True, narrow=True)):
        Habits(habits).run(stopped.saved)
    return judge(("python", "train.py"), folder, STOP)


@pytest.mark.parametrize(
    "habits",
    [
        *("", "validates", "checks", "inside", "several", "anew"),
        *("skips validates", "several accumulates validates checks inside anew"),
    ],
)
def test_a_right_resume_is_verified(tmp_path: Path, habits: str) -> None:
    found = replayed(tmp_path, habits)
    assert found.verdict is Verdict.VERIFIED, replay_report.text(found)
    assert found.border is not None
    assert found.border.step > START
    inside = "inside of" if found.border.part else "at"
    assert f"resumed {inside} step {found.border.step + 1}\n" in replay_report.text(found)


@pytest.mark.parametrize(
    ("habits", "kind"),
    [
        ("validates forgets", Kind.GENERATORS),
        ("inside forgets", Kind.GENERATORS),
        ("skips forgets", Kind.GENERATORS),
        ("checks draws", Kind.DRAWS),
    ],
)
def test_a_broken_one_is_named(tmp_path: Path, habits: str, kind: Kind) -> None:
    found = replayed(tmp_path, habits)
    assert found.verdict is Verdict.MISMATCH
    assert found.pairs[-1].findings[0].kind is kind, replay_report.text(found)
    assert not found.reasons  # nothing of it is without a partner


def test_the_last_checkpoint_of_the_first_run_is_known(tmp_path: Path) -> None:
    first = Habits("")
    with ordered(tmp_path / "whole", Orders("", states=True)):
        first.run()
    with ordered(tmp_path / "again", Orders("", states=True)):
        Habits("").run(first.saved)
    with pytest.raises(CaseError, match=r"again: it began with the state .* after step 7.*\{run\}"):
        judge(("python", "train.py"), tmp_path, None)
