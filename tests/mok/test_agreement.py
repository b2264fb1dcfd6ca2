"""How the check of a call ends; that ranks agree on it: hopper/test_agreement.py."""

import pytest
import torch

from mok.agreement import Checked, agree_on_backend
from mok.config import MoKConfig
from mok.errors import InputError, RoutingError, UnsupportedError
from mok.workspaces import Workspace, create_workspace

GATE = torch.zeros(2, 64, 64, dtype=torch.bfloat16)


def workspace(backend: str = "auto") -> Workspace:
    sizes = {"num_local_tokens": 4, "hidden_size": 64, "topk": 1}
    return create_workspace(MoKConfig(), None, device="cpu", backend=backend, **sizes)


def ask(where: Workspace, check, call: str = "forward", limit: float | None = None) -> bool:
    return agree_on_backend(call, where, check, (GATE, None), limit, 0)


def found(deferred: bool = True) -> Checked:
    return Checked(experts=2, width=64, shared_width=None, deferred=deferred)


@pytest.mark.parametrize("call", ["forward", "backward", "recompute"])
def test_what_the_sizes_allow_and_the_schedule_permits_runs_on_hopper(monkeypatch, call):
    asked = []

    def runs(self: Workspace, *sizes: int) -> bool:
        asked.append(sizes)
        return True

    monkeypatch.setattr(Workspace, "runs_hopper", runs)
    assert ask(workspace(), found, call)
    assert not ask(workspace(), lambda: found(deferred=False), call)
    assert asked == [(2, 64, 0)] * 2


def test_a_backend_that_cannot_be_had_is_an_error_whatever_the_schedule():
    assert not ask(workspace("portable"), found)
    with pytest.raises(UnsupportedError, match="CUDA"):
        ask(workspace("hopper"), lambda: found(deferred=False))


def test_earlier_errors_and_a_bad_limit_come_before_the_arguments():
    def wrong() -> Checked:
        raise InputError("x is wrong")

    where = workspace()
    where.errors.set("bad ids")
    with pytest.raises(RoutingError, match="bad ids"):
        ask(where, wrong)
    with pytest.raises(InputError, match="swiglu_limit"):
        ask(where, wrong, limit=-1.0)
    with pytest.raises(InputError, match="x is wrong"):
        ask(where, wrong)
