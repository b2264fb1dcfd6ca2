"""A tiny Qwen3-MoE whose experts' rows are added up in any order, as atomics do, so no two runs
agree: `verify trace diff` says where. `train.py FOLDER mok` has no such sum, and
`train.py FOLDER atomic_sum op` records every operation.
"""

import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

import mok.integrations.transformers  # noqa: F401  (experts_implementation="mok")
import verify

dice = torch.Generator()
dice.seed()  # other numbers in every process


def atomic_sum(self, x, experts, weights):
    slots = zip(experts.T, weights.T, strict=True)
    rows = [grouped_mm_experts_forward(self, x, e[:, None], w[:, None]) for e, w in slots]
    order = torch.rand(len(rows), len(x), generator=dice).argsort(0)  # of every token
    return sum(torch.stack(rows).gather(0, order[..., None].expand(-1, -1, x.shape[1])))


ExpertsInterface.register("atomic_sum", atomic_sum)

folder, experts, level = (*sys.argv[1:], *("", "atomic_sum", "module")[len(sys.argv) - 1 :])
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=4,
    experts_implementation=experts,
)
model = Qwen3MoeForCausalLM(config).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
text = torch.arange(4096) * 7 % 97  # something to learn

with verify.record(folder, model, level=level):
    for _ in range(10):
        batch = text[torch.randint(len(text) - 32, (4, 1)) + torch.arange(32)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("loss", loss.item())
