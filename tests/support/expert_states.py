"""A small mixture of experts as different software stores it."""

from __future__ import annotations

import torch
from checkpoint_files import State

EXPERTS, WIDTH, HIDDEN, LAYERS = 4, 6, 8, 2
LIVE = ("saved", "distributed", "digests")
PARAMETERS = 1 + LAYERS * EXPERTS * 3
TOP = "model.layers.1.mlp.experts."


def one_by_one(seed: int = 0) -> State:
    """As save_pretrained of transformers stores a mixture, with a norm."""
    draw = torch.Generator().manual_seed(seed)
    found: State = {"model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            stem = f"model.layers.{layer}.mlp.experts.{expert}."
            for name, sizes in (
                ("gate", (WIDTH, HIDDEN)),
                ("up", (WIDTH, HIDDEN)),
                ("down", (HIDDEN, WIDTH)),
            ):
                found[f"{stem}{name}_proj.weight"] = torch.randn(sizes, generator=draw).bfloat16()
    return found


def part(state: State, layer: int, name: str, expert: int) -> torch.Tensor:
    return state[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"]


def fused(state: State, *, gate_up: str = "gate_up_proj", down: str = "down_proj") -> State:
    """As a model of transformers 5 holds the same."""
    found: State = {"model.norm.weight": state["model.norm.weight"]}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.mlp.experts."
        halves = [
            torch.cat([part(state, layer, "gate", e), part(state, layer, "up", e)])
            for e in range(EXPERTS)
        ]
        found[stem + gate_up] = torch.stack(halves)
        found[stem + down] = torch.stack([part(state, layer, "down", e) for e in range(EXPERTS)])
    return found


def three(state: State) -> State:
    """As mok's layer holds them."""
    found: State = {"model.norm.weight": state["model.norm.weight"]}
    for layer in range(LAYERS):
        for name in ("gate", "up", "down"):
            found[f"model.layers.{layer}.mlp.w_{name}"] = torch.stack(
                [part(state, layer, name, e) for e in range(EXPERTS)]
            )
    return found


def mixtral(state: State) -> State:
    words = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp": "block_sparse_moe"}
    return {".".join(words.get(w, w) for w in name.split(".")): t for name, t in state.items()}


def vllm(state: State) -> State:
    return fused(state, gate_up="w13_weight", down="w2_weight")
