"""Results and indexes of goldens after damage: drawn, compared and judged, or refused by name.

A document that is read must survive every reader behind it: a renderer that trips over a field is
as bad as a traceback of the parser.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from mutations import mutated_bytes, mutated_json, read_or_refused, refused

from verify import diffs, rendering, results
from verify.goldens import status, store
from verify.reasons import EXIT_CODES
from verify.verdicts import CaseVerdict

_SPEC = importlib.util.spec_from_file_location(
    "documents_of_conftest", Path(__file__).with_name("conftest.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
made = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(made)


def measured_result() -> dict[str, Any]:
    """A result with a mismatch, a missing rank, measurements and everything that is optional."""
    numbers = {
        "numel": 8,
        "worst_ratio": 0.25,
        "worst_rows": [{"row": 1, "ratio": 0.25}],
        "rounded_elsewhere": 1,
        "forbidden": 0,
        "over_budget": 0,
        "nonfinite": 0,
        "permissive": 0,
        "relative_l2": 1e-7,
        "plain_relative_l2": float("inf"),
    }
    claims = [
        made.claim_verdict("repeat", [made.MISMATCH], differing=2, ranks=2),
        made.claim_verdict("rank", [made.UNVERIFIED], not_compared={"y": "no batch dimension"}),
        made.claim_verdict("reference", measurements={"out": numbers, "y": numbers}),
    ]
    gate = {
        "config": "ci/gate.toml",
        "since": "origin/main",
        "base": "0" * 40,
        "kernels": ["src/*.py"],
        "changed": ["src/a.py", "src/b.py"],
        "affected": ["bad"],
        "uncovered": ["src/b.py"],
        "left_out": ["slow"],
        "golden_changes": [
            {
                "case": "bad",
                "kind": "exact",
                "tensor": "out",
                "old": made.DIGEST,
                "new": None,
                "max_ulp": 0.5,
                "reason": "another order",
            }
        ],
        "budget": {"seconds": 60.0, "executions": 9, "used_seconds": 1.5, "used_executions": 5},
        "findings": [{"reason": "not-covered", "verdict": "UNVERIFIED", "detail": "src/b.py"}],
    }
    document: dict[str, Any] = made.result_of(
        [CaseVerdict("bad", "f.py::bad", claims, notes=["a note"])], ranks=2, gate=gate
    )
    document["cases"][0]["timings"]["median"] = {"case_seconds": 1.0, "overhead_seconds": 0.1}
    return document


RESULT = measured_result()
INDEX = {
    "version": 1,
    "entries": [
        {
            "case": f"case/{kind}",
            "kind": kind,
            "key": {"torch": "2.13.0", "machine": "x86_64"} if kind == "bits" else None,
            "reason": "",
            "target": "cases.py::gone",
            "file": f"case.{kind}.0123456789ab.safetensors",
            "inputs": "00",
            "source_digest": "00",
            "made": {"torch": "2.13.0", "num_threads": 2, "dirty": False, "commit": None},
            "outputs": {"out": "float32"},
            "tensors": tensors,
            "nonfinite": 0,
        }
        for kind, tensors in (
            ("exact", {"out": "float32[2]:00"}),
            ("bits", {"out": "float32[2]:00"}),
            ("float64", {f"out/{part}": "float64[2]:00" for part in store.PARTS}),
        )
    ],
}


def survives(path: Path, other: Path) -> None:
    """Whatever reads a result after it was accepted: renderers, exit code, comparison, JSON."""
    document = read_or_refused(results.read, path)
    if document is None:
        return
    assert results.exit_code(document) in EXIT_CODES.values()
    for form in rendering.FORMATS:
        rendering.render(document, form, timings=True).encode("utf-8", "backslashreplace")
    for pair in ((path, other), (other, path)):
        found = read_or_refused(lambda _path, pair=pair: diffs.diff(*pair), path)
        if found is not None:
            diffs.text(found)
            json.dumps(diffs.to_json(found), allow_nan=False)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other") / "result.json"
    results.write(RESULT, path)
    return path


def test_what_is_mutated_is_valid(other: Path) -> None:
    assert results.read(other) == RESULT
    assert results.exit_code(RESULT) == 1
    entries = store.parse(json.dumps(INDEX), "index.json")
    assert [entry.kind for entry in entries] == ["exact", "bits", "float64"]


@settings(max_examples=200)
@given(content=mutated_bytes(json.dumps(RESULT).encode()))
def test_mutated_bytes_of_a_result(other: Path, content: bytes) -> None:
    path = other.with_name("bytes.json")
    path.write_bytes(content)
    survives(path, other)


@settings(max_examples=300)
@given(text=mutated_json(RESULT))
def test_mutated_values_of_a_result(other: Path, text: str) -> None:
    path = other.with_name("values.json")
    path.write_text(text)
    survives(path, other)


def index_survives(path: Path) -> None:
    """An index that is accepted can be shown, written again and read as the same."""
    index = read_or_refused(lambda path: store.read(path.parent), path)
    if index is None:
        return
    assert store.parse(store.text_of(index.entries), "again") == tuple(
        sorted(index.entries, key=lambda entry: entry.identity)
    )
    for entry in index.entries:
        assert (path.parent / entry.file).resolve().parent == path.parent.resolve()
        assert status._row(entry.case, entry.kind, "stored", index, entry)["size"] == ""


@settings(max_examples=300)
@given(content=mutated_bytes(json.dumps(INDEX).encode()))
def test_mutated_bytes_of_an_index(other: Path, content: bytes) -> None:
    path = other.with_name("index.json")
    path.write_bytes(content)
    index_survives(path)


@settings(max_examples=500)
@given(text=mutated_json(INDEX))
def test_mutated_values_of_an_index(other: Path, text: str) -> None:
    path = other.with_name("index.json")
    path.write_text(text)
    index_survives(path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
BROKEN = [
    ("", "is empty (0 bytes)"),
    (POINTER, "is a Git LFS pointer, not the file of 12 bytes itself; get it with: git lfs pull"),
    ("{", "Expecting property name"),
    ("[" * 100_000, "recursion"),
    ('{"a": ' + "[" * 500 + "]" * 500 + "}", "nested more than 100 deep"),
    ('{"schema_version": 1, "schema_version": 1}', "the name 'schema_version' occurs twice"),
    ('{"a": NaN}', "NaN"),
    ('{"a": 1e999}', "the number 1e999 is beyond float64"),
    ('{"a": ' + "9" * 400 + "}", "has 400 digits"),
    ("\ufeff{}", "BOM"),
    ("{}\0", "Extra data"),
    ("null", ""),
    ("[1]", ""),
    ('"text"', ""),
]


@pytest.mark.parametrize(("text", "said"), BROKEN)
@pytest.mark.parametrize("name", ["result.json", "index.json"])
def test_text_that_is_no_document(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    read = results.read if name == "result.json" else lambda path: store.read(path.parent)
    assert said in refused(read, path)
    path.write_bytes(b"\xff\xfe" + text.encode("utf-16-le"))
    assert "not UTF-8 text" in refused(read, path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda case: case["outputs"].update(x={}), "['outputs'] has a field 'x'"),
        (lambda case: case.update(verdict="FINE"), "FINE"),
        (lambda case: case["claims"][0]["findings"][0].update(verdict="x"), "'x'"),
        (lambda case: case["claims"][0].update(executions=-1), "is -1, it should be at least 0"),
        (lambda case: case["claims"][0]["rate"].pop(), "['rate'] has 2 items, it should have 3 to"),
        (lambda case: case["timings"]["median"].pop("case_seconds"), "median timings"),
        (
            lambda case: case["claims"][2]["measurements"]["out"].update(numel=[8]),
            "measurement of 'out': numel is [8], it should be a count",
        ),
        (
            lambda case: case["claims"][2]["measurements"]["out"].update(worst_ratio="much"),
            "worst_ratio is 'much', it should be a number",
        ),
        (
            lambda case: case["claims"][2]["measurements"]["out"].pop("relative_l2"),
            "plain_relative_l2 stands without relative_l2",
        ),
    ],
)
def test_what_a_schema_would_let_pass(tmp_path: Path, change: Any, said: str) -> None:
    document = json.loads(json.dumps(RESULT))
    case = document["cases"][0]
    path = tmp_path / "result.json"
    results.write(document, path)
    results.read(path)
    change(case)
    path.write_text(json.dumps(document))
    assert said in refused(results.read, path)


def test_what_a_reader_would_trip_over_deep_inside(tmp_path: Path, other: Path) -> None:
    document = json.loads(json.dumps(RESULT))
    path = tmp_path / "result.json"
    for depth in (50, 90, 200, 600, 950):
        deep = "[" * depth + "]" * depth
        document["environment"]["deep"] = "DEEP"
        path.write_text(json.dumps(document).replace('"DEEP"', deep))
        survives(path, other)
        assert (read_or_refused(results.read, path) is None) == (depth > 90)


def test_a_case_that_occurs_twice_is_not_compared(tmp_path: Path, other: Path) -> None:
    document = json.loads(json.dumps(RESULT))
    document["cases"].append(document["cases"][0])
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    for pair in ((path, other), (other, path)):
        said = refused(lambda _path, pair=pair: diffs.diff(*pair), path)
        assert "holds the case bad (f.py::bad) twice" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "../case.safetensors"}, "is not a plain name"),
        ({"file": "/case.safetensors"}, "is not a plain name"),
        ({"file": "a\0b"}, "is not a plain name"),
        ({"file": "case\n.safetensors"}, "is not a plain name"),
        ({"kind": "almost"}, "kind 'almost'; allowed are exact, float64, bits"),
        ({"kind": "float64"}, "a float64 golden has exact, budget, unrounded, margin"),
        ({"kind": "bits"}, "a key belongs to kind bits"),
        ({"nonfinite": -1}, "is -1, it should be at least 0"),
        ({"more": 1}, "has an unknown field 'more'"),
        ({"case": "case/bits", "kind": "bits", "key": INDEX["entries"][1]["key"]}, "two entries"),  # type: ignore[index]
    ],
)
def test_entries_that_cannot_be_goldens(tmp_path: Path, change: Any, said: str) -> None:
    document = json.loads(json.dumps(INDEX))
    document["entries"][0].update(change)
    path = tmp_path / "index.json"
    path.write_text(json.dumps(document))
    assert said in refused(lambda path: store.read(path.parent), path)
