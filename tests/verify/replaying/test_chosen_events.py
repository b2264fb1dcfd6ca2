"""Which events' tensors `verify trace explain` keeps: the culprit's, and what it was made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trace_toy import record_toy

from verify.replaying.explaining import choose
from verify.tracing.divergence import diff
from verify.tracing.files import read_folder


def test_gradients_that_are_one_cause_are_all_kept(tmp_path: Path) -> None:
    record_toy(tmp_path / "a")
    record_toy(tmp_path / "b", [(1, "backward", "blocks.0.mlp")])
    recording, found = read_folder(tmp_path / "a")[0], diff(tmp_path / "a", tmp_path / "b")
    assert found.culprit is not None
    keys = next(step for step in recording.steps if step.number == 1).program.keys
    names = tuple(key[0] for key in keys if key[1] == "grad")
    first = keys.index((names[0], "grad", "", 0))
    place = replace(found.culprit.place, index=first, name=names[0], kind="grad", path="")
    chosen = choose(
        recording, replace(found, culprit=replace(found.culprit, place=place, names=names))
    )
    assert len(names) > 1
    assert chosen.at == tuple((1, (name, "grad", "", 0)) for name in names)


def test_an_optimizer_is_given_gradient_and_state(tmp_path: Path) -> None:
    record_toy(tmp_path / "a")
    record_toy(tmp_path / "b", [(1, "optimizer", "blocks.0.mlp")])
    found = diff(tmp_path / "a", tmp_path / "b")
    chosen = choose(read_folder(tmp_path / "a")[0], found)
    name = "blocks.0.mlp.weight"
    assert chosen.at == ((1, (name, "parameter", "", 0)),)
    assert set(chosen.given) == {
        (1, (name, "grad", "", 0)),
        (0, (name, "parameter", "", 0)),
        (0, (name, "optimizer", "exp_avg", 0)),
    }


def test_a_backward_is_given_the_forward_too(tmp_path: Path) -> None:
    record_toy(tmp_path / "a")
    record_toy(tmp_path / "b", [(1, "backward", "blocks.0.mlp")])
    found = diff(tmp_path / "a", tmp_path / "b")
    chosen = choose(read_folder(tmp_path / "a")[0], found)
    name = "blocks.0.mlp"
    assert chosen.at == ((1, (name, "grad_input", "0", 0)),)
    assert set(chosen.given) == {
        (1, (name, "grad_output", "0", 0)),
        (1, (name, "input", "0", 0)),
        (0, (f"{name}.weight", "parameter", "", 0)),
    }
