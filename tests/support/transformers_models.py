"""Tiny transformers models with random weights, and what is needed to compare and record them.

Importing this skips the tests of a file where transformers is missing. It asks the network for
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the package is imported
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY, HIDDEN, WIDTH, EXPERTS, SLOTS = 64, 64, 48, 8, 2
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": SLOTS,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def qwen3(
    experts: str = "mok", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any
) -> Qwen3MoeForCausalLM:
    """Attention and experts in both layers."""
    given = {**_COMMON, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS, **config}
    given["norm_topk_prob"] = True
    return _made(Qwen3MoeForCausalLM, Qwen3MoeConfig(**given), experts, dtype, seed)


def deepseek(
    experts: str = "mok", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any
) -> DeepseekV3ForCausalLM:
    """A dense layer, then one with a shared expert and grouped routing."""
    given = {
        **_COMMON,
        "num_key_value_heads": 4,
        "moe_intermediate_size": WIDTH,
        "n_routed_experts": EXPERTS,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
        **config,
    }
    return _made(DeepseekV3ForCausalLM, DeepseekV3Config(**given), experts, dtype, seed)


def gpt_oss(experts: str = "mok", dtype: torch.dtype = torch.bfloat16) -> GptOssForCausalLM:
    given = {**_COMMON, "num_local_experts": EXPERTS, "intermediate_size": WIDTH}
    return _made(GptOssForCausalLM, GptOssConfig(**given), experts, dtype, 0)


def _made(kind: Any, config: Any, experts: str, dtype: torch.dtype, seed: int) -> Any:
    """Parameters are drawn in float32 and rounded to bf16: models of any dtype have the same ones.
    Buffers (frequencies of positions) stay as they are, as when a model is loaded."""
    torch.manual_seed(seed)
    model = kind(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    model.set_experts_implementation(experts)
    return model


def tokens(rows: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


@contextmanager
def seen_by(module: nn.Module) -> Iterator[list[tuple[Tensor, ...]]]:
    """What a module is called with meanwhile, detached."""
    found: list[tuple[Tensor, ...]] = []
    handle = module.register_forward_pre_hook(
        lambda _, given: found.append(tuple(one.detach().clone() for one in given))
    )
    try:
        yield found
    finally:
        handle.remove()


def train(
    model: nn.Module,
    steps: int = 2,
    lr: float = 0.05,
    optimizer: torch.optim.Optimizer | None = None,
    each: Callable[[int], None] = lambda _: None,
    first: int = 0,
) -> torch.optim.Optimizer:
    """Steps of AdamW on batches that depend on the step's number alone; each: called before."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    for number in range(first, first + steps):
        each(number)
        batch = tokens(seed=100 + number)
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
    return optimizer
