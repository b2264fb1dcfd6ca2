"""A mixture of transformers in memory against what save_pretrained makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers_models as models
from checkpoint_files import digests, distributed, flipped, record, safetensors, saved, weights

SAVED_AS = {"saved": "live.pt", "distributed": "dcp", "digests": "live.json"}
WRITERS = {"saved": saved, "distributed": distributed, "digests": digests}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    model = models.qwen3("eager")
    top = tmp_path_factory.mktemp("model") / "exported"
    model.save_pretrained(top)
    return top, {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("kind", list(SAVED_AS))
def test_a_live_model_is_what_it_saved(kind: str, exported, tmp_path) -> None:
    top, state = exported
    name = "model.layers.1.mlp.experts.gate_up_proj"
    if name not in state:
        pytest.skip("this version of transformers holds experts one by one")
    a = WRITERS[kind](tmp_path / SAVED_AS[kind], state)
    code, out, _ = weights(a, top)
    assert code == 0
    assert out.startswith("verdict=VERIFIED ")
    assert "experts are fused in A and one by one in B: 4 parameters of A and 48 of B" in out
    wrong = {**state, name: flipped(state[name], (5, models.WIDTH + 7, 3))}
    (tmp_path / "wrong").mkdir()
    b = WRITERS[kind](tmp_path / "wrong" / SAVED_AS[kind], wrong)
    (one,) = record(b, top)["differences"]
    assert one["name"] == "model.layers.1.mlp.experts.5.up_proj.weight"
    assert one["name_in_a"] == f"{name}[5,48:96]"


def test_moks_layer_holds_what_the_model_saved(exported, tmp_path) -> None:
    top, state = exported
    stem = "model.layers.1.mlp."
    gate_up = state.get(f"{stem}experts.gate_up_proj")
    if gate_up is None:
        pytest.skip("this version of transformers holds experts one by one")
    gate, up = gate_up.split(models.WIDTH, dim=1)
    layer = {"w_gate": gate, "w_up": up, "w_down": state[f"{stem}experts.down_proj"]}
    a = safetensors(tmp_path / "a.safetensors", layer)
    words = ("--rename", f"w_*={stem}w_*", "--ignore", "model.layers.0.*", "--ignore", "*norm*")
    more = ("--ignore", "*self_attn*", "--ignore", "*embed*", "--ignore", "lm_head*")
    router = ("--ignore", f"{stem}gate.weight")
    code, out, _ = weights(a, top, *words, *more, *router)
    assert code == 0
    assert out.startswith("verdict=VERIFIED 24 parameters, 0 differ\n")
    layer["w_gate"] = gate.flip(0)
    b = safetensors(tmp_path / "b.safetensors", layer)
    assert weights(b, top, *words, *more, *router)[0] == 1
