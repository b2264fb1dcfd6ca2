"""Folders of torch.distributed.checkpoint: whole, damaged, hostile."""

from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    Pieces,
    Runs,
    distributed,
    model,
    refused,
    refused_at_once,
    safetensors,
    weights,
)
from torch.distributed.checkpoint.metadata import MetadataIndex

from verify.checkpoints import distributed_metadata
from verify.checkpoints.opening import opened
from verify.errors import InputFileError

HALVES = [((0, 9), (0, 8)), ((9, 16), (0, 8))]
QUARTERS = [(rows, columns) for rows in ((0, 9), (9, 16)) for columns in ((0, 3), (3, 8))]


@pytest.fixture
def whole(tmp_path) -> Path:
    return safetensors(tmp_path / "whole.safetensors", model())


@pytest.mark.parametrize("boxes", [HALVES, QUARTERS], ids=["halves", "quarters"])
def test_pieces_of_distributed_checkpoints_make_up_the_whole(boxes, whole, tmp_path) -> None:
    state = model()
    pieces = {**state, "embed.weight": Pieces.of(state["embed.weight"], boxes)}
    top = distributed(tmp_path / "dcp", {"model": pieces, "step": 7}, thread_count=2)
    code, out, _ = weights(top, whole, "--rename", "model.*=*")
    assert code == 0
    assert "torch.distributed.checkpoint, " in out
    assert "note: A: 1 value is no tensor and not compared: step\n" in out
    assert weights(top, whole)[0] == 3
    gap = {**pieces, "embed.weight": Pieces.of(state["embed.weight"], boxes[1:])}
    assert "has elements that no part holds" in refused_at_once(distributed(tmp_path / "gap", gap))


def test_pieces_that_overlap(tmp_path) -> None:
    top = distributed(tmp_path / "dcp", model())
    metadata = pickle.loads((top / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["layers.0.up.weight"].chunks
    more = type(chunks[0])(torch.Size([1, 0]), torch.Size([2, 8]))
    where = metadata.storage_data[MetadataIndex("layers.0.up.weight", chunks[0].offsets)]
    metadata.storage_data[MetadataIndex("layers.0.up.weight", more.offsets, 1)] = where
    (top / ".metadata").write_bytes(pickle.dumps(metadata))
    with opened(top) as found:  # a place that nothing asks for is no fault
        assert len(found.parameters) == 7
    chunks.append(more)
    (top / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "'layers.0.up.weight' has parts that overlap" in refused_at_once(top)


def test_missing_and_short_files_of_a_distributed_checkpoint_are_named(tmp_path) -> None:
    top = distributed(tmp_path / "dcp", model(), single_file_per_rank=False)
    names = sorted(path.name for path in top.glob("*.distcp"))
    assert len(names) == 7
    content = (top / names[2]).read_bytes()
    (top / names[2]).write_bytes(content[:-9])
    assert f"{names[2]}: is truncated: " in refused_at_once(top)
    for name in (names[2], names[5]):
        (top / name).unlink()
    assert f"lacks {names[2]}, {names[5]}: the checkpoint is not complete" in refused(top)
    (top / ".metadata").unlink()
    assert "holds __0_0.distcp, but no .metadata" in refused(top)


def test_a_piece_of_another_dtype_than_the_metadata_says(tmp_path, whole) -> None:
    """torch's own loader converts it without a word."""
    state = model()
    top = distributed(tmp_path / "dcp", state)
    path = top / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["embed.weight"].properties.dtype = torch.float32
    path.write_bytes(pickle.dumps(metadata))
    told = "'embed.weight' is stored as bfloat16[16, 8], the metadata says float32[16, 8]"
    assert told in refused(top)
    other = safetensors(tmp_path / "o.safetensors", {**state, "embed.weight": torch.ones(16, 8)})
    code, _, err = weights(top, other)
    assert code == 2
    assert told in err


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (Runs(os.system, "touch {mark}"), "posix.system"),
        (Runs(eval, "open({mark!r}, 'w')"), "builtins.eval"),
        (Runs(getattr, torch, "load"), "builtins.getattr"),
        (subprocess.Popen, "subprocess.Popen"),
        (torch.load, "torch.serialization.load"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
    ],
)
def test_metadata_that_asks_for_more_is_refused_by_name(payload, named, tmp_path) -> None:
    mark = tmp_path / "mark"
    if isinstance(payload, Runs):
        function, words = payload.__reduce__()
        words = [w.format(mark=str(mark)) if isinstance(w, str) else w for w in words]
        payload = Runs(function, *words)
        if function is getattr:
            payload = Runs(getattr, 1, "real")
    top = distributed(tmp_path / "dcp", model())
    (top / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": payload}))
    said = refused(top)
    assert f"asks for {named}, which the metadata of a checkpoint does not need" in said
    assert not mark.exists()


def test_metadata_cannot_change_the_classes_that_it_names(tmp_path) -> None:
    """Setting attributes of a class by a pickle's BUILD reaches a stand-in, made for this file."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    hostile = (
        b"\x80\x04" + name + b"N}X\x07\x00\x00\x00version" + b"X\x04\x00\x00\x00evil" + b"s\x86b."
    )
    top = tmp_path / "dcp"
    top.mkdir()
    (top / ".metadata").write_bytes(hostile)
    assert "not the metadata of a checkpoint" in refused(top)
    from torch.distributed.checkpoint.metadata import Metadata

    assert Metadata.version is None


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"nonsense", pickle.dumps([1, 2]), b"\x80\x04]r."]
)
def test_metadata_that_is_none(content, tmp_path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    assert "not the metadata of a checkpoint" in refused(tmp_path)


def test_any_cut_and_any_flipped_byte_of_metadata_is_read_or_refused(tmp_path) -> None:
    top = distributed(tmp_path / "dcp", {"w": torch.ones(2, 3), "n": 3})
    path = top / ".metadata"
    content = path.read_bytes()
    assert distributed_metadata.read(path)[1] == ["n"]
    told = []
    for at in range(0, len(content), 7):
        for changed in (
            content[:at],
            content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :],
        ):
            path.write_bytes(changed)
            try:
                distributed_metadata.read(path)
            except InputFileError as error:
                told.append(str(error))
    assert len(told) > 100
    assert all(text.startswith(f"{path}: ") for text in told)


@pytest.mark.parametrize("outside", ["../secret.distcp", "/etc/hostname", ""])
def test_a_piece_outside_of_the_folder(outside, tmp_path) -> None:
    top = distributed(tmp_path / "dcp", model())
    metadata = pickle.loads((top / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = outside
    (top / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "which is not a file of the folder" in refused(top)


def test_a_whole_tensor_may_be_stored_without_an_offset(tmp_path, whole) -> None:
    top = distributed(tmp_path / "dcp", model())
    metadata = pickle.loads((top / ".metadata").read_bytes())
    metadata.storage_data = {
        MetadataIndex(index.fqn): info for index, info in metadata.storage_data.items()
    }
    (top / ".metadata").write_bytes(pickle.dumps(metadata))
    assert weights(top, whole)[0] == 0
    metadata.storage_data.popitem()
    (top / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "it does not say where the part of 'layers.1.norm.weight'" in refused(top)
