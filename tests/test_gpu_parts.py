"""ci/gpu.sh on one GPU at once: what shares it, what has it alone, and what became of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gpu_scripts import FOLDER, gpu_scripts
from hypothesis import given
from hypothesis import strategies as st
from struck_starts import strike_start

SOURCE = {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False}
ALONE = {
    *("digest", "faults", "forward", "backward", "bench", "endurance", "backward-endurance"),
    "recording",
}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


def shell(steps: ModuleType, name: str, code: str, **more: Any) -> Any:
    return steps.Step(name, ["sh", "-c", code], **more)


def timed(steps: ModuleType, name: str, folder: Path, seconds: float = 0.2, **more: Any) -> Any:
    """A step that writes down when it begins and ends."""
    note = f'echo "{name} $(date +%s%N)" >> {folder}/times'
    return shell(steps, name, f"{note}; sleep {seconds}; {note}", **more)


def times(folder: Path) -> dict[str, tuple[int, int]]:
    """When each step began and ended, nanoseconds."""
    found: dict[str, list[int]] = {}
    for line in (folder / "times").read_text().splitlines():
        name, when = line.split()
        found.setdefault(name, []).append(int(when))
    return {name: (both[0], both[1]) for name, both in found.items()}


def overlaps(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def most_at_once(seen: dict[str, tuple[int, int]]) -> int:
    moments = [begun for begun, _ in seen.values()]
    return max(sum(one[0] <= moment < one[1] for one in seen.values()) for moment in moments)


def run_parts(steps: ModuleType, parts: list[Any], folder: Path, at_once: int) -> list[Any]:
    logs = {part.name: folder / f"{part.name}.log" for part in parts}
    limits = {part.name: part.seconds for part in parts}
    return steps.run_parts(parts, logs, limits, at_once)  # type: ignore[no-any-return]


def test_steps_of_several_parts_run_side_by_side_and_are_told_apart(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    steps = scripts["steps"]
    parts = [
        steps.Part("one", 60, [timed(steps, "a", tmp_path, 0.5), timed(steps, "b", tmp_path)]),
        steps.Part("two", 60, [shell(steps, "c", "echo because >&2; exit 4")]),
        steps.Part("three", 60, [timed(steps, name, tmp_path) for name in "defg"]),
        steps.Part("none", 60, []),
    ]
    found = run_parts(steps, parts, tmp_path, 3)
    assert [(one.name, one.status) for one in found] == [
        ("one", "passed"),
        ("two", "failed"),
        ("three", "passed"),
        ("none", "unavailable"),
    ]
    assert [[step["name"] for step in one.steps] for one in found] == [
        ["a", "b"],
        ["c"],
        [*"defg"],
        [],
    ]
    seen = times(tmp_path)
    assert overlaps(seen["a"], seen["d"])
    assert most_at_once(seen) <= 3
    assert "because" in (tmp_path / "two.log").read_text()
    assert "because" not in (tmp_path / "one.log").read_text()
    assert 0.2 < found[0].seconds < 20


def test_a_part_that_hangs_takes_no_time_of_the_others(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    steps = scripts["steps"]
    parts = [
        steps.Part("hangs", 1.5, [shell(steps, "x", "sleep 60"), shell(steps, "y", "sleep 60")]),
        steps.Part("good", 60, [timed(steps, name, tmp_path, 0.1) for name in "abc"]),
    ]
    hangs, good = run_parts(steps, parts, tmp_path, 2)
    assert {step["status"] for step in hangs.steps} == {"timed out"}
    assert (hangs.status, good.status) == ("timed out", "passed")
    assert hangs.seconds < 20


def test_threads_of_steps_that_share_the_cores_wait_without_spinning(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    steps = scripts["steps"]
    part = steps.Part("p", 60, [shell(steps, "s", 'echo "[\\"$OMP_WAIT_POLICY\\"]"', document="-")])
    for at_once, policy in ((1, ""), (2, "PASSIVE")):
        (outcome,) = run_parts(steps, [part], tmp_path, at_once)
        assert outcome.steps[0]["document"] == [policy]


@given(st.lists(st.integers(0, 9), max_size=6))
def test_every_step_comes_once_in_its_part_s_order_and_no_part_is_left_behind(
    scripts: dict[str, ModuleType], counts: list[int]
) -> None:
    steps = scripts["steps"]
    parts = [steps.Part(str(at), 1, [str(n) for n in range(n)]) for at, n in enumerate(counts)]
    order = [(part.name, place) for part, place in steps.spread(parts)]
    assert sorted(order) == [(str(at), n) for at, many in enumerate(counts) for n in range(many)]
    done = dict.fromkeys((part.name for part in parts if part.steps), 0)
    for name, place in order:
        assert place == done[name]
        assert all(place / counts[int(name)] <= done[one] / counts[int(one)] for one in done)
        done[name] += 1


def run_all(
    scripts: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    made: list[Any],
    **more: Any,
) -> dict[str, Any]:
    parts = scripts["parts"]
    monkeypatch.setattr(parts, "parts", lambda place: made)
    monkeypatch.setattr(parts, "environment", lambda root: {})
    monkeypatch.setattr(parts.sources, "of_tree", lambda root: {})
    chosen = [part.name for part in made]
    place = scripts["commands"].Place("python", folder)
    given: dict[str, Any] = {"seconds": 60.0, "source": SOURCE, "say": print, "at_once": 4, **more}
    return parts.run_all(chosen, place, folder, **given)  # type: ignore[no-any-return]


def test_what_has_to_be_alone_comes_after_all_the_rest_and_one_by_one(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = scripts["steps"]
    mixed = [timed(steps, "quiet", tmp_path, alone=True), timed(steps, "loud", tmp_path)]
    made = [
        steps.Part("tests", 60, mixed),
        steps.Part("digest", 60, [timed(steps, name, tmp_path) for name in "ab"], alone=True),
        steps.Part("verify", 60, [timed(steps, name, tmp_path) for name in "cd"]),
    ]
    document = run_all(scripts, monkeypatch, tmp_path, made)
    assert [(part["name"], part["status"]) for part in document["parts"]] == [
        ("tests", "passed"),
        ("digest", "passed"),
        ("verify", "passed"),
    ]
    names = [step["name"] for step in document["parts"][0]["steps"]]
    assert sorted(names) == ["loud", "quiet"]
    seen = times(tmp_path)
    assert overlaps(seen["c"], seen["loud"])
    assert overlaps(seen["c"], seen["d"])
    for name in ("quiet", "a", "b"):
        assert [one for one in seen if overlaps(seen[name], seen[one])] == [name]
    assert max(seen[name][1] for name in ("loud", "c", "d")) < seen["quiet"][0] < seen["a"][0]
    assert json.loads((tmp_path / "run.json").read_text()) == document
    readable = {**document, "environment": {"cuda": None}}
    assert scripts["shapes"].RUN(readable, "the run") is None  # its readers take it as it is
    scripts["evidence"]._check_names(readable)


def test_a_part_is_as_bad_as_its_worst_step_whenever_that_ran(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = scripts["steps"]
    for bad, status in (("exit 4", "failed"), ("sleep 60", "timed out")):
        for alone in (True, False):
            one = shell(steps, "bad", bad, alone=alone)
            other = shell(steps, "good", "true", alone=not alone)
            made = [steps.Part("tests", 1.4, [one, other])]
            (part,) = run_all(scripts, monkeypatch, tmp_path, made)["parts"]
            assert part["status"] == status
            assert next(s["name"] for s in part["steps"] if s["status"] == status) == "bad"


def test_a_run_that_is_cut_short_keeps_the_parts_that_were_done_and_no_half_one(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, parts = scripts["steps"], scripts["parts"]
    made = [
        steps.Part(
            "tests", 60, [shell(steps, "loud", "true"), shell(steps, "q", "true", alone=True)]
        ),
        steps.Part("verify", 60, [shell(steps, "v", "true")]),
    ]

    def cut(*_: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(parts, "run_part", cut)
    with pytest.raises(SystemExit):
        run_all(scripts, monkeypatch, tmp_path, made)
    kept = json.loads((tmp_path / "run.json").read_text())
    assert [part["name"] for part in kept["parts"]] == ["verify"]


def test_an_interrupt_ends_all_steps_that_run(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    steps = scripts["steps"]
    pids = [tmp_path / name for name in "abc"]
    waits = [shell(steps, pid.name, f"echo $$ > {pid}; sleep 60") for pid in pids]

    def interrupt() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until and not all(p.exists() and p.read_text() for p in pids):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_parts(steps, [steps.Part("p", 60, waits)], tmp_path, 3)
    thread.join()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_an_interrupt_in_the_middle_of_a_start_leaves_no_step(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = scripts["steps"]
    started = strike_start(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run_parts(
            steps, [steps.Part("p", 60, [shell(steps, c, "sleep 60") for c in "ab"])], tmp_path, 2
        )
    assert [one.returncode for one in started] == [-signal.SIGKILL] * 2


def test_what_measures_time_or_joules_or_a_rare_race_is_alone(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    commands = scripts["commands"]
    found = {part.name: part for part in commands.parts(commands.Place("python", tmp_path))}
    for name, part in found.items():
        shares = [step.name for step in part.only(alone=False).steps]
        if name in ALONE:
            assert shares == (["warm", "accuracy"] if name == "bench" else [])
        else:
            assert [step.name for step in part.only(alone=True).steps] == (
                ["pytest quiet"] if name == "tests" else []
            )


def test_each_peer_s_small_case_comes_before_any_second_one(
    scripts: dict[str, ModuleType],
) -> None:
    cases = scripts["commands"].PEER_CASES
    small = [name.endswith("/small") for name in cases]
    assert small == sorted(small, reverse=True)
    assert {name.partition("/")[0] for name in cases} == {
        name.partition("/")[0] for name in cases if name.endswith("/small")
    }


def test_parts_know_which_of_them_run(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def made(place: Any) -> list[Any]:
        seen.append(place.chosen)
        return []

    monkeypatch.setattr(scripts["parts"], "parts", made)
    place = scripts["commands"].Place("python", tmp_path)
    scripts["parts"].run_all(["forward"], place, tmp_path, 1.0, SOURCE, print)
    assert set(seen) == {("forward",)}


def test_what_does_not_fit_the_time_runs_only_when_it_is_named(
    scripts: dict[str, ModuleType],
) -> None:
    options, main = scripts["options"], scripts["parts"].main
    named = {"backward", "endurance", "backward-endurance", "recording"}
    assert tuple(name for name in options.NAMES if name not in named) == options.USUAL
    default = next(one for one in main.params if one.name == "chosen").default
    assert default == ",".join(options.USUAL)
    assert options.names(None, None, "endurance") == ("endurance",)


def test_the_sanitizer_looks_at_every_script_with_the_tools_that_can_see_it(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    commands = scripts["commands"]
    found = commands.parts(commands.Place("python", tmp_path))
    steps = {step.name for part in found if part.name == "sanitize" for step in part.steps}
    stems = {path.stem for path in FOLDER.glob("sanitize_*.py")}
    wanted = ("digest", "faults", "forward", "backward")
    assert {f"sanitize_{name}" for name in wanted} <= stems
    every = {f"{t} {stem}" for t in ("memcheck", "racecheck", "initcheck") for stem in stems}
    assert every - steps == {"racecheck sanitize_forward", "racecheck sanitize_backward"}


@pytest.mark.parametrize(
    "name",
    [
        *("degrees", "endurance", "sanitize_forward"),
        *("backward_degrees", "backward_endurance", "sanitize_backward", "training"),
        "recording",
    ],
)
def test_scripts_for_a_gpu_say_that_there_is_none(name: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(FOLDER.parents[1])}
    command = [sys.executable, f"ci/gpu/{name}.py"]
    done = subprocess.run(
        command,
        cwd=FOLDER.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "nothing ran: needs a CUDA device\n")


@pytest.mark.parametrize(
    ("ranks", "cores", "steps"), [(1, 16, 10), (1, 64, 10), (1, 6, 4), (1, 1, 1), (2, 64, 1)]
)
def test_as_many_steps_at_once_as_there_are_cores_for(
    scripts: dict[str, ModuleType], ranks: int, cores: int, steps: int
) -> None:
    assert scripts["parts"].most_at_once(ranks, cores) == steps
