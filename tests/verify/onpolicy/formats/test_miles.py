"""miles' four dumps: what its own code wrote, parts of ranks put together, and odd records."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import ODD_VALUES, mutated_json, read_or_refused, refused
from onpolicy_written import DATA, logprobs_of, tokens_of
from torch_archives import saved

from verify.onpolicy.formats import miles
from verify.onpolicy.formats.heads import head_of
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump

RANKS = [DATA / "miles_rank_0.json", DATA / "miles_rank_1.json"]


def _told(dump: Dump) -> list[str]:
    return [f"{p.place.record} {p.field}: {p.what}" for p in dump.problems]


def test_columns_that_miles_wrote() -> None:
    dump = read_dump(DATA / "miles_rollout_7.parquet", TRAINER)
    assert (dump.format, dump.problems) == ("miles", ())
    assert [sample.key for sample in dump.samples] == ["0", "1", "2"]
    for index, sample in enumerate(dump.samples):
        assert sample.place.record == f"row {index}"
        prompt, response = tokens_of(index)
        assert sample.prompt is not None
        assert sample.tokens is not None
        assert (sample.prompt.tolist(), sample.tokens.tolist()) == (prompt, response)
        assert sample.mask is not None
        assert sample.mask.tolist() == [True, True, index != 1, True]
    first, last = dump.samples[0].series, dump.samples[2].series
    assert first[ROLLOUT].values.tolist() == logprobs_of(0, 0)
    assert first[ROLLOUT].stored == "float32"
    assert last == {}


def test_rollouts_of_miles_are_read_as_those_of_slime() -> None:
    dump = read_dump(DATA / "miles_rollout_data_7.pt", TRAINER)
    assert (dump.format, dump.problems, dump.config) == ("slime", (), {"step": 7})
    assert dump.samples[1].routing[ROLLOUT].experts.shape == (4 + 4 - 1, 3, 2)


def test_train_data_that_miles_wrote() -> None:
    dump = read_dump(DATA / "miles_train_7_0.pt", ROLLOUT)
    assert (dump.format, dump.problems, dump.config) == ("miles", (), {"step": 7})
    assert [sample.key for sample in dump.samples] == ["1", "0"]
    sample = dump.samples[0]
    assert sample.tokens is not None
    assert sample.tokens.tolist() == tokens_of(1)[1]
    assert sample.series[TRAINER].values.tolist() == logprobs_of(1, 1)
    assert sample.series[ROLLOUT].values.tolist() == logprobs_of(1, 0)
    assert sample.meta["rank"] == 0
    assert sample.place.record == "rollout_data[0]"


def test_policy_loss_that_miles_wrote_has_both_sides_and_no_ids() -> None:
    dump = read_dump(DATA / "miles_rank_0_call_0.pt", TRAINER)
    assert (dump.format, dump.problems) == ("miles", ())
    assert "holds no token ids" in dump.notes[0]
    for index, sample in enumerate(dump.samples):
        assert sample.key == f"rank 0, call 0, samples[{index}]"
        assert sample.tokens is None
        assert sample.series[TRAINER].values.tolist() == logprobs_of(index, 1)
        assert sample.series[ROLLOUT].values.tolist() == logprobs_of(index, 0)
        assert sample.mask is not None
        assert sample.mask.tolist() == [True, True, index != 1, True]
        assert sample.meta == {"rank": 0, "batch_position": index, "response_length": 4}


@pytest.mark.parametrize("side", [TRAINER, ROLLOUT])
def test_ranks_hold_parts_of_one_sequence(side: str) -> None:
    (dump,) = miles.read_together(RANKS, side)
    parts = [json.loads(path.read_text())["logprob_entries"] for path in RANKS]
    for batch, sample in enumerate(dump.samples):
        entries = sorted(
            (entry for part in parts for entry in part[batch] if entry["is_valid"]),
            key=lambda entry: entry["global_position"],
        )
        assert len(entries) == 5
        assert sample.key == f"batch {batch}"
        assert sample.tokens is not None
        assert sample.tokens.tolist() == [entry["token_id"] for entry in entries]
        assert sample.series[side].values.tolist() == [entry["logprob"] for entry in entries]
    assert dump.problems == ()
    assert dump.notes[1].startswith("2 positions are not valid")
    assert len(read_dump(RANKS[1], side).samples[0].series[side].values) == 2


def test_a_folder_of_ranks_is_one_dump(tmp_path: Path) -> None:
    for path in RANKS:
        shutil.copy(path, tmp_path)
    dump = read_dump(tmp_path, TRAINER)
    assert [len(sample.series[TRAINER].values) for sample in dump.samples] == [5, 5]


def test_json_is_read_without_torch_and_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert len(read_dump(RANKS[0], TRAINER).samples) == 2


def test_ranks_that_value_one_position_differently_are_reported(tmp_path: Path) -> None:
    document = json.loads(RANKS[0].read_text())
    other = tmp_path / "rank_2.json"
    other.write_text(json.dumps(document))
    (dump,) = miles.read_together([RANKS[0], other], TRAINER)
    assert dump.problems == ()
    document["logprob_entries"][1][0]["logprob"] -= 0.5
    other.write_text(json.dumps(document))
    (dump,) = miles.read_together([RANKS[0], other], TRAINER)
    assert len(dump.problems) == 1
    assert str(dump.problems[0].place) == f"{other}, logprob_entries[1]"
    assert "at position 0, another rank token" in dump.problems[0].what


def test_parts_of_context_parallelism_are_not_taken_for_responses(tmp_path: Path) -> None:
    path = tmp_path / "f"
    content = torch.load(DATA / "miles_train_7_0.pt", weights_only=True)
    path.write_bytes(saved({**content, "cp_size": 2, "cp_rank": 1}))
    dump = miles.read(path, TRAINER)
    assert [sample.series for sample in dump.samples] == [{}, {}]
    assert "under context parallelism of 2" in dump.notes[0]
    loss = torch.load(DATA / "miles_rank_0_call_0.pt", weights_only=True)
    for name in ("train_log_probs", "rollout_log_probs"):
        loss["samples"][1][name] = loss["samples"][1][name][:2]
    path.write_bytes(saved(loss))
    dump = miles.read(path, TRAINER)
    assert dump.notes[1].startswith("1 of 2 records have another number of values")
    assert len(dump.samples[1].series[TRAINER].values) == 2


def test_columns_of_several_lengths_and_missing_ones(tmp_path: Path) -> None:
    path = tmp_path / "f"
    columns = {
        "tokens": [torch.arange(5), torch.arange(4)],
        "response_lengths": [2, 9],
        "log_probs": [torch.zeros(2)],
        "rollout_log_probs": [torch.zeros(2), None],
    }
    path.write_bytes(saved({"rollout_id": 3, "rank": 1, "rollout_data": columns}))
    dump = miles.read(path, TRAINER)
    assert [sample.key for sample in dump.samples] == ["step 3, rank 1, place 0"]
    assert list(dump.samples[0].series) == [ROLLOUT]
    assert _told(dump) == [
        " rollout_data.log_probs: has 1 entries, and there are 2 samples",
        "rollout_data[1] response_lengths: is 9, and prompt and response have 4 tokens together",
        "rollout_data[1] : holds neither tokens nor log-probabilities that can be read",
    ]


def test_bad_rows_of_a_parquet_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "f"
    rows: list[dict[str, Any]] = [
        {"sample_index": 1, "response_length": 2, "total_length": 3, "tokens": [1, 2, 3]},
        {"sample_index": None, "response_length": 2, "total_length": 4, "tokens": [1, 2, 3]},
        {"sample_index": 3, "response_length": 5, "total_length": 3, "tokens": [1, -2, 3]},
        {"sample_index": 4, "response_length": None, "total_length": 3, "tokens": None},
    ]
    values: list[Any] = [[-0.5, None], [-0.5, float("nan")], [-0.25], None]
    masks: list[Any] = [[1, 0], [1, 2], None, [1]]
    for row, listed, mask in zip(rows, values, masks, strict=True):
        row.update(rollout_log_probs=listed, loss_mask=mask)
    parquet.write_table(pa.Table.from_pylist(rows), path)
    dump = read_dump(path, TRAINER)
    assert [sample.key for sample in dump.samples] == ["1", "row 1", "3"]
    assert dump.samples[0].series[ROLLOUT].absent.tolist() == [False, True]
    assert np.isnan(dump.samples[1].series[ROLLOUT].values).tolist() == [False, True]
    assert not dump.samples[1].series[ROLLOUT].absent.any()
    assert [line.split(": ")[0] for line in _told(dump)] == [
        "row 1 total_length",
        "row 1 loss_mask",
        "row 2 tokens",
        "row 3 ",
    ]


def test_what_is_no_dump_of_miles(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(saved({"a": 1}))
    assert "holds a dict with 'a'" in refused(lambda path: miles.read(path, TRAINER), path)
    for text in ('{"rank": 0}', '{"rank": 0, "logprob_entries": 3}', '{"logprob_entries": ['):
        path.write_text(text)
        said = refused(lambda path: miles.read(path, TRAINER), path)
        assert "logprob_entries" in said or "not JSON" in said
    path.write_bytes(saved({"rollout_id": 1, "samples": []}))
    assert not miles.fits(head_of(path))


_ENTRIES = json.loads(RANKS[0].read_text())


@settings(max_examples=80)
@given(text=mutated_json(_ENTRIES))
def test_changed_entries_are_read_or_refused(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "rank_0.json"
    path.write_text(text)
    dumps = read_or_refused(lambda path: miles.read_together([path], TRAINER), path)
    for dump in dumps or ():
        assert all("\n" not in problem.what for problem in dump.problems)


_ODD = st.sampled_from([*ODD_VALUES, torch.zeros(2, 2), torch.tensor(3), {"a": [1]}, [[1, 2]]])
_TRAIN = torch.load(DATA / "miles_train_7_0.pt", weights_only=True)
_LOSS = torch.load(DATA / "miles_rank_0_call_0.pt", weights_only=True)


@settings(max_examples=40)
@given(
    columns=st.dictionaries(st.sampled_from(sorted(_TRAIN["rollout_data"])), _ODD, max_size=3),
    fields=st.dictionaries(st.sampled_from(sorted(_LOSS["samples"][0])), _ODD, max_size=3),
    outer=st.dictionaries(st.sampled_from(["rank", "call", "rollout_id", "cp_size"]), _ODD),
)
def test_odd_values_are_problems_and_no_exceptions(
    columns: dict[str, Any],
    fields: dict[str, Any],
    outer: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "miles.pt"
    path.write_bytes(
        saved({**_TRAIN, "rollout_data": {**_TRAIN["rollout_data"], **columns}, **outer})
    )
    miles.read(path, TRAINER)
    samples = [{**_LOSS["samples"][0], **fields}, _LOSS["samples"][1]]
    path.write_bytes(saved({**_LOSS, "samples": samples, **outer}))
    assert miles.read(path, TRAINER).samples
