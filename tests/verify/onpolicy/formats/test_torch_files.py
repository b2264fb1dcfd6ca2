"""Files of torch.save: what is read, what is refused and by which words, and at what cost."""

from __future__ import annotations

import collections
import datetime
import http
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated_bytes, read_or_refused, refused
from torch_archives import (
    archive,
    called,
    entries,
    pickled,
    saved,
    sizes,
    storage,
    tensor,
    text,
    whole,
)

from verify.onpolicy.formats import torch_files
from verify.onpolicy.formats.numpy_stand_ins import Array, DType
from verify.onpolicy.formats.torch_files import opened, plain
from verify.onpolicy.formats.torch_globals import RECONSTRUCT
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import Place

BASE: dict[str, Any] = {"rollout_id": 1, "samples": []}
WEIGHTS = torch.tensor([0.5, -1.25, 3.0])


class _Runs:
    """What a file that attacks its reader holds."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def _file(path: Path, value: Any, **options: Any) -> Path:
    path.write_bytes(saved({**BASE, "x": value}, **options))
    return path


def _read(path: Path, value: Any, **options: Any) -> tuple[Any, list[str]]:
    content = opened(_file(path, value, **options))
    problems = Problems()
    found = plain(content, content.value["x"], Spot(Place("f", "r"), problems), "x")
    return found, [problem.what for problem in problems.listed()]


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before 1.6"])
@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.int32).reshape(3, 2),
        np.asfortranarray(np.arange(6.0).reshape(3, 2)),
        np.arange(6, dtype=">i4"),
        np.array([0.5, np.nan, -np.inf], dtype=np.float16),
        np.array([True, False]),
        np.zeros((0, 3), dtype=np.float32),
        np.arange(6, dtype=np.uint8)[::2],
    ],
    ids=lambda value: f"{value.dtype.name} {value.shape}",
)
def test_numpy_arrays_are_read(tmp_path: Path, value: Any, old: bool) -> None:
    found, told = _read(tmp_path / "f", value, _use_new_zipfile_serialization=not old)
    assert told == []
    assert found.shape == value.shape
    assert found.dtype == value.dtype
    assert np.array_equal(found, value, equal_nan=value.dtype.kind == "f")


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before 1.6"])
@pytest.mark.parametrize(
    "value",
    [
        WEIGHTS,
        WEIGHTS.to(torch.bfloat16),
        WEIGHTS.to(torch.float64)[1:],
        torch.nn.Parameter(WEIGHTS),
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(0, 2, dtype=torch.int32),
        torch.tensor([True, False]),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}",
)
def test_tensors_are_read(tmp_path: Path, value: torch.Tensor, old: bool) -> None:
    found, told = _read(tmp_path / "f", value, _use_new_zipfile_serialization=not old)
    exact = value.detach()
    exact = exact.float() if exact.dtype == torch.bfloat16 else exact
    assert told == []
    assert np.array_equal(found, exact.numpy())
    assert found.dtype == exact.numpy().dtype


def test_dtypes_that_only_new_files_have(tmp_path: Path) -> None:
    found, _ = _read(tmp_path / "f", torch.tensor([1, 65535], dtype=torch.uint16))
    assert found.tolist() == [1, 65535]
    found, _ = _read(tmp_path / "f", WEIGHTS.to(torch.float8_e4m3fn))
    assert found.tolist() == [0.5, -1.25, 3.0]


def test_plain_values_are_read(tmp_path: Path) -> None:
    value = {
        "list": [1, -2, 70_000, 2**40, -(2**80), 1.5, None, True],
        "text": "caf\u00e9 \U0001f600 " + "x" * 1000,
        "tuple": (1, (2, (3, (4, 5)))),
        "set": {1, 2},
        "bytes": b"\0\xff",
        "no bytes": b"",
        "ordered": collections.OrderedDict(a=1),
        "size": torch.Size([2, 3]),
        "scalars": [np.float32(0.5), np.int64(-3), np.bool_(True)],
    }
    content = opened(_file(tmp_path / "f", value))
    assert content.value["x"] == value


def test_views_of_one_large_storage_are_read_where_they_lie(tmp_path: Path) -> None:
    rows = torch.arange(3_000_000.0).reshape(3, 1_000_000)
    path = _file(tmp_path / "f", [row[5:9] for row in rows])
    tracemalloc.start()
    content = opened(path)
    spot = Spot(Place("f"), Problems())
    found = [plain(content, row, spot, "x").tolist() for row in content.value["x"]]
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [
        [5, 6, 7, 8],
        [1000005, 1000006, 1000007, 1000008],
        [2e6 + n for n in range(5, 9)],
    ]
    assert taken < 2_000_000  # of 12,000,000: mapped, not read


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (_Runs(), "posix.system"),
        (datetime.date(2026, 1, 1), "datetime.date"),
        (collections.Counter("a"), "collections.Counter"),
        (torch.zeros(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (torch.zeros(2, dtype=torch.complex64), "torch.ComplexFloatStorage"),
        (torch.float32, None),
        (bytearray(b"x"), "builtins.bytearray"),
        (Path("x"), "pathlib"),
        (http.HTTPStatus.OK, "http.HTTPStatus"),  # an enum
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_other_globals_are_refused_by_name(tmp_path: Path, value: Any, name: str | None) -> None:
    path = _file(tmp_path / "f", value)
    if name is None:  # a dtype by itself is harmless
        assert opened(path).value["x"] is value
        return
    said = refused(opened, path)
    assert name in said
    assert "only tensors, numpy arrays of numbers" in said
    assert "make plain values of it or leave it out, and save again" in said


def test_what_torch_allows_and_dumps_do_not_need_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for name, arguments in (
        ("torch.Tensor", (whole(10**11),)),
        ("builtins.bytearray", (whole(10**11),)),
        ("torch.storage.UntypedStorage", (whole(10**11),)),
        ("torch.serialization._get_layout", (text("torch.strided"),)),
        ("torch._utils._rebuild_meta_tensor_no_storage", (text("x"),)),
        ("builtins.complex", (whole(1), whole(2))),
    ):
        assert name in refused(opened, pickled(path, called(name, *arguments)))
    for instructions in (
        b"\x8b" + (300).to_bytes(4, "little") + bytes(300),
        called("_codecs.encode", text("x"), text("punycode")),
        called("numpy.dtype", whole(8), b"\x89", b"\x88"),
        called(RECONSTRUCT[0], b"cnumpy\nndarray\n", sizes(10**9), text("b")),
        called(RECONSTRUCT[1], b"cnumpy\ndtype\n", sizes(0), text("b")),
        called("numpy._core.multiarray.scalar", text("f4"), text("x")),
        called("collections.OrderedDict", b"]"),
        called("torch.Size", whole(3)),
        called("torch._utils._rebuild_parameter", whole(3), b"\x88", b"}"),
        b"ccollections\nOrderedDict\n)\x81",
        b"K\x01)R",
        b"]}b",
    ):
        said = refused(opened, pickled(path, instructions))
        assert "torch does not read it" not in said, said  # it never came so far


def test_storages_that_claim_more_than_the_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "f"
    good = saved({**BASE, "x": torch.zeros(4)})
    path.write_bytes(archive(good))
    assert opened(path).value["x"].tolist() == [0, 0, 0, 0]
    path.write_bytes(archive(good, {"data/0": bytes(8)}))
    assert "storage '0' should have 16 bytes, and it has 8" in refused(opened, path)
    path.write_bytes(archive(good, {"data/0": None}))
    assert "storage '0' should have 16 bytes, and it is not there" in refused(opened, path)
    pickled(path, tensor(storage("0", 10**12), 0, (3,), (1,)))
    assert "should have 4000000000000 bytes" in refused(opened, path)
    pickled(path, tensor(storage("0", 4), 0, (3, 2), (2, 1)))
    assert "reaches 6 elements into the storage '0', which has 4" in refused(opened, path)
    pickled(path, tensor(storage("0", 4), 2**62, (1,), (1,)))
    assert "into the storage '0', which has 4" in refused(opened, path)
    pickled(path, tensor(storage("0", 4), 0, (-1,), (1,)))
    assert "no sizes" in refused(opened, path)
    pickled(path, storage("0", 4) + b"0" + storage("0", 8))
    refused(opened, path)
    pickled(path, b"(" + storage("0", 4) + storage("0", 8) + b"t")
    assert "of two sizes" in refused(opened, path)


def test_archives_that_expand_or_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    good = saved({**BASE, "x": torch.zeros(100_000)})
    path.write_bytes(archive(good, compression=zipfile.ZIP_DEFLATED))
    assert "is compressed, and torch.save compresses nothing" in refused(opened, path)
    path.write_bytes(archive(good, {"constants.pkl": b"x"}))
    assert "TorchScript" in refused(opened, path)
    path.write_bytes(archive(good, {"byteorder": b"big"}))
    assert "big-endian" in refused(opened, path)
    path.write_bytes(archive(good, {"data.pkl": None}))
    assert "0 data.pkl" in refused(opened, path)
    for content in (good[:-1], good[:-30], good[:200], good + b"x"):
        path.write_bytes(content)
        assert "is a zip archive that is cut" in refused(opened, path)
    for content, said in (
        (b"", "not one at all"),
        (b"hello", "not one at all"),
        (pickle.dumps(BASE), "a plain pickle"),
        (pickle.dumps(BASE, 2), "a plain pickle"),
    ):
        path.write_bytes(content)
        assert said in refused(opened, path)
    assert "of protocol 4" in refused(opened, _file(path, 1, pickle_protocol=4))
    assert "is a folder" in refused(opened, tmp_path)
    assert "no such file" in refused(opened, tmp_path / "none")


def test_old_files_that_are_cut(tmp_path: Path) -> None:
    path = _file(tmp_path / "f", WEIGHTS, _use_new_zipfile_serialization=False)
    whole_file = path.read_bytes()
    for cut in (1, 12, 20):
        path.write_bytes(whole_file[:-cut])
        assert "should have 12 bytes, and they are not there" in refused(opened, path)
    claim = b"K\x03Ntq"  # the number of elements in the storage's persistent id
    assert whole_file.count(claim) == 1
    path.write_bytes(whole_file.replace(claim, b"J\xff\xff\xff\x7fNtq"))
    assert "they are not there" in refused(opened, path)


def test_a_few_bytes_do_not_become_many_numbers(tmp_path: Path) -> None:
    path = tmp_path / "f"
    found, told = _read(path, torch.ones(1).expand(2**21))
    assert (found, len(told)) == (None, 1)
    assert "more numbers than its file has bytes" in told[0]
    found, told = _read(path, torch.ones(1).expand(1000))
    assert (found.sum(), told) == (1000, [])
    row = [1] * 2000
    found, told = _read(path, [row] * 2000)
    assert (found, len(told)) == (None, 1)


@pytest.mark.parametrize(
    "instructions",
    [b"]" * 70_000, b"(" * 70_000, b"Nq\1" * 70_000, b"X\4\0\0\0abcd" * 70_000],
    ids=["lists", "marks", "notes", "texts"],
)
def test_a_pickle_that_would_take_all_memory_is_refused(
    tmp_path: Path, instructions: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify.onpolicy.formats.torch_pickles.MOST_MEMORY", 2**22)
    said = refused(opened, pickled(tmp_path / "f", instructions))
    assert "more than 4194304 bytes of memory; give fewer samples" in said


def test_notes_in_a_pickle_take_no_memory_by_their_numbers(tmp_path: Path) -> None:
    path = pickled(tmp_path / "f", b"Nr\xff\xff\xff\xff" + b"j\xff\xff\xff\xff" + b"\x86")
    tracemalloc.start()
    assert opened(path).value == (None, None)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_arrays_of_other_things_are_left_out_and_named(tmp_path: Path) -> None:
    for value, said in (
        (np.array(["ab"]), "dtype 'U2', not of numbers"),
        (np.array([1, None]), "dtype 'O8', not of numbers"),
        (np.array([1 + 2j]), "dtype 'c16', not of numbers"),
    ):
        found, told = _read(tmp_path / "f", value)
        assert found is None
        assert len(told) == 1
        assert said in told[0]


def test_state_that_numpy_does_not_write() -> None:
    for state in (None, (), (1, 2, 3, 4, 5), (1, (3,), None, False, b""), (1, ("x",), 2, 3, b"")):
        array = Array()
        array.__setstate__(state)
        assert array.value is None
        assert array.why
    for shape in ((3,), (-1,), (1,), (2**40,)):
        array = Array()
        array.__setstate__((1, shape, DType("f4"), False, bytes(8)))
        assert (array.value, "not of its shape: 8 bytes" in array.why) == (None, True)


def test_names_tell_formats_apart_and_never_raise(tmp_path: Path) -> None:
    for old in (False, True):
        path = _file(tmp_path / "f", list(range(100_000)), _use_new_zipfile_serialization=not old)
        assert torch_files.names_in(path)[:3] == ("rollout_id", "samples", "x")
    for content in (b"", b"PK\x03\x04", b"\x80\x02", path.read_bytes()[:40]):
        path.write_bytes(content)
        torch_files.names_in(path)
    assert torch_files.names_in(tmp_path / "none") == ()


_RECORD = {"tokens": [1, 2, 3], "a": np.arange(3.0), "t": WEIGHTS, "s": "completed", "n": None}
_ZIP = saved({"rollout_id": 1, "samples": [_RECORD]})
_OLD = saved({"rollout_id": 1, "samples": [_RECORD]}, _use_new_zipfile_serialization=False)


@settings(max_examples=90)
@given(
    content=st.one_of(
        mutated_bytes(_ZIP),
        mutated_bytes(_OLD),
        mutated_bytes(entries(_ZIP)["archive/data.pkl"]).map(
            lambda changed: archive(_ZIP, {"data.pkl": changed})
        ),
    )
)
def test_damaged_files_are_read_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(content)
    torch_files.names_in(path)
    read_or_refused(opened, path)


@settings(max_examples=90)
@given(
    instructions=st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=3),
            st.sampled_from(
                [b"(", b"t", b"R", b"b", b"e", b"u", b"Q", b"]", b"}", b"N", b"q\0", b"h\0"]
            ),
            st.sampled_from(["numpy.ndarray", "torch.FloatStorage", "numpy.dtype"]).map(
                lambda name: "c{}\n{}\n".format(*name.rsplit(".", 1)).encode()
            ),
            st.text(max_size=5).map(text),
            st.integers(-(2**70), 2**70).map(whole),
            st.just(tensor(storage("0", 0), 0, (0,), (1,))),
            st.just(called("_codecs.encode", text("x"), text("latin1"))),
        ),
        max_size=12,
    )
)
def test_any_instructions_are_read_or_refused(
    instructions: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = pickled(tmp_path_factory.getbasetemp() / "instructions.pt", b"".join(instructions))
    read_or_refused(opened, path)
