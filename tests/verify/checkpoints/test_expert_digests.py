"""Experts of which one side has digests only: of ranks, one by one, or of all together."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_files import (
    Pieces,
    State,
    digests,
    distributed,
    flipped,
    record,
    safetensors,
    saved,
    weights,
)
from expert_states import TOP, fused, one_by_one

import verify
from verify.checkpoints import digest_files
from verify.checkpoints.parameters import Part, whole_box
from verify.hashing import digest_tensor


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_ranks_that_hold_experts_or_rows_or_columns(dim: int, tmp_path) -> None:
    state = one_by_one()
    b = safetensors(tmp_path / "b.safetensors", state)
    name = f"{TOP}2.up_proj.weight"
    c = safetensors(tmp_path / "c.safetensors", {**state, name: flipped(state[name], (5, 6))})
    whole = fused(state)
    stacked = [one for one in whole if "experts" in one]
    top = tmp_path / "ranks"
    for rank in range(2):
        mine, places = dict(whole), {}
        for one in stacked:
            shape = tuple(whole[one].shape)
            half = shape[dim] // 2
            mine[one] = whole[one].narrow(dim, rank * half, half)
            places[one] = (dim, rank * half, shape)
        digests(top / f"{rank}.json", mine, places=places, rank=rank, world=2)
    assert weights(top, b)[0] == weights(b, top)[0] == 0
    (one,) = record(top, c)["differences"]
    assert one["name"] == name
    assert str(top / "1.json") in one["detail"]
    (top / "1.json").unlink()
    code, out, _ = weights(top, b)
    assert code == 3
    assert "has digests of 0 of 48 elements only" in out or dim == 2


def test_pieces_of_a_distributed_checkpoint(tmp_path) -> None:
    state = one_by_one()
    whole: dict[str, object] = dict(fused(state))
    name = f"{TOP}gate_up_proj"
    boxes = [((0, 3), (0, 12), (0, 8)), ((3, 4), (0, 5), (0, 8)), ((3, 4), (5, 12), (0, 8))]
    whole[name] = Pieces.of(fused(state)[name], boxes)
    a = distributed(tmp_path / "dcp", whole)
    assert weights(a, safetensors(tmp_path / "b.safetensors", state))[0] == 0
    c = digests(tmp_path / "c.json", whole)
    assert weights(c, tmp_path / "b.safetensors")[0] == 0


def test_digests_of_a_process_that_holds_them_one_by_one(tmp_path) -> None:
    state = one_by_one()
    a = saved(tmp_path / "a.pt", fused(state))
    assert weights(a, digests(tmp_path / "b.json", state))[0] == 0
    name = f"{TOP}2.gate_proj.weight"
    c = digests(tmp_path / "c.json", {**state, name: flipped(state[name], (5, 7))})
    (one,) = record(a, c)["differences"]
    assert (one["name"], one["kind"], one["detail"]) == (name, "bits", "digests differ")


def together(path: Path, state: State) -> Path:
    """Digests that say nothing of single experts, as other writers may save them."""
    parts = {
        name: [Part(whole_box(t.shape), digest_tensor(t), str(path))] for name, t in state.items()
    }
    digest_files.write(path, parts, None, None)
    return path


def test_digests_of_all_experts_together(tmp_path) -> None:
    state = one_by_one()
    a = together(tmp_path / "a.json", fused(state))
    b = safetensors(tmp_path / "b.safetensors", state)
    for sides in ((a, b), (b, a)):
        code, out, _ = weights(*sides)
        assert code == 0
        assert "note: digests of several experts together, such as model.layers.0" in out
    name = f"{TOP}2.up_proj.weight"
    c = safetensors(tmp_path / "c.safetensors", {**state, name: flipped(state[name], (5, 3))})
    (one,) = record(a, c)["differences"]
    assert (one["name"], one["kind"]) == (f"{TOP}gate_up_proj", "bits")
    d = safetensors(tmp_path / "d.safetensors", {k: t for k, t in state.items() if k != name})
    found = record(a, d)
    assert [one["name"] for one in found["differences"]] == [name]
    assert "not all of them are to be compared: 7 parts are open" in found["open"][0]
    assert record(a, b, "--ignore", name)["verdict"] == "UNVERIFIED"
    e = safetensors(tmp_path / "e.safetensors", {**state, name: state[name].float()})
    found = record(a, e)
    assert [(one["name"], one["kind"]) for one in found["differences"]] == [(name, "dtype")]
    assert len(found["open"]) == 1
    f = safetensors(tmp_path / "f.safetensors", {**state, name: state[name][:5]})
    assert [(one["name"], one["kind"]) for one in record(a, f)["differences"]] == [(name, "shape")]


def test_replicas_that_differ_are_named(tmp_path) -> None:
    state = one_by_one()
    name = f"{TOP}2.up_proj.weight"
    top = tmp_path / "ranks"
    for rank, one in enumerate((state[name], flipped(state[name], (5, 3)))):
        digests(top / f"{rank}.json", fused({**state, name: one}), rank=rank, world=2)
    (found,) = record(top, safetensors(tmp_path / "b.safetensors", state))["differences"]
    assert found["name"] == f"{TOP}gate_up_proj"
    assert "replicas differ at [2:3,6:12,0:8]" in found["detail"]


def test_digests_of_fused_experts_say_which_differ(tmp_path) -> None:
    state = one_by_one()
    name = f"{TOP}2.up_proj.weight"
    a = digests(tmp_path / "a.json", fused(state))
    b = digests(tmp_path / "b.json", fused({**state, name: flipped(state[name], (5, 3))}))
    (one,) = record(a, b)["differences"]
    assert one["name"] == f"{TOP}gate_up_proj"
    assert one["detail"] == f"digests differ in 1 of 8 parts: [2:3,6:12,0:8] of {b}"
    whole = fused(state)
    assert verify.weights_digests(whole) == {key: digest_tensor(t) for key, t in whole.items()}


@pytest.mark.gpu
def test_a_gpu_takes_digests_of_experts_apart(tmp_path) -> None:
    state = one_by_one()
    there = {name: t.cuda() for name, t in fused(state).items()}
    a = digests(tmp_path / "a.json", there)
    assert a.read_text() == digests(tmp_path / "b.json", fused(state)).read_text()
    assert weights(a, safetensors(tmp_path / "b.safetensors", state))[0] == 0
