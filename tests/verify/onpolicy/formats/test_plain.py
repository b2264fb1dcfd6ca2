"""Our own JSON lines: every name of its docstring, and what is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onpolicy_files import EXPERTS, PLAIN, write

from verify.errors import InputFileError
from verify.onpolicy.formats.plain import read
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.pairing import pair
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Sample


def _one(path: Path, record: dict[str, Any], side: str = TRAINER) -> tuple[Sample, list[str]]:
    dump = read(write(path, [record]), side)
    (sample,) = dump.samples
    return sample, [f"{problem.field} {problem.what}" for problem in dump.problems]


def test_every_name(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "f", PLAIN)
    assert told == []
    assert (sample.key, sample.place.record, sample.text) == ("7", "line 1", "abc")
    assert sample.prompt is not None
    assert sample.tokens is not None
    assert sample.mask is not None
    assert sample.prompt.tolist() == [1, 5, 6]
    assert sample.tokens.tolist() == [9, 8, 2]
    assert sample.mask.tolist() == [True, True, False]
    rollout, trainer = sample.series[ROLLOUT], sample.series[TRAINER]
    assert (rollout.values.tolist(), rollout.stored) == ([-0.25, -1.5, -0.125], "float32")
    assert np.isnan(trainer.values).tolist() == [False, True, True]
    assert (trainer.absent.tolist(), trainer.stored) == ([False, True, False], "")
    assert sample.top == {ROLLOUT: ({9: -0.25, 4: -2.5}, None, {2: -0.125})}
    assert np.array_equal(sample.routing[ROLLOUT].experts, EXPERTS)
    assert (sample.routing[ROLLOUT].start, sample.routing[ROLLOUT].layers) == (0, (3, 4))
    assert sample.meta == {
        "temperature": 0.7,
        "top_p": 1.0,
        "rollout_version": "3",
        "finish_reason": "stop",
    }


@pytest.mark.parametrize("side", [TRAINER, ROLLOUT])
def test_values_of_no_named_side_are_the_files(tmp_path: Path, side: str) -> None:
    routes = {"experts": EXPERTS.tolist(), "start": 0}
    record = {"id": 1, "response_ids": [4], "logprobs": [-1], "dtype": "torch.bfloat16"}
    sample, told = _one(tmp_path / "f", {**record, "routing": routes}, side)
    assert told == []
    assert sample.series[side].stored == "bfloat16"
    assert list(sample.series) == list(sample.routing) == [side]


def test_lines_of_an_id_a_prompt_and_values_are_known_as_ours(tmp_path: Path) -> None:
    """They lack the response's ids, which is said of them; once no format was found."""
    record = {"id": 1, "prompt_ids": [3], "logprobs": [-1.0, -2.0]}
    sides = {side: write(tmp_path / side, [record]) for side in (TRAINER, ROLLOUT)}
    dumps = [read_dump(path, side) for side, path in sides.items()]
    assert [dump.format for dump in dumps] == ["plain", "plain"]
    (fault,) = pair(*dumps).misalignments
    assert fault.kind == "no-token-ids"
    other = write(tmp_path / "other", [{"id": 1, "logprobs": [-1.0]}])
    with pytest.raises(InputFileError, match="no format that is known"):
        read_dump(other, TRAINER)


def test_other_names_of_the_sampler(tmp_path: Path) -> None:
    record = {"id": 1, "response_ids": [4], "rollout_logprobs": [-1]}
    routes = {"rollout": {"experts": EXPERTS.tolist()}, "trainer": None}
    sample, told = _one(tmp_path / "f", {**record, "routing": routes})
    assert told == []
    assert list(sample.series) == list(sample.routing) == [ROLLOUT]
    assert sample.routing[ROLLOUT].start == -1


def test_a_header_holds_for_the_file_and_is_no_sample(tmp_path: Path) -> None:
    header = {"onpolicy": 1, "config": {"temperature": 0.5, "vocab_size": "many"}}
    dump = read(write(tmp_path / "f", [header, PLAIN]), TRAINER)
    assert dump.config == {"temperature": 0.5}
    assert len(dump.samples) == 1
    assert dump.problems[0].field == "config.vocab_size"
    dump = read(write(tmp_path / "f", [{"onpolicy": 2}, PLAIN]), TRAINER)
    assert [problem.kind for problem in dump.problems] == ["note"]


def test_lines_without_an_id_are_counted(tmp_path: Path) -> None:
    record = {"response_ids": [4]}
    dump = read(write(tmp_path / "f", [record, PLAIN, record]), TRAINER)
    assert [sample.key for sample in dump.samples] == ["record 1", "7", "record 3"]
    assert dump.notes == ("2 records have no id and are paired by their order",)


def test_lists_of_other_lengths_stay_as_they_are(tmp_path: Path) -> None:
    record = {"id": 1, "response_ids": [4, 5], "logprobs": [-1, -2, -3], "mask": [1]}
    sample, told = _one(tmp_path / "f", record)
    assert told == []
    assert len(sample.series[TRAINER].values) == 3
    assert sample.mask is not None
    assert len(sample.mask) == 1


@pytest.mark.parametrize(
    ("changed", "field", "why"),
    [
        ({"id": 1.5}, "id", "is 1.5"),
        ({"response_ids": [4, "5"]}, "response_ids", "entry 1 is '5'"),
        ({"sampler_logprobs": [True, -1, -1]}, "sampler_logprobs", "entry 0 is true"),
        ({"mask": [2]}, "mask", "holds 2"),
        ({"sampler_dtype": "int8"}, "sampler_dtype", "float64, float32"),
        ({"sampler_dtype": 5}, "sampler_dtype", "is 5"),
        ({"sampler_top": [{"true": -0.25}]}, "sampler_top[0]", "text can be of several"),
        ({"sampler_top": [{"5": "x"}]}, "sampler_top[0]", "token 5 has 'x'"),
        ({"sampler_top": [[5]]}, "sampler_top[0]", "keyed by token ids"),
        ({"sampler_top": 5}, "sampler_top", "is 5"),
        ({"routing": []}, "routing", "a list of 0"),
        ({"routing": {"sampler": 5}}, "routing.sampler", "is 5"),
        ({"routing": {"experts": [[[0]]], "start": -5}}, "routing.start", "is -5"),
        ({"meta": 5}, "meta", "is 5"),
        ({"meta": {"top_p": 2}}, "meta.top_p", "from 0 to 1"),
        ({"meta": {"policy_version": 1.5}}, "meta.rollout_version", "is 1.5"),
        ({"text": 5}, "text", "is 5"),
        ({"rollout_logprobs": [-1]}, "rollout_logprobs", "under another name"),
        ({"logprobs": [-1]}, "logprobs", "under another name"),
    ],
)
def test_a_bad_field_is_named_and_the_rest_is_read(
    tmp_path: Path, changed: dict[str, Any], field: str, why: str
) -> None:
    sample, told = _one(tmp_path / "f", {**PLAIN, **changed})
    assert len(told) == 1
    assert told[0].startswith(f"{field} ")
    assert why in told[0]
    assert sample.prompt is not None
    assert TRAINER in sample.series


def test_bad_lines_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    lines = [json.dumps(PLAIN), "[1]", '{"id": 1, "id": 2}', '{"a": 1}', json.dumps(PLAIN)[:40]]
    path.write_text("\n".join([*lines, json.dumps(PLAIN)]))
    dump = read(path, TRAINER)
    assert [sample.place.record for sample in dump.samples] == ["line 1", "line 6"]
    assert [(problem.place.record, problem.kind) for problem in dump.problems] == [
        (f"line {number}", "unreadable") for number in (2, 3, 4, 5)
    ]


def test_a_file_of_which_nothing_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match=r"could be read \(1 problems\); line 1: has"):
        read(write(tmp_path / "f", [{"a": 1}]), TRAINER)
    with pytest.raises(InputFileError, match="it holds no record"):
        read(write(tmp_path / "f", [{"onpolicy": 1}]), TRAINER)


def test_the_docstring_example(tmp_path: Path) -> None:
    from verify.onpolicy.formats import plain

    assert plain.__doc__ is not None
    start, end = plain.__doc__.index("{"), plain.__doc__.index("}}") + 2
    dump: Dump = read(write(tmp_path / "f", [json.loads(plain.__doc__[start:end])]), TRAINER)
    assert dump.problems == ()
    assert set(dump.samples[0].series) == {ROLLOUT, TRAINER}
