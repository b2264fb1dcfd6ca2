"""slime's dumps: what its own code wrote, records that are wrong, and what has no index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import ODD_VALUES, refused
from onpolicy_written import DATA, LAYERS, TOP_K, experts_of, logprobs_of, tokens_of
from torch_archives import saved

from verify.onpolicy.formats.heads import head_of
from verify.onpolicy.formats.slime import fits, read
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump

RECORD: dict[str, Any] = {
    "index": 4,
    "tokens": [5, 6, 7, 8, 9],
    "response_length": 3,
    "rollout_log_probs": [-0.5, -0.25, -1.0],
    "loss_mask": [1, 0, 1],
    "status": "completed",
}


def _read(path: Path, *samples: Any, **outer: Any) -> tuple[Dump, list[str]]:
    path.write_bytes(saved({"rollout_id": 2, "samples": list(samples), **outer}))
    dump = read(path, TRAINER)
    told = [f"{p.place.record} {p.field}: {p.what}" for p in dump.problems]
    return dump, told


@pytest.mark.parametrize("side", [TRAINER, ROLLOUT])
def test_a_rollout_that_slime_wrote(side: str) -> None:
    dump = read_dump(DATA / "slime_rollout_7.pt", side)
    assert (dump.format, dump.config, dump.problems, dump.notes) == ("slime", {"step": 7}, (), ())
    assert [sample.key for sample in dump.samples] == ["0", "1", "2"]
    for index, sample in enumerate(dump.samples):
        prompt, response = tokens_of(index)
        assert sample.place.record == f"samples[{index}]"
        assert sample.prompt is not None
        assert sample.prompt.tolist() == prompt
        assert sample.tokens is not None
        assert sample.tokens.tolist() == response
        assert list(sample.series) == [ROLLOUT]
        assert sample.series[ROLLOUT].values.tolist() == logprobs_of(index, 0)
        assert sample.text == f"r{index}"
        assert sample.meta["cached_tokens"] == index
        assert sample.meta["rollout_version"] == "5"
        assert sample.meta["finish_reason"] == ("stop", "length", "abort")[index]
        assert sample.meta["group"] == str(index // 2)
    assert [None if s.mask is None else s.mask.tolist() for s in dump.samples] == [
        [True, True, True, True],
        [True, True, False, True],
        [True, True, True, True],
    ]
    assert dump.samples[1].series[ROLLOUT].stored == "float32"  # numpy; the others are lists


def test_routing_has_one_row_less_than_tokens_and_begins_at_the_prompt() -> None:
    dump = read(DATA / "slime_rollout_7.pt", ROLLOUT)
    for index in (0, 1):  # a tensor from the engine's base64, and numpy
        routing = dump.samples[index].routing[ROLLOUT]
        assert routing.start == 0
        assert routing.experts.shape == (3 + index + 4 - 1, LAYERS, TOP_K)
        assert np.array_equal(routing.experts, experts_of(index))
    assert not dump.samples[2].routing


def test_training_data_that_slime_wrote() -> None:
    dump = read_dump(DATA / "slime_train_7.pt", TRAINER)
    assert (dump.format, dump.config, dump.problems) == ("slime", {"step": 7}, ())
    assert [sample.key for sample in dump.samples] == ["0", "1", "2"]
    for index, sample in enumerate(dump.samples):
        assert sample.tokens is not None
        assert sample.tokens.tolist() == tokens_of(index)[1]
        assert sample.series[ROLLOUT].values.tolist() == logprobs_of(index, 0)
        assert sample.series[TRAINER].values.tolist() == logprobs_of(index, 1)
        assert sample.series[TRAINER].stored == "float32"
        assert sample.meta["rank"] == (index == 1)
        assert sample.meta.get("finish_reason") == ("length" if index == 1 else None)


def test_bad_records_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    dump, told = _read(
        tmp_path / "f",
        RECORD,
        "text",
        {**RECORD, "index": 5, "tokens": [1, -2, 3]},
        {**RECORD, "index": 6, "rollout_log_probs": [-1.0, "x", None]},
        {**RECORD, "index": 7, "loss_mask": [1, 2, 1]},
        {**RECORD, "index": 8, "response_length": 9},
        {**RECORD, "index": 9, "rollout_routed_experts": torch.zeros(4, 2)},
        {"index": 10},
    )
    assert [sample.key for sample in dump.samples] == ["4", "5", "6", "7", "8", "9"]
    assert [line.split(":")[0] for line in told] == [
        "samples[1] ",
        "samples[2] tokens",
        "samples[3] rollout_log_probs",
        "samples[4] loss_mask",
        "samples[5] response_length",
        "samples[6] rollout_routed_experts",
        "samples[7] ",
    ]
    assert "entry 1 is -2" in told[1]
    assert "is 9, and prompt and response have 5 tokens together" in told[4]
    assert dump.samples[0].mask is not None
    assert dump.samples[2].series[ROLLOUT].absent.tolist() == [False, True, True]
    assert dump.samples[4].tokens is None
    assert dump.samples[4].series[ROLLOUT].values.tolist() == [-0.5, -0.25, -1.0]


def test_values_stay_as_written_whatever_their_length(tmp_path: Path) -> None:
    dump, told = _read(
        tmp_path / "f", {**RECORD, "rollout_log_probs": np.array([-np.inf, np.nan, 0, -9999.0])}
    )
    assert told == []
    assert repr(dump.samples[0].series[ROLLOUT].values.tolist()) == "[-inf, nan, 0.0, -9999.0]"
    bf16 = torch.tensor([-0.5, -1.25, -3.0], dtype=torch.bfloat16)
    dump, told = _read(tmp_path / "f", {**RECORD, "rollout_log_probs": bf16})
    series = dump.samples[0].series[ROLLOUT]
    assert (series.values.tolist(), series.stored, told) == ([-0.5, -1.25, -3.0], "bfloat16", [])


@pytest.mark.parametrize(
    "experts",
    [
        [[[0, 1], [2, 3]]] * 3 + [[[-1, -1], [-1, -1]]],
        {"data": "", "dtype": "int32", "shape": [4, 2, 2]},
        torch.tensor([[[0, 1], [2, 3]]] * 3 + [[[-1, -1], [-1, -1]]], dtype=torch.uint8).int(),
    ],
    ids=["lists", "base64", "tensor"],
)
def test_routing_as_lists_base64_or_tensor_keeps_minus_one(tmp_path: Path, experts: Any) -> None:
    wanted = np.array([[[0, 1], [2, 3]]] * 3 + [[[-1, -1], [-1, -1]]], dtype=np.int32)
    if isinstance(experts, torch.Tensor):
        experts = torch.from_numpy(wanted)
    if isinstance(experts, dict):
        import base64

        experts = {**experts, "data": base64.b64encode(wanted.tobytes()).decode()}
    dump, told = _read(tmp_path / "f", {**RECORD, "rollout_routed_experts": experts})
    assert told == []
    assert np.array_equal(dump.samples[0].routing[ROLLOUT].experts, wanted)


def test_base64_without_a_shape_is_no_routing(tmp_path: Path) -> None:
    dump, told = _read(tmp_path / "f", {**RECORD, "rollout_routed_experts": "AAAAAAEAAAA="})
    assert len(told) == 1
    assert told[0].startswith("samples[0] rollout_routed_experts")
    assert not dump.samples[0].routing


def test_samples_without_their_own_index_are_paired_by_place(tmp_path: Path) -> None:
    nameless = {name: value for name, value in RECORD.items() if name != "index"}
    dump, _ = _read(tmp_path / "f", nameless, nameless)
    assert [sample.key for sample in dump.samples] == ["step 2, place 0", "step 2, place 1"]
    assert dump.notes == (
        "the samples' indices are missing; they are paired by their place in the rollout",
    )
    dump, _ = _read(tmp_path / "f", RECORD, RECORD)
    assert [sample.key for sample in dump.samples] == ["step 2, place 0", "step 2, place 1"]
    assert "not one of its own each" in dump.notes[0]
    trained = {"sample_index": None, "response_lengths": 3, "tokens": torch.tensor([1, 2, 3, 4])}
    dump, _ = _read(tmp_path / "f", *({**trained, "rollout_position": at} for at in (3, 1)))
    assert [sample.key for sample in dump.samples] == ["step 2, place 3", "step 2, place 1"]


def test_several_versions_of_weights_are_told_per_token_or_not_at_all(tmp_path: Path) -> None:
    for versions, kept, notes in (
        ([], None, 0),
        (["3", "3"], "3", 0),
        (["3", "3", "4"], ["3", "3", "4"], 0),
        (["3", "4"], None, 1),
    ):
        dump, told = _read(tmp_path / "f", {**RECORD, "weight_versions": versions})
        assert dump.samples[0].meta.get("rollout_version") == kept
        assert len(told) == notes
        assert all(problem.kind == "note" for problem in dump.problems)


def test_kept_ids_of_top_p_are_told(tmp_path: Path) -> None:
    dump, _ = _read(tmp_path / "f", {**RECORD, "rollout_top_p_token_offsets": torch.arange(4)})
    assert "top_p was below 1" in dump.notes[0]


def test_what_is_no_dump_of_slime(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for value, said in (
        ([1], "holds a list of 1"),
        ({"a": 1}, "holds a dict with 'a'"),
        ({}, "holds an empty dict"),
        ({"samples": 3}, "holds a dict with 'samples'"),
    ):
        path.write_bytes(saved(value))
        assert said in refused(lambda path: read(path, TRAINER), path)
        assert not fits(head_of(path))
    path.write_bytes(saved({"rollout_id": 1, "samples": []}))
    assert fits(head_of(path))
    assert read(path, TRAINER).samples == ()


_ODD = st.sampled_from(
    [*ODD_VALUES, torch.zeros(2, 2), torch.tensor(3), np.array([1.5]), np.array("x"), 10**600]
)


@settings(max_examples=80)
@given(
    changes=st.dictionaries(
        st.sampled_from(
            [*RECORD, "rollout_routed_experts", "weight_versions", "group_index", "response",
             "prefix_cache_info", "truncated", "data_parallel_rank"]
        ),
        _ODD,
        max_size=4,
    ),
    outer=st.dictionaries(st.sampled_from(["rollout_id", "x"]), _ODD, max_size=1),
)  # fmt: skip
def test_odd_values_are_problems_and_no_exceptions(
    changes: dict[str, Any], outer: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "slime.pt"
    path.write_bytes(
        saved({"rollout_id": 2, "samples": [RECORD, {**RECORD, **changes}, {"index": 1}], **outer})
    )
    dump = read(path, ROLLOUT)
    assert dump.samples
    assert any(problem.place.record == "samples[2]" for problem in dump.problems)
    assert all("\n" not in problem.what for problem in dump.problems)
