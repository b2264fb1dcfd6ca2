"""Time-outs: defaults, environment, what is refused, and that they reach a launch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hopper_fakes import Fakes, sizes_of, small_problem

from mok import functional
from mok.config import MoKConfig
from mok.errors import InputError
from mok.hopper import pools
from mok.hopper.forward import launch
from mok.hopper.layout import Segments
from mok.hopper.pools import WorkspacePool
from mok.hopper.timeouts import ENTER_VARIABLE, INSIDE_VARIABLE, Timeouts, wanted_timeouts

CPU = torch.device("cpu")


def test_what_is_given_wins_over_the_environment_and_that_over_defaults(monkeypatch):
    monkeypatch.delenv(ENTER_VARIABLE, raising=False)
    monkeypatch.delenv(INSIDE_VARIABLE, raising=False)
    assert wanted_timeouts() == Timeouts(600.0, 30.0)
    monkeypatch.setenv(ENTER_VARIABLE, "12.5")
    assert wanted_timeouts() == Timeouts(12.5, 30.0)
    monkeypatch.setenv(INSIDE_VARIABLE, "2")
    assert wanted_timeouts() == Timeouts(12.5, 2.0)
    assert wanted_timeouts(Timeouts(1.0, 1.0)) == Timeouts(1.0, 1.0)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "2e9", "soon"])
def test_other_than_seconds_is_refused_by_name(monkeypatch, text):
    monkeypatch.setenv(ENTER_VARIABLE, text)
    with pytest.raises(InputError, match=f"MOK_TIMEOUT_ENTER = '{text}'; allowed: seconds above 0"):
        functional.get_workspace(
            *(MoKConfig(), None), device="cpu", num_local_tokens=1, hidden_size=64, topk=1
        )
    if text != "soon":
        with pytest.raises(InputError, match=r"Timeouts\.inside = "):
            Timeouts(1.0, float(text))


def test_they_reach_launches_of_memory_that_is_there_and_that_comes():
    fakes, problem = Fakes(), small_problem()
    pool, sizes = WorkspacePool(timeouts=Timeouts(3.0, 2.0)), sizes_of(problem, 70)
    asked = []

    def opened(sizes, segments, group, device, timeouts, chain):
        asked.append(timeouts)
        return dataclasses.replace(fakes.workspace(sizes, segments=segments), timeouts=timeouts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "_open", opened)
        made = pool.get(sizes, Segments(1, 4), None, CPU)
    assert asked == [Timeouts(3.0, 2.0)]
    launch(made, problem, saved=None)
    pool.set_timeouts(Timeouts(7.0, 0.25))
    again = pool.get(sizes, Segments(1, 4), None, CPU)
    launch(again, problem, saved=None)
    seen = [args[0] for name, args, _ in fakes.log if name == "forward"]
    assert [one.timeout_enter for one in seen] == [3 * 10**9, 7 * 10**9]
    assert [one.timeout for one in seen] == [2 * 10**9, 250_000_000]
    # The memory, its maps and what was reported are the same ones.
    assert (again.local is made.local, again._use is made._use) == (True, True)
    pool.close()
    assert made.closed
