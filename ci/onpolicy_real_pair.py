"""Makes a real pair of dumps: a tiny mixture of experts, sampled in bf16, scored in fp32.

A random Qwen3-MoE of transformers samples with a key-value cache in bf16, one token at a time, and
scores its tokens in one pass in fp32 with the same (bf16) weights. Both sides write through the
recorder, with the experts they chose. The files of tests/data/onpolicy were written by it:

    pip install transformers==5.24.0
    python ci/onpolicy_real_pair.py tests/data/onpolicy

Weights are drawn larger than training begins with, so that tokens are as certain, and routing as
decided, as a trained model's.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from verify.onpolicy.recorder import Recorder

SEED = 20261130
PROMPTS, RESPONSE = 12, 48
HEAD = 7.0  # how much larger the head's weights are
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.06,
    "max_position_embeddings": 256,
}


@dataclass
class Routes:
    """What the routers of a model chose, in the order of the calls: [tokens, k] for each layer."""

    experts: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    margins: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def watch(self, model: Any) -> None:
        """Hooks every router of the model."""
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.register_forward_hook(self._keep(number))

    def _keep(self, number: int) -> Any:
        def hook(router: Any, args: Any, output: Any) -> None:
            logits, _, chosen = output
            ranked = torch.softmax(logits.float(), dim=-1).sort(dim=-1, descending=True).values
            margin = ranked[:, chosen.shape[1] - 1] - ranked[:, chosen.shape[1]]
            self.experts.setdefault(number, []).append(chosen)
            self.margins.setdefault(number, []).append(margin)

        return hook

    def taken(self) -> dict[str, Any]:
        """experts [rows, layers, k] and margins [rows, layers] since the last call."""
        layers = sorted(self.experts)
        experts = torch.stack([torch.cat(self.experts[one]) for one in layers], dim=1)
        margins = torch.stack([torch.cat(self.margins[one]) for one in layers], dim=1)
        self.experts.clear()
        self.margins.clear()
        short = [[float(f"{value:.3g}") for value in row] for row in margins.tolist()]
        return {"experts": experts, "margins": short}


def models() -> tuple[Any, Any]:
    """The sampler in bf16 and the trainer in fp32, with the same weights."""
    torch.manual_seed(SEED)
    config = transformers.Qwen3MoeConfig(**SIZES, attn_implementation="eager")
    sampler = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        sampler.lm_head.weight.mul_(HEAD)
    sampler = sampler.to(torch.bfloat16).eval()
    trainer = transformers.Qwen3MoeForCausalLM(config).to(torch.float32).eval()
    trainer.load_state_dict(
        {name: value.float() for name, value in sampler.state_dict().items()}, strict=True
    )
    return sampler, trainer


def sample(model: Any, prompt: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """RESPONSE tokens after a prompt [1, P], at temperature 1, and their log-probabilities."""
    step, cache = prompt, None
    tokens, values = [], []
    for _ in range(RESPONSE):
        out = model(input_ids=step, cache=cache, use_cache=True)
        cache = out.cache
        logprobs = torch.log_softmax(out.logits[0, -1].float(), dim=-1)
        token = int(torch.multinomial(logprobs.exp(), 1))
        tokens.append(token)
        values.append(logprobs[token])
        step = torch.tensor([[token]])
    return tokens, torch.stack(values)


def score(model: Any, prompt: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the tokens in one pass over prompt and response."""
    ids = torch.cat([prompt, torch.tensor([tokens])], dim=1)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, prompt.shape[1] - 1 :]
    return torch.log_softmax(logits.float(), dim=-1)[torch.arange(len(tokens)), tokens]


def main() -> int:
    """Writes sampler.jsonl and trainer.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    sampler, trainer = models()
    routes = Routes(), Routes()
    recorders = []
    for side, model, kept in zip(("sampler", "trainer"), (sampler, trainer), routes, strict=True):
        kept.watch(model)
        path = folder / f"qwen3_moe_{side}.jsonl"
        path.unlink(missing_ok=True)
        settings = {"temperature": 1.0, "top_p": 1.0, "vocab_size": SIZES["vocab_size"]}
        recorders.append(Recorder(path, side, **settings))
    with torch.inference_mode():
        for number in range(PROMPTS):
            prompt = torch.randint(SIZES["vocab_size"], (1, 6 + number))
            tokens, sampled = sample(sampler, prompt)
            ids = prompt[0].tolist()
            recorders[0].add(number, tokens, sampled, prompt_ids=ids, **routes[0].taken())
            scored = score(trainer, prompt, tokens)
            recorders[1].add(number, tokens, scored, prompt_ids=ids, **routes[1].taken())
    return 0


if __name__ == "__main__":
    sys.exit(main())
