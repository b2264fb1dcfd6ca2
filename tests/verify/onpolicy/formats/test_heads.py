"""What a file is, from how it begins and whatever its name says."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from verify.errors import InputFileError
from verify.onpolicy.formats.heads import JSON, PARQUET, PICKLE, SAFETENSORS, TORCH, head_of


def _safetensors(header: dict[str, object]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def test_containers_are_told_apart_by_content(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("dump/data.pkl", b"")
    contents = {
        JSON: b'{"a": 1}\n',
        PICKLE: b"\x80\x02}q\x00.",
        PARQUET: b"PAR1....PAR1",
        SAFETENSORS: _safetensors({"x": {}}),
        TORCH: archive.read_bytes(),
    }
    for container, content in contents.items():
        path = tmp_path / f"{container}.csv"
        path.write_bytes(content)
        head = head_of(path)
        assert (head.container, head.suffix, head.size) == (container, ".csv", len(content))
    assert head_of(tmp_path / "json.csv").first == {"a": 1}
    assert head_of(tmp_path / "json.csv").has("a")
    assert not head_of(tmp_path / "json.csv").has("a", "b")
    assert head_of(tmp_path / "safetensors.csv").first == {"x": {}}
    assert head_of(tmp_path / "torch.csv").names == ("dump/data.pkl",)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"\x1f\x8b\x08", "compressed with gzip; unpack it first: gunzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\xff\xfe{\x00", "UTF-16"),
        (b"<html>", "page of HTML"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 12\n", "Git LFS pointer"),
        (b"PK\x03\x04", "zip archive, as torch.save writes, and is none or is cut"),
        (b"PK\x05\x06" + b"\0" * 18, "not JSON"),
        (b"\x93NUMPY\x01\x00", "NumPy array"),
        (b"plain prose\n", "not JSON: line 1"),
        ((12).to_bytes(8, "little") + b'{"x": {}, "x', "not a safetensors file: its header"),
        ((9).to_bytes(8, "little") + b"{\xff", "not a safetensors file: its header"),
    ],
)
def test_what_no_reader_takes_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=why) as raised:
        head_of(path)
    assert str(path) in str(raised.value)


def test_a_zip_that_torch_did_not_write(tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.npy", b"")
    with pytest.raises(InputFileError, match=r"none of torch.save: it holds 'a.npy'"):
        head_of(path)


def test_an_archive_of_torch_that_was_packed_again_is_called_compressed(tmp_path: Path) -> None:
    """Once it was of no format that is known."""
    path = tmp_path / "dump.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("dump/data.pkl", b"x" * 100)
    with pytest.raises(InputFileError, match=r"torch\.save whose entries are compressed"):
        head_of(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("dump/data.pkl", b"x" * 100)
    assert head_of(path).container == TORCH


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, why in (("pipe", "not a regular"), ("loop", "circle"), ("gone", "no such file")):
        with pytest.raises(InputFileError, match=why):
            head_of(tmp_path / name)
