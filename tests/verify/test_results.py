"""The result document: built, written, read, refused, and judged by its claims alone."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify import results
from verify.errors import InputFileError
from verify.evidence import BASE, Execution
from verify.reasons import REASONS, Verdict
from verify.verdicts import CaseVerdict


def test_schema_accepts_every_kind_of_document(mixed, nasty, make_result):
    validator = jsonschema.Draft202012Validator(results.schema())
    validator.check_schema(results.schema())
    for document in (mixed, nasty, make_result([]), make_result(ranks=4)):
        validator.validate(document)


def test_schema_lists_exactly_the_reasons_and_verdicts():
    definitions = results.schema()["$defs"]
    assert set(definitions["reason"]["enum"]) == set(REASONS)
    assert set(definitions["verdict"]["enum"]) == {verdict.value for verdict in Verdict}


@pytest.mark.parametrize("break_it", ["verdict", "reason", "missing"])
def test_schema_refuses(mixed, break_it):
    claim = mixed["cases"][1]["claims"][0]
    if break_it == "verdict":
        claim["verdict"] = "PASSED"
    elif break_it == "reason":
        claim["findings"][0]["reason"] = "who-knows"
    else:
        del claim["bound"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(mixed, results.schema())


def test_build_takes_digests_from_the_base_of_the_main_process(make_result):
    def made(claim, rank, process, run, digest):
        return Execution(
            "moe", claim, "v", rank, run, process=process, outputs={"out": digest}, seconds=1.0
        )

    executions = [
        made(BASE, 0, 1, 0, "fresh"),
        made("repeat", 0, 0, 1, "later"),
        made(BASE, 0, 0, 0, "base0"),
        made(BASE, 1, 0, 0, "base1"),
    ]
    case = make_result(executions=executions, ranks=2)["cases"][0]
    assert case["outputs"] == {"0": {"out": "base0"}, "1": {"out": "base1"}}
    assert case["timings"] == {
        "case_seconds": 4.0,
        "overhead_seconds": 0.0,
        "overhead_share": 0.0,
        "median": {"case_seconds": 1.0, "overhead_seconds": 0.0},
    }


def test_build_is_json_clean_and_totals_add_up(mixed):
    assert json.loads(json.dumps(mixed, allow_nan=False)) == mixed
    assert mixed["totals"] == {
        "cases": 3,
        "claims": 4,
        "executions": 12,
        "verified": 2,
        "mismatch": 1,
        "unverified": 1,
    }
    assert (mixed["verdict"], mixed["exit_code"]) == ("MISMATCH", 1)
    assert mixed["started"] == "2026-01-02T03:04:05+00:00"


def test_reproduce_names_only_what_is_not_the_default():
    defaults = {"runs": 5, "processes": 3, "timeout": 300.0, "seed": None, "ranks": None}
    assert results.reproduce("moe", None, defaults, 1) == "verify run moe"
    assert (
        results.reproduce("a b.py::f", "rank", {**defaults, "runs": 9, "seed": 0}, 4)
        == "verify run 'a b.py::f' --claims rank --ranks 4 --runs 9 --seed 0"
    )
    assert results.reproduce("moe", None, {**defaults, "ranks": 1}, 1) == "verify run moe --ranks 1"
    assert results.reproduce("", "rank", defaults, 4) == ""


@pytest.mark.parametrize(
    ("states", "controls", "code"),
    [
        (["VERIFIED"], "not-run", 0),
        (["VERIFIED", "UNVERIFIED"], "passed", 3),
        (["UNVERIFIED", "MISMATCH"], "failed", 1),
        (["VERIFIED"], "failed", 3),
        ([], "passed", 3),
    ],
)
def test_exit_code_is_that_of_the_worst_claim(states, controls, code):
    claims = [{"verdict": state} for state in states]
    document = {
        "verdict": "VERIFIED",  # what the field says does not help
        "controls": {"status": controls},
        "cases": [{"claims": claims}] if states else [],
    }
    assert results.exit_code(document) == code
    assert results.exit_code({**document, "verdict": "MISMATCH"}) == 1


def test_exit_code_of_a_case_without_claims_is_never_zero(make_result):
    document = make_result([CaseVerdict("empty", "empty", [])])
    assert document["verdict"] == "UNVERIFIED"
    assert results.exit_code(document) == 3


@given(st.lists(st.lists(st.sampled_from(list(Verdict)), max_size=3), max_size=3))
def test_exit_code_zero_needs_a_claim_in_every_case_and_all_verified(cases):
    document = {
        "verdict": "VERIFIED",
        "controls": {"status": "not-run"},
        "cases": [{"claims": [{"verdict": state.value} for state in case]} for case in cases],
    }
    sound = bool(cases) and all(
        case and all(state == Verdict.VERIFIED for state in case) for case in cases
    )
    assert (results.exit_code(document) == 0) == sound


def test_write_makes_folders_and_leaves_no_temporary_file(tmp_path, mixed):
    path = tmp_path / "a" / "b" / "result.json"
    results.write(mixed, path)
    assert results.read(path) == results.read(path.parent) == mixed
    assert os.listdir(path.parent) == ["result.json"]


def test_write_replaces_as_a_whole(tmp_path, mixed):
    path = tmp_path / "result.json"
    results.write(mixed, path)
    stop = threading.Event()

    def rewrite():
        while not stop.is_set():
            results.write(mixed, path)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(50):
            assert results.read(path) == mixed
    finally:
        stop.set()
        writer.join()


def test_write_says_why_it_cannot(tmp_path, mixed):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputFileError, match=r"cannot write .*file/result\.json"):
        results.write(mixed, tmp_path / "file" / "result.json")


def test_read_survives_lone_surrogates(tmp_path, nasty):
    results.write(nasty, tmp_path / "result.json")
    assert results.read(tmp_path) == nasty


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a result document"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "no field schema_version"),
        (b'{"schema_version": 2}', "schema_version 2, this version reads 1"),
        (b'{"schema_version": 1}', "no field 'tool'"),
        (b'{"schema_version": 1, "seconds": NaN}', "it holds NaN"),
        (b'{"schema_version": Infinity}', "it holds Infinity"),
        (b"[" * 100_000, "not a result document"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a result document"),
    ],
)
def test_read_names_file_and_reason(tmp_path, content, said):
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(InputFileError) as caught:
        results.read(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_read_missing_file_and_folder_without_result(tmp_path):
    with pytest.raises(InputFileError, match="no such file"):
        results.read(tmp_path / "none.json")
    with pytest.raises(InputFileError, match=r"holds no result\.json"):
        results.read(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("cases", 0, "claims", 0, "verdict"), "GOOD", "'GOOD' is not a valid Verdict"),
        (("cases", 0, "claims", 0, "executions"), True, "should be integer"),
        (("cases", 0, "claims"), {}, "should be array"),
        (("controls",), None, "should be object"),
    ],
)
def test_read_finds_malformed_fields(tmp_path, mixed, path, value, said):
    place = mixed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "result.json").write_text(json.dumps(mixed))
    with pytest.raises(InputFileError, match=said):
        results.read(tmp_path)


def test_read_tolerates_additions(tmp_path, mixed):
    mixed["cases"][1]["claims"][0]["findings"][0]["reason"] = "a-later-reason"
    mixed["cases"][1]["later"] = mixed["later"] = [1]
    results.write(mixed, tmp_path / "result.json")
    assert results.read(tmp_path) == mixed


def test_measurements_that_are_not_finite_become_text(nasty):
    measured = nasty["cases"][0]["claims"][0]["measurements"]
    assert "nan" in next(iter(measured.values())).values()
    assert not any(
        isinstance(v, float) and math.isnan(v) for m in measured.values() for v in m.values()
    )


def test_schema_file_is_ascii():
    path = Path(results.__file__).parent / "schema" / "result-v1.schema.json"
    assert path.read_bytes().isascii()
