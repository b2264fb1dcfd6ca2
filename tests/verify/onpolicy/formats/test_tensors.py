"""Safetensors of named tensors: both layouts, every dtype, and files whose parts do not fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import ODD_VALUES, mutated_bytes, read_or_refused, refused
from safetensors.torch import save

from verify.onpolicy.formats.heads import head_of
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.formats.tensors import fits, read
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump

SAMPLER = torch.tensor([-0.5, -1.25, float("nan"), -2.0, -0.125])
KEYED = {
    "b/response_ids": torch.tensor([7, 8]),
    "b/sampler_logprobs": SAMPLER[:2],
    "a 10/response_ids": torch.tensor([4], dtype=torch.int32),
    "a 10/prompt_ids": torch.tensor([1, 2], dtype=torch.uint8),
    "a 10/trainer_logprobs": SAMPLER[:1].double(),
    "a 10/mask": torch.tensor([True]),
    "a 10/sampler_routing": torch.tensor([[[0, 1]], [[-1, -1]]], dtype=torch.int16),
    "a 9/logprobs": SAMPLER[3:4].to(torch.bfloat16),
    "other": torch.zeros(3),
}
PACKED = {
    "cu_seqlens": torch.tensor([0, 2, 2, 5], dtype=torch.int32),
    "response_ids": torch.tensor([7, 8, 4, 5, 6]),
    "sampler_logprobs": SAMPLER,
    "trainer_logprobs": SAMPLER.to(torch.bfloat16),
    "mask": torch.tensor([1.0, 0, 1, 1, 1]),
    "prompt_ids": torch.tensor([1, 2, 3]),
    "prompt_cu_seqlens": torch.tensor([0, 1, 2, 3]),
    "trainer_routing": torch.arange(6, dtype=torch.int32).reshape(6, 1, 1),
    "routing_cu_seqlens": torch.tensor([0, 2, 2, 6]),
}
META = {"ids": json.dumps(["x", 7, "z"]), "meta": json.dumps({"temperature": 0.5, "step": 3})}


def _dump(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    side: str = TRAINER,
) -> tuple[Dump, list[str]]:
    path.write_bytes(save(dict(tensors), dict(metadata) if metadata else None))
    dump = read_dump(path, side)
    assert dump.format == "tensors"
    return dump, [f"{p.place.record} {p.field}: {p.what}" for p in dump.problems]


def test_one_tensor_for_each_field_of_each_sample(tmp_path: Path) -> None:
    dump, told = _dump(tmp_path / "f", KEYED, side=ROLLOUT)
    assert (told, dump.notes, dump.config) == ([], (), {})
    assert [sample.key for sample in dump.samples] == ["a 9", "a 10", "b"]
    nine, ten, last = dump.samples
    assert nine.tokens is None
    assert (nine.series[ROLLOUT].values.tolist(), nine.series[ROLLOUT].stored) == ([-2], "bfloat16")
    assert ten.prompt is not None
    assert ten.prompt.tolist() == [1, 2]
    assert ten.mask is not None
    assert ten.mask.tolist() == [True]
    assert (ten.series[TRAINER].values.tolist(), ten.series[TRAINER].stored) == ([-0.5], "float64")
    assert ten.routing[ROLLOUT].experts.tolist() == [[[0, 1]], [[-1, -1]]]
    assert ten.routing[ROLLOUT].start == 0
    assert last.tokens is not None
    assert last.tokens.tolist() == [7, 8]
    assert (last.series[ROLLOUT].stored, last.mask) == ("float32", None)


def test_all_samples_in_one_tensor_for_each_field(tmp_path: Path) -> None:
    dump, told = _dump(tmp_path / "f", PACKED, META)
    assert (told, dump.notes) == ([], ())
    assert dump.config == {"temperature": 0.5, "step": 3}
    assert [sample.key for sample in dump.samples] == ["x", "7", "z"]
    assert [sample.place.record for sample in dump.samples] == [f"packed[{n}]" for n in range(3)]
    lists = [
        [None if value is None else value.tolist() for value in (s.prompt, s.tokens, s.mask)]
        for s in dump.samples
    ]
    assert lists == [
        [[1], [7, 8], [True, False]],
        [[2], [], []],
        [[3], [4, 5, 6], [True, True, True]],
    ]
    both = dump.samples[2].series
    assert repr(both[ROLLOUT].values.tolist()) == "[nan, -2.0, -0.125]"
    assert repr(both[TRAINER].values.tolist()) == "[nan, -2.0, -0.125]"
    assert (both[ROLLOUT].stored, both[TRAINER].stored) == ("float32", "bfloat16")
    assert not both[ROLLOUT].absent.any()
    assert [s.routing[TRAINER].experts.shape for s in dump.samples] == [
        (2, 1, 1),
        (0, 1, 1),
        (4, 1, 1),
    ]


def test_packed_samples_without_ids_are_numbered(tmp_path: Path) -> None:
    dump, told = _dump(tmp_path / "f", PACKED)
    assert [sample.key for sample in dump.samples] == ["packed 0", "packed 1", "packed 2"]
    assert dump.notes == ("packed samples without ids are paired by their place in the file",)
    for ids in ('["a"]', "3", "{", "NaN"):
        dump, told = _dump(tmp_path / "f", PACKED, {"ids": ids})
        assert len(told) == 1
        assert told[0].startswith(" metadata ids: is ")
        assert len(dump.samples) == 3


@pytest.mark.parametrize(
    ("changed", "told", "left"),
    [
        ({"cu_seqlens": torch.tensor([0, 2, 4])}, "response_ids: has 5 rows, and cu_seqlens", 0),
        ({"cu_seqlens": torch.tensor([1, 2, 2, 5])}, "cu_seqlens: does not begin with 0", 0),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 5])}, "cu_seqlens: does not begin with 0", 0),
        ({"cu_seqlens": torch.tensor([0, -(2**63), 2**62, 5])}, "or falls", 0),
        ({"cu_seqlens": torch.tensor([0.0, 2, 2, 5])}, "it is one list of integers", 0),
        ({"cu_seqlens": None}, "cu_seqlens: is missing or cannot be read", 0),
        ({"mask": torch.ones(4)}, "mask: has 4 rows, and cu_seqlens ends at 5", 3),
        ({"prompt_cu_seqlens": None}, "prompt_ids: its prompt_cu_seqlens is missing", 3),
        ({"prompt_cu_seqlens": torch.tensor([0, 3])}, "is for 1 samples; there are 3", 3),
        ({"response_ids": torch.tensor([7, -8, 4, 5, 6])}, "packed[0] response_ids: entry 1", 3),
        ({"sampler_logprobs": torch.zeros(5, 2)}, "sampler_logprobs: is an array of float32", 3),
        ({"mask": torch.zeros(5, dtype=torch.complex64)}, "is of 'C64'; read are F64", 3),
        ({"mask": torch.zeros(5).to(torch.float8_e4m3fn)}, "is of 'F8_E4M3'; read are F64", 3),
        ({"trainer_routing": torch.zeros(6, 1)}, "packed[0] trainer_routing: is an array", 3),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, changed: Mapping[str, torch.Tensor | None], told: str, left: int
) -> None:
    tensors = {**PACKED, **changed}
    kept = {name: value for name, value in tensors.items() if value is not None}
    dump, said = _dump(tmp_path / "f", kept)
    assert len(dump.samples) == left
    assert any(told in line for line in said), said
    assert any(sample.tokens is not None for sample in dump.samples) == bool(left)


def test_what_is_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(save({"weight": torch.zeros(2), "a/weight": torch.zeros(1)}))
    assert "has no tensor named as a field" in refused(lambda path: read(path, TRAINER), path)
    assert not fits(head_of(path))
    path.write_bytes(save(PACKED))
    assert fits(head_of(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "is truncated" in refused(lambda path: read(path, TRAINER), path)
    many = {
        f"{n}/response_ids": {"dtype": "I64", "shape": [400], "data_offsets": [0, 3200]}
        for n in range(9)
    }
    path.write_bytes(_with_header(many, bytes(3200)))
    assert "its tensors overlap" in refused(lambda path: read(path, TRAINER), path)


def _with_header(header: Mapping[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(save(PACKED, META))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert len(read(path, TRAINER).samples) == 3


_BYTES = save(PACKED, META)
_HEADER = json.loads(_BYTES[8 : 8 + int.from_bytes(_BYTES[:8], "little")])


@settings(max_examples=90)
@given(content=mutated_bytes(_BYTES))
def test_damaged_files_are_read_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    read_or_refused(lambda path: read(path, TRAINER), path)


@settings(max_examples=90)
@given(
    name=st.sampled_from(sorted(_HEADER)),
    part=st.sampled_from(["dtype", "shape", "data_offsets", "ids", "meta", ""]),
    value=st.sampled_from([*ODD_VALUES, "BF16", "U64", [5], [5, 1], [-1], [0], [2**62, 4], [0, 8]]),
)
def test_odd_headers_are_read_or_refused(
    name: str, part: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header = {**_HEADER, name: {**_HEADER[name], part: value} if part else value}
    path = tmp_path_factory.getbasetemp() / "odd.safetensors"
    data = _BYTES[8 + int.from_bytes(_BYTES[:8], "little") :]
    path.write_bytes(_with_header(header, data))
    read_or_refused(lambda path: read(path, TRAINER), path)
