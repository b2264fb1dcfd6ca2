"""The JSON lines: what the format of Megatron-LM's tracer asks for, and nothing made up."""

from __future__ import annotations

import json
import math

import pytest
from trace_toy import header, record_toy, write_step

from verify.errors import InputFileError
from verify.tracing.export import export, lines
from verify.tracing.files import TraceWriter, read_folder

VALUES = {"sha256", "summary", "captured_numel", "sample_indices", "all_finite"}


def check(record, before):
    """The rules of the format's version 1 for a record without values."""
    assert record["schema_version"] == 1
    for name in ("rank", "sequence", "occurrence"):
        assert type(record[name]) is int
        assert record[name] >= 0
    assert record["sequence"] > before
    assert record["microbatch"] is None
    assert record["iteration"] is None or record["iteration"] >= 0
    for name in ("name", "phase"):
        assert 0 < len(record[name]) <= 512
        assert all(ord(character) >= 32 for character in record[name])
    assert record["event"] == "tensor"
    assert isinstance(record["metadata"], dict)
    tensor = record["tensor"]
    assert tensor["mode"] == "metadata"
    assert tensor["numel"] == math.prod(tensor["shape"])
    assert (tensor["value_observed"], tensor["exact_value_certificate"]) == (False, False)
    assert not VALUES & tensor.keys()
    assert all(tensor[name] for name in ("dtype", "layout", "device_type"))
    assert tensor["layout"] != "strided"  # which would need strides
    assert tensor["requires_grad"] is False
    assert "requires_grad" in record["metadata"]["not_recorded"]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_keeps_to_the_format(tmp_path):
    for rank in range(2):
        record_toy(tmp_path / "a", rank=rank, world=2, shards=2)
    assert export(read_folder(tmp_path / "a"), tmp_path / "out") == 2 * 210
    for rank in range(2):
        records = read(tmp_path / "out" / f"rank_{rank:06d}.jsonl")
        assert {one["rank"] for one in records} == {rank}
        for before, record in enumerate(records, -1):
            check(record, before)
        names = ("iteration", "phase", "event", "name", "occurrence")
        keys = [tuple(one[name] for name in names) for one in records]
        assert len(set(keys)) == len(keys)
    shard = next(one for one in records if one["name"] == "head.weight:parameter")
    assert (shard["phase"], shard["iteration"]) == ("start", None)
    assert shard["tensor"]["shape"] == [2, 6]
    assert shard["metadata"]["whole"] == {"shape": [4, 6], "ranges": [[2, 4], [0, 6]]}


def test_digests_differ_exactly_where_the_recordings_do(tmp_path):
    record_toy(tmp_path / "a")
    record_toy(tmp_path / "b", [(1, "forward", "head")])
    sides = []
    for side in "ab":
        export(read_folder(tmp_path / side), tmp_path / f"out_{side}", (1, 2))
        sides.append(read(tmp_path / f"out_{side}" / "rank_000000.jsonl"))
    different = [one["name"] for one, other in zip(*sides, strict=True) if one != other]
    assert different[0] == "head:output"
    assert (sides[0][0]["name"], sides[0][0]["phase"]) == ("(model):input:0", "forward")
    assert {one["iteration"] for one in sides[0]} == {1}
    assert {one["metadata"]["digest_scheme"] for one in sides[0]} == {"lanes4x64-v1"}


def test_names_that_the_format_would_refuse_or_take_for_one(tmp_path):
    names = ["x" * 2000, "y\n\x00", "a:output", "a"]
    entries = [(name, "output", "", name) for name in names]
    entries.append(("a", "output", "output", "again"))
    writer = TraceWriter(tmp_path / "a", header())
    write_step(writer, 0, entries)
    writer.close()
    (recording,) = read_folder(tmp_path / "a").values()
    made = list(lines(recording, (None, None)))
    for before, record in enumerate(made, -1):
        check(record, before)
    assert made[0]["metadata"]["name"] == names[0]
    assert len({(one["name"], one["occurrence"]) for one in made}) == len(made)


def test_nothing_is_left_of_a_failed_export(tmp_path):
    for rank in range(2):
        record_toy(tmp_path / "a", rank=rank, world=2)
    (tmp_path / "out").mkdir()
    taken = tmp_path / "out" / "rank_000001.jsonl"
    taken.write_text("mine")
    with pytest.raises(InputFileError, match=r"rank_000001\.jsonl: exists already"):
        export(read_folder(tmp_path / "a"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [taken.name]
    assert taken.read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputFileError, match="file"):
        export(read_folder(tmp_path / "a"), tmp_path / "file" / "out")
