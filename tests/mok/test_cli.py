"""The command line: tables, JSON, and exit 3 when nothing was measured. Speed is not judged."""

import json
import sys

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


@pytest.mark.parametrize("rounds", [1, 4])
def test_contenders_alternate_and_the_starter_rotates(rounds):
    calls: list[str] = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    result = timing.alternate(contenders, rounds, warmup=0)
    assert "".join(calls) == ("abba" * rounds)[: 2 * rounds]
    assert {value.samples for value in result.values()} == {rounds}
    assert all(v.lower <= v.median <= v.upper for v in result.values())
