"""Evidence of GPU runs: figures of README and docs/measured.md are those that were measured, and
every file says where.

The first tests judge what is committed; the others break things on purpose and are told.
One file of more than 400 lines, since all of it rests on one run as parts.py writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench_documents import bench_document
from click.testing import CliRunner
from gpu_scripts import gpu_scripts

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
README, MEASURED = "README.md", "docs/measured.md"
HEADINGS = "## Determinism\n\n## Speed\n\n"


def pages() -> dict[str, str]:
    return {name: (ROOT / name).read_text() for name in (README, MEASURED)}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


def test_what_is_committed_is_evidence_and_both_pages_say_nothing_else(
    scripts: dict[str, ModuleType],
) -> None:
    """Without any evidence README must say that there is none; with some, what is missing."""
    found = scripts["evidence"].read()
    assert scripts["tables"].problems(pages(), found) == []
    limits = pages()[README].partition("\n## Limits\n")[2]
    assert [one for one in scripts["evidence"].missing(found) if f"`{one}`" not in limits] == []


def test_what_is_committed_was_measured_on_the_commit_that_it_names(
    scripts: dict[str, ModuleType],
) -> None:
    evidence = scripts["evidence"]
    found = evidence.read()
    if not found:
        pytest.skip("nothing was measured on a GPU yet, as README says")
    try:
        told = {name: evidence.source_problem(one) for name, one in found.items()}
    except scripts["sources"].NoHistory as unknown:
        pytest.skip(f"commits of evidence cannot be checked here: {unknown}")
    assert not any(told.values()), told


def _cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_every_goal_of_the_digest_is_told_with_whether_it_is_met(
    scripts: dict[str, ModuleType],
) -> None:
    goals, measured = scripts["goals"], pages()[MEASURED]
    found = [one for one in scripts["evidence"].read().values() if one["part"] == "digest"]
    if not found:
        pytest.skip("nothing was measured on a GPU yet, as README says")
    for one in found:
        for step in one["results"].values():
            judged = goals.judged(step["document"])
            assert len(judged) >= 4
            assert [j.what for j in judged if list(j.cells()) not in _cells(measured)] == []
            assert goals.summary(judged) in measured
            print(goals.summary(judged))  # shown with -s, and beside a failure


def test_every_goal_stands_in_measured_and_what_missed_it_in_readme_too(
    scripts: dict[str, ModuleType],
) -> None:
    goals, found = scripts["goals"], scripts["evidence"].read()
    if not found:
        pytest.skip("nothing was measured on a GPU yet, as README says")
    own, readme, measured = list(found.values()), *(_cells(text) for text in pages().values())
    for part in scripts["evidence"].PARTS:
        judged = goals.of_part(part, [one for one in own if one["part"] == part])
        assert [goal for goal in judged if list(goal.cells()) not in measured] == []
        missed = [goal for goal in judged if goal.met not in (goals.YES, goals.FREE)]
        assert [goal for goal in missed if [part, *goal.cells()] not in readme] == []
        told = f"{part} {sum(goal.met == goals.YES for goal in judged)} of "
        assert (told in pages()[README]) == bool(judged), part


ENVIRONMENT = {
    "platform": "Linux",
    "machine": "x86_64",
    "cpu_model": "a cpu",
    "cpu_count": 16,
    "python": "CPython 3.12.3",
    "torch": "2.11.0+cu130",
    "torch_git": "abc",
    "flags": {"deterministic_algorithms": False},
    "variables": {
        "NCCL_NVLS_ENABLE": "0",
        "CUDA_HOME": "/opt/cuda",
        "OMP_NUM_THREADS": "1",
    },
    "cuda": {
        "runtime": "13.0",
        "driver": "580.1",
        "devices": [{"name": "NVIDIA H200", "capability": "9.0"}],
        "visible": 1,
        "links": {},
        "nccl": "2.28.9",
    },
}
JUNIT = (
    "<testsuites><testsuite><testcase classname='a' name='one'/>"
    "<testcase classname='a' name='two'/>"
    "<testcase classname='a' name='three'><skipped/></testcase></testsuite></testsuites>"
)
FAILING = JUNIT.replace("'two'/>", "'two'><failure message='x'/></testcase>")
FAULTS = {
    "schema_version": 1,
    "passed": True,
    "environment": ENVIRONMENT,
    "faults": [
        {
            "name": "atomic-sum",
            "claim": "repeat",
            "fault": "adds floats with atomics",
            "caught": True,
            "plain_check": {"noticed": 3, "trials": 100},
            "claims": {
                "repeat": {
                    "executions": 30,
                    "differing": 29,
                    "interval_95": [0.83, 1.0],
                    "variants": {},
                }
            },
            "twin": {"executions": 90, "differing": 0, "not_verified": [], "claims": {}},
        }
    ],
}
DIGEST = {
    "unit": "TB/s",
    "protocol": "2 GB, alternating",
    "rows": [
        {"dtype": "bf16", "verify digest": 4.125, "of the read": 0.9199, "of hash_tensor": 1.25},
        {"dtype": "int8", "verify digest": 4.0, "of the read": 0.92, "of hash_tensor": None},
    ],
    "plan_replay_us": 15.0,
    "plan_build_us": 100.4,
}


def step(name: str, document: Any = None, **more: Any) -> dict[str, Any]:
    given = {"name": name, "command": f"verify {name}", "status": "passed", "exit": 0}
    return {**given, "seconds": 1.5, "document": document, **more}


@pytest.fixture
def run(scripts: dict[str, ModuleType], mixed_result: dict[str, Any]) -> dict[str, Any]:
    """As parts.py writes it: every part but the benchmark, which has tests of its own."""
    sanitize = [
        step("memcheck sanitize_digest", said="ERROR SUMMARY: 0 errors"),
        step("racecheck sanitize_digest", said="RACECHECK SUMMARY: 0 hazards displayed"),
    ]
    clean = {**mixed_result, "verdict": "VERIFIED", "cases": mixed_result["cases"][:1]}
    steps = {
        "tests": [step("pytest", JUNIT)],
        "digest": [step("digest", DIGEST)],
        "faults": [step("faults", FAULTS)],
        "verify": [step("layer", clean)],
        "peers": [step("peers", mixed_result)],
        "sanitize": sanitize,
    }
    return {
        "format": "mok-verify-gpu-run-v1",
        "commit": COMMIT,
        "dirty": False,
        "sources": scripts["sources"].of_tree(),
        "started": "2026-01-02T03:04:05+00:00",
        "ranks": 1,
        "seconds": 60.0,
        "environment": ENVIRONMENT,
        "parts": [
            {"name": name, "status": "passed", "seconds": 12.5, "steps": some}
            for name, some in steps.items()
        ],
    }


@pytest.fixture
def mixed_result() -> dict[str, Any]:
    """One VERIFIED case, and one whose d_router differs in every run."""
    finding = {
        "reason": "bits-differ",
        "detail": "d_router has other bits",
        "tensor": "d_router",
        "variant": "restored",
        "difference": {"lines": ["first: at /tmp/x/y.py"], "suggests": ["atomics"]},
    }
    good = {"claim": "repeat", "verdict": "VERIFIED", "executions": 20, "differing": 0}
    bad = {"claim": "repeat", "verdict": "MISMATCH", "executions": 20, "differing": 20}
    rest = {"bound": 0.14, "findings": [], "measurements": {}}
    case = {"description": "a layer", "ranks": 1, "device": "cuda"}
    return {
        "command": "verify run cases.py --device cuda --report /tmp/raw/peers",
        "verdict": "MISMATCH",
        "ranks": 1,
        "totals": {"cases": 2},
        "cases": [
            {
                **case,
                "case": "ci/gpu/peer_cases.py::peers/torch/small",
                "verdict": "VERIFIED",
                "claims": [{**good, **rest}],
            },
            {
                **case,
                "case": "ci/gpu/peer_cases.py::peers/liger/small",
                "verdict": "MISMATCH",
                "claims": [{**bad, **rest, "findings": [finding]}],
            },
        ],
    }


@pytest.fixture
def collect(scripts: dict[str, ModuleType], run: dict[str, Any]) -> Callable[..., Any]:
    """As the command does, where git knows the commit of `run`, and no other."""
    known = {COMMIT: dict(run["sources"])}

    def collected(*runs: dict[str, Any], into: Path) -> Any:
        return scripts["evidence"].collect(runs, into, known.get)

    return collected


@pytest.fixture
def found(
    scripts: dict[str, ModuleType], run: dict[str, Any], collect: Callable[..., Any], tmp_path: Path
) -> dict[str, Any]:
    """The evidence of `run`, kept in tmp_path."""
    collect(run, into=tmp_path)
    return dict(scripts["evidence"].read(tmp_path))


@pytest.fixture
def whole(scripts: dict[str, ModuleType], found: dict[str, Any]) -> dict[str, str]:
    """Both pages with the tables of `found`, and nothing else."""
    empty = {README: f"{HEADINGS}## Limits\n\n", MEASURED: ""}
    return dict(scripts["tables"].written(empty, found))


def test_a_run_becomes_files_that_are_evidence_and_tables_that_are_theirs(
    scripts: dict[str, ModuleType],
    run: dict[str, Any],
    collect: Callable[..., Any],
    tmp_path: Path,
) -> None:
    evidence, tables = scripts["evidence"], scripts["tables"]
    files = collect(run, into=tmp_path).written
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        f"h200/{name}.json" for name in ("tests", "digest", "faults", "verify", "peers", "sanitize")
    ]
    found = evidence.read(tmp_path)
    assert found["h200/tests.json"]["results"]["pytest"] == {
        "exit": 0,
        "status": "passed",
        "seconds": 1.5,
        "passed": 2,
        "failed": [],
        "skipped": 1,
    }
    assert "/tmp" not in "".join(path.read_text() for path in files)
    assert found["h200/verify.json"]["environment"]["variables"] == {"NCCL_NVLS_ENABLE": "0"}
    readme = f"# A readme\n\n{HEADINGS}## Files\n\ntree\n\n## Limits\n\n{tables.UNMEASURED}- one\n"
    before = {README: readme, MEASURED: "# Measured\n"}
    told = tables.problems(before, found)
    assert sum(one.startswith(f"{MEASURED}: evidence of ") for one in told) == 6
    assert [one for one in told if not one.startswith(MEASURED)] == [
        f"{README}: evidence of 'verified' has no table",
        f"{README}: evidence of 'digests' has no table",
        f"{README}: evidence of 'missed' has no table",
        *(one for one in told if "Limits must say" in one),
    ]
    assert len(told) == 10
    after = tables.written(before, found)
    assert tables.problems(after, found) == []
    assert tables.written(after, found) == after
    readme, measured = after[README], after[MEASURED]
    places = ("## Determinism", "### Verified on a GPU", "## Speed", "### Digests", "### Goals")
    order = [readme.index(f"\n{one}") for one in (*places, "## Files")]
    assert order == sorted(order)
    assert measured.startswith("# Measured\n\n## GPU tests\n\n<!-- evidence: tests -->\n")
    names = (
        *("degrees", "backward-degrees", "training", "forward", "backward", "bench", "endurance"),
        *("backward-endurance", "recording", "verify-x2", "training-x2"),
    )
    lacking = ", ".join(f"`h200/{name}.json`" for name in names)
    lacking = f"- Not measured on a GPU yet: {lacking}.\n"
    assert readme.endswith(f"## Files\n\ntree\n\n## Limits\n\n{lacking}- one\n")
    none = tables.written(after, {})
    assert none[README].endswith(f"## Limits\n\n{tables.UNMEASURED}- one\n")
    assert "evidence:" not in "".join(none.values())
    for shown in (
        "d_router",
        "20 of 20",
        "29 of 30, 83.0 to 100.0 %",
        "3 of 100",
        "4.125",
        "100.4 us",
    ):
        assert shown in measured, shown
    for shown in ("4.125", "100.4 us", "digest 3 of 6.", "bf16: digest / int64 sum"):
        assert shown in readme, shown
    for text in (readme, measured):
        assert f"`bash ci/gpu.sh --parts verify` at commit `{COMMIT[:12]}`, 2026-01-02" in text


def test_figures_that_are_not_those_of_the_evidence_are_told(
    scripts: dict[str, ModuleType], found: dict[str, Any], whole: dict[str, str], tmp_path: Path
) -> None:
    evidence, tables = scripts["evidence"], scripts["tables"]
    for page, table, right, wrong in (
        (MEASURED, "faults", "29 of 30", "30 of 30"),
        (README, "digests", "4.125", "4.126"),
        (README, "missed", "0.919", "0.920"),
    ):
        edited = {**whole, page: whole[page].replace(right, wrong)}
        told = f"{page}: table {table!r} is not that of the evidence"
        assert told in tables.problems(edited, found)
        assert tables.written(edited, found) == whole
    (tmp_path / "h200" / "faults.json").unlink()
    left = evidence.read(tmp_path)
    assert tables.problems(whole, left)[0] == f"{MEASURED}: table 'faults' has no evidence"
    assert "adds floats" not in tables.written(whole, left)[MEASURED]
    for page, text in whole.items():
        block = text[text.index("<!-- evidence:") : text.index(tables.END) + 12]
        for wrong in (text.replace("<!-- end -->", "", 1), text + tables.END, text + block):
            spoilt = {**whole, page: wrong}
            assert any(
                problem.startswith(f"{page}: ") and "<!-- end -->" in problem
                for problem in tables.problems(spoilt, found)
            )
            with pytest.raises(tables.PageError, match=f"{page} has .* mend that by hand"):
                tables.written(spoilt, found)  # adds no second table
    for lacks in ("## Limits\n\n", HEADINGS, "## Determinism\n\n## Limits\n\n"):
        with pytest.raises(tables.PageError, match=r"README\.md has no heading"):
            tables.written({README: lacks, MEASURED: ""}, found)
    empty = tables.LIMITS + tables.UNMEASURED
    assert tables.problems({README: empty, MEASURED: ""}, {}) == []
    [told] = tables.problems({README: "no table", MEASURED: ""}, {})
    assert told.startswith("README.md: Limits must say")
    shown = "<!-- evidence: bench -->\n| 1 |\n<!-- end -->\n"
    [told] = tables.problems({README: empty, MEASURED: shown}, {})
    assert told == "docs/measured.md: table 'bench' has no evidence"


def test_no_table_stands_on_the_page_of_another(
    scripts: dict[str, ModuleType], found: dict[str, Any], whole: dict[str, str]
) -> None:
    """Not even in the state of the evidence: one of both would be forgotten some day."""
    tables = scripts["tables"]
    assert not set(tables.TABLES) & set(tables.SHORT)
    for table, home, other in (("tests", MEASURED, README), ("digests", README, MEASURED)):
        text = whole[home]
        start = text.index(f"<!-- evidence: {table} -->")
        block = text[start : text.index(tables.END, start) + len(tables.END)]
        both = {**whole, other: f"{whole[other]}{block}\n"}
        assert tables.problems(both, found) == [f"{other}: table {table!r} belongs in {home}"]
        assert block not in tables.written(both, found)[other]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_several_ranks_stand_beside_one_and_say_how_they_are_joined(
    scripts: dict[str, ModuleType],
    run: dict[str, Any],
    collect: Callable[..., Any],
    tmp_path: Path,
    ranks: int,
) -> None:
    evidence, tables = scripts["evidence"], scripts["tables"]
    collect(run, into=tmp_path)
    required = evidence.missing(evidence.read(tmp_path))
    links = {f"GPU{one}-GPU{one + 1}": "NV18" for one in range(ranks - 1)}
    devices = ENVIRONMENT["cuda"]["devices"] * ranks  # type: ignore[index]
    cuda = {**ENVIRONMENT["cuda"], "visible": ranks, "links": links, "devices": devices}  # type: ignore[dict-item]
    many = {**run, "ranks": ranks, "environment": {**ENVIRONMENT, "cuda": cuda}}
    together = ("tests", "verify", "peers")
    many["parts"] = [one for one in run["parts"] if one["name"] in together]
    collect(many, into=tmp_path)
    found = evidence.read(tmp_path)
    assert {f"h200/{name}-x{ranks}.json" for name in together} < set(found)
    assert [name for name in required if name not in evidence.missing(found)] == (
        ["h200/verify-x2.json"] if ranks == 2 else []  # no more is required
    )
    made = tables.made(found)
    for name in together:
        text = made[name][1]
        assert f"{ranks} x NVIDIA H200" in text
        assert "NCCL 2.28.9, NV18." in text
        assert text.index(f"--parts {name}`") < text.index(f"--parts {name} --ranks {ranks}`")
    rows = [line.split("|")[1].strip() for line in made["tests"][1].splitlines() if "|" in line]
    assert rows[2:] == ["1", str(ranks)]


Change = Callable[[dict[str, Any]], Any]


def _nested(levels: int) -> Any:
    found: Any = {}
    for _ in range(levels):
        found = [found]
    return {"rows": found}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: run.update(commit="unknown"), "with --commit"),
        (lambda run: run.update(format="x"), "not a run"),
        (lambda run: run["environment"].update(cuda=None), "no CUDA device"),
        (lambda run: run["environment"]["cuda"].update(driver=None), "driver"),
        (lambda run: run["parts"][1]["steps"].clear(), "no result"),
        (lambda run: run.pop("sources"), "only a claim"),
        (lambda run: run["sources"].pop("csrc"), "SHA-256"),
        (lambda run: run["sources"].update(csrc="0" * 64), "csrc held something else"),
        (lambda run: run.update(commit="f" * 40), "not in this history"),
        (lambda run: run.update(dirty=True), "uncommitted"),
        (lambda run: run.update(started="2026-01-02"), "no time"),
        (lambda run: run.pop("commit"), "commit is missing"),
        (lambda run: run.pop("parts"), "parts is missing"),
        (lambda run: run.update(parts=None), "parts is None"),
        (lambda run: run.update(parts=[]), "parts is empty"),
        (lambda run: run.update(environment=None), "environment is None"),
        (lambda run: run["environment"].pop("cuda"), "cuda is missing"),
        (lambda run: run["environment"]["cuda"].update(devices="NVIDIA H200"), "no CUDA device"),
        (lambda run: run["environment"]["cuda"].update(devices=[{}]), "name is missing"),
        (lambda run: run["environment"]["cuda"]["devices"][0].update(name="../.."), "no folder"),
        (lambda run: run["environment"].update(variables=[]), "variables is"),
        (lambda run: run.update(ranks="2"), "ranks is '2'"),
        (lambda run: run.update(ranks=-3), "ranks is -3"),
        (lambda run: run.update(ranks=True), "ranks is True"),
        (lambda run: run["parts"][1].pop("seconds"), "seconds is missing"),
        (lambda run: run["parts"][1].update(seconds=math.nan), "seconds is nan"),
        (lambda run: run["parts"][1].update(steps=None), "steps is None"),
        (lambda run: run["parts"][1].update(name="../x"), "'../x'; known are"),
        (lambda run: run["parts"].append(run["parts"][1]), "'digest' twice"),
        (lambda run: run["parts"][1]["steps"].append(step("digest", DIGEST)), "'digest' twice"),
        (lambda run: run["parts"][1]["steps"][0].pop("document"), "document is missing"),
        (lambda run: run["parts"][0]["steps"][0].update(document="<a>"), "no JUnit XML"),
        (lambda run: run["parts"][0]["steps"][0].update(document=5), "no JUnit XML"),
        (lambda run: run["parts"][1]["steps"][0].update(document=[1]), "must be an object"),
        (lambda run: run["parts"][1]["steps"][0].update(document="1"), "must be an object"),
        (lambda run: run["parts"][1]["steps"][0].update(document={}), "rows is missing"),
        (lambda run: run["parts"][1]["steps"][0].update(document=None), "document is missing"),
        (lambda run: run["parts"][1]["steps"][0].update(document=_nested(500)), "nested"),
        (lambda run: run["parts"][3]["steps"][0].update(document={}), "command is missing"),
        (lambda run: run["parts"][2]["steps"][0].update(document={"faults": [{}]}), "is missing"),
        (lambda run: run["parts"][1]["steps"][0].update(status="failed"), "'digest' 'failed'"),
        (lambda run: run["parts"][0]["steps"][0].update(document=FAILING), "a::two"),
        (lambda run: run["parts"][3]["steps"][0]["document"].update(verdict="UNVERIFIED"), "UNVER"),
        (
            lambda run: run["parts"][1]["steps"][0]["document"].update(note="x" * 200_000),
            "at most 200000",
        ),
    ],
)
def test_a_run_that_nobody_could_repeat_is_refused(
    scripts: dict[str, ModuleType],
    run: dict[str, Any],
    collect: Callable[..., Any],
    tmp_path: Path,
    change: Change,
    told: str,
) -> None:
    given = json.loads(json.dumps(run))
    change(given)
    with pytest.raises(scripts["evidence"].EvidenceError, match=told):
        collect(run, given, into=tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing of the run that is right either


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda one: one.pop("environment"), "environment is missing"),
        (lambda one: one.update(commit="HEAD"), "no commit"),
        (lambda one: one.update(status="unavailable"), "not known"),
        (lambda one: one.update(status="failed"), "not known"),
        (lambda one: one.update(status="timed out"), "not known"),
        (lambda one: one.update(dirty=True), "uncommitted"),
        (lambda one: one.pop("sources"), "sources is missing"),
        (lambda one: one["sources"].update(csrc="?"), "SHA-256"),
        (
            lambda one: one["environment"]["cuda"]["devices"][0].update(name="B"),
            "belongs at b/digest",
        ),
        (lambda one: one.update(ranks=2), "belongs at h200/digest-x2.json"),
        (lambda one: one.update(ranks=-3), "ranks is -3"),
        (lambda one: one.update(ranks=True), "ranks is True"),
        (lambda one: one.update(seconds=math.nan), "NaN"),
        (lambda one: one.update(seconds=-1), "seconds is -1"),
        (lambda one: one.update(results={"digest": 5}), "digest is 5"),
        (lambda one: one.update(results={"digest": {}}), "status is missing"),
        (lambda one: one["results"]["digest"].update(document={}), "rows is missing"),
        (lambda one: one["results"]["digest"]["document"].update(rows=[_nested(500)]), "nested"),
        (lambda one: one["environment"]["cuda"].update(devices=[{}]), "name is missing"),
        (lambda one: one["environment"]["cuda"].update(devices="x"), "must be a list"),
        (lambda one: one["environment"]["variables"].update(MOK_API_KEY="1"), "a credential"),
        (lambda one: one.update(command="bash /home/me/gpu.sh"), "a path"),
        (lambda one: one.update(note={"(/home/me/x": 1}), "a path"),
        (lambda one: one["results"]["digest"].update(note="in /srv/x"), "a path"),
        (lambda one: one["environment"].pop("torch"), "no torch"),
    ],
)
def test_a_committed_file_that_is_no_evidence_is_named(
    scripts: dict[str, ModuleType],
    run: dict[str, Any],
    collect: Callable[..., Any],
    tmp_path: Path,
    change: Change,
    told: str,
) -> None:
    evidence = scripts["evidence"]
    collect(run, into=tmp_path)
    path = tmp_path / "h200" / "digest.json"
    one = json.loads(path.read_text())
    change(one)
    path.write_text(json.dumps(one))
    with pytest.raises(evidence.EvidenceError, match=told) as raised:
        evidence.read(tmp_path)
    assert "h200/digest.json" in str(raised.value)


def _no_utf8(path: Path) -> None:
    path.write_bytes(b'{"a": "\xff"}')


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILT: Mapping[str, Callable[[Path], Any]] = {
    "not UTF-8": _no_utf8,
    "a folder": _folder,
    "a list": lambda path: path.write_text("[1]"),
    "a number": lambda path: path.write_text("5"),
    "not JSON": lambda path: path.write_text("{"),
    "deep": lambda path: path.write_text("[" * 100_000 + "]" * 100_000),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_file_that_is_no_document_is_named_by_every_command(
    scripts: dict[str, ModuleType],
    run: dict[str, Any],
    collect: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], Any],
) -> None:
    evidence, tables = scripts["evidence"], scripts["tables"]
    collect(run, into=tmp_path / "kept")
    given = tmp_path / "run" / "run.json"
    given.parent.mkdir()
    given.write_text(json.dumps(run))
    for path in (given, tmp_path / "kept" / "h200" / "digest.json"):
        spoil(path)
    into = tmp_path / "into"
    done = CliRunner().invoke(evidence.main, ["collect", str(given.parent), "--folder", str(into)])
    assert (done.exit_code, done.stdout, into.exists()) == (2, "", False)
    assert "nothing was written" in done.stderr
    (tmp_path / "docs").mkdir()
    (tmp_path / README).write_text("## Files\n\n## Limits\n\n")
    (tmp_path / MEASURED).write_text("")
    read = evidence.read
    monkeypatch.setattr(evidence, "read", lambda: read(tmp_path / "kept"))
    monkeypatch.setattr(tables.evidence, "read", evidence.read)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for command, words, code in (
        (evidence.main, ["check"], 1),
        (tables.main, [], 2),
        (tables.main, ["--check"], 2),
    ):
        done = CliRunner().invoke(command, words)
        assert (done.exit_code, done.stdout) == (code, "")
        assert "h200/digest.json" in done.stderr


def test_a_page_that_cannot_be_written_is_told(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = scripts["tables"]
    monkeypatch.setattr(tables.evidence, "read", dict)
    readme, measured = tmp_path / README, tmp_path / MEASURED
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for words in ([], ["--check"]):
        assert CliRunner().invoke(tables.main, words).exit_code == 2  # there is none
    readme.write_text("# One\n\n## Limits\n\n- two\n")
    for words in ([], ["--check"]):
        done = CliRunner().invoke(tables.main, words)
        assert (done.exit_code, MEASURED in done.stderr) == (2, True)  # there is only README
    measured.parent.mkdir()
    measured.write_text("# Measured\n")
    readme.write_bytes(b"\xff")
    assert CliRunner().invoke(tables.main, ["--check"]).exit_code == 2
    readme.write_text("# No limits\n")
    done = CliRunner().invoke(tables.main, [])
    assert (done.exit_code, readme.read_text()) == (2, "# No limits\n")
    assert "no heading '## Limits'" in done.stderr
    assert CliRunner().invoke(tables.main, ["--check"]).exit_code == 1
    readme.write_text("# One\n\n## Limits\n\n- two\n")
    readme.chmod(0o640)
    assert CliRunner().invoke(tables.main, []).exit_code == 0
    assert CliRunner().invoke(tables.main, ["--check"]).exit_code == 0
    assert readme.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["README.md", "docs", "measured.md"]


def test_both_pages_are_whole_before_one_is_renamed(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, write = scripts["tables"], Path.write_text
    monkeypatch.setattr(tables.evidence, "read", dict)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    before = {README: "# One\n\n## Limits\n\n- two\n", MEASURED: "# Measured\n"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)

    def full(path: Path, text: str, **more: Any) -> int:
        write(path, text[:3], **more)
        if "measured" in path.name:
            raise OSError("no space left on device")
        return write(path, text, **more)

    monkeypatch.setattr(Path, "write_text", full)
    done = CliRunner().invoke(tables.main, [])
    assert (done.exit_code, "no space left" in done.stderr) == (2, True)
    assert {name: (tmp_path / name).read_text() for name in before} == before
    assert len(list(tmp_path.rglob("*"))) == 3  # nothing is left beside them


def test_a_device_names_a_folder_below_and_credentials_are_not_kept(
    scripts: dict[str, ModuleType], run: dict[str, Any], collect: Callable[..., Any], tmp_path: Path
) -> None:
    cuda = run["environment"]["cuda"]
    devices = [{**cuda["devices"][0], "name": "nvidia /abs/../../H100 80GB"}]
    variables = {"MOK_API_KEY": "1", "MOK_X": "2", "NCCL_Y": "TOKEN=3", "CUDA_Z": "(/home/me/x)"}
    environment = {**run["environment"], "cuda": {**cuda, "devices": devices}}
    environment["variables"] = variables
    made = collect({**run, "environment": environment}, into=tmp_path / "a" / "b")
    assert {path.parent for path in made.written} == {tmp_path / "a" / "b" / "abs-h100-80gb"}
    kept = json.loads(made.written[0].read_text())["environment"]
    assert kept["variables"] == {"MOK_X": "2"}


def test_a_part_that_did_not_pass_leaves_nothing_and_is_told(
    scripts: dict[str, ModuleType],
    run: dict[str, Any],
    collect: Callable[..., Any],
    tmp_path: Path,
) -> None:
    by_name = {one["name"]: one for one in run["parts"]}
    by_name["tests"]["status"] = "failed"
    by_name["sanitize"]["status"] = "timed out"
    by_name["peers"]["status"] = "timed out"
    by_name["peers"]["steps"].append(step("peers-torch-small", status="timed out", exit=None))
    made = collect(run, into=tmp_path)
    assert [text.split(" in ")[0] for text in made.left_out] == [
        "h200/tests.json: failed",
        "h200/sanitize.json: timed out",
    ]
    assert "tests.json" not in {path.name for path in made.written}
    assert "peers.json" in {path.name for path in made.written}
    drawn = scripts["tables"].made(scripts["evidence"].read(tmp_path))["peers"][1]
    cells = [[one.strip() for one in line.split("|")[1:4]] for line in drawn.splitlines()]
    assert ["torch-small", "-", "timed out"] in cells  # what did not end has its row all the same
    assert "`bash ci/gpu.sh --parts peers` (timed out) at commit" in drawn


def test_of_several_measurements_the_newest_is_kept(
    scripts: dict[str, ModuleType],
    run: dict[str, Any],
    collect: Callable[..., Any],
    tmp_path: Path,
) -> None:
    later = {**run, "started": "2026-01-02T03:04:06+00:00", "parts": run["parts"][:1]}
    made = collect(later, run, into=tmp_path)
    assert len(made.written) == 6
    assert made.older == [
        "h200/tests.json: kept that of 2026-01-02T03:04:06+00:00, not 2026-01-02T03:04:05+00:00"
    ]
    again = collect(run, into=tmp_path)  # what is there already counts as well
    assert again.older == made.older
    found = scripts["evidence"].read(tmp_path)
    assert found["h200/tests.json"]["measured"] == later["started"]
    assert found["h200/digest.json"]["measured"] == run["started"]


def test_what_a_device_lacks_is_named_in_the_limits_of_readme(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, tables = scripts["evidence"].missing, scripts["tables"]
    more = ("verify-x2", "training-x2")
    names = {f"h200/{name}.json": {} for name in (*scripts["evidence"].PARTS, *more)}
    assert len(names) == 17
    assert missing({}) == []
    assert missing({"b200/digest.json": {}}) == []
    assert missing(names) == []
    for drawn in ("made", "shortened"):
        monkeypatch.setattr(tables, drawn, lambda _: {})

    def written(readme: str, found: Mapping[str, Any]) -> str:
        after = tables.written({README: readme, MEASURED: ""}, found)
        assert after[MEASURED] == ""  # that is said in one place
        return str(after[README])

    def problems(readme: str, found: Mapping[str, Any]) -> list[str]:
        return list(tables.problems({README: readme, MEASURED: ""}, found))

    whole = written("## Limits\n\n- one\n", names)
    assert whole == "## Limits\n\n- one\n"
    for name in names:
        some: dict[str, Any] = {other: {} for other in names if other != name}
        assert missing(some) == [name]
        said = f"## Limits\n\n- Not measured on a GPU yet: `{name}`.\n- one\n"
        assert written(whole, some) == said
        assert written(said, some) == said
        assert written(said, names) == whole
        assert problems(said, some) == []
        assert len(problems(said, names)) == 1  # it was measured since
        for wrong in (whole, said + said, f"{tables.UNMEASURED}{said}", f"{said}\n## X\n{said}"):
            assert len(problems(wrong, some)) == 1
        elsewhere = said.replace("## Limits\n\n", "## Limits\n\n## Other\n\n")
        assert len(problems(elsewhere, some)) == 1
        fewer: dict[str, Any] = {other: {} for other in list(some)[1:]}
        assert len(problems(said, fewer)) == 1  # one of two is not all


def test_a_table_says_which_of_its_sources_changed_since(
    scripts: dict[str, ModuleType],
    run: dict[str, Any],
    collect: Callable[..., Any],
    tmp_path: Path,
) -> None:
    tables = scripts["tables"]
    collect(run, into=tmp_path)
    found = scripts["evidence"].read(tmp_path)
    both = (tables.made, tables.shortened)
    assert not any("Stale" in text for draw in both for _, text in draw(found).values())
    now = {**run["sources"], "csrc": "0" * 64, "tests": "1" * 64}
    drawn = {name: text for name, (_, text) in tables.made(found, now).items()}
    assert drawn["digest"].endswith("Stale: since then `csrc` changed.\n")
    assert drawn["tests"].endswith("Stale: since then `csrc`, `tests` changed.\n")
    short = {name: text for name, (_, text) in tables.shortened(found, now).items()}
    assert short.keys() == {"verified", "digests", "missed"}
    assert all(text.endswith("Stale: since then `csrc` changed.\n") for text in short.values())


def test_a_goal_that_is_missed_or_not_measured_is_told(scripts: dict[str, ModuleType]) -> None:
    goals = scripts["goals"]
    found = goals.judged(DIGEST)
    assert [(one.measured, one.met) for one in found] == [
        ("0.919", "NO"),
        ("1.250", "yes"),
        ("0.920", "yes"),
        ("-", "not measured"),
        ("15.0 us", "yes"),
        ("100.4 us", "NO"),
    ]
    assert goals.summary(found) == (
        "3 of 6 goals met; not met: bf16: digest / int64 sum, int8: digest / torch.hash_tensor, "
        "host time to build a plan of 64 tensors."
    )
    assert goals.summary(found[1:2]) == "1 of 1 goals met."
    assert {one.met for one in goals.judged({})} == {"not measured"}
    equal = {"rows": [{"dtype": "bf16", "of the read": 1.0, "of hash_tensor": 1.0}]}
    assert [one.met for one in goals.judged(equal)][:2] == ["yes", "NO"]


def test_both_steps_of_the_benchmark_are_drawn_and_one_without_a_document_is_named(
    scripts: dict[str, ModuleType], run: dict[str, Any], collect: Callable[..., Any], tmp_path: Path
) -> None:
    document = json.loads(json.dumps(bench_document()))
    steps = [step("layer", document, status="timed out"), step("ours", document)]
    run["parts"] = [{"name": "bench", "status": "timed out", "seconds": 1.0, "steps": steps}]
    collect(run, into=tmp_path)
    text = scripts["tables"].made(scripts["evidence"].read(tmp_path))["bench"][1]
    assert "Step `layer` (timed out):" in text
    assert "Step `ours`:" in text
    assert text.count("Rotation: ") == 2
    steps[0]["document"] = None
    collect({**run, "started": "2026-01-02T03:04:06+00:00"}, into=tmp_path)
    text = scripts["tables"].made(scripts["evidence"].read(tmp_path))["bench"][1]
    assert "Step `layer` (timed out).\n" in text
    assert text.count("Rotation: ") == 1
