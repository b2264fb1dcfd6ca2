"""Recording what torch.compile compiled: the borders, and nothing that changes what is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from traced_models import events, stack, steps_of

import verify

# dynamo looks at it itself, and means to hide the warning
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """A compiled layer inside a module that is not; `how` is a backend's name, by either way."""

    def __init__(self, backend: str, in_place: bool) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), stack(1)[0].feed.eval()
        if in_place:
            self.layer.compile(backend=backend)
        else:
            self.layer = torch.compile(self.layer, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return verify.probe("first", self.first(x)) + self.layer(self.first(x)).sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [False, True])
def test_borders_of_compiled_modules(tmp_path: Path, backend: str, in_place: bool) -> None:
    grads = []
    for on in (False, True):
        torch.manual_seed(0)
        model = Model(backend, in_place)
        x = torch.randn(2, 8)
        with verify.record(tmp_path, model) if on else contextlib.nullcontext():
            for _ in range(2):
                model(x).sum().backward()
        grads.append(verify.digest({f"{i}": p.grad for i, p in enumerate(model.parameters())}))
    assert str(grads[0]) == str(grads[1])
    _, step = steps_of(tmp_path)
    assert {one.definition.name for one in events(step, "output")} == {"(root)", "first", "layer"}
    for kind in ("input", "output", "grad_output", "grad_input"):
        assert len(events(step, kind, "layer")) == 2, kind
    assert events(step, "parameter", "layer.0.weight")


def test_a_compiled_model_is_one_module(tmp_path: Path) -> None:
    """The names are those without the wrapper; probes inside of it are silent."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return verify.probe("inside", self.linear(x))

    model = torch.compile(Inner(), backend="eager", fullgraph=True)
    with verify.record(tmp_path, model):
        model(torch.ones(2, 3)).sum().backward()
    _, step = steps_of(tmp_path)
    assert {one.definition.name for one in events(step, "output")} == {"(root)"}
    assert {one.definition.name for one in events(step, "grad")} == {
        "linear.weight",
        "linear.bias",
    }
    assert not events(step, "probe")


def test_a_compiled_function_around_the_model(tmp_path: Path) -> None:
    """The hooks are silent inside of it, and compile with it."""
    model = nn.Linear(3, 3)
    call = torch.compile(lambda x: model(x) * 2, backend="eager")
    with verify.record(tmp_path, model):
        call(torch.ones(2, 3)).sum().backward()
    _, step = steps_of(tmp_path)
    assert not events(step, "output")
    assert len(events(step, "grad")) == 2
