"""The backward in ci/gpu: degrees, many calls under load, the sanitizer's script, speed; evidence
of each, its tables and goals."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from backward_fakes import simulated_backward
from degree_script import load_backward_degrees, load_degrees, load_problem
from gpu_scripts import check_contradicted, check_needed, gpu_scripts, load_script
from hopper_fakes import Fakes, simulated_launch

from mok.bench.layer_command import layer
from mok.bench.shapes import SHAPES
from mok.errors import UnsupportedError
from mok.hopper.layout import Segments


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def many(scripts: dict[str, ModuleType]) -> Iterator[ModuleType]:
    load_script("endurance")
    yield load_script("backward_endurance")
    for name in ("endurance", "backward_endurance"):
        del sys.modules[name]


# ---- degrees ------------------------------------------------------------------------------------


@pytest.fixture
def degrees(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose launches of one rank are simulated on a CPU."""
    script, fakes = load_backward_degrees(), Fakes()
    forward = load_degrees()

    def open_ranks(degree: int, sizes: Any, device: Any, segments: Any, **_: Any) -> Any:
        assert degree == 0
        return forward.Ranks(0, (fakes.workspace(sizes, segments=segments),))

    def ensure(workspace: Any, *, segments: Segments | None = None) -> Any:
        return workspace.backward or fakes.backward(workspace, segments=segments)

    def launch(workspace: Any, problem: Any, *, saved: int, num_sms: int = 0) -> Any:
        return simulated_launch(workspace, problem, saved=saved)

    monkeypatch.setattr(script.degrees, "open_ranks", open_ranks)
    monkeypatch.setattr(script.degrees.Ranks, "wait", lambda self: None)
    monkeypatch.setattr(script, "ensure_backward", ensure)
    monkeypatch.setattr(script, "launch", launch)
    monkeypatch.setattr(script, "launch_backward", simulated_backward)
    return script


FACTS = {"blocks": 9, "wraps": 2, "tails": 1, "empty_experts": 1, "crossing": 1, "parts": 1}


def test_a_row_of_degrees_compares_every_gradient(
    degrees: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_problem().whole_problem(tokens=150, hidden=64, width=64, experts=8)
    base = degrees.make_base(whole, degrees.upstream(150, 64))
    facts = degrees.Facts((150,), **FACTS)
    monkeypatch.setattr(degrees, "facts_of", lambda workspaces, tokens: facts)
    row = degrees.row_of(base, (0, (1, 1), 7))
    assert degrees.passed(row)
    assert (row["wrong"], row["lacking"], row["ctas"]) == ([], [], 7)
    plain = degrees.backward
    for name in (*degrees.ROUTED, *degrees.SHARED):

        def wrong(*given: Any, name: str = name, **options: Any) -> Any:
            found = plain(*given, **options)
            value = getattr(found[0], name).clone()
            value.view(-1)[-1] += 1.0
            return [replace(found[0], **{name: value})]

        monkeypatch.setattr(degrees, "backward", wrong)
        row = degrees.row_of(base, (0, (1, 1), 0))
        assert row["wrong"] == [name, f"{name} computed again"]
        assert not degrees.passed(row)


def test_what_did_not_occur_is_named_and_nothing_else() -> None:
    degrees = load_backward_degrees()
    good = degrees.Facts((0, 5, 7), **FACTS)
    assert degrees.lacking(good) == []
    assert degrees.lacking(replace(good, tokens=(12,))) == []
    for changed, word in (
        ({"wraps": 1}, "ring"),
        ({"tails": 0}, "tail"),
        ({"empty_experts": 0}, "without rows"),
        ({"crossing": 0}, "border"),
        ({"parts": 0}, "in parts"),
        ({"tokens": (1, 5, 7)}, "without tokens"),
    ):
        (told,) = degrees.lacking(replace(good, **changed))
        assert word in told


def test_sums_of_the_shared_expert_are_those_of_each_ranks_tokens(degrees: ModuleType) -> None:
    whole = load_problem().whole_problem(tokens=150, hidden=64, width=64, experts=8)
    d_out = degrees.upstream(150, 64)
    base = degrees.make_base(whole, d_out)
    parts = base.wanted((50, 0, 100))
    assert base.wanted((50, 0, 100)) == parts  # computed once
    for name in degrees.SHARED:
        one, none, other = parts[name].chunk(3)
        assert not none.any()
        total = base.gradients[name]
        assert torch.allclose(one + other, total, rtol=1e-3, atol=1e-3 * float(total.abs().max()))
        assert one.any()
        assert other.any()


def test_the_sanitizers_script_fills_what_kernels_are_to_write_and_nothing_else(
    degrees: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    script = load_script("sanitize_backward")
    try:
        made = script.backward_problem

        def zeros(problem: Any, backward: Any) -> Any:
            weights = [torch.zeros(2, 3, dtype=backward.dtype) for _ in range(2)]
            return made.Gradients(
                torch.zeros(4, 3), torch.zeros(0, 2), d_gate=None, d_up=weights[0]
            )

        def gradients() -> list[torch.Tensor]:
            whole, d_out, _ = script.problem(torch.device("cpu"))
            found = made.make_gradients(whole, made.BackwardProblem(d_out))
            return [one for one in (found.d_x, found.d_router, found.d_up) if one is not None]

        monkeypatch.setattr(made, "make_gradients", zeros)
        assert not any(one.isnan().any() for one in gradients())
        with script.filled_gradients():
            assert all(one.isnan().all() for one in gradients())
        assert made.make_gradients is zeros
        with pytest.raises(KeyError), script.filled_gradients():
            raise KeyError
        assert made.make_gradients is zeros

        seen: list[bool] = []
        plain = degrees.launch_backward

        def launch(*given: Any, **options: Any) -> Any:
            seen.append(all(one.isnan().all() for one in gradients()))
            return plain(*given, **options)

        facts = degrees.Facts((script.T,), **FACTS)
        monkeypatch.setattr(script, "device_or_exit", lambda: torch.device("cpu"))
        monkeypatch.setattr(script, "DEGREES", {0: (script.T,)})
        monkeypatch.setattr(degrees, "facts_of", lambda workspaces, tokens: facts)
        monkeypatch.setattr(degrees, "launch_backward", launch)
        assert script.main() == 0
        assert seen == [True, True]  # of every launch
    finally:
        del sys.modules["sanitize_backward"]


def test_the_sanitizers_script_runs_and_names_a_wrong_gradient(
    degrees: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # else the script leaves it behind
    script = load_script("sanitize_backward")
    try:
        assert script.backward_degrees is degrees
        facts = [degrees.Facts((script.T,), **FACTS)]
        monkeypatch.setattr(script, "device_or_exit", lambda: torch.device("cpu"))
        monkeypatch.setattr(script, "DEGREES", {0: (script.T,)})
        monkeypatch.setattr(degrees, "facts_of", lambda workspaces, tokens: facts[0])
        assert script.main() == 0
        assert "backwards are right" in capsys.readouterr().out
        facts[0] = replace(facts[0], parts=0)
        assert script.main() == 1
        assert "ran without what it is made for" in capsys.readouterr().out
        _, _, expected = script.problem(torch.device("cpu"))
        found = {
            name: expected[key].repeat(2, *[1] * (expected[key].dim() - 1))
            for name, key in script.NAMES.items()
            if "shared" in name
        }
        assert script.wrong_of(found, expected, 2) == [
            f"{name} of a rank without tokens" for name in found
        ]
        for one in found.values():
            one[: one.shape[0] // 2] = 0
        assert script.wrong_of(found, expected, 2) == []
        found["d_shared_up"][-1, 0] += 1
        assert script.wrong_of(found, expected, 2) == ["d_shared_up"]
    finally:
        del sys.modules["sanitize_backward"]


# ---- many calls ---------------------------------------------------------------------------------


def endured(many: ModuleType, shape: str, wanted: int, ms: float, **more: Any) -> dict[str, Any]:
    """A row of backward-endurance.json: one digest for each gradient."""
    endurance = many.endurance
    digests = Counter({tuple(range(20)): wanted + 20})
    tally = endurance.Tally(digests, [endurance.Batch("hold=66", wanted, True, 1.0)])
    row = endurance.row_of(shape, wanted, ms / 1000, tally, 2.0)
    outputs = endurance.by_output(digests, many.GRADIENTS)
    return {**row, "outputs": outputs, **more}


def test_every_gradient_has_to_have_one_digest(many: ModuleType) -> None:
    good = endured(many, "small", 100, 0.1)
    assert good["outputs"] == dict.fromkeys(many.GRADIENTS, 1)
    assert many.passed(good)
    assert not many.passed({**good, "under_load": 99})
    other = (*range(8), 80, *range(9, 20))  # of d_gate
    found = many.endurance.by_output([tuple(range(20)), other], many.GRADIENTS)
    assert found == {**dict.fromkeys(many.GRADIENTS, 1), "d_gate": 2}
    assert not many.passed({**good, "outputs": found})
    assert not many.passed({**good, "outputs": {"d_x": 1}})
    chosen = many.endurance.chosen
    whole = chosen((), None, many.BACKWARDS)
    assert sum(count for shape, count in whole if shape.name != "kimi-shard") >= 10_000
    assert (SHAPES["kimi-shard"], 200) in whole
    assert chosen(("small",), 7, many.BACKWARDS) == [(SHAPES["small"], 7)]


def test_backwards_of_the_portable_backend_are_not_counted_as_the_kernels(
    many: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOK_HOPPER_BACKWARD", "0")
    with pytest.raises(UnsupportedError, match="MOK_HOPPER_BACKWARD=0 leaves backwards to the por"):
        many.Backward(SHAPES["small"], torch.device("cpu"), 1)


@pytest.mark.gpu
def test_backwards_have_one_digest_until_something_changes(many: ModuleType) -> None:
    from mok.hopper.support import BACKWARD_VARIABLE, device_problem

    device = torch.device("cuda", torch.cuda.current_device())
    problem = device_problem(device)
    if problem is not None:
        pytest.skip(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(BACKWARD_VARIABLE, raising=False)
        backward = many.Backward(SHAPES["small"], device, 100)
        backward.launch(40)
        found = backward.collect()
        assert list(found.values()) == [41]
        backward.d_out[3, 5] += 1.0
        backward.launch(20)
        changed = backward.collect()
        assert list(changed.values()) == [20]
        outputs = many.endurance.by_output([*found, *changed], many.GRADIENTS)
        assert outputs["d_x"] == outputs["d_down"] == 2


# ---- evidence, tables ---------------------------------------------------------------------------


def degree(number: int, ctas: int, **more: Any) -> dict[str, Any]:
    """A row of backward-degrees.json: the same bits, and everything occurred."""
    row = {"degree": number, "segments": "1 to 1", "ctas": ctas, "equal": True, "tokens": [0, 9]}
    return {**row, **FACTS, "wrong": [], "lacking": [], **more}


def trained(ranks: int, **more: Any) -> dict[str, Any]:
    """A row of training.json."""
    row = {"ranks": ranks, "shared": False, "recompute": True, "steps": 200, "times": 2}
    row |= {"equal": True, "losses": "a" * 64, "weights": "b" * 64, "first": 5.0, "last": 0.5}
    return {**row, "kernels": 400, "wanted": 400, "seconds": 9.0, **more}


def test_shapes_of_the_documents(scripts: dict[str, ModuleType], many: ModuleType) -> None:
    shapes = scripts["shapes"]
    for part, row, optional in (
        ("backward-degrees", degree(4, 132), ()),
        ("backward-endurance", endured(many, "small", 100, 0.1), ("digest", "seconds")),
        ("training", trained(8), ()),
    ):
        check_needed(shapes.DOCUMENTS[part], row, optional)


def test_a_part_that_passed_holds_no_row_that_failed(
    scripts: dict[str, ModuleType], many: ModuleType
) -> None:
    evidence = scripts["evidence"]
    good = endured(many, "small", 100, 0.1)
    for part, row, wrong in (
        ("backward-degrees", degree(4, 132), {"equal": False}),
        ("backward-degrees", degree(4, 132), {"lacking": ["a tail"]}),
        ("backward-endurance", good, {"distinct": 2}),
        ("backward-endurance", good, {"under_load": 99}),
        ("training", trained(1), {"equal": False}),
        ("training", trained(1), {"kernels": 399}),
        ("training", trained(1), {"kernels": 0, "wanted": 0}),
    ):
        check_contradicted(evidence, part, row, wrong)


def _cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_tables_hold_every_row(scripts: dict[str, ModuleType], many: ModuleType) -> None:
    tables, goals = scripts["forward_tables"], scripts["goals"]

    def own(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"results": {"step": {"status": "passed", "document": {"rows": rows}}}}]

    lines = _cells(tables.backward_degrees(own([degree(0, 1), degree(0, 132, equal=False)])))
    assert lines[2] == ["one rank", "1 to 1", "1, 132", "0 to 9", *"921111", "1 of 2"]
    lines = _cells(tables.training(own([trained(1), trained(8, equal=False)])))
    assert lines[2][:5] == ["1", "no", "computed again", "2 of 200 steps", "yes"]
    assert lines[3][:5] == ["8", "no", "computed again", "2 of 200 steps", "NO"]
    assert lines[2][5:] == ["a" * 16, "b" * 16, "5.000 to 0.500", "400"]
    rows = [
        endured(many, "small", 5000, 0.1),
        endured(many, "medium", 5000, 1.9),
        endured(many, "slow", 5000, 2.1),
        endured(many, "kimi-shard", 199, 18.0),
    ]
    text = tables.backward_endurance(own(rows))
    assert "d_x 1, d_router 1, d_gate 1, d_up 1, d_down 1" in text
    found = goals.judged_endurance({"rows": rows}, "backward")
    assert [(one.measured, one.met) for one in found[-2:]] == [("10000", "yes"), ("199", "NO")]
    assert goals.summary(found) in text


# ---- speed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "limit"), [(("backward",), 265.0), (("backward", "bench"), 120)]
)
def test_the_backward_is_timed_with_the_kernels_and_its_time(
    scripts: dict[str, ModuleType], tmp_path: Path, chosen: tuple[str, ...], limit: float
) -> None:
    commands = scripts["commands"]
    for ranks, starting in ((1, 0.0), (2, 10.0), (4, 20.0), (8, 30.0)):
        place = commands.Place("python", tmp_path, ranks, left=300.0, chosen=chosen)
        parts = {part.name: part for part in commands.parts(place)}
        (step,) = parts["backward"].steps
        assert not any("MOK_HOPPER_BACKWARD" in word for word in step.command)  # the default
        assert step.alone
        words = list(step.command[step.command.index("layer") + 1 :])
        given = layer.make_context("layer", words).params
        assert (given["direction"], given["limit"]) == ("backward", limit - starting)
        wanted = ("mok", "mok-main", "sonicmoe", "torch") if ranks == 1 else ()
        assert given["contenders"] == wanted


def test_all_of_the_kernels_cases_run_both_directions_by_default(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    commands = scripts["commands"]
    for ranks in (1, 2, 4, 8):
        parts = {
            part.name: part for part in commands.parts(commands.Place("python", tmp_path, ranks))
        }
        steps = {step.name: step.command for step in parts["verify"].steps}
        alone = {"hopper-degrees", "hopper-backward-degrees", "hopper-clamped", "hopper-exact"}
        wanted = {"hopper", "hopper-forward", "hopper-backward", *(alone if ranks == 1 else ())}
        assert {name for name in steps if name.startswith("hopper")} == wanted
        assert not any("MOK_HOPPER_BACKWARD" in word for one in steps.values() for word in one)
        (training,) = parts["training"].steps
        assert training.command[-2:] == ["--ranks", str(ranks)]
