"""What is drawn from the document: tables, markdown, figures; determinism as verify found it."""

import copy
import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import pytest
from bench_documents import bench_document

from mok.bench import determinism, document, figures, tables
from mok.bench.determinism import Finding, Here
from mok.bench.prediction import predict
from mok.bench.shapes import PEER_SHAPES, SHAPES
from mok.errors import InputError


@pytest.fixture(scope="module")
def found():
    findings = [Finding("torch", "small", "VERIFIED", "VERIFIED: repeat, process", "p.py::torch")]
    return bench_document(findings=findings)


def _lines(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_markdown_has_a_table_for_each_protocol(found):
    text = tables.markdown(found)
    for protocol in ("Rotation", "Alone", "Pair"):
        assert f"{protocol}: {found['protocols'][protocol.lower()]}." in text
    assert len(_lines(text, "| shape")) == 3
    first = _lines(text, "| tiny", "| mok ")[0]
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[2] == "10.00 (10.00 to 10.00)"
    assert cells[4] == "~1.5"
    assert cells[-1] == "our own layer"


def test_estimated_joules_have_no_ratio_in_the_table(found):
    changed = copy.deepcopy(found)
    changed["ratios"] = document.ratios(changed["rows"], "mok")
    lines = _lines(tables.markdown(changed, whole=True), "| torch ", "| no ")
    cells = {
        (line.split("|")[1].strip(), line.split("|")[2].strip()): line.split("|")[6].strip()
        for line in lines
    }
    assert cells["tiny", "rotation"] == cells["tiny", "pair"] == "-"
    assert float(cells["tiny", "alone"]) > 0


def test_estimates_carry_a_tilde_and_counted_joules_do_not(found):
    assert tables.joules({"joules": 5.512, "joules_kind": "estimate"}) == "~5.51"
    assert tables.joules({"joules": 5.512, "joules_kind": "counter"}) == "5.51"
    assert tables.joules({"joules": None, "joules_kind": None}) == "-"


def test_nothing_is_left_out(found):
    text = tables.text(found)
    assert "Skipped: sonicmoe (not installed)." in text
    assert len(_lines(text, "liger", "failed in first calls: RuntimeError: liger cannot")) == 1
    assert "not comparable: no known rate" in text
    assert "VERIFIED: repeat, process (on small)" in text
    assert "not checked" in text
    assert "GEMM gate-up size" in text
    assert "finished." in text


def test_a_failure_cannot_break_a_markdown_table(found):
    changed = copy.deepcopy(found)
    changed["failures"][0]["error"] = "a | b\nc"
    line = _lines(tables.markdown(changed), "a / b c")[0]
    assert line.count("|") == _lines(tables.markdown(changed), "| shape")[0].count("|")


def test_only_documents_of_this_version_are_drawn(found, tmp_path):
    for wrong in ({}, {**found, "schema_version": 2}, {**found, "schema": "other"}, [], "text"):
        for draw in (tables.markdown, tables.text, figures.svg):
            with pytest.raises(InputError, match="allowed"):
                draw(wrong)
    path = tmp_path / "layer.json"
    document.save(found, path)
    assert tables.markdown(document.load(path)) == tables.markdown(found)
    path.write_text("{")
    with pytest.raises(InputError, match="Check the path"):
        document.load(path)


@pytest.mark.parametrize("protocol", ["rotation", "alone", "pair"])
def test_a_figure_is_well_formed_and_has_a_bar_for_every_number(found, protocol):
    picture = ElementTree.fromstring(figures.svg(found, protocol))
    space = "{http://www.w3.org/2000/svg}"
    titles = [element.text for element in picture.iter(f"{space}title")]
    rows = [row for row in found["rows"] if row["protocol"] == protocol]
    assert len(titles) == 2 * len(rows)  # energy and speed
    assert any("10.000 ms" in title for title in titles)
    bars = [bar for bar in picture.iter(f"{space}rect") if bar.get("class", "").startswith("c")]
    assert all(0 < float(bar.get("width")) < 240 for bar in bars)


def test_bars_are_as_long_as_their_values_and_only_speed_is_drawn_without_energy(found):
    drawn = figures.layout(found, "rotation")
    assert [panel.title for panel in drawn.panels] == [
        "forward, pJ per operation (estimate)",
        "backward, pJ per operation (estimate)",
        "forward, TFLOP/s",
        "backward, TFLOP/s",
    ]
    speed = drawn.panels[2].bars
    rates = [
        row["tflops"]
        for row in found["rows"]
        if row["protocol"] == "rotation" and row["direction"] == "forward"
    ]
    assert len(speed) == len(rates) == 5  # liger runs on the second shape
    longest = max(bar.width for bar in speed)
    for bar, rate in zip(speed, rates, strict=True):
        assert bar.width / longest == pytest.approx(rate / max(rates), abs=0.01)
    silent = copy.deepcopy(found)
    for row in silent["rows"]:
        row["joules"] = None
    assert len(figures.layout(silent, "rotation").panels) == 2


def test_a_protocol_without_rows_has_no_figure(found):
    empty = {**found, "rows": [row for row in found["rows"] if row["protocol"] == "alone"]}
    with pytest.raises(InputError, match="allowed here: alone"):
        figures.svg(empty, "rotation")


def _case(name, verdict, *claims):
    return {
        "case": name,
        "verdict": verdict,
        "claims": [
            {"claim": claim, "verdict": state, "executions": runs, "differing": differing}
            for claim, state, runs, differing in claims
        ],
    }


CASES = [
    _case("ci/gpu/peers.py::peers/torch/small", "VERIFIED", ("repeat", "VERIFIED", 20, 0)),
    _case(
        "peers.py::liger_small",
        "MISMATCH",
        ("repeat", "MISMATCH", 20, 20),
        ("process", "VERIFIED", 3, 0),
    ),
    _case("peers.py::peers/torch/ranks", "VERIFIED", ("rank", "VERIFIED", 2, 0)),
    _case("moe", "VERIFIED", ("batch", "VERIFIED", 4, 0)),
    _case("moe/clamped", "VERIFIED", ("batch", "VERIFIED", 4, 0)),
    _case("peers.py::torch kimi shard", "UNVERIFIED", ("repeat", "UNVERIFIED", 0, 0)),
    _case("peers.py::something-small", "VERIFIED", ("repeat", "VERIFIED", 20, 0)),
]


HERE = Here("cpu", None, "2.11.0", "c" * 40)


def test_determinism_is_quoted_from_the_cases_of_a_contender(monkeypatch, tmp_path):
    monkeypatch.setattr("verify.results.read", lambda path: {"cases": CASES})
    versions = dict.fromkeys(["mok", "torch", "liger", "sonicmoe"], "1.0")
    findings = determinism.read_findings([tmp_path], versions, HERE)
    assert [(f.contender, f.shape, f.verdict) for f in findings] == [
        ("torch", "small", "VERIFIED"),
        ("liger", "small", "MISMATCH"),
        ("torch", "ranks", "VERIFIED"),
        ("mok", "moe", "VERIFIED"),
        ("torch", "kimi-shard", "UNVERIFIED"),
    ]
    assert determinism.quoted(findings, "torch", "small") == "VERIFIED: repeat"
    assert determinism.quoted(findings, "torch", "kimi-shard") == "UNVERIFIED: repeat"
    assert determinism.quoted(findings, "liger", "kimi-shard") == (
        "MISMATCH: repeat (20 of 20 runs differ); VERIFIED: process (on small)"
    )
    assert determinism.quoted(findings, "sonicmoe", "small") == "not checked"
    assert determinism.quoted(findings, "mok", "small") == "VERIFIED: batch (on moe)"
    assert determinism.quoted(findings, "torch", "small", 2) == "VERIFIED: rank"
    assert determinism.quoted(findings, "liger", "small", 2) == "not checked"


def _checked(device="cuda:0", *, gpu="NVIDIA H200", torch="2.11.0", commit="c" * 40):
    """A result document with ours and two peers' cases."""
    cases = [
        {**_case(name, "VERIFIED", ("repeat", "VERIFIED", 20, 0)), "device": device}
        for name in ("moe", "p.py::peers/liger/small", "p.py::peers/sonicmoe/ranks")
    ]
    cases[1]["description"] = "liger 0.8.5, T=512 E=8 H=1024 I=512 K=2"
    cases[2]["description"] = "sonicmoe 0.1.2.post1 between NCCL all-to-alls"
    cuda = {"devices": [{"name": gpu}]} if gpu else None
    environment = {"torch": torch, "source": {"commit": commit}, "cuda": cuda}
    return {"tool": {"version": "0.1.0"}, "environment": environment, "cases": cases}


def _read(monkeypatch, tmp_path, document, **changes):
    monkeypatch.setattr("verify.results.read", lambda path: document)
    versions = {"mok": "0.1.0 portable", "liger": "0.8.5", "sonicmoe": "0.1.2.post1"}
    here = dataclasses.replace(Here("cuda", "NVIDIA H200", "2.11.0", "c" * 40), **changes)
    return determinism.read_findings([tmp_path], versions, here)


def test_a_finding_keeps_with_what_it_was_checked(monkeypatch, tmp_path):
    findings = _read(monkeypatch, tmp_path, _checked())
    assert [(f.contender, f.version) for f in findings] == [
        ("mok", "0.1.0"),
        ("liger", "0.8.5"),
        ("sonicmoe", "0.1.2.post1"),
    ]
    for found in findings:
        facts = (found.torch, found.commit, found.gpu, found.differs)
        assert facts == ("2.11.0", "c" * 40, "NVIDIA H200", "")
    assert determinism.quoted(findings, "liger", "small") == "VERIFIED: repeat"


@pytest.mark.parametrize(("device", "kind"), [("", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_a_case_on_another_kind_of_device_says_nothing_here(monkeypatch, tmp_path, device, kind):
    assert _read(monkeypatch, tmp_path, _checked(device), device=kind) == []
    same = "cuda" if device == "cuda" else "cpu"
    assert len(_read(monkeypatch, tmp_path, _checked(device), device=same)) == 3


def test_a_finding_says_what_was_another_when_it_was_checked(monkeypatch, tmp_path):
    document = _checked(gpu="NVIDIA A100", torch="2.10.0", commit="d" * 40)
    document["cases"][1]["description"] = "liger 0.8.4, T=512"
    findings = _read(monkeypatch, tmp_path, document)
    assert determinism.quoted(findings, "liger", "kimi-shard") == (
        "VERIFIED: repeat (on small; checked with liger 0.8.4, torch 2.10.0, commit dddddddddddd, "
        "NVIDIA A100)"
    )
    assert "0.1.0" not in determinism.quoted(findings, "mok", "small")
    # What nobody knows is no difference, and no word of a description is a version.
    document["cases"][1]["description"] = "liger between NCCL all-to-alls"
    document["environment"] = {"cuda": None}
    findings = _read(monkeypatch, tmp_path, document, commit=None, gpu=None)
    assert [found.differs for found in findings] == [""] * 3
    assert findings[1].version is None


def test_a_file_that_is_no_result_is_refused(tmp_path):
    from verify.errors import InputFileError

    path = tmp_path / "result.json"
    path.write_text(json.dumps({"schema_version": 1}))
    with pytest.raises(InputFileError, match=r"result\.json"):
        determinism.read_findings([path], {"torch": "1.0"}, HERE)


def test_predicted_time_grows_with_what_is_asked_and_fits_the_known_budget(monkeypatch):
    def seconds(
        shapes=PEER_SHAPES, alone=("sonicmoe", "torch"), pairs=(), rounds=25, loop=2.0, **more
    ):
        return predict(
            [SHAPES[name] for name in shapes],
            ["torch", "huggingface", "liger", "sonicmoe"],
            alone,
            pairs,
            rounds=rounds,
            seconds=loop,
            slow_rounds=5,
            slow_factor=5.0,
            device="cuda",
            **more,
        )

    whole = seconds()
    assert 60 < whole < 240
    assert seconds(shapes=PEER_SHAPES[:1]) < whole / 3
    assert seconds(alone=()) < whole - 60
    assert seconds(pairs=(("sonicmoe", "torch"),)) > whole
    assert seconds(rounds=0) < whole
    assert seconds(loop=4.0) > whole
    forward = dict.fromkeys(("torch", "huggingface", "liger", "sonicmoe"), ("forward",))
    assert seconds(directions=forward) < whole - 30
    # one that is timed forward only is not slow for a backward that nobody calls
    slow = {"liger": {"forward": 400.0, "backward": 1.0}}
    monkeypatch.setattr("mok.bench.prediction.known_rates", lambda *place: ())
    both = seconds(alone=("liger",), tflops=slow)
    assert seconds(alone=("liger",), tflops=slow, directions={"liger": ("forward",)}) < both - 60
