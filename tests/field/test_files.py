"""Reports of files: equal by value, too little compared, not what the name says; `verify diff`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save, save_file
from torch import Tensor

from verify.cli import main
from verify.goldens import packing
from verify.hashing import digest_tensor
from verify.tensor_files import opened

Counts = Callable[[str, str], None]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4096\n"


def with_bits(x: Tensor, value: int, where: int = 5) -> Tensor:
    """A copy of x in which one element holds these bits."""
    size = x.element_size()
    word = {2: torch.int16, 4: torch.int32}[size]
    out = x.clone()
    signed = int.from_bytes(value.to_bytes(size, "little"), "little", signed=True)
    out.view(word).view(-1)[where] = signed
    return out


def layer(change: str) -> dict[str, Tensor]:
    """Weights, the same weights under a second name, and a buffer; one element has changed."""
    w = ((torch.arange(100_000, dtype=torch.float32) - 5e4) / 7).view(100, 1000)
    found = {"w": w.clone(), "head": w.clone(), "expert_bias": torch.linspace(-1, 1, 100)}
    if change == "weight":
        found["w"].view(torch.int32)[50, 500] ^= 1 << 20
    if change == "tied":
        found["head"].view(torch.int32)[99, 999] ^= 1
    if change == "bias":
        found["expert_bias"][7] = 0.5
    return found


def compared(a: Path, b: Path) -> tuple[int, str]:
    """Exit code of `verify diff`, and all that it says."""
    done = CliRunner().invoke(main, ["diff", str(a), str(b)])
    assert "Traceback" not in done.output
    assert "unexpected" not in done.stderr
    return done.exit_code, done.output


def saved(path: Path, **tensors: Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


BITS = [
    (torch.float32, 0, 0x80000000, r"1 x -0.0 vs 0.0 (value-equal, sign bit)"),
    (torch.float32, 0x7FC00000, 0xFFC00001, "nan (0x7fc00000) vs nan (0xffc00001)"),
    (torch.bfloat16, 0x7F81, 0x7FC0, "nan (0x7f81) vs nan (0x7fc0)"),
]


@pytest.mark.parametrize(("dtype", "one", "other", "said"), BITS)
def test_equal_values_are_not_equal_bits(
    tmp_path: Path, dtype: torch.dtype, one: int, other: int, said: str, counts: Counts
) -> None:
    x = torch.linspace(1, 2, 32, dtype=torch.float32).to(dtype)
    a = saved(tmp_path / "a.safetensors", x=with_bits(x, one), y=x)
    b = saved(tmp_path / "b.safetensors", x=with_bits(x, other), y=x)
    code, shown = compared(a, b)
    assert code == 1, shown
    assert said in shown
    assert "x: 1 of 32 elements differ" in shown
    assert "same    y: equal bits" in shown
    if one:
        assert "1 x NaN payload (both NaN)" in shown
    else:
        assert "equal as values: only the signs of zeros differ" in shown
    counts("BUG-53", "fault")


@pytest.mark.parametrize(("dtype", "one", "other", "said"), BITS)
def test_the_same_nan_at_the_same_place_is_no_alarm(
    tmp_path: Path, dtype: torch.dtype, one: int, other: int, said: str, counts: Counts
) -> None:
    x = torch.linspace(1, 2, 32, dtype=torch.float32).to(dtype)
    a = saved(tmp_path / "a.safetensors", x=with_bits(x, other))
    b = saved(tmp_path / "b.safetensors", x=with_bits(x, other))
    code, shown = compared(a, b)
    assert code == 0, shown
    assert ("1 NaN in both (same bits)" in shown) == (one != 0), "silence hides a NaN"
    counts("BUG-53", "twin")


def test_dtype_shape_emptiness_and_names(tmp_path: Path, counts: Counts) -> None:
    x = torch.linspace(1, 2, 3).to(torch.bfloat16)
    one = torch.ones(())
    a = saved(tmp_path / "a.safetensors", d=x, s=x, a=x, b=x, zero_dim=one, e=torch.ones(0, 4))
    b = saved(
        tmp_path / "b.safetensors",
        d=x.float(),
        s=x.view(3, 1),
        a=x,
        c=x,
        zero_dim=one * 2,
        e=torch.ones(0, 4),
    )
    code, shown = compared(a, b)
    assert code == 1
    assert "differs d: dtype bfloat16 vs float32 (values equal after cast)" in shown
    assert "differs s: shape (3,) vs (3, 1)" in shown
    assert f"differs b: only in {a}" in shown
    assert f"differs c: only in {b}" in shown
    assert "differs zero_dim: 1 of 1 elements differ" in shown
    assert "e: 0 elements compared" in shown
    counts("BUG-54", "fault")
    empty = saved(tmp_path / "empty.safetensors", e=torch.ones(0, 4))
    code, shown = compared(empty, empty)
    assert code == 3, "nothing compared is not equal"
    assert "0 elements compared" in shown
    code, shown = compared(a, a)
    assert code == 0, shown
    counts("BUG-54", "twin")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("weight", ["w: 1 of 100000 elements differ", "first: w[50,500]", "one bit flipped"]),
        ("bias", ["expert_bias: 1 of 100 elements differ", "first: expert_bias[7]"]),
        ("tied", ["head: 1 of 100000 elements differ"]),
    ],
)
def test_every_byte_is_looked_at(
    tmp_path: Path, change: str, said: list[str], counts: Counts
) -> None:
    a = saved(tmp_path / "a.safetensors", **layer(""))
    b = saved(tmp_path / "b.safetensors", **layer(change))
    code, shown = compared(a, b)
    assert code == 1
    for text in said:
        assert text in shown
    assert shown.count("same    ") == len(layer("")) - 1
    left, right = layer(""), layer(change)
    differing = [n for n in left if str(digest_tensor(left[n])) != str(digest_tensor(right[n]))]
    assert len(differing) == 1, "a digest covers everything, too"
    counts("BUG-57", "fault")
    code, shown = compared(a, saved(tmp_path / "c.safetensors", **layer("")))
    assert code == 0, shown
    counts("BUG-57", "twin")


def test_copies_under_one_key_do_not_overwrite_each_other(tmp_path: Path, counts: Counts) -> None:
    w = torch.linspace(0, 1, 8)
    for run, second in (("a", w), ("b", with_bits(w, 0x3F000000))):
        for dp, tensor in enumerate((w, second)):
            save_file({"tp0:w": tensor}, saved(tmp_path / run / f"dp{dp}.safetensors", _=w))
    code, shown = compared(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "same    dp0.safetensors: tp0:w" in shown
    assert "differs dp1.safetensors: tp0:w" in shown
    # one file cannot hold two: the format's own reader lets the last one win
    entry = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    header = f'{{"tp0:w":{entry},"tp0:w":{entry}}}'.encode()
    double = tmp_path / "double.safetensors"
    double.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    code, shown = compared(double, double)
    assert code == 2
    assert f"{double}: " in shown
    assert "the name 'tp0:w' occurs twice" in shown
    counts("BUG-57", "fault")
    code, shown = compared(tmp_path / "a", tmp_path / "a")
    assert code == 0, shown
    counts("BUG-57", "twin")


GOOD = save({"w": torch.linspace(0, 1, 8)})
NOT_WHAT_THEY_SAY = {
    "pointer": (POINTER, "is a Git LFS pointer, not the file of 4096 bytes itself; get it with: "),
    "empty": (b"", "is empty (0 bytes)"),
    "short": (GOOD[:-8], "is truncated: its tensors need 32 bytes, 24 are there"),
    "long": (GOOD + bytes(8), "8 bytes follow after its tensors' 32"),
}


@pytest.mark.parametrize("kind", [*NOT_WHAT_THEY_SAY, "npy", "pt"])
def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, kind: str, counts: Counts) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    good.write_bytes(GOOD)
    if kind == "npy":
        with bad.open("wb") as file:
            np.save(file, np.ones(4, np.float32))
        said = "a NumPy file (.npy)"
    elif kind == "pt":
        torch.save({"view": torch.ones(10_000)[:4]}, bad)
        said = "a zip archive, as torch.save and numpy.savez write"
    else:
        content, said = NOT_WHAT_THEY_SAY[kind]
        bad.write_bytes(content)
    for pair in ((good, bad), (bad, good), (bad, bad)):
        code, shown = compared(*pair)
        assert code == 2
        assert len(shown.strip().splitlines()) == 1
        assert f"{bad}: " in shown
        assert said in shown
    counts("BUG-58", "fault")
    assert compared(good, good)[0] == 0
    counts("BUG-58", "twin")


def test_what_raw_memory_would_get_wrong_is_written_by_elements(
    tmp_path: Path, counts: Counts
) -> None:
    x = torch.linspace(0, 1, 12).view(3, 4)
    tensors = {
        "transposed": x.t(),
        "expanded": x[:1].expand(4, 4),
        "whole": x,
        "part": x[1:2],
        "conjugated": torch.complex(x, x).conj(),
        "zero_dim": x[0, 1],
        "empty": x[:0],
    }
    with pytest.raises((ValueError, RuntimeError)):
        save(tensors)  # why the writer has to care
    path = tmp_path / "golden.safetensors"
    path.write_bytes(packing.to_bytes(tensors, "case", "exact"))
    with opened(path) as file:
        for name, tensor in tensors.items():
            assert str(digest_tensor(file.tensor(name))) == str(digest_tensor(tensor)), name
    again = packing.to_bytes({n: t.clone() for n, t in tensors.items()}, "case", "exact")
    assert path.read_bytes() == again, "strides are no content"
    counts("BUG-58", "twin")


def test_time_and_memory_are_no_differences(tmp_path: Path) -> None:
    """Negative control 7: what differs between any two runs is not compared, and no alarm."""
    from importlib import util

    spec = util.spec_from_file_location(
        "verify_conftest", Path(__file__).parents[1] / "verify" / "conftest.py"
    )
    assert spec is not None
    assert spec.loader is not None
    documents = util.module_from_spec(spec)
    spec.loader.exec_module(documents)
    result = documents.result_of()
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(result))
    result["started"], result["seconds"] = "2026-03-04T05:06:07+00:00", 9.75
    result["cases"][0]["timings"]["case_seconds"] = 7.5
    result["cases"][0]["claims"][0]["seconds"] = 3.25
    b.write_text(json.dumps(result))
    code, shown = compared(a, b)
    assert code == 0, shown
    assert "note" not in shown
