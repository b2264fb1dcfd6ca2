"""The part `tests` of ci/gpu.sh: every file of GPU tests runs, those of groups on so many GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from gpu_scripts import FOLDER, gpu_scripts


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


def test_every_file_of_gpu_tests_runs_once_and_quiet_tests_are_there(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    commands, pytests, root = scripts["commands"], scripts["pytests"], FOLDER.parents[1]
    tests = commands.parts(commands.Place("python", tmp_path))[0]
    *loud, quiet = tests.steps
    files = [word for step in loud for word in step.command if word.endswith(".py")]
    marked = [
        path
        for path in (root / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", path.read_text())
    ]
    marked.remove(Path(__file__))  # which only speaks of them
    assert sorted(files) == sorted(str(path.relative_to(root)) for path in marked)
    assert len({step.document for step in tests.steps}) == len(tests.steps)
    stems = {Path(name).stem for name in files}
    assert stems.issuperset(pytests.LONG_TESTS)
    for test in pytests.QUIET_TESTS:
        file, _, name = test.partition("::")
        assert f"@pytest.mark.gpu\ndef {name}(" in (root / file).read_text()
        assert test in quiet.command
        assert all(step.command[step.command.index(test) - 1] == "--deselect" for step in loud)


def test_what_is_deselected_is_known_to_pytest(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    commands, pytests = scripts["commands"], scripts["pytests"]
    place = commands.Place(sys.executable, tmp_path)
    step = next(s for s in commands.parts(place)[0].steps if s.name == "pytest test_controls_gpu")
    words = [*step.command, "--collect-only", "-n0"]
    done = subprocess.run(words, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_fault_is_caught_by_name_and_twin_is_clean" in done.stdout
    for test in pytests.QUIET_TESTS:
        assert test.rpartition("::")[2] not in done.stdout


ALSO = {2: {"test_symmetric", "test_cuda", "test_jit_gpu", "test_devices"}, 4: set(), 8: set()}
"""By number of GPUs, files that have tests of just so many."""


def collected(command: Sequence[str]) -> list[str]:
    """Names of the tests that a step would run."""
    words = [*command, "--collect-only", "-n0"]
    done = subprocess.run(words, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_group_gets_the_tests_of_its_size_in_turn_and_alone(
    scripts: dict[str, ModuleType], tmp_path: Path, ranks: int
) -> None:
    commands = scripts["commands"]
    part = commands.parts(commands.Place("python", tmp_path, ranks))[0]
    assert part.name == "tests"
    assert part.only(alone=False).steps == []
    steps = {step.name.removeprefix("pytest "): step.command for step in part.steps}
    several = {"test_several_gpus", "test_backward_several_gpus"}
    assert set(steps) == several | ALSO[ranks]
    assert len({step.document for step in part.steps}) == len(steps)
    for name, command in steps.items():
        assert command[command.index("-m", 3) + 1] == "gpus"
        chosen = command[command.index("-k") + 1] if "-k" in command else None
        assert chosen == (f"{ranks}gpus" if name in several else None)
        assert sum(word.endswith(".py") for word in command) == 1


def test_no_test_is_known_for_other_groups_and_none_is_lost(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    commands, pytests = scripts["commands"], scripts["pytests"]
    assert tuple(ALSO) == pytests.COUNTS
    assert pytests.of_a_group(commands.Place("python", tmp_path, 3)) == []
    marked, found = set(), set()
    for path in (FOLDER.parents[1] / "tests").rglob("test_*.py"):
        needs = pytests.ON_GPUS.findall(path.read_text())
        found |= {path.stem} if needs else set()
        # one kind of mark in a file: `-k` would leave out tests whose ids name no number
        assert len({one.isdigit() for one in needs}) <= 1, path
        if path != Path(__file__) and re.search(r"mark\.gpus\(", path.read_text()):
            marked.add(path.stem)
    assert found == marked
    assert found == set().union(*ALSO.values(), {"test_several_gpus", "test_backward_several_gpus"})


MARK = ".".join(("pytest", "mark"))  # in pieces: this file has no such tests
MANY = f"{MARK}.gpus"


@pytest.mark.parametrize(
    ("text", "one", "several"),
    [
        (f"@{MARK}.gpu\ndef f(): ...", True, []),
        (f"@{MANY}(2)\ndef f(): ...", False, ["2"]),
        (f"pytestmark = {MANY}(4)", False, ["4"]),
        (f"pytestmark = [{MARK}.gpu, {MARK}.slow]", True, []),
        (f"    pytest.param(n, id=f'{{n}}gpus', marks={MANY}(n))", False, ["n"]),
        (f"speaks = 'of {MARK}.gpu and {MANY}(2)'", False, []),
    ],
)
def test_which_gpus_a_file_of_tests_needs(
    scripts: dict[str, ModuleType], text: str, one: bool, several: list[str]
) -> None:
    pytests = scripts["pytests"]
    assert bool(pytests.ON_GPU.search(text)) == one
    assert pytests.ON_GPUS.findall(text) == several


def test_pytest_chooses_the_tests_of_the_group_and_no_other(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    commands = scripts["commands"]
    place = commands.Place(sys.executable, tmp_path, 4)
    steps = {step.name: step.command for step in commands.parts(place)[0].steps}
    forward = collected(steps["pytest test_several_gpus"])
    backward = collected(steps["pytest test_backward_several_gpus"])
    assert (len(forward), len(backward)) == (9, 10)
    assert all("4gpus" in name for name in (*forward, *backward))


def test_tests_of_groups_do_not_run_on_one_gpu(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    commands = scripts["commands"]
    steps = commands.parts(commands.Place(sys.executable, tmp_path))[0].steps
    files = [word for step in steps for word in step.command if word.endswith("gpus.py")]
    assert files == []
    command = next(step.command for step in steps if step.name == "pytest test_devices")
    names = collected(command)
    assert "test_four_ranks_of_the_layer_share_one_gpu" in names
    assert not any("two_gpus" in name for name in names)
