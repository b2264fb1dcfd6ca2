"""Faults planted into the sources of the kernels: what emulated examples see is known by them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import emulation
import pytest


@dataclass(frozen=True)
class Fault:
    """A replacement in one source, and the example that shows it within a few seeds."""

    file: str
    old: str
    new: str
    example: str
    expected: str = ""  # a part of what is reported


def changed_sources(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A copy of csrc in `folder`, after (file, old, new) each."""
    csrc = folder / "csrc"
    shutil.copytree(emulation.CSRC, csrc)
    for file, old, new in changes:
        text = (csrc / file).read_text()
        assert old in text, "the source changed: plant the fault anew"
        (csrc / file).write_text(text.replace(old, new, 1))
    return csrc


def check_seen(fault: Fault, problems_with: Callable[[int], list[str]]) -> None:
    """One of 24 seeds shows the fault. problems_with: what is reported with a seed."""
    for seed in range(24):
        if any(fault.expected in line for line in problems_with(seed)):
            return
    pytest.fail("not seen with 24 seeds")
