"""A folder of dumps: which files it holds, and what they hold together."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from verify import input_files
from verify.errors import InputFileError
from verify.onpolicy.samples import Dump

_MOST_FILES = 10_000


def joined(dumps: list[Dump], notes: tuple[str, ...] = ()) -> Dump:
    """Several files of one format as one dump; settings that differ go to the samples."""
    first = dumps[0].config
    shared = {
        name: value
        for name, value in first.items()
        if all(dump.config.get(name) == value for dump in dumps)
    }
    samples = []
    for dump in dumps:
        own: dict[str, Any] = {
            name: value for name, value in dump.config.items() if name not in shared
        }
        for sample in dump.samples:
            samples.append(replace(sample, meta={**own, **sample.meta}) if own else sample)
    return Dump(
        dumps[0].format,
        tuple(file for dump in dumps for file in dump.files),
        tuple(samples),
        tuple(problem for dump in dumps for problem in dump.problems),
        (*dict.fromkeys(note for dump in dumps for note in dump.notes), *notes),
        shared,
    )


def files_in(folder: Path) -> list[Path]:
    """The files in a folder and below, in the order of the numbers in their names."""
    found: list[Path] = []
    try:
        for root, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [Path(root, name) for name in names if not name.startswith(".")]
            if len(found) > _MOST_FILES:
                raise InputFileError(f"{folder}: holds more than {_MOST_FILES} files")
    except OSError as error:
        raise InputFileError(f"{folder}: {input_files.absence_of(folder, error)}") from error
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"(\d{1,18})", str(path))
    return [(int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts)]


def _raise(error: OSError) -> None:
    raise error
