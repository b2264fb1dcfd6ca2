"""Tensor files that are not what they should be, and paths that lead nowhere.

Whatever happens to a file, it is either read as what it says or refused with its name: one line,
no other exception. The same for every reader of a path.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from mutations import mutated_bytes, read_or_refused, refused
from safetensors.torch import save, save_file

from verify import diffs, results
from verify.errors import InputFileError
from verify.gates import config
from verify.goldens import packing, store
from verify.tensor_files import opened

TENSORS = {
    "w": torch.arange(12, dtype=torch.float32).view(3, 4),
    "bias": torch.tensor([1.0, -0.0], dtype=torch.bfloat16),
    "step": torch.tensor(7),
}
GOOD = save(TENSORS, {"mok-verify": '{"case": "c"}'})
DTYPES = {"F32": np.uint32, "BF16": np.uint16, "I64": np.int64}


def with_header(header: dict[str, Any] | str, data: bytes = b"") -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "replace")
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
X = json.dumps(ENTRY)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with opened(path) as file:
        return {name: file.tensor(name) for name in file.names}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "git lfs pull"),
        (b"", "is empty (0 bytes)"),
        (GOOD[:-8], "its tensors need 60 bytes, 52 are there"),
        (GOOD + bytes(8), "8 bytes follow after its tensors' 60"),
        (b"\x93NUMPY\x01\0v\0{'descr': '<f4', }      ", "a NumPy file (.npy)"),
        (b"PK\x03\x04" + bytes(40), "a zip archive, as torch.save"),
        (b"\x80\x02}q\0X\x01\0\0\0" + bytes(9), "a pickle"),
        (b"<!DOCTYPE html><html><body>404", "a page of HTML"),
        (with_header(f'{{"x": {X}, "x": {X}}}', bytes(16)), "the name 'x' occurs twice"),
        (with_header(f'{{"x": {X}, "y": {X}}}', bytes(16)), "not a safetensors file"),
        (with_header({"x": {**ENTRY, "data_offsets": [-16, 16]}}, bytes(16)), "lies at -16 to 16"),
        (with_header({"x": {**ENTRY, "data_offsets": [0, 16.0]}}, bytes(16)), "at 0 to 16.0"),
        (with_header(X.join(('{"x": ', "}")).replace("16", "1e999"), bytes(16)), "beyond float64"),
        (with_header({"x": {**ENTRY, "shape": [2**40] * 3}}, bytes(16)), "overflow"),
        (with_header({"x": {**ENTRY, "shape": [5]}}, bytes(16)), "not a safetensors file"),
        (with_header({"x": {**ENTRY, "dtype": "F31"}}, bytes(16)), "F31"),
        (with_header('{"x": ' + "[" * 50_000 + "]" * 50_000 + "}"), "nested too deeply"),
        (with_header("{}").replace(b"{}", b"{\xff"), "its header is malformed: not UTF-8"),
        (with_header('{"\\ud800": ' + X + "}", bytes(16)), "not a safetensors file"),
        (with_header({"__metadata__": {"a": 1}, "x": ENTRY}, bytes(16)), "expected a string"),
        (struct.pack("<Q", 2**62) + b"{}" + bytes(16), "begins with"),
        (struct.pack("<Q", 100_000_001) + b"{}" + bytes(16), "begins with"),
    ],
)
def test_what_is_no_safetensors_file_is_said_to_be_what_it_is(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    assert said in refused(read_all, path)
    good = tmp_path / "good.safetensors"
    good.write_bytes(GOOD)
    for pair in (lambda p: diffs.diff(p, good), lambda p: diffs.diff(good, p)):
        assert said in refused(pair, path)


def test_files_of_torch_and_numpy_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    torch.save({"view": torch.ones(1000)[:3]}, path)
    assert "a zip archive, as torch.save" in refused(read_all, path)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    assert "a NumPy file" in refused(read_all, path)


@settings(max_examples=400)
@given(content=mutated_bytes(GOOD))
def test_mutated_tensor_files_are_read_as_they_say_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    found = read_or_refused(read_all, path)
    if found is None:
        return
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    assert found.keys() == header.keys()
    for name, tensor in found.items():
        begin, end = header[name]["data_offsets"]
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw == content[8 + length + begin : 8 + length + end]
        assert list(tensor.shape) == header[name]["shape"]


@settings(max_examples=400)
@given(content=mutated_bytes(GOOD))
def test_a_mutated_golden_is_the_stored_bits_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / ENTRY_OF_GOOD.file
    path.write_bytes(content)
    found = read_or_refused(golden_at, path)
    if found is None:
        return
    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert bytes_of(tensor) == bytes_of(TENSORS[name])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


ENTRY_OF_GOOD = store.Entry(
    case="c",
    kind="exact",
    key=None,
    reason="",
    target="c.py::c",
    file="c.exact.000000000000.safetensors",
    inputs="",
    source_digest="",
    made={},
    outputs={name: str(t.dtype).removeprefix("torch.") for name, t in TENSORS.items()},
    tensors=packing.digests_of(TENSORS),
)


def golden_at(path: Path) -> dict[str, torch.Tensor]:
    return packing.load(path.parent, store.Entry(**{**vars(ENTRY_OF_GOOD), "file": path.name}))


READERS: dict[str, Callable[[Path], object]] = {
    "tensors": read_all,
    "result": results.read,
    "diff": lambda path: diffs.diff(path, path),
    "goldens": store.read,
    "golden": golden_at,
    "gate": config.load,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["dangling", "loop", "below a file", "behind a loop", "a pipe"])
def test_paths_that_lead_nowhere(tmp_path: Path, reader: str, kind: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / "x"
    if kind == "dangling":
        path.symlink_to("gone")
        reason = "is a symbolic link to 'gone', which is gone"
    elif kind == "loop":
        path.symlink_to("x")
        reason = "its symbolic links lead in a circle"
    elif kind == "below a file":
        path, reason = tmp_path / "file" / "x", "a part of its path is a file, not a folder"
    elif kind == "behind a loop":
        path, reason = tmp_path / "loop" / "x", "its symbolic links lead in a circle"
    else:
        if reader == "result":
            pytest.skip("a pipe is a good way to hand over a result")
        os.mkfifo(path)
        reason = "is a file; goldens lie in a folder" if reader == "goldens" else "not a regular"
    assert reason in refused(READERS[reader], path)


@pytest.mark.parametrize("reader", READERS)
def test_what_is_not_there_and_what_is_a_folder(tmp_path: Path, reader: str) -> None:
    if reader != "goldens":  # without a folder there are no goldens: the claim says so
        assert "no such file" in refused(READERS[reader], tmp_path / "none")
    if reader in ("tensors", "golden", "gate"):
        assert "is a folder, not a file" in refused(READERS[reader], tmp_path)
    assert "NUL" in refused(READERS[reader], tmp_path / "a\0b")


def test_a_result_comes_through_a_pipe(tmp_path: Path, make_result: Any) -> None:
    content = json.dumps(make_result())
    reading, writing = os.pipe()
    os.write(writing, content.encode())
    os.close(writing)
    try:
        assert results.read(Path(f"/dev/fd/{reading}"))["verdict"] == "VERIFIED"
    finally:
        os.close(reading)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/n\xff.json"))
    path.write_text("{")
    assert "not a result document" in refused(results.read, path)
    bad = path.with_suffix(".safetensors")
    bad.write_bytes(GOOD[:-1])
    assert "is truncated" in refused(read_all, bad)


def test_folders_are_compared_to_their_last_file(tmp_path: Path) -> None:
    for side, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / side).mkdir()
        (tmp_path / f"real-{side}").mkdir()
        save_file({"x": torch.ones(4)}, tmp_path / side / "same.safetensors")
        save_file({"x": torch.tensor([value])}, tmp_path / f"real-{side}" / "x.safetensors")
        (tmp_path / side / "link").symlink_to(tmp_path / f"real-{side}")
    a, b = tmp_path / "a", tmp_path / "b"
    assert diffs.exit_code(diffs.diff(a, b)) == 1, "what lies behind a link counts, too"
    (tmp_path / "real-a" / "back").symlink_to(a)
    with pytest.raises(InputFileError, match=r"link/back: is a symbolic link to a folder that"):
        diffs.diff(a, b)
    (tmp_path / "real-a" / "back").unlink()
    (a / "gone.safetensors").symlink_to("nowhere")
    (b / "gone.safetensors").symlink_to("nowhere")
    with pytest.raises(InputFileError, match=r"gone\.safetensors: no such file: it is a symbolic"):
        diffs.diff(a, b)


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in ("a", "b"):
        (tmp_path / side / "closed").mkdir(parents=True)
        save_file({"x": torch.ones(4)}, tmp_path / side / "x.safetensors")
    scan, listed = os.scandir, os.listdir

    def closed(path: Any) -> None:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", lambda path: closed(path) or scan(path))
    monkeypatch.setattr(os, "listdir", lambda path: closed(path) or listed(path))
    with pytest.raises(InputFileError, match="closed: cannot read: Permission denied"):
        diffs.diff(tmp_path / "a", tmp_path / "b")
    assert "Permission denied" in refused(store.read, tmp_path / "a" / "closed")
