"""Reports of goldens: stale, foreign, broken, of another dtype; caught, placed and explained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from field_table import Field, run_file
from field_table import test_the_fault_is_found as test_the_fault_is_found
from field_table import test_the_twin_is_clean as test_the_twin_is_clean

from verify.goldens import packing, recording, status, store

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
THREADS = 5  # of the golden of bug_55_threads


def golden(
    report: str, title: str, fault: str, reason: str = "golden-differs", **more: Any
) -> Field:
    return Field(report, title, fault, f"{fault}_twin", claim="golden", reason=reason, **more)


ZERO = "-0.0 for 0.0"
STALE = (
    "golden: verdict=MISMATCH",
    "this run is stable: a second execution gave the same bits",
    r"worst error against float64: golden [0-9.]+ ulp, this run [0-9.]+ ulp",
    "the code has changed since the golden was made",
    r"changed since: torch 2\.11\.0 -> ",
    "likely: a stale golden, not a regression: .*; decide by hand",
    "suggests: few ulp .*terms added in another order",
)
FIELDS = (
    golden(
        "BUG-53",
        ZERO,
        "bug_53_zero",
        tensor="out",
        clean=("repeat",),
        says=[
            r"out: 1 of 128 elements differ",
            r"first: out\[0,5\] 0\.0 \(0x00000000\) vs -0\.0 \(0x80000000\)",
            r"1 x -0\.0 vs 0\.0 \(value-equal, sign bit\)",
            "equal as values: only the signs of zeros differ",
        ],
    ),
    golden(
        "BUG-53",
        "NaN with another payload",
        "bug_53_payload",
        tensor="out",
        says=[
            r"first: out\[0,5\] nan \(0x7fc00000\) vs nan \(0xffc00001\)",
            r"1 x NaN payload \(both NaN\)",
            r"note: .*holds NaN or infinity: out",
        ],
        twin_says=[r"note: .*holds NaN or infinity: out"],
    ),
    golden(
        "BUG-53",
        "signalling and quiet NaN",
        "bug_53_signalling",
        tensor="out",
        says=[r"\(0x7f81\) vs nan \(0x7fc0\)", r"1 x NaN payload"],
    ),
    golden(
        "BUG-54",
        "float32 for bfloat16",
        "bug_54_dtype",
        "outputs-differ",
        tensor="out",
        says=[
            r"out is float32\[16, 8\], expected bfloat16\[16, 8\]",
            r"dtype bfloat16 vs float32 \(values equal after cast\)",
        ],
    ),
    golden(
        "BUG-54",
        "(16, 1) for (16,)",
        "bug_54_shape",
        "outputs-differ",
        tensor="out",
        says=[r"out is float32\[16, 1\], expected float32\[16\]"],
    ),
    golden(
        "BUG-54",
        "nothing in both",
        "bug_54_empty",
        "vacuous",
        says=["verdict=UNVERIFIED", "every output is empty"],
        silent=["verdict=VERIFIED"],
    ),
    golden(
        "BUG-54",
        "an output is gone",
        "bug_54_missing",
        "outputs-differ",
        tensor="b",
        says=["output b is missing"],
        equal=("a",),
    ),
    golden(
        "BUG-54",
        "an output is new",
        "bug_54_extra",
        "no-golden",
        says=["verdict=UNVERIFIED", "not in the golden: c; make it again"],
    ),
    golden(
        "BUG-54",
        "odd dtypes and layouts",
        "bug_54_odd",
        says=[
            r"zero_dim: 1 of 1 elements differ",
            r"expanded: 4 of 4 elements differ",
            r"strided: 1 of 32 elements differ",
            r"fp8: 1 of 128 elements differ",
            r"bool: 1 of 128 elements differ",
            r"complex: 1 of 128 elements differ",
            r"conjugated: 1 of 128 elements differ",
        ],
        silent=["Error"],
    ),
    golden("BUG-55", "another order of summation", "bug_55_order", tensor="out", says=STALE),
    golden(
        "BUG-55",
        "a lower precision is no other order",
        "bug_55_regression",
        tensor="out",
        says=["likely: a regression: this run is [0-9.e+]+x as far from float64 as the golden"],
        silent=["stale"],
    ),
    golden(
        "BUG-55",
        "another number of threads",
        "bug_55_threads",
        tensor="out",
        says=[
            rf"changed since: .*num_threads {THREADS} -> ",
            rf"executed again with {THREADS} threads, as then: gives the golden's bits: "
            "the result depends on the thread count",
        ],
    ),
    golden(
        "BUG-55",
        "a run that differs from itself",
        "bug_55_unstable",
        tensor="out",
        says=["this run is not stable: its executions differ, see the claim repeat"],
        silent=["likely"],
    ),
    golden(
        "BUG-55",
        "a golden that holds an infinity",
        "bug_55_infinite",
        tensor="out",
        says=[
            r"first: out\[0,5\] inf \(0x7f800000\) vs",
            "the golden itself holds 1 NaN or infinity, this run 0",
            "likely: the golden was made by a broken run",
        ],
    ),
    golden(
        "BUG-55",
        "bits of another version of torch",
        "bug_55_environment",
        "env-unknown",
        says=["verdict=UNVERIFIED", r"no golden for this environment; nearest: torch 2\.11\.0 -> "],
    ),
    golden(
        "BUG-57",
        "one bit in the middle of a large tensor",
        "bug_57_weight",
        tensor="tied",
        says=[
            r"weight: 1 of 100000 elements differ",
            r"first: weight\[50,500\]",
            r"one bit flipped, the same in all 1 \(xor 0x00100000, bit 20\)",
            r"tied: 1 of 100000 elements differ",
        ],
        equal=("expert_bias", "scale", "probe"),
    ),
    golden(
        "BUG-57",
        "a buffer, no parameter",
        "bug_57_bias",
        tensor="expert_bias",
        says=[r"expert_bias: 1 of 100 elements differ", r"first: expert_bias\[7\]"],
        equal=("weight", "tied", "scale", "probe"),
    ),
    golden(
        "BUG-57",
        "a buffer that no state_dict holds",
        "bug_57_scale",
        tensor="scale",
        says=[r"first: scale\[1\] 1\.0 .* vs 2\.0"],
        equal=("weight", "tied", "expert_bias", "probe"),
    ),
    golden(
        "BUG-58",
        "strided, expanded and shared tensors are stored by their elements",
        "bug_58_shared",
        tensor="t",
        says=[r"t: 1 of 128 elements differ", r"first: t\[2,3\]"],
        equal=("expanded", "a", "b"),
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The goldens, made by `verify golden update` from the code as it was then."""
    place = tmp_path_factory.mktemp("goldens") / "golden"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CI", raising=False)
        recording.update(
            [str(HERE / "cases_goldens_then.py")], place, reason="then", allow_nonfinite=True
        )
    # the same file, as it was then
    index = place / store.INDEX
    index.write_text(index.read_text().replace("cases_goldens_then.py", "cases_goldens.py"))
    _changed(place, "bug_55_order", made={"torch": "2.11.0"})
    _changed(place, "bug_55_threads", made={"num_threads": THREADS})
    _changed(place, "bug_55_environment", key={"torch": "2.11.0"})
    _store_nothing(place)
    return place


def _changed(folder: Path, case: str, **fields: Mapping[str, Any]) -> None:
    """The entry of a case with other provenance, as another environment would have written it."""
    path = folder / store.INDEX
    document = json.loads(path.read_text())
    entry = next(one for one in document["entries"] if one["case"] == case)
    for name, change in fields.items():
        entry[name].update(change)
    path.write_text(json.dumps(document))


def _store_nothing(folder: Path) -> None:
    """A golden of an empty output, which `verify golden update` refuses to make."""
    index = store.read(folder)
    like = index.of("bug_54_empty_twin", "exact")[0]
    tensors = {"out": torch.zeros(0, 4)}
    digests = packing.digests_of(tensors)
    file = packing.file_name("bug_54_empty", "exact", digests)
    entry = replace(like, case="bug_54_empty", file=file, tensors=digests)
    content = {file: packing.to_bytes(tensors, entry.case, "exact")}
    with store.locked(folder):
        store.write(folder, [*index.entries, entry], content)


@pytest.fixture(scope="module")
def cases(folder: Path) -> Mapping[str, Any]:
    return run_file(HERE / "cases_goldens.py", golden=folder)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("bug_53_payload", "bug_53_payload holds 1 NaN or infinity, first in out; a broken run"),
        ("bug_55_infinite", "bug_55_infinite holds 1 NaN or infinity, first in out; a broken run"),
    ],
)
def test_a_broken_run_does_not_become_a_golden(
    tmp_path: Path, case: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    target = f"{HERE / 'cases_goldens_then.py'}::{case}"
    with pytest.raises(recording.RefusedError, match=said):
        recording.update([target], tmp_path / "golden", reason="a test")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_nothing_does_not_become_a_golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    target = f"{HERE / 'cases_goldens.py'}::bug_54_empty"
    with pytest.raises(recording.RefusedError, match="vacuous"):
        recording.update([target], tmp_path / "golden", reason="a test")


def test_a_stored_infinity_is_pointed_at(folder: Path) -> None:
    rows = {row["case"]: row for row in status.status((), folder)}
    assert "1 NaN or infinity" in rows["bug_55_infinite"]["made"]
    assert "NaN" not in rows["bug_55_infinite_twin"]["made"]
