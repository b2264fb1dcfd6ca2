"""`verify run` on users' files: every reason, rare faults, crashes, and hostile surroundings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_runs import entry, held_while, put

from verify import results
from verify.errors import CaseError
from verify.goldens import packing, status
from verify.plans import with_options
from verify.running import RunOptions, find_all, joined_by_torchrun, refuse_unreadable, run

pytestmark = pytest.mark.slow

FAULTS = """
import os
import neighbour
import numpy as np, torch, verify

X = {"x": verify.normal(64, 8)}
case = verify.case(inputs=X, claims=("repeat",))
WORKSPACE, KEPT, CALLS = torch.empty(64, 8), {}, []
print("a lot of output\\n" * 20000)

def add(x, rows):
    return torch.zeros(4, 8).index_add_(0, rows % 4, x[rows])

@case
def consumes_global_rng(x):
    return add(x, torch.randperm(64))

@case
def bits_differ(x):
    keys = np.frombuffer(os.urandom(256), np.uint32)
    return add(x, torch.from_numpy(keys.argsort(kind="stable")))

@case
def input_mutated(x):
    return x.mul_(2).clone()

@case
def aliased_output(x):
    return torch.mul(x, 2, out=WORKSPACE)

@case
def cached_output(x):
    return KEPT.setdefault("x", x * 2).clone()

@case
def nothing_compared(x):
    return "a string"

@case
def raises_sometimes(x):
    CALLS.append(1)
    if len(CALLS) == 4:
        raise SystemExit("in one of five")
    return x * 2

@case
def case_error(x):
    raise ValueError("always")

@case
def vacuous(x):
    return torch.ones(3)

@case
def clean(x):
    print("more output\\n" * 2000)
    return x * neighbour.TWO
"""
UNVERIFIED = {"cached-output", "nothing-compared", "case-error", "vacuous"}


def write(folder: Path, text: str, name: str = "cases.py") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def claims_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{c['case']}/{k['claim']}": k for c in result["cases"] for k in c["claims"]}


def test_each_fault_of_a_user_s_file_has_its_own_reason(tmp_path: Path) -> None:
    folder = tmp_path / "mit Leerzeichen und Ümläuten"
    write(folder, "TWO = 2", "neighbour.py")
    result = run([write(folder, FAULTS, "user ☃.py")], RunOptions())
    claims = claims_of(result)
    assert len(claims) == 10
    for name, claim in claims.items():
        reason = name.partition("/")[0].replace("_", "-")
        found = {f["reason"] for f in claim["findings"]}
        if reason == "clean":
            assert found == set()
            assert claim["bound"] == pytest.approx(1 - 0.05 ** (1 / claim["executions"]))
        else:
            assert found == {reason}, name
            assert claim["verdict"] == ("UNVERIFIED" if reason in UNVERIFIED else "MISMATCH")
    assert (result["verdict"], results.exit_code(result)) == ("MISMATCH", 1)

    finding = claims["consumes_global_rng/repeat"]["findings"][0]
    text = "\n".join(finding["difference"]["lines"])
    assert finding["tensor"] == "out"
    assert "first: out[" in text
    assert text.count("(0x") == 2
    assert "%" in text
    finding = claims["bits_differ/repeat"]["findings"][0]
    assert finding["difference"]["suggests"]
    assert "in one of five" in claims["raises_sometimes/repeat"]["findings"][0]["detail"]
    assert claims["bits_differ/repeat"]["reproduce"].startswith("verify run '")


def test_a_rare_fault_is_found_explained_and_its_rate_estimated(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
import os, torch, verify
CALLS = [os.urandom(1)[0] % 30]  # where in the period it starts is the system's choice

@verify.case(inputs={"x": verify.normal(16, 16)}, claims=("repeat",))
def rare(x):
    CALLS[0] += 1
    out = x * 2
    if CALLS[0] % 30 == 29:
        out[5, 7] += 0.5
    return out

@verify.case(inputs={"x": verify.normal(16, 16)}, claims=("repeat",))
def clean(x):
    return x * 2
""",
    )
    result = run([path], RunOptions(runs=100))
    claims = claims_of(result)
    rare, clean = claims["rare/repeat"], claims["clean/repeat"]
    assert {f["reason"] for f in rare["findings"]} == {"bits-differ"}
    assert rare["executions"] == 100
    if rare["differing"] < 10:  # else the base itself was the faulty one, and all others differ
        assert rare["differing"] in (3, 4)
        rate, low, high = rare["rate"]
        assert rate == rare["differing"] / 100
        assert low < 1 / 30 < high
    explained = [f for f in rare["findings"] if f["difference"]]
    assert explained
    assert "out[5,7]" in "\n".join(explained[0]["difference"]["lines"])
    assert clean["findings"] == []
    assert clean["bound"] == pytest.approx(1 - 0.05 ** (1 / 100))


@pytest.mark.parametrize("end", ["os.abort()", "os._exit(13)", "os._exit(0)"])
def test_a_process_that_dies_after_good_executions_is_no_pass(tmp_path: Path, end: str) -> None:
    """13 is the code with which a worker says that it left its peers."""
    path = write(
        tmp_path,
        f"""
import os, torch, verify
CALLS = []

@verify.case(inputs={{"x": verify.normal(4)}}, claims=("repeat",))
def dies(x):
    CALLS.append(1)
    if len(CALLS) == 10:  # in the probe, after everything that the claim needs
        {end}
    return x * 2
""",
    )
    result = run([path], RunOptions())
    (claim,) = claims_of(result).values()
    assert claim["verdict"] == "UNVERIFIED"
    assert {f["reason"] for f in claim["findings"]} == {"crashed"}
    assert results.exit_code(result) == 3


def test_a_call_that_never_ends_times_out(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
import time, torch, verify

@verify.case(claims=("repeat",))
def endless():
    time.sleep(600)
    return torch.ones(2)
""",
    )
    result = run([path], RunOptions(timeout=8.0))
    (claim,) = claims_of(result).values()
    assert {f["reason"] for f in claim["findings"]} >= {"timed-out"}
    assert claim["verdict"] == "UNVERIFIED"
    assert result["seconds"] < 40


def test_files_in_the_working_folder_shadow_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "verify", "json", "struct", "numpy", "typing"):
        write(tmp_path, f"raise RuntimeError('the wrong {name}')", f"{name}.py")
    write(tmp_path, "THREE = 3", "from_the_working_folder.py")
    write(
        tmp_path / "deep",
        """
import time
import torch, verify
from from_the_working_folder import THREE

@verify.case(inputs={"x": verify.normal(64, 64)}, claims=("repeat", "process", "contention"))
def clean(x):
    time.sleep(0.1)  # long enough for a load to make progress beside it
    return (x @ x) * THREE
""",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    result = run(["deep/cases.py"], RunOptions(processes=1))
    details = [f["detail"] for c in claims_of(result).values() for f in c["findings"]]
    assert (result["verdict"], details) == ("VERIFIED", [])


def test_a_file_that_checks_itself_at_import_does_not_start_workers_without_end(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path,
        """
import torch, verify

@verify.case(claims=("repeat",))
def plain():
    return torch.arange(3.0)

OUTCOME = verify.check(plain)
""",
    )
    result = run([path], RunOptions())
    (claim,) = claims_of(result).values()
    assert claim["verdict"] == "UNVERIFIED"
    assert "__main__" in claim["findings"][0]["detail"]
    assert result["seconds"] < 60


def test_a_setup_that_differs_in_every_process_proves_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
import os, torch, verify

def setup():
    return {"x": torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.int32)}

@verify.case(setup=setup, claims=("repeat", "process"))
def f(x):
    return x + 1
""",
    )
    claims = claims_of(run([path], RunOptions(processes=1)))
    assert claims["f/repeat"]["verdict"] == "VERIFIED"
    assert {f["reason"] for f in claims["f/process"]["findings"]} == {"input-mismatch"}
    assert claims["f/process"]["verdict"] == "UNVERIFIED"


def test_nothing_to_run_and_torchrun_s_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CaseError):
        run([], RunOptions())
    with pytest.raises(CaseError, match="no such file"):
        run([str(tmp_path / "gone.py")], RunOptions())
    assert not joined_by_torchrun()
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert not joined_by_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert joined_by_torchrun()


SEQUENCE = """
import os, torch, verify

X = {"x": verify.normal(16, 4, requires_grad=True)}
case = verify.case(inputs=X, claims=("repeat",))

@case
def a_before(x):
    return x * 2

@case
def b_dies(x):
    os._exit(7)

@case
def c_after(x):
    return x * 3
"""


def test_a_crash_does_not_touch_the_cases_that_were_finished(tmp_path: Path) -> None:
    file = tmp_path / "sequence.py"
    file.write_text(SEQUENCE)
    found = {one["case"]: one for one in run([str(file)], RunOptions())["cases"]}
    assert found["a_before"]["verdict"] == "VERIFIED"
    for name in ("b_dies", "c_after"):
        reasons = [f["reason"] for f in found[name]["claims"][0]["findings"]]
        assert reasons == ["crashed"]


DECLARED = """
import torch, verify

def wrong(total, parts):
    return [total] * parts

@verify.case(
    inputs={"x": verify.normal(16, 4)},
    placement={"x": verify.sharded(0, wrong), "out": verify.sharded(0)},
    claims=("repeat",), ranks=2,
)
def misplaced(x):
    return x * 2
"""


def test_sizes_that_do_not_add_up_are_a_case_error_and_no_missing_rank(tmp_path: Path) -> None:
    file = tmp_path / "declared.py"
    file.write_text(DECLARED)
    (case,) = run([str(file)], RunOptions())["cases"]
    reasons = {f["reason"] for claim in case["claims"] for f in claim["findings"]}
    details = [f["detail"] for claim in case["claims"] for f in claim["findings"]]
    assert "case-error" in reasons
    assert "missing-rank" not in reasons
    assert any("must give 2 numbers >= 0 that add up to 16" in detail for detail in details)


MOVES = """
import os
from pathlib import Path
import torch, verify

os.chdir(Path(__file__).parent / "data")

def read():
    return torch.arange(float(Path("number.txt").read_text()))

one = verify.case(name="one", claims=("repeat",))(read)
two = verify.case(name="two", claims=("repeat",))(read)
"""


def test_a_file_that_changes_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "number.txt").write_text("3")
    write(tmp_path, MOVES, "moves_a.py")
    write(
        tmp_path,
        "import torch, verify\n@verify.case(claims=('repeat',))\n"
        "def still():\n    return torch.arange(3.0)\n",
        "stays.py",
    )
    monkeypatch.chdir(tmp_path)
    result = run(["moves_a.py", "stays.py"], RunOptions(runs=2))
    assert Path.cwd() == tmp_path
    details = [f["detail"] for c in claims_of(result).values() for f in c["findings"]]
    assert (result["verdict"], details) == ("VERIFIED", [])
    assert [case["case"] for case in result["cases"]] == ["one", "two", "still"]


STORED = """
import verify

@verify.case(inputs={"x": verify.normal(4)}, claims=("golden",), golden="exact")
def k(x):
    return x * 2
"""


def test_the_golden_of_another_file_s_case_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own, copy = (write(tmp_path, STORED, f"{name}.py") for name in ("own", "copy"))
    golden = tmp_path / "golden"
    put(golden, entry("k", {"out": torch.ones(4)}, target="own.py::k"))
    options = RunOptions(golden=golden)

    def refused(target: str) -> None:
        refuse_unreadable([with_options(one, options) for one in find_all([target])], options)

    refused(own)
    with pytest.raises(CaseError, match=r"the golden of 'k' belongs to own\.py::k.* rename one"):
        refused(copy)
    with pytest.raises(CaseError, match="rename one"):
        run([own, copy], options)
    write(tmp_path, "import no_such_module_at_all", "broken.py")
    put(golden, entry("k", {"out": torch.ones(4)}, target="broken.py::k"))
    with pytest.raises(CaseError, match=r"cannot be told: .*no_such_module_at_all"):
        refused(copy)
    put(golden, entry("k", {"out": torch.ones(4)}, target="gone.py::k"))
    refused(copy)


def test_goldens_are_read_under_a_lock_and_owners_imported_outside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = write(tmp_path, STORED, "copy.py")
    write(tmp_path, STORED.replace("def k", "def other"), "own.py")
    golden = tmp_path / "golden"
    put(golden, entry("k", {"out": torch.ones(4)}, target="own.py::k"))
    options = RunOptions(golden=golden)
    cases = [with_options(one, options) for one in find_all([copy])]
    seen = held_while(monkeypatch, golden, (packing, "load"), (status, "cases_of_file"))
    refuse_unreadable(cases, options)
    assert seen == {"load": [True], "cases_of_file": [False]}
