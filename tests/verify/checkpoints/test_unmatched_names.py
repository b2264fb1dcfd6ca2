"""Names that differ: renamed, prefixed, tied, exchanged, fused, ignored; each with a twin."""

from __future__ import annotations

import functools

import pytest
import torch
from checkpoint_files import KINDS, digests, flipped, model, record, safetensors, weights

from verify import weights_cli
from verify.checkpoints.comparing import compare_checkpoints
from verify.checkpoints.parameters import Checkpoint, Parameter

VERIFIED = "verdict=VERIFIED 7 parameters, 0 differ\n"


@pytest.mark.parametrize("kind", ["file", "digests"])
def test_a_renamed_parameter(kind, tmp_path) -> None:
    state = model()
    a = KINDS["saved"](tmp_path, state)
    renamed = {name.replace("layers.1.up", "layers.1.gate"): t for name, t in state.items()}
    b = KINDS[kind](tmp_path, renamed)
    code, out, _ = weights(a, b)
    assert code == 1
    assert out.startswith("verdict=MISMATCH 8 parameters, 2 differ: 1 only in A, 1 only in B\n")
    rule = "layers.1.up.weight=layers.1.gate.weight"
    assert "suggests: layers.1.gate.weight in B has the bits of layers.1.up.weight in A: " in out
    assert f"--rename '{rule}'" in out
    assert weights(a, b, "--rename", rule)[:2] == (
        0,
        VERIFIED + out.split("\n\n")[0].split("\n", 1)[1] + "\n",
    )
    assert weights(a, b, "--rename", "layers.1.u*.weight=layers.1.g*.weight")[0] == 1


def test_a_prefix_of_all_names(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", {f"model.{name}": t for name, t in state.items()})
    b = safetensors(tmp_path / "b.safetensors", state)
    code, out, _ = weights(a, b)
    assert code == 3
    assert out.startswith(
        "verdict=UNVERIFIED 14 parameters, 14 differ: 7 only in A, 7 only in B; "
        "nothing was compared\n"
    )
    assert "suggests: names differ by a prefix: --rename 'model.*=*'\n" in out
    code, out, _ = weights(a, b, "--rename", "model.*=*")
    assert (code, out.splitlines(True)[0]) == (0, VERIFIED)
    assert "suggests: names differ by a prefix: --rename '*=model.*'\n" in weights(b, a)[1]
    assert weights(b, a, "--rename", "*=model.*")[0] == 0


def test_a_difference_behind_a_rename_has_both_names(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", {f"model.{name}": t for name, t in state.items()})
    state["embed.weight"] = flipped(state["embed.weight"], (0, 0), 15)
    b = safetensors(tmp_path / "b.safetensors", state)
    out = weights(a, b, "--rename", "model.*=*")[1]
    assert "model.embed.weight = embed.weight  bits" in out
    found = record(a, b, "--rename", "model.*=*")["differences"]
    assert [(one["name_in_a"], one["name"]) for one in found] == [
        ("model.embed.weight", "embed.weight")
    ]


def test_tied_weights_that_one_side_stores_once(tmp_path) -> None:
    state = model()
    tied = {**state, "head.weight": state["embed.weight"]}
    a = digests(tmp_path / "a.json", tied)
    b = safetensors(tmp_path / "b.safetensors", state)
    code, out, _ = weights(a, b)
    assert code == 1
    assert "1 differ: 1 only in A" in out
    assert "suggests: head.weight has the bits of embed.weight in A: tied" in out
    code, out, _ = weights(a, b, "--rename", "head.weight=embed.weight")
    assert (code, out.splitlines(True)[0]) == (0, VERIFIED)
    assert (
        "note: A: embed.weight and head.weight have the same bits and are embed.weight in B" in out
    )
    tied["head.weight"] = flipped(state["embed.weight"], (15, 7))
    c = digests(tmp_path / "c.json", tied)
    assert "has the bits of" not in weights(c, b)[1]
    code, out, err = weights(c, b, "--rename", "head.weight=embed.weight")
    assert (code, out) == (2, "")
    assert "renames give 2 parameters of A with different bits the name 'embed.weight'" in err


def test_exchanged_parameters(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    up, down = state["layers.0.up.weight"], state["layers.0.down.weight"]
    swapped = {**state, "layers.0.up.weight": down, "layers.0.down.weight": up}
    for b in (
        safetensors(tmp_path / "b.safetensors", swapped),
        digests(tmp_path / "b.json", swapped),
    ):
        out = weights(a, b)[1]
        said = "layers.0.up.weight in B has the bits of layers.0.down.weight in A: exchanged?"
        assert said in out


def test_fused_parameters_are_named_and_not_compared(tmp_path) -> None:
    parts = {f"attn.{x}_proj.weight": torch.full((4, 8), ord(x) * 1.0) for x in "qkv"}
    norm = {"norm": torch.ones(8)}
    a = safetensors(tmp_path / "a.safetensors", parts | norm)
    fused = torch.cat(list(parts.values()))
    b = safetensors(tmp_path / "b.safetensors", {"attn.qkv_proj.weight": fused, **norm})
    out = weights(a, b)[1]
    assert "4 differ: 3 only in A, 1 only in B" in out
    assert (
        "attn.qkv_proj.weight float32[12,8] in B may be 3 parameters of A, fused: "
        "attn.k_proj.weight, attn.q_proj.weight, attn.v_proj.weight" in out
    )
    assert "in A may be 3 parameters of B, fused" in weights(b, a)[1]
    code, out, err = weights(a, b, "--rename", "attn.*_proj.weight=attn.*qkv_proj.weight")
    assert code == 1
    rules = [x for k in "qkv" for x in ("--rename", f"attn.{k}_proj.weight=attn.qkv_proj.weight")]
    code, out, err = weights(a, b, *rules)
    assert (code, out) == (2, "")
    assert "attn.q_proj.weight float32[4,8]" in err
    assert "fused parameters are not compared" in err
    experts = {f"mlp.blocks.{n}.up.weight": torch.full((4, 8), n * 1.0) for n in range(12)}
    c = safetensors(tmp_path / "c.safetensors", experts | norm)
    stacked = {"mlp.blocks.up": torch.stack(list(experts.values())), **norm}
    out = weights(c, safetensors(tmp_path / "d.safetensors", stacked))[1]
    assert "may be 12 parameters of A, fused: mlp.blocks.0.up.weight, mlp.blocks.1.up" in out
    stacked["mlp.blocks.up"] = torch.zeros(11, 4, 8)
    assert "A, fused" not in weights(c, safetensors(tmp_path / "d.safetensors", stacked))[1]


def test_what_is_ignored_is_said(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", state)
    b = digests(tmp_path / "b.json", {**state, "embed.weight": torch.zeros(16, 8).bfloat16()})
    assert weights(a, b)[0] == 1
    code, out, _ = weights(a, b, "--ignore", "embed.*", "--ignore", "optim.*")
    assert code == 0
    assert out.startswith("verdict=VERIFIED 6 parameters, 0 differ\n")
    assert "note: ignored: 1 parameter embed.weight\n" in out
    assert "note: ignore 'optim.*' matches no parameter\n" in out
    code, out, _ = weights(a, b, "--ignore", "*")
    assert code == 3
    assert "verdict=UNVERIFIED 0 parameters, 0 differ; nothing was compared\n" in out


def test_renames_of_the_command_line_come_before_those_of_a_file(tmp_path) -> None:
    state = model()
    a = safetensors(tmp_path / "a.safetensors", {f"model.{name}": t for name, t in state.items()})
    state["head"] = state.pop("embed.weight")
    b = safetensors(tmp_path / "b.safetensors", state)
    rules = tmp_path / "rules.txt"
    rules.write_text("# to the sampler's names\nmodel.*=*\nx=y\n")
    assert weights(a, b, "--rename-file", rules)[0] == 1
    words = ("--rename-file", rules, "--rename", "model.embed.weight=head")
    code, out, _ = weights(a, b, *words)
    assert code == 0
    assert "note: rename 'x' matches no parameter of A\n" in out
    code, _, err = weights(a, b, "--rename-file", tmp_path / "gone")
    assert code == 2
    assert "gone: no such file" in err


def test_help_has_examples_and_progress_is_paced(monkeypatch) -> None:
    code, out, _ = weights("--help")
    assert code == 0
    assert "  verify weights " in out.split("Examples:")[1]
    assert "Exit codes: 0 verified, 1 mismatch, 2 usage" in out
    now, said = [0.0], []
    monkeypatch.setattr(weights_cli.time, "monotonic", lambda: now[0])
    told = weights_cli._paced(said.append)
    for step in range(40):
        now[0] = step / 8
        told(str(step))
    assert said == ["8", "16", "24", "32"]


def test_hints_on_thousands_of_names_look_at_each_a_few_times(monkeypatch) -> None:
    forms = 0
    form = Parameter.form

    def counted(self: Parameter) -> str:
        nonlocal forms
        forms += 1
        return form(self)

    monkeypatch.setattr(Parameter, "form", counted)
    count = 1500
    sides = [
        {
            name: Parameter(name, "float32", (1,), functools.partial(torch.full, (1,), number))
            for number, name in enumerate(f"{word}.{i}.w" for i in range(count))
        }
        for word in "ab"
    ]
    left, right = (Checkpoint(word, "", side) for word, side in zip("ab", sides, strict=True))
    found = compare_checkpoints(left, right)
    assert len(found.findings) == 2 * count
    assert found.hints[0] == "b.0.w in B has the bits of a.0.w in A: --rename 'a.0.w=b.0.w'"
    assert forms < 20 * count
