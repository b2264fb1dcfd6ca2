"""Recording on a CUDA device: digests there, without waiting, at the time, and the same as here."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from sync_debug import synchronising_raises
from torch import nn
from traced_models import events, stack, steps_of

import verify
from verify.hashing import digest_on_host

pytestmark = pytest.mark.gpu


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for on in (False, True):
        model = stack().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        with verify.record(tmp_path, model) if on else contextlib.nullcontext():
            for _ in range(3):
                with torch.autocast("cuda", torch.bfloat16):
                    model(torch.randn(2, 5, 8, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        state = str(verify.digest({"m": model.state_dict(), "o": optimizer.state_dict()["state"]}))
        found.append((state, torch.rand(1, device="cuda").item()))
    assert found[0] == found[1]
    steps = steps_of(tmp_path)
    assert [one.number for one in steps] == [-1, 0, 1, 2]
    (weight,) = events(steps[-1], "parameter", "1.down.weight")
    assert weight.digest == digest_on_host(model[1].down.weight)
    assert events(steps[-1], "rng", "cuda:0")


def test_nothing_waits_and_later_changes_are_not_seen(tmp_path: Path) -> None:
    """Two steps on a stream of their own: border and hooks are asynchronous."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    x = torch.randn(64, 64, device="cuda")
    kept = []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with verify.record(tmp_path, model) as recording:
        with synchronising_raises(), torch.cuda.stream(stream):
            for _ in range(2):
                kept.append(x.clone())
                torch.cuda._sleep(10_000_000)
                y = model(x)
                kept.append(y.detach().clone())
                x.neg_()
                y.data.zero_()
                recording.step()
        torch.cuda.current_stream().wait_stream(stream)
    steps = steps_of(tmp_path)[1:]
    for number, step in enumerate(steps):
        assert events(step, "input", "0")[0].digest == digest_on_host(kept[2 * number])
        assert events(step, "output", "1")[0].digest == digest_on_host(kept[2 * number + 1])


def test_what_the_border_of_a_step_computes_is_no_event(tmp_path: Path) -> None:
    """It gathers the digests on the device and copies them, while operations are looked at."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with verify.record(tmp_path, model, optimizer, level="op"):
        for _ in range(3):
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
    steps = steps_of(tmp_path)
    assert [step.number for step in steps] == [-1, 0, 1, 2]
    names = {event.definition.name for step in steps for event in step.events}
    assert "(root)/aten.sum.default" in names
    assert not any("aten.cat" in name or "aten.copy_" in name for name in names)
