"""vLLM's RequestOutput, written by hand as `dataclasses.asdict` makes it of its fields."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onpolicy_files import EXPERTS, VLLM, packed, write

from verify.errors import InputFileError
from verify.onpolicy.formats.vllm import read
from verify.onpolicy.samples import ROLLOUT, TRAINER, Sample


def _one(path: Path, outer: dict[str, Any], **output: Any) -> tuple[Sample, list[str]]:
    record = copy.deepcopy(VLLM) | outer
    record["outputs"][0] |= output
    dump = read(write(path, [record]), TRAINER)
    (sample,) = dump.samples
    told = [f"{problem.field} {problem.what}" for problem in dump.problems]
    return sample, [*told, *dump.notes]


def test_an_output(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "f", {"sampling_params": {"top_p": 0.9, "logprobs": 0}})
    assert told == []
    assert (sample.key, sample.text) == ("r1", "abc")
    assert sample.prompt is not None
    assert sample.tokens is not None
    assert sample.prompt.tolist() == [1, 5, 6]
    assert sample.tokens.tolist() == [9, 8, 2]
    assert sample.series[ROLLOUT].values.tolist() == [-0.25, -1.5, -0.125]
    assert sample.top[ROLLOUT] == ({9: -0.25}, {4: -0.5, 8: -1.5}, {2: -0.125})
    assert np.array_equal(sample.routing[ROLLOUT].experts, EXPERTS)
    assert sample.routing[ROLLOUT].start == 0
    assert sample.meta == {
        "top_p": 0.9,
        "finish_reason": "stop",
        "cumulative_logprob": -1.875,
        "cached_tokens": 2,
    }


def test_flat_logprobs_say_the_same(tmp_path: Path) -> None:
    flat = {
        "start_indices": [0, 1, 3],
        "end_indices": [1, 3, 4],
        "token_ids": [9, 4, 8, 2],
        "logprobs": [-0.25, -0.5, -1.5, -0.125],
        "ranks": [1, 1, 2, 1],
        "decoded_tokens": ["a", "x", "b", "c"],
    }
    sample, told = _one(tmp_path / "f", {}, logprobs=flat)
    assert told == []
    assert sample.series[ROLLOUT].values.tolist() == [-0.25, -1.5, -0.125]
    assert sample.top[ROLLOUT] == ({9: -0.25}, {4: -0.5, 8: -1.5}, {2: -0.125})
    for name, wrong in (
        ("token_ids", [9]),
        ("start_indices", [0, 0, 0]),
        ("end_indices", [1, 3, 9]),
        ("end_indices", [1]),
        ("logprobs", None),
    ):
        sample, told = _one(tmp_path / "f", {}, logprobs={**flat, name: wrong})
        assert sample.series == {}
        assert told


def test_a_sampled_token_that_the_alternatives_lack_is_absent_never_the_first(
    tmp_path: Path,
) -> None:
    tops = [{"4": {"logprob": -0.1}}, {"8": {"logprob": -1.5}}, {"4": {"logprob": -0.1}}]
    sample, told = _one(tmp_path / "f", {}, logprobs=tops)
    assert sample.series[ROLLOUT].absent.tolist() == [True, False, True]
    assert np.isnan(sample.series[ROLLOUT].values[0])
    assert "the sampled id 9 is not among the alternatives at 0, nor at 1 more" in told[0]


def test_lists_of_other_lengths_stay_as_they_are(tmp_path: Path) -> None:
    tops = [{"9": {"logprob": -0.25}}] * 5
    sample, _ = _one(tmp_path / "f", {}, logprobs=tops)
    assert len(sample.series[ROLLOUT].values) == 5
    assert sample.series[ROLLOUT].absent.tolist() == [False, True, True, True, True]


def test_several_outputs_have_keys_of_their_own(tmp_path: Path) -> None:
    record = copy.deepcopy(VLLM)
    record["outputs"].append({**record["outputs"][0], "index": 1})
    dump = read(write(tmp_path / "f", [record]), TRAINER)
    assert [sample.key for sample in dump.samples] == ["r1:0", "r1:1"]


def test_routing_of_the_prompt_apart(tmp_path: Path) -> None:
    outer = {"prompt_routed_experts": EXPERTS[:3].tolist()}
    sample, told = _one(tmp_path / "f", outer, routed_experts=EXPERTS[3:].tolist())
    assert told == []
    assert np.array_equal(sample.routing[ROLLOUT].experts, EXPERTS)
    outer = {"prompt_routed_experts": EXPERTS[:3, :1].tolist()}
    sample, told = _one(tmp_path / "f", outer, routed_experts=EXPERTS[3:].tolist())
    assert "other layers or k" in told[0]
    assert sample.routing[ROLLOUT].start == -1


def test_where_rows_begin_is_not_guessed(tmp_path: Path) -> None:
    sample, _ = _one(tmp_path / "f", {}, routed_experts=EXPERTS[2:].tolist())
    assert sample.routing[ROLLOUT].start == -1
    part = EXPERTS[2:].astype(np.uint8)
    given = {"data": packed(part), "dtype": "uint8", "shape": [3, 2, 2], "start": 2}
    sample, _ = _one(tmp_path / "f", {}, routed_experts=given)
    assert sample.routing[ROLLOUT].start == 2


@pytest.mark.parametrize(
    ("output", "field", "why"),
    [
        ({"token_ids": "abc"}, "token_ids", "is 'abc'"),
        ({"logprobs": 5}, "logprobs", "is 5"),
        ({"logprobs": [5, None, None]}, "logprobs[0]", "is 5"),
        ({"logprobs": [{"true": -0.2}]}, "logprobs[0]", "has the name 'true'"),
        ({"logprobs": [{"9": {"logprob": "x"}}]}, "logprobs[0]", "token 9 has 'x'"),
        ({"cumulative_logprob": "x"}, "cumulative_logprob", "is 'x'"),
        ({"routed_experts": [[1]]}, "routed_experts", "no row is a list of lists"),
        ({"text": 1}, "text", "is 1"),
    ],
)
def test_a_bad_field_is_named_and_the_rest_is_read(
    tmp_path: Path, output: dict[str, Any], field: str, why: str
) -> None:
    sample, told = _one(tmp_path / "f", {}, **output)
    assert told[0].startswith(f"outputs[0].{field} ")
    assert why in told[0]
    assert sample.prompt is not None


def test_an_output_without_log_probabilities(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "f", {}, logprobs=None)
    assert sample.series == {}
    assert told == ["1 outputs have no logprobs; ask for them: logprobs=0"]


def test_records_without_outputs(tmp_path: Path) -> None:
    dump = read(write(tmp_path / "f", [{**VLLM, "outputs": 5}, VLLM]), TRAINER)
    assert [problem.kind for problem in dump.problems] == ["unreadable"]
    with pytest.raises(InputFileError, match=r"outputs\[0\]: is 5; it is an object"):
        read(write(tmp_path / "f", [{**VLLM, "outputs": [5]}]), TRAINER)
