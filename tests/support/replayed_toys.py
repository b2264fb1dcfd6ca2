"""A tiny training run that can be stopped and resumed, in this process, with a fault to plant.

`replayed` makes the four recordings of `verify replay` in a folder, as scripts under orders would.
The data are 16 rows in batches of two, in one order; parameters, buffers, an optimizer with state,
a schedule of its rate and dropout are all there, so that each can be lost.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import verify
from verify.replaying.orders import VARIABLE, Orders, Stopped, write_orders

STEPS, STOP, EVERY = 8, 5, 2  # checkpoints after each second step: a resume goes on at step 4
Saved = dict[str, Any]


@contextmanager
def ordered(folder: Path, orders: Orders) -> Iterator[None]:
    """Recordings inside follow these orders, and a stop ends the block."""
    folder.mkdir(parents=True)
    path = folder / "orders.json"
    write_orders(Orders(**{**vars(orders), "folder": str(folder)}), path)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(path)
    try:
        with suppress(Stopped):
            yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


class Training:
    """One run of the script. saved: its last checkpoint."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.saved: Saved | None = None

    def run(self, resume: Saved | None = None, *, steps: int = STEPS, out: str = "run") -> None:
        fault = self.fault
        random.seed()  # as in another process: nothing here draws from these
        np.random.seed(None)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2), nn.Tanh()
        )
        model[1].register_buffer("scale", torch.rand(6) + 1, persistent="unsaved" not in fault)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        first = 0
        if resume is not None and "forgets" not in fault:
            saved = copy.deepcopy(resume)
            if "bfloat16" in fault:
                mean = saved["model"]["1.running_mean"]
                saved["model"]["1.running_mean"] = mean.bfloat16()
            if "unsaved" in fault:
                saved["model"].pop("1.scale")  # as of a buffer that was not persistent before
                model[1].scale.fill_(1.5)
            if "weights" not in fault:
                model.load_state_dict(saved["model"])
            if "optimizer" not in fault:
                optimizer.load_state_dict(saved["optimizer"])
            if "scheduler" not in fault:
                scheduler.load_state_dict(saved["scheduler"])
            first = saved["step"] - ("counter" in fault) + ("skips" in fault)
            if "generator" not in fault:
                torch.set_rng_state(saved["rng"])
        with verify.record(out, model, optimizer):
            if resume is not None and "draws" in fault:
                torch.randperm(4)  # what skips batches
            if resume is None and "leak" in fault:
                torch.randperm(4)  # a validation before training
            if resume is None and "forked" in fault:
                with torch.random.fork_rng():
                    torch.randperm(4)
            for step in range(first, steps):
                at = step - first if "order" in fault and resume is not None else step
                batch = verify.probe("batch", torch.arange(2) + 2 * at % 16)
                optimizer.zero_grad()
                (model(rows[batch]) * model[1].scale[:2]).square().mean().backward()
                optimizer.step()
                scheduler.step()
                if step % EVERY == EVERY - 1:
                    self.saved = copy.deepcopy(
                        {
                            "model": model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "scheduler": scheduler.state_dict(),
                            "rng": torch.get_rng_state(),
                            "step": step + 1,
                        }
                    )


def replayed(folder: Path, fault: str = "", *, again: str = "", stop: int = STOP) -> Path:
    """The recordings of a replay in `folder`. fault: of the resumed run. again: of the second."""
    with ordered(folder / "whole", Orders("", states=True)):
        Training().run()
    with ordered(folder / "again", Orders("", states=True)):
        Training(again).run()
    stopped = Training()
    with ordered(folder / "stopped", Orders("", stop, states=True)):
        stopped.run()
    with ordered(folder / "resumed", Orders("", states=True, narrow=True)):
        Training(fault).run(stopped.saved or {})
    return folder
