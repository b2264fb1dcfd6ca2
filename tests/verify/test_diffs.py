"""`verify diff`: bits of files and folders, digests of results, and every way a file can be bad."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from verify.diffs import diff, exit_code, text, to_json
from verify.errors import InputFileError
from verify.results import write
from verify.verdicts import CaseVerdict


def _save(path, **tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def _named(found):
    return {entry.name: entry for entry in found.entries}


def test_equal_files(tmp_path):
    nan = torch.tensor([float("nan"), 1.0, float("nan")])
    a = _save(tmp_path / "a.safetensors", x=nan, y=torch.zeros(2, dtype=torch.bfloat16))
    b = _save(tmp_path / "b.safetensors", x=nan, y=torch.zeros(2, dtype=torch.bfloat16))
    found = diff(a, b)
    assert exit_code(found) == 0
    assert "2 NaN in both (same bits)" in text(found)
    assert text(found).splitlines()[-1] == "verdict=VERIFIED 2 tensors compared, 0 differences"


def test_one_sign_of_a_zero_is_a_difference(tmp_path):
    a = _save(tmp_path / "a.safetensors", x=torch.tensor([1.0, 0.0]))
    b = _save(tmp_path / "b.safetensors", x=torch.tensor([1.0, -0.0]))
    found = diff(a, b)
    assert exit_code(found) == 1
    shown = text(found)
    assert "x: 1 of 2 elements differ" in shown
    assert "0x80000000" in shown
    assert shown.endswith("verdict=MISMATCH 1 tensors compared, 1 differences")
    assert json.loads(json.dumps(to_json(found)))["verdict"] == "MISMATCH"


def test_names_dtypes_and_shapes(tmp_path):
    a = _save(
        tmp_path / "a.safetensors",
        only_a=torch.ones(1),
        dtype=torch.ones(2),
        shape=torch.ones(2, 3),
    )
    b = _save(
        tmp_path / "b.safetensors",
        only_b=torch.ones(1),
        dtype=torch.ones(2, dtype=torch.bfloat16),
        shape=torch.ones(3, 2),
    )
    found = _named(diff(a, b))
    assert set(found) == {"only_a", "only_b", "dtype", "shape"}
    assert not any(entry.equal for entry in found.values())
    assert "only in" in found["only_a"].detail
    assert "float32 vs bfloat16" in found["dtype"].detail
    assert "(2, 3) vs (3, 2)" in found["shape"].detail


@pytest.mark.parametrize("tensors", [{}, {"empty": torch.zeros(0)}])
def test_nothing_compared_is_not_equal(tmp_path, tensors):
    a = _save(tmp_path / "a.safetensors", **tensors)
    b = _save(tmp_path / "b.safetensors", **tensors)
    found = diff(a, b)
    assert exit_code(found) == 3
    assert text(found).splitlines()[-1].startswith("verdict=UNVERIFIED 0 tensors compared")


def test_folders_are_matched_by_relative_name(tmp_path):
    for side in ("a", "b"):
        _save(tmp_path / side / "sub" / "w.safetensors", w=torch.ones(2))
    _save(tmp_path / "a" / "extra.safetensors", w=torch.ones(2))
    found = diff(tmp_path / "a", tmp_path / "b")
    assert exit_code(found) == 1
    assert _named(found)["sub/w.safetensors: w"].equal
    assert not _named(found)["extra.safetensors"].equal
    (tmp_path / "a" / "extra.safetensors").unlink()
    assert exit_code(diff(tmp_path / "a", tmp_path / "b")) == 0


def test_empty_folders_compare_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert exit_code(diff(tmp_path / "a", tmp_path / "b")) == 3


POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty (0 bytes)"),
        (POINTER, "Git LFS pointer, not the file of 123456 bytes itself; get it with: git lfs"),
        (b"abc", "only 3 bytes"),
        (b"PK\x03\x04" + b"x" * 100, "begins with b'PK"),
        (struct.pack("<Q", 200) + b'{"x"', "is truncated: its header needs 208 bytes"),
        (struct.pack("<Q", 4) + b"{no}", "its header is malformed"),
        (struct.pack("<Q", 8) + b'{"x":[]}', "its header is malformed"),
        (
            struct.pack("<Q", 8) + b'{"x":{}}',
            "its header is malformed",
        ),
    ],
)
def test_bad_files_are_named_with_the_reason(tmp_path, content, said):
    good = _save(tmp_path / "good.safetensors", x=torch.ones(4))
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(content)
    for pair in ((good, bad), (bad, good)):
        with pytest.raises(InputFileError) as caught:
            diff(*pair)
        assert str(bad) in str(caught.value)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_cut_file_says_how_much_is_missing(tmp_path):
    good = _save(tmp_path / "good.safetensors", x=torch.ones(4))
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(good.read_bytes()[:-5])
    with pytest.raises(InputFileError, match="its tensors need 16 bytes, 11 are there"):
        diff(good, bad)


def test_every_prefix_of_a_file_is_refused(tmp_path):
    good = _save(tmp_path / "good.safetensors", x=torch.ones(2), y=torch.zeros(1))
    content = good.read_bytes()
    bad = tmp_path / "bad.safetensors"
    for length in range(len(content)):
        bad.write_bytes(content[:length])
        with pytest.raises(InputFileError):
            diff(good, bad)


def test_wrong_kinds_and_missing_paths(tmp_path, make_result):
    good = _save(tmp_path / "good.safetensors", x=torch.ones(4))
    write(make_result(), tmp_path / "result.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputFileError, match=r"is a safetensors file, but .* is a folder"):
        diff(good, tmp_path / "folder")
    with pytest.raises(InputFileError, match="is a result"):
        diff(good, tmp_path / "result.json")
    with pytest.raises(InputFileError, match="no such file or folder"):
        diff(good, tmp_path / "none.safetensors")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path):
    good = _save(tmp_path / "good.safetensors", x=torch.ones(4))
    good.chmod(0)
    with pytest.raises(InputFileError, match="Permission denied"):
        diff(good, good)


def test_fp8_files(tmp_path):
    x = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    a = _save(tmp_path / "a.safetensors", x=x)
    b = _save(tmp_path / "b.safetensors", x=x.view(torch.uint8).add(1).view(x.dtype))
    assert exit_code(diff(a, a)) == 0
    assert exit_code(diff(a, b)) == 1


@pytest.fixture
def two(tmp_path, make_result):
    """Paths of two equal results; change one with `edit`."""
    paths = tmp_path / "a" / "result.json", tmp_path / "b" / "result.json"
    for path in paths:
        write(make_result(ranks=2), path)
    return paths


def _edit(path, change):
    document = json.loads(path.read_text())
    change(document, document["cases"][0])
    path.write_text(json.dumps(document))


def test_equal_results_by_file_and_folder(two):
    assert exit_code(diff(*two)) == 0
    found = diff(two[0].parent, two[1])
    assert text(found).splitlines() == [
        "same    moe rank 0 out",
        "same    moe rank 1 out",
        "verdict=VERIFIED 2 digests compared, 0 differences",
    ]


def test_another_digest_names_case_rank_and_tensor(two):
    _edit(two[1], lambda _document, case: case["outputs"]["1"].update(out="float32[2]:abcd"))
    found = diff(*two)
    assert exit_code(found) == 1
    assert [entry.name for entry in found.entries if not entry.equal] == ["moe rank 1 out"]
    assert "B float32[2]:abcd" in text(found)


def test_same_bits_under_other_circumstances_are_said(two):
    def change(document, case):
        case["seed"] = 7
        case["inputs"]["0"]["x"] = "other"
        document["environment"]["torch"] = "2.14"
        document["environment"]["flags"]["a"] = False

    _edit(two[1], change)
    found = diff(*two)
    assert exit_code(found) == 0
    shown = text(found)
    assert "note: the bits are the same although the following differ" in shown
    assert "note: moe: seed 0 in A, 7 in B" in shown
    assert "note: moe: inputs differ: x" in shown
    assert "note: environment torch: '2.13.0' in A, '2.14' in B" in shown
    assert "note: environment flags.a: True in A, False in B" in shown


def test_other_bits_with_other_inputs_are_said(two):
    def change(_document, case):
        case["inputs"]["0"]["x"] = "other"
        case["outputs"]["0"]["out"] = "other"

    _edit(two[1], change)
    assert "note: the bits differ, and so do the following" in text(diff(*two))


def test_a_lost_case_rank_tensor_or_verdict_is_a_difference(two, make_result):
    _edit(two[1], lambda _document, case: case["outputs"].pop("1"))
    assert exit_code(diff(*two)) == 1
    write(make_result(ranks=2), two[1])
    _edit(two[1], lambda _document, case: case["outputs"]["1"].clear())
    assert exit_code(diff(*two)) == 1
    write(make_result(ranks=2), two[1])
    _edit(two[1], lambda _document, case: case["claims"][0].update(verdict="MISMATCH"))
    assert "verdict=VERIFIED in A, verdict=MISMATCH in B" in text(diff(*two))
    assert exit_code(diff(*two)) == 1
    write(make_result([]), two[1])
    assert "case moe: only in A" in text(diff(*two))


def test_other_digest_schemes_are_not_compared(two):
    _edit(two[1], lambda document, _case: document["tool"].update(digest_scheme="v9"))
    found = diff(*two)
    assert exit_code(found) == 3
    assert "digests cannot be compared" in text(found)


def test_results_without_outputs_compare_nothing(two, make_result, make_claim):
    for path in two:
        write(make_result([CaseVerdict("c", "c", [make_claim()])], executions=[]), path)
    assert exit_code(diff(*two)) == 3


def test_two_cases_of_one_name_are_told_apart(two, make_result, make_claim):
    cases = [CaseVerdict("f", target, [make_claim()]) for target in ("a.py::f", "b.py::f")]
    for path in two:
        write(make_result(cases), path)
    assert {entry.name for entry in diff(*two).entries} == {
        "f (a.py::f) rank 0 out",
        "f (b.py::f) rank 0 out",
    }


def test_a_case_without_outputs_beside_one_that_has_them_is_open(two, make_result, make_claim):
    names = ("f", "always_raises")
    for path in two:
        write(make_result([CaseVerdict(name, name, [make_claim()]) for name in names]), path)
        _edit(path, lambda document, _case: document["cases"][1]["outputs"].clear())
    found = diff(*two)
    assert exit_code(found) == 3
    assert text(found).splitlines() == [
        "same    f rank 0 out",
        "open    case always_raises: no outputs in A and B: not compared",
        "verdict=UNVERIFIED 1 digests compared, 0 differences; 1 open",
    ]
    for path in two:
        _edit(path, lambda document, _case: document["cases"][1]["outputs"].update({"0": {}}))
    assert exit_code(diff(*two)) == 3
    _edit(two[1], lambda _document, case: case["outputs"]["0"].update(out="other"))
    assert exit_code(diff(*two)) == 1


def test_equal_outputs_of_two_mismatches_are_not_verified(two, mixed):
    for path in two:
        write(mixed, path)
    found = diff(*two)
    assert exit_code(found) == 3
    shown = text(found)
    assert "open    case bad: outputs are equal, but both runs were MISMATCH" in shown
    assert "open    case gone: outputs are equal, but both runs were UNVERIFIED" in shown
    assert "case good" not in shown
    assert shown.splitlines()[-1].startswith("verdict=UNVERIFIED")
    assert "VERIFIED" not in shown.replace("UNVERIFIED", "")
    assert to_json(found)["exit_code"] == 3
