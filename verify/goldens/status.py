"""`verify golden status` and `prune`: what is stored, for whom, and what nothing asks for any more.

Nothing is executed here. A source digest that has changed is said, not judged: whether bits changed
with it is what `verify run --claims golden` finds out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from verify import input_files
from verify.errors import InputFileError
from verify.goldens import keys, packing, store
from verify.goldens.store import Entry, Index
from verify.plans import source_digest
from verify.rendering.escaping import printable
from verify.targets import Found, builtin, find
from verify.targets import _of_file as of_file
from verify.targets import _of_module as of_module

FINE = ("stored", "stored, code changed since")


def status(targets: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """One row per case that declares a golden or entry that is stored, with its state.

    targets: cases to look at besides those that the index names. Raises InputFileError for an
    index that cannot be read, CaseError for a target that cannot be found.
    """
    index = store.read(folder)
    asked = {one.case.name: one for target in targets for one in find(target) if one.case.golden}
    found = []
    for entry in index.entries:
        case = asked.get(entry.case) or case_of(entry, folder)
        found.append(_row(entry.case, entry.kind, _state(index, entry, case), index, entry))
    for name, one in asked.items():
        entries = index.of(name, one.case.golden)
        if not entries:
            found.append(_row(name, one.case.golden, "missing", index, None))
        elif one.case.golden == "bits":
            state = _for_this_environment(entries)
            if state:
                found.append(_row(name, "bits", state, index, None))
    found += [
        _row("", "", f"file {name} belongs to no entry", index, None)
        for name in store.unnamed(index)
    ]
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


def _state(index: Index, entry: Entry, found: Found | None) -> str:
    try:
        packing.load(index.folder, entry)
    except InputFileError as error:
        return f"unreadable: {error}"
    if found is None:
        return "unused"
    return FINE[0] if source_digest(found.case) == entry.source_digest else FINE[1]


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
    if separator:
        file = Path(os.path.normpath(Path(os.path.abspath(folder)).parent / path))
        if not input_files.exists(file):  # a broken link is an error, not a case that is gone
            return None
        found = of_file(str(file))
    else:
        found = of_module(module) if colon else builtin()
    wanted = (entry.case, entry.kind)
    return next((one for one in found if (one.case.name, one.case.golden) == wanted), None)


def _row(case: str, kind: str, state: str, index: Index, entry: Entry | None) -> dict[str, Any]:
    path = index.folder / entry.file if entry is not None else None
    size = path.stat().st_size if path is not None and path.is_file() else None
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
