"""Writes openai_chat.jsonl, prime_rl.jsonl and prime_traces.jsonl again, bit for bit.

    python write_openai_prime.py PATH_OF_PRIME_RL

in an environment with openai 2.54.0, msgspec 0.23.0, numpy, orjson and verifiers 0.4.0, and a
checkout of prime-rl at commit 559b4477.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec
import numpy as np
import orjson
from openai.types.chat import ChatCompletion
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import AssistantMessage, ToolMessage, UserMessage

_HERE = Path(__file__).parent


def openai_chat() -> bytes:
    first = _completion(
        "chatcmpl-1",
        [_choice(0, [("Hi", -0.25, []), ("!", -1.5, [])], token_ids=[13347, 0])],
        prompt_token_ids=[1, 2, 3],
    )
    rows = [
        ("token_id:7", -0.5, [("token_id:7", -0.5), ("token_id:9", -1.25)]),
        ("token_id:2", -9999.0, [("token_id:9", -0.125), ("token_id:2", -9999.0)]),
    ]
    other = _choice(1, [("token_id:7", -0.5, [])], finish="length")
    second = _completion("chatcmpl-2", [_choice(0, rows), other])
    third = _completion("chatcmpl-3", [_choice(0, [("Hi", -0.25, [("Hi", -0.25), ("Yo", -1.75)])])])
    return "".join(f"{one.model_dump_json()}\n" for one in (first, second, third)).encode()


def prime_rl(checkout: Path) -> bytes:
    home = checkout / "src" / "prime_rl" / "transports" / "rollouts" / "types.py"
    spec = importlib.util.spec_from_file_location("prime_rl_types", home)
    types = importlib.util.module_from_spec(spec)
    sys.modules["prime_rl_types"] = types
    spec.loader.exec_module(types)
    experts = np.arange(20, dtype=np.uint8).reshape(5, 2, 2)
    first = types.TrainingSample(
        token_ids=[5, 6, 7, 8, 2],
        mask=[False, False, True, True, True],
        logprobs=[0.0, 0.0, -0.25, -1.5, -0.125],
        temperatures=[1.0, 1.0, 0.7, 0.7, 0.7],
        env_name="sums",
        routed_experts=types.RoutedExperts(experts.tobytes(), list(experts.shape), "uint8"),
    )
    second = types.TrainingSample(
        token_ids=[5, 9],
        mask=[False, True],
        logprobs=[0.0, -2.5],
        temperatures=[1.0, 1.0],
        env_name="sums",
        ref_logprobs=[0.0, -9.0],
    )
    return b"".join(msgspec.json.encode(one) + b"\n" for one in (first, second))


def prime_traces() -> bytes:
    task = {"type": "Sum", "data": {"idx": 0, "prompt": "1+1"}}
    nodes = [
        _node(None, UserMessage(content="1+1"), [5, 6], [0, 0], []),
        _node(0, AssistantMessage(content="call"), [7, 8, 9], [0, 1, 1], [-0.25, -1.5]),
        _node(1, ToolMessage(content="2", tool_call_id="t"), [10], [0], []),
        _node(2, AssistantMessage(content="2"), [7, 3], [0, 1], [-0.125]),
        _node(0, AssistantMessage(content="two"), [7, 4], [0, 1], [-3.0]),
    ]
    trace = WireTrace.model_validate(
        {
            "id": "trace-a",
            "task": task,
            "agent": {"config": {"model": "m"}, "name": "solver"},
            "nodes": [node.model_dump() for node in nodes],
            "is_completed": True,
            "ok": True,
            "stop_condition": "agent_completed",
            "verifiers": {"version": "0.4.0"},
            "timing": {"start": 1.0},
        }
    )
    given = {"id": "episode-1", "task": task, "traces": [trace.model_dump()], "ok": True}
    record = WireEpisode.model_validate(given).to_record()
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    return orjson.dumps(record, default=str, option=options)


def _completion(key, choices, **extra):
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    usage["prompt_tokens_details"] = {"cached_tokens": 2}
    given = {"id": key, "object": "chat.completion", "created": 1760000000, "model": "m"}
    return ChatCompletion.model_validate({**given, "choices": choices, "usage": usage, **extra})


def _choice(index, rows, finish="stop", **extra):
    return {
        "index": index,
        "finish_reason": finish,
        "message": {"role": "assistant", "content": "".join(row[0] for row in rows)},
        "logprobs": {
            "content": [
                {**_token(token, value), "top_logprobs": [_token(*other) for other in others]}
                for token, value, others in rows
            ]
        },
        **extra,
    }


def _token(token, value):
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def _node(parent, message, token_ids, mask, logprobs):
    return MessageNode(
        parent=parent,
        message=message,
        sampled=bool(logprobs),
        timestamp=1.0,
        token_ids=token_ids,
        mask=[bool(counted) for counted in mask],
        logprobs=logprobs,
    )


if __name__ == "__main__":
    (_HERE / "openai_chat.jsonl").write_bytes(openai_chat())
    (_HERE / "prime_rl.jsonl").write_bytes(prime_rl(Path(sys.argv[1])))
    (_HERE / "prime_traces.jsonl").write_bytes(prime_traces())
