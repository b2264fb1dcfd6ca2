"""The steps of the part `tests` of ci/gpu.sh: tests of one GPU, or of a group of N GPUs.

Tests of one GPU ask about bits, so that several processes of them may share it; those of a group
measure how long a rank waits for one that died, so that nothing runs beside them.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from steps import Step  # beside this file

if TYPE_CHECKING:
    from commands import Place

_MARK = r"^(?:pytestmark = (?:\[\n)?.*|.*\bmarks=|\s*@)pytest\.mark\."
ON_GPU = re.compile(rf"{_MARK}gpu\b", re.MULTILINE)
ON_GPUS = re.compile(rf"{_MARK}gpus\((\w+)\)", re.MULTILINE)
"""A test of a group and its number of GPUs: digits, or the name of a parameter, where the ids of
tests end in 2gpus, 4gpus and so on."""
COUNTS = (2, 4, 8)
"""The values of that parameter: of other numbers of GPUs there are no tests."""
LONG_TESTS = (
    *("test_controls_gpu", "test_conditions_cuda", "test_devices"),
    *("test_backward_gpu", "test_backward_rings_gpu", "test_backward_degrees_gpu"),
)
"""Files of tests that take as long as all the others: each gets a process of its own."""
QUIET_TESTS = (
    "tests/verify/test_controls_gpu.py::"
    "test_the_missing_barrier_hides_when_quiet_and_shows_when_multiprocessors_are_taken",
    "tests/verify/test_controls_gpu.py::test_plain_check_misses_what_the_condition_finds",
)
"""Tests of what a race does on a quiet GPU: they run alone."""


def of_one_gpu(place: Place) -> list[Step]:
    """Tests of one GPU, in several processes. Those for a quiet GPU come alone."""
    groups: dict[str, list[str]] = {name: [] for name in LONG_TESTS}
    for name, stem, folder, text in _files(place):
        if ON_GPU.search(text):
            groups.setdefault(stem if stem in LONG_TESTS else folder, []).append(name)
    left_out = [word for test in QUIET_TESTS for word in ("--deselect", test)]
    one = "gpu and not gpus"
    return [
        *(_pytest(place, name, one, [*left_out, *some]) for name, some in groups.items() if some),
        replace(_pytest(place, "quiet", one, QUIET_TESTS), alone=True),
    ]


def of_a_group(place: Place) -> list[Step]:
    """Tests that need as many GPUs as there are ranks: a process for each file. None for a number
    of ranks that no test knows."""
    found = []
    for name, stem, _, text in _files(place):
        needs = set(ON_GPUS.findall(text))
        if str(place.ranks) in needs:
            found.append(_pytest(place, stem, "gpus", [name]))
        elif place.ranks in COUNTS and not all(map(str.isdigit, needs)):
            found.append(_pytest(place, stem, "gpus", ["-k", f"{place.ranks}gpus", name]))
    return found


def _files(place: Place) -> list[tuple[str, str, str, str]]:
    """Of every file of tests its path below the root, its own name, its folder's, and its text."""
    return [
        (str(path.relative_to(place.root)), path.stem, path.parent.name, path.read_text("utf-8"))
        for path in sorted((place.root / "tests").rglob("test_*.py"))
    ]


def _pytest(place: Place, name: str, marks: str, words: Sequence[str]) -> Step:
    """The plugin is named where the package is not installed, only on the path."""
    known = [one.name for one in importlib.metadata.entry_points(group="pytest11")]
    plugin = [] if "mok_verify" in known else ["-p", "_mok_verify_pytest"]
    quiet = ["-p", "no:benchmark", "-p", "no:cacheprovider", "-q"]
    document = str(place.raw / f"tests-{name}.xml")
    chosen = ["-m", marks, "--junitxml", document]
    command = [place.python, "-m", "pytest", *plugin, *quiet, *chosen, *words]
    return Step(f"pytest {name}", command, document, needs=" passed")
