"""OpenAI chat completions: a file that openai 2.54.0 wrote, and what servers add to the protocol.

tests/data/onpolicy/openai_chat.jsonl is `ChatCompletion.model_validate(...).model_dump_json()` of
that package, one a line: with vLLM's return_token_ids, with tokens as ids, and with text alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onpolicy_files import EXPERTS, OPENAI_CHAT, packed, write

from verify.errors import InputFileError
from verify.onpolicy.formats.openai_chat import read
from verify.onpolicy.samples import ROLLOUT, TRAINER, Sample

_DATA = Path(__file__).parents[3] / "data" / "onpolicy" / "openai_chat.jsonl"


def _one(path: Path, outer: dict[str, Any], **choice: Any) -> tuple[Sample, list[str]]:
    record = copy.deepcopy(OPENAI_CHAT) | outer
    record["choices"][0] |= choice
    dump = read(write(path, [record]), TRAINER)
    (sample,) = dump.samples
    told = [f"{problem.field} {problem.what}" for problem in dump.problems]
    return sample, [*told, *dump.notes]


def test_a_file_of_the_producers_own_code() -> None:
    dump = read(_DATA, TRAINER)
    assert dump.problems == ()
    assert len(dump.notes) == 1
    assert dump.notes[0].startswith("1 answers have no token ids, and text is never paired")
    first, second, third, text = dump.samples
    assert [sample.key for sample in dump.samples] == [
        "chatcmpl-1",
        "chatcmpl-2:0",
        "chatcmpl-2:1",
        "chatcmpl-3",
    ]
    assert first.prompt is not None
    assert first.tokens is not None
    assert second.tokens is not None
    assert first.prompt.tolist() == [1, 2, 3]
    assert first.tokens.tolist() == [13347, 0]
    assert first.series[ROLLOUT].values.tolist() == [-0.25, -1.5]
    assert (first.text, first.meta["cached_tokens"]) == ("Hi!", 2)
    assert second.tokens.tolist() == [7, 2]
    assert second.top[ROLLOUT] == ({7: -0.5, 9: -1.25}, {9: -0.125, 2: -9999.0})
    assert second.series[ROLLOUT].values.tolist() == [-0.5, -9999.0]
    assert third.meta["finish_reason"] == "length"
    assert (text.tokens, dict(text.top), text.text) == (None, {}, "Hi")
    assert text.series[ROLLOUT].values.tolist() == [-0.25]


def test_what_vllm_adds(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "f", {})
    assert told == []
    assert sample.tokens is not None
    assert sample.tokens.tolist() == [9, 8, 2]
    assert np.array_equal(sample.routing[ROLLOUT].experts, EXPERTS)
    assert sample.routing[ROLLOUT].start == 0


def test_what_sglang_adds(tmp_path: Path) -> None:
    extra = {"routed_experts": packed(EXPERTS)}
    outer = {"metadata": {"weight_version": "v3"}, "routed_experts_shape": [2, 2]}
    sample, told = _one(tmp_path / "f", outer, sgl_ext=extra, routed_experts=None)
    assert told == []
    assert np.array_equal(sample.routing[ROLLOUT].experts, EXPERTS)
    assert sample.meta["rollout_version"] == "v3"
    sample, told = _one(tmp_path / "f", {}, sgl_ext=extra, routed_experts=None)
    assert sample.routing == {}
    assert "5 rows of 4" in told[0]


def test_a_line_of_a_batch_result(tmp_path: Path) -> None:
    body = copy.deepcopy(OPENAI_CHAT)
    record = {"id": "batch-1", "custom_id": "mine", "response": {"status_code": 200, "body": body}}
    (sample,) = read(write(tmp_path / "f", [record]), TRAINER).samples
    assert sample.key == "mine"
    assert sample.series[ROLLOUT].values.tolist() == [-0.25, -1.5, -0.125]


def test_a_completion_of_plain_text(tmp_path: Path) -> None:
    scored = {"tokens": ["token_id:9", "token_id:2"], "token_logprobs": [-0.5, None]}
    choice = {"index": 0, "text": "ab", "logprobs": scored, "finish_reason": "stop"}
    (sample,) = read(write(tmp_path / "f", [{"id": "c", "choices": [choice]}]), TRAINER).samples
    assert sample.tokens is not None
    assert sample.tokens.tolist() == [9, 2]
    assert sample.series[ROLLOUT].absent.tolist() == [False, True]
    assert sample.text == "ab"


def test_text_is_never_taken_for_ids(tmp_path: Path) -> None:
    content = [{"token": "token_id:9", "logprob": -1.0}, {"token": "9", "logprob": -1.0}]
    sample, told = _one(tmp_path / "f", {}, logprobs={"content": content}, token_ids=None)
    assert sample.tokens is None
    assert "no token ids" in told[0]


@pytest.mark.parametrize(
    ("choice", "field", "why"),
    [
        ({"logprobs": 5}, "logprobs", "is 5"),
        ({"logprobs": {"content": 5}}, "logprobs.content", "is 5"),
        ({"logprobs": {"content": [5]}}, "logprobs.content", "a list of 1"),
        ({"token_ids": [-1]}, "token_ids", "entry 0 is -1"),
        ({"routed_experts": "AAAA"}, "routed_experts", "with no shape"),
        ({"finish_reason": 1.5}, "finish_reason", "is 1.5"),
    ],
)
def test_a_bad_field_is_named_and_the_rest_is_read(
    tmp_path: Path, choice: dict[str, Any], field: str, why: str
) -> None:
    sample, told = _one(tmp_path / "f", {}, **choice)
    assert told[0].startswith(f"choices[0].{field} ")
    assert why in told[0]
    assert sample.prompt is not None


def test_alternatives_without_a_number(tmp_path: Path) -> None:
    item = {"token": "token_id:9", "logprob": -1.0}
    for bad in ([{"token": "token_id:9", "logprob": "x"}], [{"token": "a"}], "x", [5]):
        logprobs = {"content": [{**item, "top_logprobs": bad}]}
        sample, told = _one(tmp_path / "f", {}, logprobs=logprobs)
        assert sample.top == {ROLLOUT: (None,)}
        assert "top_logprobs" in told[0]


def test_answers_without_log_probabilities_and_errors_in_their_place(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "f", {}, logprobs=None)
    assert sample.series == {}
    assert told == ["1 answers have no logprobs; ask for them: logprobs true"]
    error = {"error": {"message": "overloaded"}}
    dump = read(write(tmp_path / "f", [error, OPENAI_CHAT]), TRAINER)
    assert [problem.kind for problem in dump.problems] == ["unreadable"]
    with pytest.raises(InputFileError, match="choices: is null"):
        read(write(tmp_path / "f", [error]), TRAINER)
