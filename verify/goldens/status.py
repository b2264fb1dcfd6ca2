"""`verify golden status` and `prune`: what is stored, for whom, and what nothing asks for any more.

Nothing is executed here. A source digest that has changed is said, not judged: whether bits changed
with it is what `verify run --claims golden` finds out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from verify import input_files
from verify.errors import InputFileError, VerifyError
from verify.goldens import keys, packing, store
from verify.goldens.store import INDEX, Entry, Index
from verify.plans import source_digest
from verify.rendering.escaping import printable
from verify.sources import source_files
from verify.targets import Found, builtin, cases_of_file, cases_of_module, find

FINE = ("stored", "stored, code changed since")


def status(targets: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """One row per case that declares a golden or entry that is stored, with its state.

    targets: cases to look at besides those that the index names. Raises InputFileError for an
    index that cannot be read, CaseError for a target that cannot be found.
    """
    with store.reading(folder):
        index = store.read(folder)
        stored = [(entry, _problem(index, entry)) for entry in index.entries]
        stray = store.unnamed(index)
    # not inside: importing a case runs code that may write goldens itself
    given = [one for target in targets for one in find(target) if one.case.golden]
    asked = list({one.target: one for one in given}.values())
    found = []
    for entry, problem in stored:
        own = [one for one in asked if _declares(one, entry) and not elsewhere(entry, one, folder)]
        case = own[0] if own else case_of(entry, folder)
        found.append(_row(entry.case, entry.kind, problem or _state(entry, case), index, entry))
    for one in asked:
        state = _lack(one, index)
        if state:
            found.append(_row(one.case.name, one.case.golden, state, index, None))
    found += [_row("", "", f"file {name} belongs to no entry", index, None) for name in stray]
    return sorted(found, key=lambda row: (row["case"], row["kind"]))


def unused(folder: Path) -> tuple[Index, list[Entry], list[str]]:
    """The index, its entries that no case asks for, and files that no entry names."""
    index = store.read(folder)
    entries = [entry for entry in index.entries if case_of(entry, folder) is None]
    return index, entries, store.unnamed(index)


def prune(folder: Path, *, dry_run: bool = False) -> list[str]:
    """Removes what `unused` finds; returns one line for each.

    A case whose file cannot be imported is an error, not a case that is gone.
    """
    store.read(folder)  # a file, or a folder that cannot be read, is not an empty one
    if not folder.is_dir():
        return []
    with store.locked(folder):
        index, entries, files = unused(folder)
        if not dry_run and (entries or files):
            gone = {entry.identity for entry in entries}
            left = [entry for entry in index.entries if entry.identity not in gone]
            store.write(folder, left, {})
    told = [f"{entry.case} ({entry.kind}): no case {entry.target} declares it" for entry in entries]
    return [printable(line) for line in [*told, *(f"{name}: no entry names it" for name in files)]]


def text(rows: Sequence[dict[str, Any]], folder: Path) -> str:
    """The rows as a table, and the size of the folder."""
    if not rows:
        return f"{folder}: no goldens, and no case that declares one was named"
    shown = [
        (
            printable(row["case"]),
            row["kind"],
            printable(row["state"]),
            row["size"],
            printable(row["made"]),
            printable(row["reason"]),
        )
        for row in rows
    ]
    headers = ("case", "kind", "state", "bytes", "made with", "reason")
    table = tabulate(shown, headers=headers, tablefmt="simple", disable_numparse=True)
    # a link counts as itself: it may lead nowhere
    size = sum(path.lstat().st_size for path in folder.iterdir()) if folder.is_dir() else 0
    lines = [line.rstrip() for line in table.splitlines()]
    return "\n".join([*lines, f"{folder}: {size:,} bytes"])


def exit_code(rows: Sequence[dict[str, Any]]) -> int:
    """0 when everything that is asked for is stored and readable, 2 for unreadable, else 3."""
    if any(row["state"].startswith("unreadable") for row in rows):
        return 2
    return 0 if rows and all(row["state"] in FINE for row in rows) else 3


def _problem(index: Index, entry: Entry) -> str:
    try:
        packing.load(index.folder, entry)
    except InputFileError as error:
        return f"unreadable: {error}"
    return ""


def _state(entry: Entry, found: Found | None) -> str:
    if found is None:
        return "unused"
    return FINE[0] if source_digest(found.case) == entry.source_digest else FINE[1]


def _lack(one: Found, index: Index) -> str:
    """What keeps a case that was asked for from having its golden, or an empty text."""
    entries = index.of(one.case.name, one.case.golden)
    if not entries:
        return "missing"
    for entry in entries:
        problem = elsewhere(entry, one, index.folder)
        if problem:
            return problem
    return _for_this_environment(entries) if one.case.golden == "bits" else ""


def _for_this_environment(entries: Sequence[Entry]) -> str:
    from verify.environment import environment

    record = environment()
    devices = {"cuda" if "cuda" in (one.key or {}) else "cpu" for one in entries}
    known = [dict(one.key or {}) for one in entries]
    if any(keys.key_of(record, (device,)) in known for device in devices):
        return ""
    near = keys.nearest(keys.key_of(record, (max(devices),)), list(known))
    return f"none for this environment: {', '.join(near)}"


def lasting(target: str, folder: Path) -> str:
    """A target as the index holds it: a file is named from the folder above the goldens.

    So it is found from every directory, and in every checkout.
    """
    path, separator, name = target.partition("::")
    if not separator:
        return target
    above = os.path.dirname(os.path.abspath(folder))
    return f"{Path(os.path.relpath(os.path.abspath(path), above)).as_posix()}::{name}"


def case_of(entry: Entry, folder: Path) -> Found | None:
    """The case of an entry, or None when it is gone or declares another golden.

    A target that cannot be imported raises CaseError: it may be there again tomorrow.
    """
    path, separator, _ = entry.target.partition("::")
    module, colon, _ = entry.target.partition(":")
    with contextlib.chdir(os.getcwd()):  # the file may go elsewhere; `folder` starts from here
        if separator:
            file = Path(os.path.normpath(Path(os.path.abspath(folder)).parent / path))
            if not input_files.exists(file):  # a broken link is an error, not a case that is gone
                return None
            found = cases_of_file(str(file))
        else:
            found = cases_of_module(module) if colon else builtin()
    return next((one for one in found if _declares(one, entry)), None)


def elsewhere(entry: Entry, found: Found, folder: Path) -> str:
    """How a golden is not that of the case, though of its name; an empty text when it is.

    It is another's while a case in another file declares it, and nobody's while that cannot be
    told. A case that has moved keeps its golden. Imports the file that the entry names, so call it
    outside of `store.reading`.
    """
    if entry.target == lasting(found.target, folder):
        return ""
    try:
        owner = case_of(entry, folder)
        if owner is None or source_files(owner.case)[:1] == source_files(found.case)[:1]:
            return ""
    except VerifyError as error:
        return (
            f"belongs to {entry.target}, and whether that still declares it cannot be told:"
            f" {error}; repair it, or take its line out of {folder / INDEX}"
        )
    return f"belongs to {entry.target}, which declares it, too; rename one of the two cases"


def _declares(found: Found, entry: Entry) -> bool:
    return (found.case.name, found.case.golden) == (entry.case, entry.kind)


def _row(case: str, kind: str, state: str, index: Index, entry: Entry | None) -> dict[str, Any]:
    path = index.folder / entry.file if entry is not None else None
    size = None
    if path is not None and path.is_file():
        with contextlib.suppress(FileNotFoundError):  # a writer may have replaced it by now
            size = path.stat().st_size
    made = dict(entry.made) if entry is not None else {}
    commit = str(made.get("commit") or "")[:8]
    shown = [f"torch {made['torch']}"] if made.get("torch") else []
    shown += [commit + ("+" if made.get("dirty") else "")] if commit else []
    shown += [f"{entry.nonfinite} NaN or infinity"] if entry is not None and entry.nonfinite else []
    return {
        "case": case,
        "kind": kind,
        "state": state,
        "size": f"{size:,}" if size is not None else "",
        "made": ", ".join(shown),
        "reason": entry.reason if entry is not None else "",
        "key": dict(entry.key) if entry is not None and entry.key else None,
    }
