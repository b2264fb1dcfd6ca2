"""Small records of each JSON format that `verify onpolicy` reads, and files of them.

All are written by hand from the documented fields of their producers; files that a producer's own
code wrote are in tests/data/onpolicy.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

EXPERTS = (np.arange(5 * 2 * 2).reshape(5, 2, 2) % 4).astype(np.int32)  # 3 + 3 tokens, less one


def packed(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def npy(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode("ascii")


def write(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


PLAIN: dict[str, Any] = {
    "id": "7",
    "prompt_ids": [1, 5, 6],
    "response_ids": [9, 8, 2],
    "sampler_logprobs": [-0.25, -1.5, -0.125],
    "trainer_logprobs": [-0.25, None, "NaN"],
    "sampler_dtype": "float32",
    "mask": [1, 1, 0],
    "sampler_top": [{"9": -0.25, "4": -2.5}, None, {"2": -0.125}],
    "routing": {"sampler": {"experts": EXPERTS.tolist(), "start": 0, "layers": [3, 4]}},
    "text": "abc",
    "meta": {"temperature": 0.7, "top_p": 1, "policy_version": 3, "finish_reason": "stop"},
}

NEMO_RL: dict[str, Any] = {  # fields and batch dimension as of commit 7ea279ab (2026-08)
    "content": ["user says, model answers"],
    "rewards": [1.0],
    "input_lengths": [6],
    "token_ids": [[1, 5, 6, 9, 8, 2, 0, 0]],
    "token_loss_mask": [[0, 0, 0, 1, 0, 1, 0, 0]],
    "sample_loss_mask": [1.0],
    "advantages": [[0.0] * 8],
    "generation_logprobs": [[0.0, 0.0, 0.0, -0.25, 0.0, -0.125, 0.0, 0.0]],
    "prev_logprobs": [[0.0, -3.0, -4.0, -0.5, -1.0, -0.125, -9.0, -9.0]],
    "idx": 0,
}

VERL: dict[str, Any] = {  # fields as of commit b178a3cd (2026-01)
    "input": "1+1?",
    "output": "2",
    "gts": "2",
    "score": 1.0,
    "step": 4,
    "acc": True,
}

SGLANG: dict[str, Any] = {  # fields as of version 0.5
    "text": "abc",
    "output_ids": [9, 8, 2],
    "meta_info": {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "v2",
        "input_token_logprobs": [[None, 1, None], [-2.0, 5, None], [-1.0, 6, None]],
        "output_token_logprobs": [[-0.25, 9, None], [-1.5, 8, "b"], [-0.125, 2, None]],
        "output_top_logprobs": [[[-0.25, 9, None], [-2.5, 4, None]], None, [[-0.125, 2, None]]],
        "routed_experts": packed(EXPERTS),
    },
    "routed_experts_shape": [2, 2],
}

VLLM: dict[str, Any] = {  # fields as of commit 003d3ee2; dataclasses.asdict of each
    "request_id": "r1",
    "prompt": "p",
    "prompt_token_ids": [1, 5, 6],
    "prompt_logprobs": None,
    "outputs": [
        {
            "index": 0,
            "text": "abc",
            "token_ids": [9, 8, 2],
            "cumulative_logprob": -1.875,
            "logprobs": [
                {"9": {"logprob": -0.25, "rank": 1, "decoded_token": "a"}},
                {
                    "4": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
                    "8": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
                },
                {"2": {"logprob": -0.125, "rank": 1, "decoded_token": "c"}},
            ],
            "routed_experts": EXPERTS.tolist(),
            "finish_reason": "stop",
            "stop_reason": None,
            "lora_request": None,
        }
    ],
    "finished": True,
    "num_cached_tokens": 2,
}

OPENAI_CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abc"},
            "logprobs": {
                "content": [
                    {"token": "token_id:9", "logprob": -0.25, "bytes": [97], "top_logprobs": []},
                    {"token": "token_id:8", "logprob": -1.5, "bytes": [98], "top_logprobs": []},
                    {"token": "token_id:2", "logprob": -0.125, "bytes": [99], "top_logprobs": []},
                ]
            },
            "finish_reason": "stop",
            "token_ids": [9, 8, 2],
            "routed_experts": npy(EXPERTS.astype(np.uint8)),
        }
    ],
    "prompt_token_ids": [1, 5, 6],
}

PRIME_RL: dict[str, Any] = {  # fields as of commit 559b4477
    "token_ids": [1, 5, 6, 9, 8, 2],
    "mask": [False, False, False, True, True, True],
    "logprobs": [0.0, 0.0, 0.0, -0.25, -1.5, -0.125],
    "temperatures": [1.0, 1.0, 1.0, 0.7, 0.7, 0.7],
    "env_name": "sums",
    "routed_experts": {
        "data": packed(EXPERTS.astype(np.uint8)),
        "shape": [5, 2, 2],
        "dtype": "uint8",
    },
}

PRIME_TRACE: dict[str, Any] = {
    "id": "t1",
    "task": {"type": "Sum"},
    "nodes": [
        {"parent": None, "token_ids": [1, 5], "mask": [False, False], "logprobs": []},
        {"parent": 0, "token_ids": [6, 9], "mask": [False, True], "logprobs": [-0.25]},
        {"parent": 1, "token_ids": [8], "mask": [True], "logprobs": [-1.5]},
        {"parent": 0, "token_ids": [2], "mask": [True], "logprobs": [-0.125]},
    ],
}

RECORDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "nemo-rl": NEMO_RL,
    "verl": VERL,
    "sglang": SGLANG,
    "vllm": VLLM,
    "openai-chat": OPENAI_CHAT,
    "prime-rl": PRIME_RL,
}
"""By the names of the table of formats."""
