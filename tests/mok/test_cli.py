"""The command line: tables, JSON, and exit 3 when nothing was measured. Speed is not judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mok.bench import digest, timing
from mok.cli import main


def _invoke(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_bench_portable_reports_both_contenders_and_the_machine():
    result = _invoke("bench", "portable", "--rounds", "2", "--tokens", "64", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {row["contender"] for row in report["rows"]} == {"portable", "plain loop"}
    assert report["shape"]["T"] == 64
    assert all(row["ratio_to_loop"] > 0 for row in report["rows"])
    assert {"cpu", "cores", "torch_threads", "torch"} <= set(report["machine"])
    assert "alternating" in report["protocol"]


def test_bench_portable_prints_a_table():
    result = _invoke("bench", "portable", "--rounds", "1", "--tokens", "64")
    assert result.exit_code == 0, result.output
    assert "median_ms" in result.output
    assert "machine: cpu=" in result.output


def test_bench_digest_reports_every_dtype_and_puts_threads_back(threads):
    torch.set_num_threads(2)
    result = _invoke("bench", "digest", "--rounds", "1", "--megabytes", "1", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["dtype"] for row in report["rows"]] == list(digest.DTYPES)
    assert all(row["plain read"] > 0 and row["verify digest"] > 0 for row in report["rows"])
    assert torch.get_num_threads() == 2


def test_nothing_measured_is_exit_3(monkeypatch):
    monkeypatch.setitem(sys.modules, "verify.hashing", None)
    monkeypatch.delattr("verify.hashing", raising=False)
    result = _invoke("bench", "digest", "--megabytes", "1")
    assert result.exit_code == 3
    assert "nothing measured" in result.stderr
    assert _invoke("bench", "portable", "--rounds", "0").exit_code == 3


def test_usage_errors_are_exit_2():
    assert _invoke("bench", "portable", "--rounds", "many").exit_code == 2
    assert _invoke("nothing").exit_code == 2


def test_env_names_the_backend_and_why():
    result = _invoke("env", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["backend"] == "portable"
    assert facts["reason"]
    assert "portable" in _invoke("env").output


@pytest.mark.skipif(torch.cuda.is_available(), reason="loading a kernel keeps it")
def test_env_leaves_no_kernel_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "kernels"))
    assert _invoke("env").exit_code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_exit_2_in_one_line(unbuffered):
    code = "from mok.cli import main; main(['build', '--help'])"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2
    assert done.stderr == "error: writing failed: No space left on device\n"


def test_an_error_of_another_file_is_not_taken_for_the_output(monkeypatch):
    def fails():
        raise FileNotFoundError(2, "No such file or directory", "elsewhere")

    monkeypatch.setattr("mok.environment.describe", fails)
    assert isinstance(_invoke("env").exception, FileNotFoundError)


@pytest.mark.parametrize("rounds", [1, 4])
def test_contenders_alternate_and_the_starter_rotates(rounds):
    calls: list[str] = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    result = timing.alternate(contenders, rounds, warmup=0)
    assert "".join(calls) == ("abba" * rounds)[: 2 * rounds]
    assert {value.samples for value in result.values()} == {rounds}
    assert all(v.lower <= v.median <= v.upper for v in result.values())
