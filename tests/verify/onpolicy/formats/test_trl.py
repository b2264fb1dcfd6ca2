"""TRL's completions: texts of what its trainer wrote, and a note of what is missing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
from mutations import refused
from onpolicy_written import DATA

from verify.onpolicy.formats import trl
from verify.onpolicy.formats.heads import head_of
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.samples import ROLLOUT, TRAINER


def test_completions_that_trl_wrote() -> None:
    dump = read_dump(DATA / "trl_completions_00003.parquet", ROLLOUT)
    assert (dump.format, dump.problems, dump.notes) == ("trl", (), (trl.NOTE,))
    assert "no token ids and no log-probabilities" in dump.notes[0]
    assert [sample.key for sample in dump.samples] == ["step 3, row 0", "step 3, row 1"]
    assert [sample.text for sample in dump.samples] == ["2", "let me see\n2."]
    for sample in dump.samples:
        assert (sample.tokens, sample.series, sample.meta) == (None, {}, {"step": 3})


def test_completions_that_are_text_and_odd_ones(tmp_path: Path) -> None:
    path = tmp_path / "f"
    table = {
        "step": [0, None, -5],
        "prompt": ["a", "b", "c"],
        "completion": ["one", None, "three"],
        "advantage": [0.0, 1.0, 2.0],
    }
    parquet.write_table(pa.table(table), path)
    dump = read_dump(path, TRAINER)
    assert [sample.text for sample in dump.samples] == ["one", None, "three"]
    assert [sample.key for sample in dump.samples] == ["step 0, row 0", "row 1", "row 2"]
    assert [(p.place.record, p.field) for p in dump.problems] == [("row 2", "step")]


def test_other_columns_are_not_trl(tmp_path: Path) -> None:
    path = tmp_path / "f"
    parquet.write_table(pa.table({"step": [1], "prompt": ["a"]}), path)
    assert not trl.fits(head_of(path))
    assert "has the columns 'step', 'prompt'" in refused(lambda p: trl.read(p, TRAINER), path)
