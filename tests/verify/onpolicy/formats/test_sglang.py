"""SGLang's answers of /generate, written by hand from its documented fields."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onpolicy_files import EXPERTS, SGLANG, packed, write

from verify.errors import InputFileError
from verify.onpolicy.formats.sglang import read
from verify.onpolicy.samples import ROLLOUT, TRAINER, Sample


def _one(path: Path, record: dict[str, Any], **info: Any) -> tuple[Sample, list[str]]:
    record = copy.deepcopy(record)
    record["meta_info"] |= info
    dump = read(write(path, [record]), TRAINER)
    (sample,) = dump.samples
    told = [f"{problem.field} {problem.what}" for problem in dump.problems]
    return sample, [*told, *dump.notes]


def test_an_answer(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "f", SGLANG)
    assert told == []
    assert (sample.key, sample.text) == ("r1", "abc")
    assert sample.prompt is not None
    assert sample.tokens is not None
    assert sample.prompt.tolist() == [1, 5, 6]
    assert sample.tokens.tolist() == [9, 8, 2]
    assert sample.series[ROLLOUT].values.tolist() == [-0.25, -1.5, -0.125]
    assert sample.top == {ROLLOUT: ({9: -0.25, 4: -2.5}, None, {2: -0.125})}
    assert np.array_equal(sample.routing[ROLLOUT].experts, EXPERTS)
    assert sample.routing[ROLLOUT].start == 0
    assert sample.meta == {
        "finish_reason": "stop",
        "cached_tokens": 1,
        "response_length": 3,
        "prompt_length": 3,
        "rollout_version": "v2",
    }


def test_a_list_of_answers_is_as_many_records(tmp_path: Path) -> None:
    dump = read(write(tmp_path / "f", [[SGLANG, SGLANG], SGLANG]), TRAINER)
    assert [sample.place.record for sample in dump.samples] == ["line 1[0]", "line 1[1]", "line 2"]


def test_weights_that_changed_within_the_answer(tmp_path: Path) -> None:
    spans = [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 3}]
    sample, _ = _one(tmp_path / "f", SGLANG, weight_versions=spans)
    assert sample.meta["rollout_version"] == ["v1", "v1", "v2"]
    for odd in (spans[:1], [*spans, {"version": "v3", "start": 9, "end": 10}], [1, 2], "v"):
        sample, _ = _one(tmp_path / "f", SGLANG, weight_versions=odd)
        assert sample.meta["rollout_version"] == "v2"


def test_what_was_put_beside_the_answer(tmp_path: Path) -> None:
    record = {**SGLANG, "input_ids": [1, 5, 6], "sampling_params": {"temperature": 0.5, "n": 1}}
    sample, told = _one(tmp_path / "f", record, input_token_logprobs=None)
    assert told == []
    assert sample.prompt is not None
    assert sample.prompt.tolist() == [1, 5, 6]
    assert sample.meta["temperature"] == 0.5


def test_a_prompt_that_is_not_all_there_is_left_out(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "f", SGLANG, input_token_logprobs=[[-1.0, 6, None]])
    assert sample.prompt is None
    assert "holds 1 of 3 prompt tokens" in told[0]


def test_routing_from_the_middle(tmp_path: Path) -> None:
    rest = packed(EXPERTS[3:])
    sample, told = _one(tmp_path / "f", SGLANG, routed_experts=rest, routed_experts_start_len=3)
    assert told == []
    assert sample.routing[ROLLOUT].start == 3
    assert len(sample.routing[ROLLOUT].experts) == 2


def test_routing_without_a_shape_is_not_guessed(tmp_path: Path) -> None:
    record = {name: value for name, value in SGLANG.items() if name != "routed_experts_shape"}
    sample, told = _one(tmp_path / "f", record)
    assert sample.routing == {}
    assert "20 numbers, 5 rows of 4" in told[0]
    sample, told = _one(tmp_path / "f", {**SGLANG, "routed_experts_shape": [0, 2]})
    assert sample.routing == {}
    assert "[layers, experts a token]" in told[0]


def test_an_answer_without_log_probabilities(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "f", SGLANG, output_token_logprobs=None)
    assert sample.tokens is not None
    assert sample.tokens.tolist() == [9, 8, 2]
    assert sample.series == {}
    assert told == ["1 answers have no output_token_logprobs; ask for them: return_logprob"]


@pytest.mark.parametrize(
    ("info", "field", "why"),
    [
        ({"output_token_logprobs": [[-1.0]]}, "output_token_logprobs", "entry 0 is a list of 1"),
        ({"output_token_logprobs": {"a": 1}}, "output_token_logprobs", "an object of 1 names"),
        ({"output_token_logprobs": [[-1.0, None]]}, "output_token_logprobs[..][1]", "null"),
        ({"output_token_logprobs": [["x", 5]]}, "output_token_logprobs[..][0]", "'x'"),
        ({"output_top_logprobs": [5]}, "output_top_logprobs[0]", "holds 5"),
        ({"output_top_logprobs": [[["a", 5, None]]]}, "output_top_logprobs[0]", "a list of 3"),
        ({"output_top_logprobs": 5}, "output_top_logprobs", "is 5"),
        ({"routed_experts": "?"}, "routed_experts", "no base64"),
        ({"routed_experts": 5}, "routed_experts", "is 5"),
        ({"finish_reason": {"type": 1.5}}, "finish_reason", "is 1.5"),
        ({"cached_tokens": -1}, "cached_tokens", "is -1"),
        ({"id": None, "completion_tokens": "3"}, "response_length", "is '3'"),
    ],
)
def test_a_bad_field_is_named_and_the_rest_is_read(
    tmp_path: Path, info: dict[str, Any], field: str, why: str
) -> None:
    sample, told = _one(tmp_path / "f", SGLANG, **info)
    assert told[0].startswith(f"meta_info.{field} ")
    assert why in told[0]
    assert sample.tokens is not None
    assert sample.prompt is not None


def test_records_without_meta_info(tmp_path: Path) -> None:
    dump = read(write(tmp_path / "f", [{"text": "a"}, SGLANG]), TRAINER)
    assert [problem.kind for problem in dump.problems] == ["unreadable"]
    with pytest.raises(InputFileError, match="its meta_info is null"):
        read(write(tmp_path / "f", [{"text": "a"}]), TRAINER)
