"""Reports of faults that depend on the batch: size, place and neighbours apart; twins clean."""

from __future__ import annotations

import pytest
from field_table import Field
from field_table import test_the_fault_is_found as test_the_fault_is_found
from field_table import test_the_twin_is_clean as test_the_twin_is_clean

pytestmark = pytest.mark.slow

FIELDS = (
    Field(
        "BUG-12",
        "same row, other batch size, other bits",
        "bug_12",
        "bug_12_twin",
        claim="batch",
        reason="bits-differ",
        tensor="out",
        says=[
            "out differs at size=1, size=2, size=3, size=5; equal at size=7,.*neighbours=replaced",
            "on the number of entries: a tile, split or kernel chosen by size, .*; not a leak",
        ],
        clean=("repeat",),
    ),
    Field(
        "BUG-12",
        "same row, other place in the batch",
        "bug_12_place",
        "bug_12_twin",
        claim="batch",
        reason="bits-differ",
        tensor="out",
        says=["the number of entries and the place in the batch", "not a leak"],
        clean=("repeat",),
    ),
    Field(
        "BUG-12",
        "other neighbours, other bits: a leak",
        "bug_12_leak",
        "bug_12_leak_twin",
        claim="batch",
        reason="bits-differ",
        tensor="out",
        says=["depends on the content of its neighbours: a leak", "equal at .*position=reversed"],
        silent=["another order of accumulation"],
        clean=("repeat",),
    ),
    Field(
        "BUG-12",
        "a leak into every second entry only",
        "bug_12_pairs",
        "bug_12_twin",
        claim="batch",
        reason="bits-differ",
        tensor="out",
        says=["depends on the content of its neighbours: a leak", "equal at .*neighbours=replaced"],
        clean=("repeat",),
    ),
    Field(
        "axolotl-1375",
        "packed sequences attend across sample borders",
        "packed",
        "packed_twin",
        claim="batch",
        reason="bits-differ",
        tensor="out",
        says=["depends on the content of its neighbours: a leak", "packing border"],
        silent=["another order of accumulation"],
        clean=("repeat",),
    ),
)
