"""Planted faults of weights that were handed on, each with a twin that is silent."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from checkpoint_files import KINDS, digests, flipped, model, record, safetensors, shards, weights

from verify.checkpoints import tensor_pairs

VERIFIED = "verdict=VERIFIED 7 parameters, 0 differ\n"
TENSORS = [kind for kind in KINDS if kind != "digests"]


@pytest.mark.parametrize(("a", "b"), [*itertools.permutations(KINDS, 2), ("digests", "digests")])
def test_every_kind_with_every_kind(a, b, tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    state = model()
    left, right = KINDS[a](tmp_path / "a", state), KINDS[b](tmp_path / "b", state)
    code, out, _ = weights(left, right)
    assert (code, out.splitlines(True)[0]) == (0, VERIFIED)
    (tmp_path / "c").mkdir()
    state["layers.1.up.weight"] = flipped(state["layers.1.up.weight"], (3, 5))
    code, out, _ = weights(left, KINDS[b](tmp_path / "c", state))
    assert code == 1
    assert out.startswith("verdict=MISMATCH 7 parameters, 1 differ: 1 bits\n")
    assert "layers.1.up.weight  bits       bfloat16[8,8]  bfloat16[8,8]" in out
    if "digests" in (a, b):
        assert "layers.1.up.weight: digests differ\n" in out
    else:
        assert "layers.1.up.weight: 1 of 64 elements differ (1.56 %), at most 1 ulp\n" in out
        assert "| first: layers.1.up.weight[3,5] " in out


def test_a_stale_parameter(tmp_path) -> None:
    before, now = model(0), model(1)
    a = safetensors(tmp_path / "a.safetensors", now)
    stale = {**now, "layers.0.down.weight": before["layers.0.down.weight"]}
    code, out, _ = weights(a, digests(tmp_path / "b.json", stale))
    assert code == 1
    assert "1 differ: 1 bits" in out
    assert "layers.0.down.weight: digests differ" in out
    assert weights(a, digests(tmp_path / "c.json", now))[0] == 0


@pytest.mark.parametrize("kind", TENSORS)
def test_another_dtype_is_told_with_what_the_cast_costs(kind, tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    norm = state["layers.0.norm.weight"]
    right = {**state, "layers.0.norm.weight": norm.bfloat16()}
    code, out, _ = weights(a, KINDS[kind](tmp_path, right))
    assert code == 1
    assert "1 differ: 1 dtype" in out
    assert "float32[8]  bfloat16[8]" in out
    changed = int((norm.bfloat16().float() != norm).sum())
    assert f"equal after a cast of A to bfloat16, which changes {changed} of 8 values" in out


def test_another_dtype_whose_values_differ_too(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    wide = state["embed.weight"].float()
    b = safetensors(tmp_path / "b.safetensors", {**state, "embed.weight": wide})
    assert "equal after a cast of A to float32, which loses nothing" in weights(a, b)[1]
    wide[3, 4] += 1
    c = safetensors(tmp_path / "c.safetensors", {**state, "embed.weight": wide})
    out = weights(a, c)[1]
    assert "not equal after a cast of A to float32 either: 1 of 128 elements differ" in out
    assert "| first: embed.weight[3,4] " in out


def test_another_dtype_from_digests_alone(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    b = digests(tmp_path / "b.json", {**state, "embed.weight": state["embed.weight"].half()})
    code, out, _ = weights(a, b)
    assert code == 1
    assert "1 differ: 1 dtype" in out
    assert "cannot be told from digests: give the tensors" in out


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(index, tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    top = shards(tmp_path / "b", state, count=3, index=index)
    assert weights(a, top)[0] == 0
    (top / "model-00002-of-00003.safetensors").unlink()
    code, out, err = weights(a, top)
    assert (code, out) == (2, "")
    assert f"{top}: lacks model-00002-of-00003.safetensors: the checkpoint is not complete" in err


@pytest.mark.parametrize("shape", [(8, 8), (16, 8)])
def test_a_transposed_parameter(shape, tmp_path) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    a = safetensors(tmp_path / "a.safetensors", {"w": weight})
    b = safetensors(tmp_path / "b.safetensors", {"w": weight.t()})
    code, out, _ = weights(a, b)
    assert code == 1
    assert f"1 differ: 1 {'bits' if shape == (8, 8) else 'shape'}\n" in out
    assert "B is A transposed" in out
    noise = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(4))
    c = safetensors(tmp_path / "c.safetensors", {"w": noise})
    assert "B is A transposed" not in weights(a, c)[1]
    torch.save({"w": weight.t().contiguous().t()}, tmp_path / "same.pt")  # strides are no bits
    assert weights(a, tmp_path / "same.pt")[0] == 0


def test_a_reshaped_parameter(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    shaped = {**state, "embed.weight": state["embed.weight"].reshape(8, 16)}
    for b in (
        safetensors(tmp_path / "b.safetensors", shaped),
        digests(tmp_path / "b.json", shaped),
    ):
        out = weights(a, b)[1]
        assert "1 differ: 1 shape" in out
        assert "the same elements in the same order: reshaped" in out
    other = {**state, "embed.weight": torch.zeros(8, 16).bfloat16()}
    assert ": reshaped" not in weights(a, digests(tmp_path / "c.json", other))[1]


def test_two_files_that_hold_one_name(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    top = tmp_path / "b"
    top.mkdir()
    names = list(state)
    safetensors(top / "one.safetensors", {name: state[name] for name in names[:4]})
    safetensors(top / "two.safetensors", {name: state[name] for name in names[4:]})
    assert weights(a, top)[0] == 0
    safetensors(top / "two.safetensors", {name: state[name] for name in names[3:]})
    code, out, err = weights(a, top)
    assert (code, out) == (2, "")
    assert f"{top / 'two.safetensors'}: holds tensor {names[3]!r}" in err
    assert f"as {top / 'one.safetensors'} does" in err


def test_the_payload_of_a_nan(tmp_path) -> None:
    weight = torch.full((4,), float("nan"))
    a = safetensors(tmp_path / "a.safetensors", {"w": weight})
    assert weights(a, safetensors(tmp_path / "b.safetensors", {"w": weight}))[0] == 0
    c = safetensors(tmp_path / "c.safetensors", {"w": flipped(weight, (2,))})
    code, out, _ = weights(a, c)
    assert code == 1
    assert "1 x NaN payload (both NaN)" in out
    assert weights(a, digests(tmp_path / "c.json", {"w": flipped(weight, (2,))}))[0] == 1


def test_empty_tensors_alone_are_nothing(tmp_path) -> None:
    empty = torch.empty(0, 4)
    a = safetensors(tmp_path / "a.safetensors", {"w": empty})
    for b in (
        safetensors(tmp_path / "b.safetensors", {"w": empty}),
        digests(tmp_path / "b.json", {"w": empty}),
    ):
        code, out, _ = weights(a, b)
        assert code == 3
        assert out.startswith("verdict=UNVERIFIED 1 parameter, 0 differ; nothing was compared\n")
    other = digests(tmp_path / "c.json", {"w": torch.empty(0, 5)})
    assert weights(a, other)[0] == 1
    with_more = {"w": empty, "v": torch.ones(2)}
    a = safetensors(tmp_path / "a.safetensors", with_more)
    assert weights(a, digests(tmp_path / "b.json", with_more))[0] == 0
    b = digests(tmp_path / "b.json", {**with_more, "w": torch.empty(0, 5)})
    assert "1 differ: 1 shape" in weights(a, b)[1]


def test_at_most_twenty_are_shown_and_all_are_counted(tmp_path) -> None:
    some = {f"w.{number}": torch.ones(2) for number in range(33)}
    a = safetensors(tmp_path / "a.safetensors", some)
    b = safetensors(tmp_path / "b.safetensors", {name: t + 1 for name, t in some.items()})
    out = weights(a, b)[1]
    assert out.startswith("verdict=MISMATCH 33 parameters, 33 differ: 33 bits\n")
    assert "\nw.19 " in out
    assert "\nw.20 " not in out
    assert "and 13 more\n" in out
    found = record(a, b)
    assert [one["name"] for one in found["differences"]] == [f"w.{n}" for n in range(33)]
    assert found["counts"] == {"bits": 33, "dtype": 0, "shape": 0, "only in A": 0, "only in B": 0}


def test_json_and_hostile_names(tmp_path) -> None:
    name = "\n::error::x\x1b[2J|##[group]"
    a = safetensors(tmp_path / "a.safetensors", {name: torch.zeros(2)})
    b = safetensors(tmp_path / "b.safetensors", {name: torch.ones(2)})
    code, out, _ = weights(a, b)
    assert code == 1
    assert not any(line.startswith("::") for line in out.splitlines())
    assert "\x1b" not in out
    assert "##[" not in out
    found = record(a, b)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["verdict"], found["exit_code"], found["version"]) == ("MISMATCH", 1, 1)
    assert found["differences"][0]["name"] == name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64, torch.int8])
def test_large_tensors_are_told_as_small_ones_are(dtype, monkeypatch) -> None:
    """By blocks, whose borders are anywhere, against the comparison of all at once."""
    draw = torch.Generator().manual_seed(5)
    a = (torch.randn(7, 31, generator=draw) * 9).to(dtype)
    for places in ([3], [0, 216], [100, 101, 150, 16, 15], range(200)):
        b = a.clone()
        for place in places:
            b.view(-1)[place] = 3 if dtype == torch.int8 else float("nan")
        monkeypatch.setattr(tensor_pairs, "_EXPLAINED", 1 << 22)
        line, more = tensor_pairs.difference("w", a, b)
        monkeypatch.setattr(tensor_pairs, "_EXPLAINED", 0)
        for block, measured in ((250, 250), (16, 250), (16, 4)):
            monkeypatch.setattr(tensor_pairs, "_BLOCK", block)
            monkeypatch.setattr(tensor_pairs, "_MEASURED", measured)
            by_blocks, short = tensor_pairs.difference("w", a, b)
            whole = [one for one in more if not one.startswith("suggests: ")]
            if len(places) <= measured:
                assert (by_blocks, list(short)) == (line, whole)
            else:
                assert line.startswith(by_blocks)
                assert list(short) == whole[:1]
