"""Reports of results that differ between processes, or after a first call; twins clean."""

from __future__ import annotations

import pytest
from field_table import Field
from field_table import test_the_fault_is_found as test_the_fault_is_found
from field_table import test_the_twin_is_clean as test_the_twin_is_clean

pytestmark = pytest.mark.slow

FIELDS = (
    Field(
        "BUG-03",
        "equal inside a process, different between processes",
        "bug_03",
        "bug_03_twin",
        claim="process",
        reason="bits-differ",
        tensor="out",
        says=[
            "2 groups of processes that agree: \\{main, process 2\\} \\{process 1\\}",
            "within a process: 0 of 5 runs differ",
            "chosen once per process: an autotuned configuration",
            "another order of accumulation for another process",
        ],
        silent=["unordered"],
        equal=("double",),
        clean=("repeat",),
    ),
    Field(
        "BUG-07",
        "the order of a set of strings decides who gets which draws",
        "bug_07",
        "bug_07_twin",
        claim="process",
        reason="bits-differ",
        says=[
            "tensors under other names",
            "iteration over a set of strings, which follows PYTHONHASHSEED",
            "within a process: 0 of 5 runs differ",
        ],
        silent=["autotuned"],
        clean=("repeat",),
    ),
    Field(
        "llvm-57589",
        "an import inside the first call turns on flush-to-zero",
        "flush",
        "flush_twin",
        claim="repeat",
        reason="bits-differ",
        tensor="tiny",
        says=[
            "zeros for subnormal numbers in all 256 places: flush-to-zero is on",
            "the first call differs from 5 later ones",
        ],
        equal=("plain",),
    ),
)
