"""Writes the dumps beside it with the producers' own code; README.md has the versions.

Run it once for each with the producer's name: slime and miles with PYTHONPATH at a checkout of
theirs, trl where it is installed. The values are made up here, the serialising is theirs. Needs
what they import: torch, ray, httpx, polars, pandas, pyarrow and more.
"""

import base64
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "support"))

from onpolicy_written import LAYERS, TOP_K, experts_of, logprobs_of, tokens_of  # noqa: E402


def _whole(index: int) -> list[int]:
    prompt, response = tokens_of(index)
    return prompt + response


def slime() -> None:
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.observability.train_data_utils import _build_dump_payload
    from slime.utils.types import Sample

    args = SimpleNamespace(num_layers=LAYERS, moe_router_topk=TOP_K)
    samples = []
    for index in range(3):
        prompt, response = tokens_of(index)
        sample = Sample(group_index=index // 2, index=index, prompt="text", tokens=list(prompt))
        meta = {
            "finish_reason": {"type": ("stop", "length", "abort")[index]},
            "weight_version": "5",
            "prompt_tokens": len(prompt),
            "cached_tokens": index,
        }
        if index == 0:  # the engine's own payload; the others are set as arrays
            payload = experts_of(index).tobytes()
            meta["routed_experts"] = base64.b64encode(payload).decode()
        sample.append_response_tokens(
            args, tokens=response, log_probs=logprobs_of(index, 0), text=f"r{index}", meta_info=meta
        )
        if index == 1:
            sample.rollout_routed_experts = experts_of(index)  # numpy, as older versions kept it
        samples.append(sample)
    samples[1].loss_mask = [1, 1, 0, 1]
    samples[1].rollout_log_probs = np.array(logprobs_of(1, 0), dtype=np.float32)
    save_debug_rollout_data(
        str(HERE / "slime_rollout_{rollout_id}.pt"), samples, rollout_id=7, evaluation=False
    )
    shards = []
    for rank, own in enumerate(([2, 0], [1])):
        data = {
            "partition": own,
            "sample_indices": own,
            "tokens": [torch.tensor(_whole(at)) for at in own],
            "response_lengths": [4 for _ in own],
            "total_lengths": [len(_whole(at)) for at in own],
            "loss_masks": [torch.tensor(samples[at].loss_mask, dtype=torch.int) for at in own],
            "rollout_log_probs": [torch.tensor(logprobs_of(at, 0)) for at in own],
            "log_probs": [torch.tensor(logprobs_of(at, 1)) for at in own],
            "rewards": [1.0 for _ in own],
            "truncated": [int(at == 1) for at in own],
            "micro_batch_indices": [own],
            "num_microbatches": [1],
            "global_batch_sizes": [3],
            "raw_reward": [1.0, 0.0, 1.0],
        }
        shards.append({"rank": rank, "data_parallel_rank": rank, "rollout_data": data})
    payload = _build_dump_payload(shards, rollout_id=7, writer_rank=0)
    torch.save(payload, HERE / "slime_train_7.pt")


def miles() -> None:
    from miles.backends.training_utils.debug_dump import maybe_dump_policy_loss_debug
    from miles.ray.rollout.debug_data import save_dashboard_columns, save_debug_rollout_data
    from miles.utils.debug_utils.run_megatron.worker.output import _compute_output_info
    from miles.utils.train_dump_utils import save_debug_train_data_for_rank
    from miles.utils.types import Sample

    samples = []
    for index in range(3):
        prompt, response = tokens_of(index)
        samples.append(
            Sample(
                index=index,
                tokens=prompt + response,
                response_length=4,
                loss_mask=[1, 1, 0, 1] if index == 1 else [1] * 4,
                rollout_log_probs=logprobs_of(index, 0) if index != 2 else None,
                weight_versions=["5"],
                rollout_routed_experts=experts_of(index),
                status=Sample.Status.COMPLETED,
            )
        )
    save_dashboard_columns(samples, HERE / "miles_rollout_7.parquet")
    args = Namespace(
        save_debug_trajectory_data=None, save_debug_rollout_data=str(HERE / "x/{rollout_id}.pt")
    )
    save_debug_rollout_data(args, samples, 7, evaluation=False)
    (HERE / "x/7.pt").rename(HERE / "miles_rollout_data_7.pt")
    (HERE / "x").rmdir()
    for path in (HERE / "dashboard_columns").iterdir():
        path.unlink()
    (HERE / "dashboard_columns").rmdir()
    train = [torch.tensor(logprobs_of(index, 1)) for index in range(2)]
    rollout = [torch.tensor(logprobs_of(index, 0)) for index in range(2)]
    maybe_dump_policy_loss_debug(
        args=Namespace(dump_details=str(HERE)),
        batch={"total_lengths": [7, 8], "response_lengths": [4, 4]},
        train_log_probs=train,
        old_log_probs=train,
        rollout_log_probs=rollout,
        advantages=[torch.ones(4)] * 2,
        local_loss_masks=[torch.ones(4), torch.tensor([1, 1, 0, 1])],
        ppo_kl=torch.tensor(0.0),
        pg_loss=torch.tensor(0.5),
    )
    (HERE / "policy_loss_debug/rank_0_call_0.pt").rename(HERE / "miles_rank_0_call_0.pt")
    (HERE / "policy_loss_debug").rmdir()
    save_debug_train_data_for_rank(
        Namespace(
            save_debug_train_data=str(HERE / "miles_train_{rollout_id}_{rank}.pt"), qkv_format="thd"
        ),
        rollout_id=7,
        rank=0,
        rollout_data={
            "sample_indices": [1, 0],
            "tokens": [torch.tensor(_whole(at)) for at in (1, 0)],
            "response_lengths": [4, 4],
            "total_lengths": [8, 7],
            "loss_masks": [torch.tensor([1, 1, 0, 1]), torch.ones(4, dtype=torch.int)],
            "log_probs": [train[1], train[0]],
            "rollout_log_probs": [rollout[1], rollout[0]],
            "rewards": [1.0, 0.0],
            "raw_reward": [0.0, 1.0, 1.0],
        },
    )
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 6, 11, generator=draw)
    labels = torch.randint(0, 11, (2, 6), generator=draw)
    labels[:, -1] = -100
    positions = torch.arange(6).expand(2, 6)
    for rank, part in enumerate(([0, 1, 4, 5], [2, 3])):  # context parallelism of two
        info = _compute_output_info(
            logits=logits[:, part],
            labels=labels[:, part],
            position_ids=positions[:, part],
            rank=rank,
        )
        (HERE / f"miles_rank_{rank}.json").write_text(json.dumps(info, indent=2))


def trl() -> None:
    from collections import defaultdict, deque

    from transformers import TrainerControl, TrainerState
    from trl import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.accelerator = SimpleNamespace(is_main_process=True)
    trainer.log_completions = True
    trainer.num_completions_to_print = 1
    trainer.state, trainer.control = TrainerState(global_step=3), TrainerControl()
    trainer.callback_handler = SimpleNamespace(on_log=lambda *given: given[2])
    trainer.args = SimpleNamespace(
        report_to=[],
        output_dir=str(HERE),
        include_num_input_tokens_seen="no",
        log_unique_prompts=False,
    )
    ask = [{"role": "user", "content": "1 + 1?"}]
    trainer._logs = {
        "images": deque(),
        "prompt": deque([ask, ask]),
        "completion": deque(
            [
                [{"role": "assistant", "content": "2"}],
                [
                    {"role": "assistant", "content": "let me see"},
                    {"role": "tool", "content": "2"},
                    {"role": "assistant", "content": "2."},
                ],
            ]
        ),
        "rewards": {"exact": deque([1.0, 0.0])},
        "extra": {"length": deque([1, 5])},
        "advantages": deque([0.7, -0.7]),
    }
    (HERE / "completions").mkdir()
    trainer.log({"loss": 0.0})
    (HERE / "completions/completions_00003.parquet").rename(HERE / "trl_completions_00003.parquet")
    (HERE / "completions").rmdir()


if __name__ == "__main__":
    {"slime": slime, "miles": miles, "trl": trl}[sys.argv[1]]()
