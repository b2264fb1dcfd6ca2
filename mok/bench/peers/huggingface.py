"""transformers' grouped_mm experts, called as a model calls them, without a model around them.

`transformers.integrations.moe.grouped_mm_experts_forward` takes its weights from the module that it
is a method of; here that is a bare object with the same attributes.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from mok.bench.peers.adapting import Loaded, Peer


def load() -> Loaded:
    """Imports transformers. Raises ImportError when its internals have moved."""
    from transformers.integrations import moe

    forward, apply_gate = moe.grouped_mm_experts_forward, moe._default_apply_gate

    def layer(
        x: Tensor, gate_up: Tensor, down: Tensor, topk_experts: Tensor, router: Tensor
    ) -> Tensor:
        experts = SimpleNamespace(
            num_experts=gate_up.shape[0],
            has_gate=True,
            has_bias=False,
            has_post_expert_norm=False,
            is_transposed=False,
            _is_expert_parallel=False,
            gate_up_proj=gate_up,
            down_proj=down,
            act_fn=torch.nn.functional.silu,
        )
        experts._apply_gate = partial(apply_gate, experts)
        out: Tensor = forward(experts, x, topk_experts, router)
        return out

    return Loaded(layer)


PEER = Peer(
    name="huggingface",
    distribution="transformers",
    modules=("transformers",),
    install="pip install transformers==5.17.0",
    load=load,
    devices=("cpu", "cuda"),
    least=(5,),
)
