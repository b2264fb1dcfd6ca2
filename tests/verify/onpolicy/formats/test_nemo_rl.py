"""NeMo-RL's train_data_step{N}.jsonl, written by hand from what its logger writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onpolicy_files import NEMO_RL, write

from verify.errors import InputFileError
from verify.onpolicy.formats.nemo_rl import read
from verify.onpolicy.samples import ROLLOUT, TRAINER, Sample


def _one(path: Path, **changed: Any) -> tuple[Sample, list[str]]:
    dump = read(write(path, [{**NEMO_RL, **changed}]), TRAINER)
    (sample,) = dump.samples
    told = [f"{problem.field} {problem.what}" for problem in dump.problems]
    return sample, [*told, *dump.notes]


def _is_sample(sample: Sample) -> None:
    assert sample.prompt is not None
    assert sample.tokens is not None
    assert sample.mask is not None
    assert sample.prompt.tolist() == [1, 5, 6]
    assert sample.tokens.tolist() == [9, 8, 2]
    assert sample.mask.tolist() == [True, False, True]
    assert sample.series[ROLLOUT].values.tolist() == [-0.25, 0.0, -0.125]
    assert sample.series[TRAINER].values.tolist() == [-0.5, -1.0, -0.125]
    assert sample.text == "user says, model answers"


def test_a_line_as_the_logger_writes_it(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "train_data_step12.jsonl")
    assert told == []
    _is_sample(sample)
    assert (sample.key, dict(sample.meta)) == ("12:0", {"step": 12})


def test_a_line_without_the_batch_dimension(tmp_path: Path) -> None:
    flat = {name: value[0] if isinstance(value, list) else value for name, value in NEMO_RL.items()}
    (sample,) = read(write(tmp_path / "f.jsonl", [flat]), TRAINER).samples
    _is_sample(sample)
    assert (sample.key, dict(sample.meta)) == ("0", {})


def test_a_line_of_several_samples(tmp_path: Path) -> None:
    two = {name: value * 2 if isinstance(value, list) else value for name, value in NEMO_RL.items()}
    dump = read(write(tmp_path / "f.jsonl", [two]), TRAINER)
    assert len(dump.samples) == 2
    _is_sample(dump.samples[1])


def test_zeros_that_stand_for_a_skipped_pass_are_no_side(tmp_path: Path) -> None:
    zeros = [[0.0] * 8]
    sample, told = _one(tmp_path / "f", prev_logprobs=zeros)
    assert set(sample.series) == {ROLLOUT}
    assert "force_on_policy_ratio" in told[0]
    other = {**NEMO_RL, "idx": 1, "prev_logprobs": zeros}  # zeros of one sample are judged later
    dump = read(write(tmp_path / "f", [NEMO_RL, other]), TRAINER)
    assert all(TRAINER in sample.series for sample in dump.samples)
    assert dump.notes == ()


def test_a_sample_that_the_loss_leaves_out_counts_no_token(tmp_path: Path) -> None:
    sample, told = _one(tmp_path / "f", sample_loss_mask=[0.0])
    assert sample.mask is not None
    assert not sample.mask.any()
    assert "1 samples count no token" in told[0]


@pytest.mark.parametrize(
    ("changed", "field", "why"),
    [
        ({"input_lengths": [9]}, "input_lengths", "is 9; it is an integer from 0 to 8"),
        ({"token_loss_mask": [[3] * 8]}, "token_loss_mask", "holds 3"),
        ({"prev_logprobs": [[-1.0] * 3]}, "prev_logprobs", "3 entries for 8 tokens"),
        ({"generation_logprobs": [["a"] * 8]}, "generation_logprobs", "entry 0 is 'a'"),
        ({"sample_loss_mask": ["a"]}, "sample_loss_mask", "is 'a'"),
        ({"idx": [0.5]}, "idx", "is 0.5"),
    ],
)
def test_a_bad_field_is_named_and_the_rest_is_read(
    tmp_path: Path, changed: dict[str, Any], field: str, why: str
) -> None:
    sample, told = _one(tmp_path / "f", **changed)
    assert len(told) == 1
    assert told[0].startswith(f"{field} ")
    assert why in told[0]
    assert sample.tokens is not None


def test_no_mask_is_not_a_mask_of_zeros(tmp_path: Path) -> None:
    record = {name: value for name, value in NEMO_RL.items() if name != "token_loss_mask"}
    (sample,) = read(write(tmp_path / "f", [record]), TRAINER).samples
    assert sample.mask is None
    assert sample.tokens is not None
    assert len(sample.tokens) == len(sample.series[TRAINER].values) == 6


def test_a_line_without_token_ids_is_left_out(tmp_path: Path) -> None:
    broken = {**NEMO_RL, "token_ids": [["a"]]}
    dump = read(write(tmp_path / "f", [broken, NEMO_RL]), TRAINER)
    assert len(dump.samples) == 1
    assert [problem.kind for problem in dump.problems] == ["bad-value", "unreadable"]
    with pytest.raises(InputFileError, match="no record could be read"):
        read(write(tmp_path / "f", [broken]), TRAINER)


def test_a_nan_keeps_its_place(tmp_path: Path) -> None:
    values = [[0.0, 0.0, 0.0, float("nan"), 0.0, float("-inf"), 0.0, 0.0]]
    sample, told = _one(tmp_path / "f", generation_logprobs=values)
    assert told == []
    series = sample.series[ROLLOUT]
    assert np.isnan(series.values[0])
    assert series.values[2] == -np.inf
    assert not series.absent.any()
