"""Goldens: what a case gave when somebody last said that it is right, in a folder under review.

Three kinds. `exact`: an exact case's bits, without an environment key, since integers are equal
everywhere. `float64`: the float64 reference with its budget, by which today's bits are judged on
any machine. `bits`: opt-in, the bits themselves, keyed by what their author does not control.
`store` holds the folder, `packing` the tensors, `keys` what a bit golden depends on, `recording`
makes entries, `changes` compares two states of the folder, `status` says what is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

KINDS = ("exact", "float64", "bits")
PARTS = ("exact", "budget", "unrounded", "margin")  # tensors of each output in a float64 golden
DEFAULT_FOLDER = Path("golden")


def changes_since(folder: Path, revision: str) -> list[dict[str, Any]]:
    """What changed in the folder since a git revision, one row per tensor; see `changes.rows`."""
    from verify.goldens.changes import since

    return since(folder, revision)
