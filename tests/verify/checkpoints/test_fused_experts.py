"""Experts that one side stores fused and the other one by one: each fault, and its twin."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from checkpoint_files import KINDS, State, digests, flipped, record, safetensors, saved, weights
from expert_states import (
    HIDDEN,
    LIVE,
    PARAMETERS,
    TOP,
    WIDTH,
    fused,
    mixtral,
    one_by_one,
    three,
    vllm,
)

from verify.checkpoints.comparing import compare_checkpoints
from verify.checkpoints.parameters import Checkpoint, Parameter


@pytest.mark.parametrize("kind", LIVE)
@pytest.mark.parametrize("form", [fused, three, vllm])
def test_equal_experts_in_any_form(form: Callable[[State], State], kind: str, tmp_path) -> None:
    state = one_by_one()
    a = KINDS[kind](tmp_path, form(state))
    b = safetensors(tmp_path / "b.safetensors", state)
    held = len(form(state)) - 1
    for sides in ((a, b), (b, a)):
        code, out, _ = weights(*sides)
        assert code == 0
        assert out.startswith(f"verdict=VERIFIED {PARAMETERS} parameters, 0 differ\n")
        counts = (held, PARAMETERS - 1) if sides[0] == a else (PARAMETERS - 1, held)
        words = ("fused", "one by one") if sides[0] == a else ("one by one", "fused")
        assert f"note: experts are {words[0]} in A and {words[1]} in B: {counts[0]} param" in out
        assert f" of A and {counts[1]} of B are compared by expert and part, such as " in out


@pytest.mark.parametrize("kind", LIVE)
def test_one_bit_of_one_expert(kind: str, tmp_path) -> None:
    state = one_by_one()
    b = safetensors(tmp_path / "b.safetensors", state)
    for name, place in (("gate", "gate_up_proj[2,0:6]"), ("up", "gate_up_proj[2,6:12]"),
                        ("down", "down_proj[2]")):  # fmt: skip
        wrong = f"{TOP}2.{name}_proj.weight"
        top = tmp_path / name
        top.mkdir()
        a = KINDS[kind](top, fused({**state, wrong: flipped(state[wrong], (5, 3))}))
        found = record(a, b)
        assert found["counts"]["bits"] == len(found["differences"]) == 1
        assert found["parameters"] == found["compared"] == PARAMETERS
        assert found["differences"][0]["name"] == wrong
        assert found["differences"][0]["name_in_a"] == f"{TOP}{place}"
        detail = found["differences"][0]["detail"]
        if kind == "digests":
            assert "digests differ in 1 of 1 parts: [2:3," in detail
        else:
            assert detail.startswith("1 of 48 elements differ")
        back = record(b, a)["differences"]
        assert [(one["name"], one["name_in_a"]) for one in back] == [(f"{TOP}{place}", wrong)]


@pytest.mark.parametrize("kind", LIVE)
def test_two_experts_exchanged(kind: str, tmp_path) -> None:
    state = one_by_one()
    wrong = dict(state)
    for name in ("gate", "up", "down"):
        one, two = (f"{TOP}{e}.{name}_proj.weight" for e in (1, 3))
        wrong[one], wrong[two] = state[two], state[one]
    a = KINDS[kind](tmp_path, fused(state))
    b = safetensors(tmp_path / "b.safetensors", wrong)
    code, out, _ = weights(a, b)
    assert code == 1
    assert f"{PARAMETERS} parameters, 6 differ: 6 bits\n" in out
    assert (
        f"suggests: {TOP}1.up_proj.weight in B has the bits of {TOP}gate_up_proj[3,6:12] in A: "
        "exchanged?" in out
    )
    assert out.count("exchanged?") == 6
    there = weights(b, a)[1]
    assert f"{TOP}gate_up_proj[1,6:12] in B has the bits of {TOP}3.up_proj.weight in A" in there
    different = {**state, f"{TOP}1.up_proj.weight": state[f"{TOP}1.up_proj.weight"] + 1}
    c = safetensors(tmp_path / "c.safetensors", different)
    assert "exchanged?" not in weights(a, c)[1]


@pytest.mark.parametrize("kind", LIVE)
def test_gate_and_up_exchanged_in_all_experts(kind: str, tmp_path) -> None:
    state = one_by_one()
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    wrong = {".".join(other.get(w, w) for w in name.split(".")): t for name, t in state.items()}
    a = KINDS[kind](tmp_path, fused(wrong))
    b = safetensors(tmp_path / "b.safetensors", state)
    code, out, _ = weights(a, b)
    assert code == 1
    assert "16 differ: 16 bits\n" in out
    stem = TOP.replace("1", "0")
    said = f"{stem}0.gate_proj.weight in B has the bits of {stem}gate_up_proj[0,6:12] in A: exch"
    assert said in out


@pytest.mark.parametrize("kind", LIVE)
def test_an_expert_is_missing_or_too_many(kind: str, tmp_path) -> None:
    state = one_by_one()
    a = KINDS[kind](tmp_path, fused(state))
    lost = {name: t for name, t in state.items() if not name.startswith(f"{TOP}3.")}
    b = safetensors(tmp_path / "b.safetensors", lost)
    found = record(a, b)
    assert found["counts"] == {
        "bits": 0, "dtype": 0, "shape": 0, "only in A": 3, "only in B": 0
    }  # fmt: skip
    assert [(one["name"], one["name_in_a"]) for one in found["differences"]] == [
        (f"{TOP}3.down_proj.weight", f"{TOP}down_proj[3]"),
        (f"{TOP}3.gate_proj.weight", f"{TOP}gate_up_proj[3,0:6]"),
        (f"{TOP}3.up_proj.weight", f"{TOP}gate_up_proj[3,6:12]"),
    ]
    names = {one["name"] for one in record(b, a)["differences"]}
    assert names == {
        f"{TOP}down_proj[3]",
        f"{TOP}gate_up_proj[3,0:6]",
        f"{TOP}gate_up_proj[3,6:12]",
    }
    more = {**state, f"{TOP}4.up_proj.weight": torch.ones(WIDTH, HIDDEN).bfloat16()}
    c = safetensors(tmp_path / "c.safetensors", more)
    found = record(a, c)["differences"]
    assert [(one["name"], one["kind"]) for one in found] == [
        (f"{TOP}4.up_proj.weight", "only in B")
    ]
    half = {name: t for name, t in state.items() if name != f"{TOP}0.up_proj.weight"}
    assert [one["name"] for one in record(a, safetensors(tmp_path / "d.safetensors", half))[
        "differences"
    ]] == [f"{TOP}0.up_proj.weight"]  # fmt: skip


@pytest.mark.parametrize("kind", LIVE)
def test_another_dtype_or_size_of_one_expert(kind: str, tmp_path) -> None:
    state = one_by_one()
    a = KINDS[kind](tmp_path, fused(state))
    name = f"{TOP}2.up_proj.weight"
    b = safetensors(tmp_path / "b.safetensors", {**state, name: state[name].float()})
    (one,) = record(a, b)["differences"]
    assert (one["kind"], one["name"], one["name_in_a"]) == (
        "dtype",
        name,
        f"{TOP}gate_up_proj[2,6:12]",
    )
    assert (one["a"], one["b"]) == ("bfloat16[6,8]", "float32[6,8]")
    if kind != "digests":
        assert one["detail"] == "equal after a cast of A to float32, which loses nothing"
    c = safetensors(tmp_path / "c.safetensors", {**state, name: state[name][:5]})
    (one,) = record(a, c)["differences"]
    assert (one["kind"], one["name"], one["b"]) == ("shape", name, "bfloat16[5,8]")


def test_other_names_of_the_layer_are_renamed(tmp_path) -> None:
    state = one_by_one()
    a = saved(tmp_path / "a.pt", fused(state))
    b = safetensors(tmp_path / "b.safetensors", mixtral(state))
    rule = "*.mlp.*=*.block_sparse_moe.*"
    out = weights(a, b)[1]
    assert f"suggests: layers of experts have another word in their names: --rename '{rule}'" in out
    assert weights(a, b, "--rename", rule)[0] == 0
    name = "model.layers.0.block_sparse_moe.experts.3.w3.weight"
    wrong = mixtral(state)
    wrong[name] = flipped(wrong[name], (0, 0))
    c = safetensors(tmp_path / "c.safetensors", wrong)
    (one,) = record(a, c, "--rename", rule)["differences"]
    assert one["name"] == name
    assert one["name_in_a"] == "model.layers.0.mlp.experts.gate_up_proj[3,6:12]"
    wrong = {name.replace("layers.1.block_sparse_moe", "layers.1.moe"): t for name, t in
             mixtral(state).items()}  # fmt: skip
    d = safetensors(tmp_path / "d.safetensors", wrong)
    assert "another word" not in weights(a, d)[1]


@pytest.mark.parametrize("kind", LIVE)
def test_both_sides_stack_experts_in_other_ways(kind: str, tmp_path) -> None:
    state = one_by_one()
    a = KINDS[kind](tmp_path, three(state))
    b = safetensors(tmp_path / "b.safetensors", fused(state))
    code, out, _ = weights(a, b)
    assert code == 0
    assert "experts are fused in A and fused otherwise in B: 6 parameters of A and 4 of B" in out
    name = f"{TOP}3.up_proj.weight"
    wrong = fused({**state, name: flipped(state[name], (0, 0))})
    (one,) = record(a, safetensors(tmp_path / "c.safetensors", wrong))["differences"]
    assert one["name"] == f"{TOP}gate_up_proj[3,6:12]"
    assert one["name_in_a"] == "model.layers.1.mlp.w_up[3]"


def test_what_is_not_compared_is_said(tmp_path) -> None:
    state = one_by_one()
    a = saved(tmp_path / "a.pt", fused(state))
    b = safetensors(tmp_path / "b.safetensors", state)
    code, out, _ = weights(a, b, "--no-fuse")
    assert code == 1
    assert "28 differ: 4 only in A, 24 only in B\n" in out
    said = f"suggests: A holds experts fused ({TOP}gate_up_proj), B one by one ({TOP}0.gate_pro"
    said = said.replace("layers.1", "layers.0")
    assert out.count("suggests: ") == out.count(said) == 1
    assert "without --no-fuse, by expert and part" in out
    c = digests(tmp_path / "c.json", fused(state))
    d = digests(tmp_path / "d.json", state)
    code, out, _ = weights(c, d)
    assert code == 1
    assert said in out
    assert "give the tensors of one side, or digests of both in one form\n" in out
    turned = {k: t.transpose(1, 2) if t.dim() == 3 else t for k, t in fused(state).items()}
    out = weights(safetensors(tmp_path / "e.safetensors", turned), b)[1]
    assert said in out
    assert "not compared, since an expert's gate would be [4, 12] in A and is [6, 8] in B" in out
    both = {**fused(state), **{k: t for k, t in three(state).items() if k.endswith("up")}}
    out = weights(safetensors(tmp_path / "f.safetensors", both), b)[1]
    assert "are one part in A: leave one out\n" in out


def test_ignored_experts_are_left_out_on_both_sides(tmp_path) -> None:
    state = one_by_one()
    name = f"{TOP}2.up_proj.weight"
    a = saved(tmp_path / "a.pt", fused({**state, name: flipped(state[name], (5, 3))}))
    b = safetensors(tmp_path / "b.safetensors", state)
    assert weights(a, b)[0] == 1
    for sides in ((a, b), (b, a)):
        code, out, _ = weights(*sides, "--ignore", name)
        assert code == 0
        assert f"verdict=VERIFIED {PARAMETERS - 1} parameters, 0 differ\n" in out
        assert f"note: ignored: 1 parameter {name}\n" in out


def test_fused_experts_of_any_name_have_one_hint(tmp_path) -> None:
    experts = {f"mlp.experts.{n}.up.weight": torch.full((4, 8), n * 1.0) for n in range(12)}
    a = safetensors(tmp_path / "a.safetensors", experts)
    stacked = {"mlp.experts.up": torch.stack(list(experts.values()))}
    b = safetensors(tmp_path / "b.safetensors", stacked)
    assert weights(a, b)[0] == 0
    out = weights(a, b, "--no-fuse")[1]
    assert out.count("suggests: ") == 1
    assert "A holds experts one by one (mlp.experts.0.up.weight), B fused (mlp.experts.up): " in out
    stacked["mlp.experts.up"][11, 3, 7] = 0
    c = safetensors(tmp_path / "c.safetensors", stacked)
    assert "mlp.experts.11.up.weight = mlp.experts.up[11]  bits" in weights(a, c)[1]


def test_a_fused_tensor_is_read_once_and_a_layer_stays_in_memory() -> None:
    loads: list[str] = []

    def load(name: str, tensor: torch.Tensor) -> torch.Tensor:
        loads.append(name)
        return tensor.clone()

    def checkpoint(state: State) -> Checkpoint:
        return Checkpoint("", "", {
            name: Parameter(name, str(t.dtype)[6:], t.shape, functools.partial(load, name, t))
            for name, t in state.items()
        })  # fmt: skip

    state = one_by_one()
    for form in (fused, three):
        loads.clear()
        found = compare_checkpoints(checkpoint(form(state)), checkpoint(state))
        assert found.verdict == "VERIFIED"
        assert sorted(loads) == sorted([*form(state), *state])


def test_other_names_alone_are_no_fusing(tmp_path) -> None:
    state = one_by_one()
    a = safetensors(tmp_path / "a.safetensors", state)
    words = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    other = {".".join(words.get(w, w) for w in name.split(".")): t for name, t in state.items()}
    b = safetensors(tmp_path / "b.safetensors", other)
    code, out, _ = weights(a, b)
    assert code == 1
    assert "48 differ: 24 only in A, 24 only in B\n" in out
    assert "by expert and part" not in out
    rules = [x for old, new in words.items() for x in ("--rename", f"*.{old}.*=*.{new}.*")]
    assert weights(a, b, *rules)[0] == 0


def test_a_first_word_is_no_word_of_a_rename(tmp_path) -> None:
    sides = []
    for word, state in (("x", fused(one_by_one())), ("y", one_by_one())):
        layer = {name: t for name, t in state.items() if ".layers.0." in name}
        named = {name.replace("model.layers.0", word): t for name, t in layer.items()}
        sides.append(safetensors(tmp_path / f"{word}.safetensors", named))
    assert "another word" not in weights(*sides)[1]
    assert weights(*sides, "--rename", "x.*=y.*")[0] == 0
