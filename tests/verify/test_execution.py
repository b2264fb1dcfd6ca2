"""One execution: what is put in place before it, what is seen after it, and that nothing leaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import verify
from verify.captures import Layout, same_bits
from verify.cases import Case
from verify.conduct import set_up
from verify.decision import decide
from verify.errors import CaseError
from verify.evidence import Execution, Failure, Plan, Record
from verify.execution import Capture, execute, restore_modules
from verify.placements import local, replicated, sharded
from verify.sessions import Session, first, perform
from verify.staging import Stage, batch_size, give, prepare
from verify.targets import Found

X = {"x": verify.normal(8, 4, requires_grad=True)}


def once(function: Callable[..., Any], **options: Any) -> Capture:
    return twice(function, **options)[0]


def twice(function: Callable[..., Any], **options: Any) -> tuple[Capture, Capture, Stage]:
    options.setdefault("inputs", X)
    stage = prepare(Case(name="c", execute=function, **options))
    given = give(stage, 1, 0)
    return execute(stage, given), execute(stage, given), stage


def equal(a: Capture, b: Capture) -> bool:
    return a.outputs.keys() == b.outputs.keys() and all(
        same_bits(a.outputs[n], b.outputs[n]) for n in a.outputs
    )


def test_gradients_are_outputs_by_name_with_random_upstream() -> None:
    def f(x: Tensor, w: Tensor, n: int, k: Tensor) -> dict[str, Tensor]:
        return {"y": x @ w, "z": (x * n).sum(1), "i": k + 1}

    capture = once(
        f,
        inputs={
            **X,
            "w": verify.normal(4, 3, requires_grad=True),
            "k": verify.integers(5, low=0, high=9),
        },
        setup=lambda: {"n": 3},
    )
    assert set(capture.outputs) == {"y", "z", "i", "grad.x", "grad.w"}
    up = capture.upstream
    assert set(up) == {"y", "z"}, "integers have no upstream gradient"
    assert all(len(t.unique()) == t.numel() for t in up.values()), "random, never ones"
    stage_x = verify.generate("x", (8, 4))
    assert torch.allclose(capture.outputs["grad.w"], stage_x.t() @ up["y"], atol=1e-5)
    other = once(lambda x: {"y": x[:, :3] * 2}).upstream
    assert torch.equal(other["y"], up["y"]), "the same name and shape have the same upstream"
    assert not torch.equal(once(lambda x: {"q": x[:, :3] * 2}).upstream["q"], up["y"])


def test_gradients_can_be_declined() -> None:
    capture = once(lambda x: x * 2, gradients=False)
    assert set(capture.outputs) == {"out"}
    assert not capture.outputs["out"].requires_grad


def test_inputs_are_restored_and_the_mutation_is_seen() -> None:
    a, b, _ = twice(lambda x: x.mul_(2).clone(), inputs={"x": verify.normal(8)})
    assert a.mutated == b.mutated == ["x"]
    assert equal(a, b)
    declared = once(lambda x: x.mul_(2).clone(), inputs={"x": verify.normal(8)}, mutates=("x",))
    assert declared.mutated == []
    assert torch.equal(declared.outputs["after.x"], declared.outputs["out"])


def test_a_mutation_that_changes_only_the_sign_of_zero_is_seen() -> None:
    def f(z: Tensor) -> Tensor:
        z.neg_()
        return torch.arange(3.0)

    assert once(f, inputs={}, setup=lambda: {"z": torch.zeros(2)}).mutated == ["z"]


class Everything(nn.Module):
    """State of every kind, changed by each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(4), persistent=False)
        self.register_buffer("rebound", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.hidden.add_(x.detach().sum(0))
        self.rebound = self.rebound + x.detach().amax(0)
        if not hasattr(self, "lazy"):
            self.register_buffer("lazy", torch.ones(4))
        return self.inner(x) * self.seen + self.hidden + self.rebound * self.lazy


def test_parameters_and_buffers_are_restored_and_their_changes_are_outputs() -> None:
    module = Everything()
    with torch.no_grad():
        given_ = {n: t.clone() for n, t in [*module.named_parameters(), *module.named_buffers()]}
    a, b, stage = twice(lambda x, module: module(x), setup=lambda: {"module": module})
    assert equal(a, b)
    assert a.mutated == []
    assert {n for n in a.outputs if n.startswith("state.")} == {
        f"state.module.{n}"
        for n in (
            "seen",
            "hidden",
            "rebound",
            "inner.1.running_mean",
            "inner.1.running_var",
            "inner.1.num_batches_tracked",
        )
    }
    assert {n for n in a.outputs if n.startswith("grad.")} == {
        "grad.x",
        *(f"grad.module.{n}" for n, _ in module.named_parameters()),
    }
    kept = {n: t.clone() for n, t in b.outputs.items()}
    execute(stage, give(stage, 1, 0, seed=5), seed=5)
    for name, tensor in kept.items():
        assert same_bits(b.outputs[name], tensor), f"restoring overwrote the held {name}"
    restore_modules(stage)
    for name, tensor in given_.items():
        assert same_bits(dict([*module.named_parameters(), *module.named_buffers()])[name], tensor)
    assert all(p.grad is None for p in module.parameters())


def test_a_changed_parameter_is_a_mutation_unless_declared() -> None:
    def step(x: Tensor, module: nn.Linear) -> Tensor:
        with torch.no_grad():
            module.weight.add_(1)
        return module(x)

    a, b, _ = twice(step, setup=lambda: {"module": nn.Linear(4, 4)})
    assert a.mutated == ["module.weight"]
    assert equal(a, b)
    declared = once(step, setup=lambda: {"module": nn.Linear(4, 4)}, mutates=("module.*",))
    assert "after.module.weight" in declared.outputs
    assert declared.mutated == []


def test_setup_runs_with_seeded_generators_and_gradients_of_earlier_calls_are_gone() -> None:
    def setup() -> dict[str, Any]:
        return {"module": nn.Linear(4, 2), "t": torch.randn(3)}

    def f(x: Tensor, module: nn.Linear, t: Tensor) -> Tensor:
        return module(x)

    a, b, stage = twice(f, setup=setup)
    assert equal(a, b), "gradients do not pile up"
    again = twice(f, setup=setup)[2]
    assert torch.equal(stage.tensors["t"], again.tensors["t"])
    other = twice(f, setup=setup, seed=1)[2]
    assert not torch.equal(stage.tensors["t"], other.tensors["t"])


def test_dropout_consumes_the_global_generator() -> None:
    a, b, stage = twice(lambda x: nn.functional.dropout(x, 0.5))
    assert equal(a, b)
    assert {n for n in a.after if a.after[n] != a.before[n]} == {"torch"}
    free = [execute(stage, give(stage, 1, 0), arm="free") for _ in range(2)]
    assert not equal(free[0], a) or not equal(free[1], a)
    assert a.before == b.before
    assert free[0].before != a.before


def test_a_generator_in_its_own_fork_leaves_no_trace() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x + torch.rand(4)

    a, b, _ = twice(f)
    assert equal(a, b)
    assert a.before == a.after


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (lambda t: t.t(), (1, 6)),
        (lambda t: t[:, ::2], (6, 2)),
        (lambda t: t[0].expand(5, 6), (0, 1)),
    ],
)
def test_strided_inputs_keep_their_strides(view: Any, strides: tuple[int, ...]) -> None:
    seen: list[tuple[int, ...]] = []

    def f(v: Tensor) -> Tensor:
        seen.append(v.stride())
        return v.clone()

    a, b, _ = twice(f, inputs={}, setup=lambda: {"v": view(torch.arange(24.0).reshape(4, 6))})
    assert seen == [strides, strides]
    assert equal(a, b)
    assert a.mutated == []


def test_a_non_leaf_from_setup_becomes_a_leaf_with_a_gradient() -> None:
    def setup() -> dict[str, Tensor]:
        return {"w": torch.ones(4, requires_grad=True) * 2}

    a, b, _ = twice(lambda x, w: x * w, setup=setup)
    assert "grad.w" in a.outputs
    assert equal(a, b)


def test_outputs_that_are_inputs_or_views_of_them() -> None:
    a, b, stage = twice(lambda x: {"same": x, "view": x[2:5], "row": x.detach()[0]})
    assert equal(a, b)
    assert a.mutated == []
    assert torch.equal(a.outputs["same"], stage.tensors["x"])
    expected = a.upstream["same"].clone()
    expected[2:5] += a.upstream["view"]
    assert torch.equal(a.outputs["grad.x"], expected)


def test_nested_integer_complex_and_number_outputs() -> None:
    def f(x: Tensor) -> Any:
        return {"c": torch.fft.rfft(x), "n": (x.argmax(), [True, 3]), "s": "text", "none": None}

    a, b, _ = twice(f)
    assert set(a.outputs) == {"c", "n.0", "n.1.0", "n.1.1", "grad.x"}
    assert a.upstream["c"].is_complex()
    assert len(a.upstream["c"].imag.unique()) > 8
    assert a.ignored == ["s (str)"]
    assert equal(a, b)


def test_a_buffer_of_setup_that_is_written_is_a_mutation() -> None:
    a, b, _ = twice(
        lambda x, buf: torch.mul(x.detach(), 2, out=buf), setup=lambda: {"buf": torch.zeros(8, 4)}
    )
    assert a.mutated == b.mutated == ["buf"]
    assert torch.equal(a.outputs["out"], b.outputs["out"])


@pytest.mark.parametrize(
    "error", [SystemExit(0), RuntimeError("boom"), AssertionError(), RecursionError()]
)
def test_what_user_code_raises_is_captured(error: BaseException) -> None:
    def f(x: Tensor) -> Tensor:
        raise error

    failure = once(f).failure
    assert failure is not None
    assert failure.type == type(error).__name__
    assert failure.message.startswith(f"{error} (test_execution.py, line ")
    assert "in f" in failure.traceback


def test_an_error_in_backward_is_captured_and_leaves_no_outputs() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ValueError("in backward")

    capture = once(lambda x: Bad.apply(x))
    assert capture.failure is not None
    assert capture.failure.message.startswith("in backward (")
    assert capture.outputs == {}


def test_a_very_long_message_is_cut() -> None:
    def f(x: Tensor) -> Tensor:
        raise ValueError("a" * 10**6)

    failure = once(f).failure
    assert failure is not None
    assert len(failure.message) <= 4100  # with file and line
    assert len(failure.traceback) <= 4000


def test_keyboard_interrupt_is_the_user_s_own() -> None:
    def f(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(f)


def test_group_reaches_only_functions_that_name_it() -> None:
    def strict(x: Tensor, **options: Any) -> Tensor:
        return torch.relu(x, **options)

    def named(x: Tensor, group: Any) -> Tensor:
        return x * (2 if group is None else group)

    assert once(strict).failure is None
    assert torch.equal(once(named).outputs["out"], 2 * verify.generate("x", (8, 4)))
    own = once(named, setup=lambda: {"group": 3})
    assert torch.equal(own.outputs["out"], 3 * verify.generate("x", (8, 4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setup": lambda: {"x": 1}}, "both inputs and setup give 'x'"),
        ({"setup": lambda: torch.ones(2)}, "setup returned Tensor; it must return a mapping"),
        ({"setup": lambda: [1]}, "setup returned list"),
        (
            {"inputs": {"x": verify.normal(2), "y": verify.normal(3)}, "batch": {"x": 0, "y": 0}},
            "batch sizes differ",
        ),
    ],
)
def test_wrong_setups(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        prepare(Case(name="c", execute=lambda **kw: kw["x"], **{"inputs": X, **options}))


def test_exit_in_setup_is_a_failure_not_the_end() -> None:
    found = Found(Case(name="c", execute=lambda: 0, setup=lambda: sys.exit(0)), "c")
    outcome = set_up(found, 0, 1, None, lambda failure: failure)
    assert isinstance(outcome, Failure)
    assert outcome.type == "SystemExit"


def sharded_stage(world: int, rank: int) -> Stage:
    def sizes(total: int, parts: int) -> list[int]:
        return [total] if parts == 1 else [0, *[1] * (parts - 2), total - (parts - 2)]

    case = Case(
        name="c",
        execute=lambda **kw: kw["x"],
        inputs={**X, "w": verify.normal(4, 6), "r": verify.normal(3)},
        placement={"x": sharded(0, sizes), "w": sharded(1), "r": replicated, "l": local},
        batch={"x": 0},
    )
    return prepare(case, rank, world)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_shards_cover_the_whole_once(parts: int) -> None:
    given = [give(sharded_stage(parts, rank), parts, rank) for rank in range(parts)]
    whole = sharded_stage(1, 0).tensors
    for name, dim in (("x", 0), ("w", 1)):
        assert torch.equal(torch.cat([g.tensors[name] for g in given], dim), whole[name])
        if parts > 1:
            starts = [g.layouts[name].start for g in given]  # type: ignore[union-attr]
            assert starts == sorted(starts)
            assert given[0].layouts[name] == Layout(dim, 0, tuple(whole[name].shape))
    assert all(torch.equal(g.tensors["r"], whole["r"]) for g in given)
    assert all(g.tensors["x"].requires_grad and g.tensors["x"].is_leaf for g in given)


def test_rows_refill_and_other_seeds() -> None:
    stage = sharded_stage(1, 0)
    whole = stage.tensors["x"].detach()
    assert batch_size(stage) == 8
    rows = torch.tensor([5, 0, 2])
    assert torch.equal(give(stage, 1, 0, rows=rows).tensors["x"], whole[rows])
    mask = torch.tensor([True, False] * 4)
    refilled = give(stage, 1, 0, refill=mask).tensors["x"].detach()
    assert torch.equal(refilled[1::2], whole[1::2])
    assert not (refilled[::2] == whole[::2]).all(1).any()
    assert torch.equal(stage.tensors["x"].detach(), whole), "the snapshot is never written"
    other = give(stage, 1, 0, seed=1).tensors
    assert not torch.equal(other["x"], whole)
    assert not torch.equal(other["r"], stage.tensors["r"])


def test_chosen_rows_keep_their_upstream_gradient() -> None:
    stage = prepare(Case(name="c", execute=lambda x: x * 2, inputs=X, batch={"x": 0, "out": 0}))
    base = execute(stage, give(stage, 1, 0))
    rows = torch.tensor([6, 1])
    part = execute(stage, give(stage, 1, 0, rows=rows))
    assert torch.equal(part.upstream["out"], base.upstream["out"][rows])
    assert torch.equal(part.outputs["grad.x"], base.outputs["grad.x"][rows])


def records_of(function: Callable[..., Any], runs: int = 2, **options: Any) -> list[Record]:
    case = Case(name="c", execute=function, claims=("repeat",), **{"inputs": X, **options})
    records: list[Record] = []
    plan = Plan("c", "c", ["repeat"], 1, {"repeat": runs})
    session = Session(prepare(case), plan, records.append)
    first(session)
    for run in range(runs):
        perform(session, "repeat", "restored", run=run)
    return records


def test_the_first_call_counts() -> None:
    """A warm-up that changes the result is a fault, not something to discard."""
    calls: list[int] = []

    def f(x: Tensor) -> Tensor:
        calls.append(1)
        return x.detach() * (1.0 if len(calls) > 1 else 1.0000001)

    records = records_of(f, 3)
    verdict = decide(Plan("c", "c", ["repeat"], 1, {"repeat": 3}), records)
    claim = verdict.claims[0]
    assert {f.reason for f in claim.findings} == {"bits-differ"}
    assert claim.differing == 3
    assert len(calls) == 4, "nothing is executed that is not recorded"


def test_a_rare_difference_is_explained_from_the_run_that_showed_it() -> None:
    calls: list[int] = []

    def f(x: Tensor) -> Tensor:
        calls.append(1)
        out = x.detach() * 2
        if len(calls) == 3:
            out[3, 1] += 1
        return out

    records = [r for r in records_of(f, 4) if isinstance(r, Execution)]
    assert [bool(r.differences) for r in records] == [False, False, True, False, False]
    difference = records[2].differences["out"]
    text = "\n".join(difference["lines"])
    assert "out[3,1]" in text
    assert text.count("0x") >= 2


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.set_default_device("cpu"),
        lambda: torch.set_grad_enabled(False),
    ],
    ids=["dtype", "deterministic", "device", "grad"],
)
def test_settings_that_user_code_leaves_behind_do_not_break_the_harness(setting: Any) -> None:
    def f(x: Tensor) -> Tensor:
        out = x * 2
        setting()
        return out

    try:
        records = [r for r in records_of(f, 1) if isinstance(r, Execution)]
        assert [r.failure for r in records] == [None, None]
        assert records[0].outputs["out"] == records[1].outputs["out"]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)


def test_no_grad_autocast_and_a_lot_of_output(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: Tensor) -> dict[str, Tensor]:
        os.write(1, b"a line\n" * 2000)
        with torch.no_grad():
            a = x * 2
        with torch.autocast("cpu", torch.bfloat16):
            b = x @ x.t()
        return {"a": a, "b": b}

    a, b, _ = twice(f)
    assert equal(a, b)
    assert a.outputs["b"].dtype is torch.bfloat16
    assert set(a.upstream) == {"b"}
    assert capfd.readouterr().out.count("a line") == 4000
