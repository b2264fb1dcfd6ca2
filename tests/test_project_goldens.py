"""This project's own goldens: there for every case that declares one, readable, small."""

from pathlib import Path

import pytest

from verify import builtin
from verify.conditions.goldens import inputs_digest
from verify.goldens import packing, store
from verify.staging import prepare
from verify.targets import find_exact

FOLDER = Path(__file__).parents[1] / "golden"
DECLARING = {case.name: case for case in (*builtin.CASES, *builtin.BY_NAME) if case.golden}
LARGEST = 8 * 2**20  # bytes, all of the folder


def test_every_case_that_declares_a_golden_has_one_and_nothing_else_is_stored() -> None:
    index = store.read(FOLDER)
    assert {entry.case for entry in index.entries} == set(DECLARING)
    assert len(DECLARING) >= 12
    assert not store.unnamed(index)
    lines = (FOLDER / store.INDEX).read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(index.entries) + 2, "one line per entry, and one before and after"
    assert all(entry.reason for entry in index.entries)
    assert all(entry.key is None for entry in index.entries), "they hold on every machine"


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= LARGEST


@pytest.mark.parametrize("name", sorted(DECLARING))
def test_a_golden_is_readable_and_of_the_inputs_of_today(name: str) -> None:
    (entry,) = store.read(FOLDER).of(name, DECLARING[name].golden)
    packing.load(FOLDER, entry)
    assert entry.inputs == inputs_digest(prepare(DECLARING[name]))
    assert find_exact(entry.target).case is DECLARING[name]
