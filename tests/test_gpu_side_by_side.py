"""ci/gpu/side_by_side.py: so many at a time and no more; one that fails ends all."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from gpu_scripts import gpu_scripts
from struck_starts import strike_start


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with gpu_scripts() as loaded:
        yield loaded["side_by_side"]


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_as_many_as_may_run_at_a_time_and_every_one(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The first ones wait until as many run as may; each says how many it saw."""
    monkeypatch.chdir(tmp_path)
    look = "n=$(ls | grep -c now); echo $n >> seen"
    wait = f"until [ -e go ]; do {look}; [ $n -lt {at_once} ] || touch go; sleep 0.02; done"
    commands = [shell(f"touch now-{n}; {wait}; {look}; rm now-{n}") for n in range(5)]
    script.run_side_by_side(commands, at_once, patience=30)
    assert max(map(int, (tmp_path / "seen").read_text().split())) == at_once
    assert sorted(path.name for path in tmp_path.iterdir()) == ["go", "seen"]


@pytest.mark.parametrize("at_once", [1, 2])
def test_one_that_fails_ends_the_others_and_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_once: int
) -> None:
    started = strike_start(monkeypatch, 9)  # never: only to see what was started
    commands = [shell("exit 4"), ["sleep", "60"], shell(f"touch {tmp_path}/ran")]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="exit code 4 of sh -c exit 4; must be 0"):
        script.run_side_by_side(commands, at_once)
    assert time.monotonic() - began < 20
    assert not (tmp_path / "ran").exists()
    assert [one.returncode for one in started] == [4, -signal.SIGKILL][: len(started)]
    with pytest.raises(RuntimeError, match="must be 0"):
        script.run_side_by_side([shell("exit 0"), shell("exit 4")], 2)


def test_what_is_not_done_in_time_is_killed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = strike_start(monkeypatch, 9)
    with pytest.raises(RuntimeError, match=r"2 commands, 2 at once, were not done after 0\.2 s"):
        script.run_side_by_side([["sleep", "60"]] * 2, 2, patience=0.2)
    assert [one.returncode for one in started] == [-signal.SIGKILL] * 2


def test_an_interrupt_in_the_middle_of_a_start_leaves_no_process(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = strike_start(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        script.run_side_by_side([["sleep", "60"]] * 3, 3)
    assert [one.returncode for one in started] == [-signal.SIGKILL] * 2


def test_what_they_print_is_dropped_and_errors_are_shown(
    script: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    script.run_side_by_side([shell("echo out; echo wrong >&2")], 1)
    assert capfd.readouterr() == ("", "wrong\n")
