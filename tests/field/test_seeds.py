"""Two runs that differ because the user changed the seed: that is said, nothing else is blamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verify import diffs, results, running
from verify.reasons import Verdict

pytestmark = pytest.mark.slow

CASE = Path(__file__).with_name("cases_batch.py")


def stored(folder: Path, seed: int | None) -> Path:
    """A result of one sound case, with this seed."""
    options = running.RunOptions(runs=2, seed=seed, claims=("repeat",))
    result = running.run([f"{CASE}::bug_12_twin"], options)
    assert result["verdict"] == "VERIFIED"
    results.write(result, folder / results.FILE_NAME)
    return folder


def test_another_seed_is_named_and_the_same_one_is_equal(
    tmp_path: Path, counts: Callable[[str, str], None]
) -> None:
    first, other, again = (
        stored(tmp_path / name, seed) for name, seed in (("a", None), ("b", 1), ("c", 0))
    )
    found = diffs.diff(first, other)
    assert found.verdict is Verdict.MISMATCH
    assert found.notes[0] == "the bits differ, and so do the following, which may be why"
    assert "bug_12_twin: seed 0 in A, 1 in B" in found.notes
    assert "bug_12_twin: inputs differ: w, x" in found.notes
    assert not any(entry.name.endswith("claim repeat") for entry in found.entries)
    counts("control-10", "fault")
    same = diffs.diff(first, again)
    assert same.verdict is Verdict.VERIFIED
    assert not any("seed" in note for note in same.notes)
    counts("control-10", "twin")
