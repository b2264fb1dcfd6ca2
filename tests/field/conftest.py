"""Counts the faults of the field: every test that names one says whether it was fault or twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def counts(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Call it with the report's id and "fault" or "twin", at the end of a test that passed."""

    def count(identity: str, side: str) -> None:
        assert side in ("fault", "twin")
        record_property("field", f"{identity} {side}")

    return count
