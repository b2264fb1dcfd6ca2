"""The files of a report folder: the result document, and the pages that are drawn from it.

One list of names for who writes them, who removes those of an earlier run, and who must not take
them for a change. It refuses to touch any other file of the folder, and files of these names that
no earlier run wrote.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verify import input_files, rendering, results
from verify.errors import InputFileError

_TOOL = "mok-verify"  # as a document names what wrote it
_PAGES = {"report.html": "html", "report.md": "markdown", "junit.xml": "junit"}


def files(folder: Path) -> list[Path]:
    """All that `write` writes."""
    return [folder / name for name in (results.FILE_NAME, *_PAGES)]


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Writes the document and its pages; raises InputFileError where that fails."""
    results.write(result, folder / results.FILE_NAME)
    for name, kind in _PAGES.items():
        results.write_text(folder / name, rendering.render(result, kind))


def remove(folder: Path) -> None:
    """Removes those of an earlier run: nobody shall take its verdict for that of a run that failed.

    Raises InputFileError for one that cannot be removed, and, with all of them left as they are,
    for a folder that holds some without a result document: somebody else wrote those.
    """
    there = [path for path in files(folder) if os.path.lexists(path)]
    if there and not _ours(folder / results.FILE_NAME):
        raise InputFileError(
            f"{folder}: holds {', '.join(path.name for path in there)}, but no {results.FILE_NAME}"
            " that verify wrote, so a report would replace files of somebody else; give --report"
            " another folder, or remove them"
        )
    for path in there:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputFileError(f"cannot remove {path}: {error.strerror or error}") from error


def _ours(path: Path) -> bool:
    """Whether it is a result document, of any version of this tool."""
    what = "a result document"
    try:
        data = input_files.parse_json(input_files.read_text(path, what), str(path), what)
    except InputFileError:
        return False
    tool = data.get("tool") if isinstance(data, dict) else None
    return isinstance(tool, dict) and tool.get("name") == _TOOL
