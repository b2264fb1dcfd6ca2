"""What all modules of field cases share: their cases, executed once, and the count of reports.

A module `test_X.py` has a table FIELDS and imports the two tests of `field_table`; its cases are in
`cases_X.py` beside it. ONE_THREAD = True gives every rank one thread: threads that wait for each
other on shared cores take longer than small tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from field_table import parameters, run_file

from verify import running


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "field" in metafunc.fixturenames:
        metafunc.parametrize("field", parameters(metafunc.module.FIELDS))


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Any]]:
    """The result document's entries of the module's cases, by name."""
    test = Path(request.module.__file__)
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request.module, "ONE_THREAD", False):
            patch.setattr(running, "threads_per_rank", lambda ranks: 1)
        yield run_file(test.with_name(test.name.replace("test_", "cases_", 1)))


@pytest.fixture
def counts(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Call it with the report's id and "fault" or "twin", at the end of a test that passed."""

    def count(identity: str, side: str) -> None:
        assert side in ("fault", "twin")
        record_property("field", f"{identity} {side}")

    return count
