"""Tensors of goldens as files: every dtype and stride back again, any other content refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from verify.budgets import Reference
from verify.captures import same_bits
from verify.errors import InputFileError, UnsupportedError
from verify.goldens import KINDS, PARTS, packing, store
from verify.goldens.store import Entry

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.bool,
    torch.complex64,
)


def entry(tensors: dict[str, torch.Tensor], kind: str = "exact", **fields: Any) -> Entry:
    digests = packing.digests_of(tensors)
    given = {
        "key": {"cpu": "x"} if kind == "bits" else None,
        "outputs": {n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items()},
        "tensors": digests,
        "file": packing.file_name("c", kind, digests),
    }
    rest = {"reason": "", "target": "", "inputs": "", "source_digest": "", "made": {}}
    return Entry(case="c", kind=kind, **{**rest, **given, **fields})


def save(folder: Path, tensors: dict[str, torch.Tensor], one: Entry) -> None:
    (folder / one.file).write_bytes(packing.to_bytes(tensors, "c", one.kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(48, dtype=torch.uint8).reshape(2, 24)
    value = bits.bool() if dtype == torch.bool else bits.view(dtype)
    tensors = {"out": value, "grad.x": value.t(), "empty": value[:0], "one": value[0, 0]}
    one = entry(tensors)
    save(tmp_path, tensors, one)
    found = packing.load(tmp_path, one)
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_values_that_compare_unequal_to_themselves_or_equal_to_others() -> None:
    nan = torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32)
    assert same_bits(load(packing.to_bytes({"x": nan}, "c", "bits"))["x"], nan)
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert lazy.is_conj()
    assert same_bits(load(packing.to_bytes({"x": lazy}, "c", "bits"))["x"], lazy.resolve_conj())


def test_a_dtype_that_the_format_cannot_hold_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"golden of 'mine'.*complex128"):
        packing.to_bytes({"x": torch.ones(2, dtype=torch.complex128)}, "mine", "exact")


def test_the_same_tensors_are_the_same_bytes() -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3, dtype=torch.int64)}
    shuffled = dict(reversed(tensors.items()))
    assert packing.to_bytes(tensors, "c", "bits") == packing.to_bytes(shuffled, "c", "bits")


def test_what_is_not_what_the_index_says_is_refused(tmp_path: Path) -> None:
    tensors = {"out": torch.tensor([0.0, 1.0])}
    one = entry(tensors)
    path = tmp_path / one.file

    def refused(with_: dict[str, torch.Tensor], said: str) -> None:
        save(tmp_path, with_, one)
        with pytest.raises(InputFileError, match=said) as caught:
            packing.load(tmp_path, one)
        assert str(path) in str(caught.value)
        assert "verify golden update" in str(caught.value)

    refused({"out": torch.tensor([-0.0, 1.0])}, "'out' has other bits")
    refused({"out": torch.tensor([0.0, 1.0]).double()}, r"'out' is float64\[2\].*float32\[2\]")
    refused({"out": torch.zeros(2, 1)}, r"'out' is float32\[2,1\]")
    refused({"other": tensors["out"]}, "lacks tensor 'out'")
    refused({**tensors, "more": tensors["out"]}, "also holds tensor 'more'")
    path.unlink()
    with pytest.raises(InputFileError, match="no such file"):
        packing.load(tmp_path, one)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(InputFileError, match="Git LFS pointer"):
        packing.load(tmp_path, one)


hostile = st.text(max_size=120) | st.sampled_from(["../../etc", "a/b", ".", "", "-rf", "\x00"])


@given(hostile, st.sampled_from(KINDS))
def test_file_names_are_plain_whatever_the_case_is_called(case: str, kind: str) -> None:
    name = packing.file_name(case, kind, {"out": "d"})
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name)
    assert len(name) < 130
    assert store._safe(name)
    assert store._ours(name)


def test_file_names_tell_cases_kinds_and_contents_apart() -> None:
    names = {
        packing.file_name(case, kind, {"out": digest})
        for case in ("a/b", "a.b", "a b", "A.b")
        for kind in KINDS
        for digest in ("x", "y")
    }
    assert len(names) == 4 * 3 * 2


# --- float64 goldens


finite = st.floats(0, 1e38, allow_subnormal=True)


@given(st.lists(st.tuples(st.floats(-1e300, 1e300), finite), min_size=1, max_size=8))
def test_a_reference_comes_back_with_budgets_that_are_never_smaller(
    pairs: list[tuple[float, float]],
) -> None:
    value, budget = torch.tensor(pairs, dtype=torch.float64).t()
    given_ = {"a/b": Reference(value, budget, value + 1, budget * 2)}
    packed = packing.pack_reference(given_)
    assert set(packed) == {f"a/b/{part}" for part in PARTS}
    again = packing.unpack_reference(load(packing.to_bytes(packed, "c", "float64")))["a/b"]
    assert torch.equal(again.exact, value)
    assert torch.equal(again.unrounded, value + 1)
    for kept, was in ((again.budget, budget), (again.margin, budget * 2)):
        assert kept.dtype == torch.float64
        assert bool((kept >= was).all())
        assert bool((kept <= was * (1 + 2.0**-22) + 2.0**-149).all())


def test_a_reference_that_lacks_a_part_is_refused() -> None:
    one = torch.ones(2, dtype=torch.float64)
    packed = packing.pack_reference({"out": Reference(one, one, one, one)})
    del packed["out/margin"]
    with pytest.raises(InputFileError, match="lacks the tensor 'out/margin'"):
        packing.unpack_reference(packed)


def test_the_metadata_is_one_key(tmp_path: Path) -> None:
    content = packing.to_bytes({"x": torch.ones(1)}, 'a"\n', "exact")
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    assert {n: json.loads(v) for n, v in metadata.items()} == {
        "mok-verify": {"case": 'a"\n', "kind": "exact"}
    }


def test_only_tensors_that_share_memory_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(12.0)
    tensors = {
        "whole": whole,
        "part": whole[3:7],
        "turned": whole.reshape(3, 4).t(),
        "own": torch.ones(3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    clone, copied = torch.Tensor.clone, []

    def counted(tensor: torch.Tensor, *words: Any, **given: Any) -> torch.Tensor:
        copied.append(tuple(tensor.shape))
        return clone(tensor, *words, **given)

    one = entry(tensors)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", counted)
        content = packing.to_bytes(tensors, "c", one.kind)
    # `part` lies in `whole`; the transposed one was copied already; signs are inverted in a copy
    assert copied == [(4,), (1, 2)]
    (tmp_path / one.file).write_bytes(content)
    found = packing.load(tmp_path, one)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_the_size_of_a_golden() -> None:
    tensors = {"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(5, dtype=torch.bfloat16)}
    assert packing.size_of(tensors) == 34
    assert packing.size_of({}) == 0
