"""Rows as a table of docs/measured.md, or of README."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate


def grid(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """GitHub's Markdown; a cell's bars and line breaks become what a table can hold."""
    clean = [[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return tabulate(clean, headers=headers, tablefmt="github", disable_numparse=True)
