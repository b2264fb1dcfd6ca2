"""What changed between two states of the goldens: the rows that a pull request shows.

One row per tensor: old and new digest, the largest distance in ULP of the output's dtype, how many
elements differ, and the reason. The old state is another folder's, or a git revision's. For float64
goldens the values just before the output cast are compared, in ULP of the output's dtype.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify import git
from verify.budgets import spacing
from verify.comparison import compare
from verify.errors import InputFileError
from verify.goldens import PARTS, packing, store
from verify.goldens.store import INDEX, Entry

Tensors = Mapping[str, Tensor]
UNREADABLE = "(index)"  # the case of the one row about an old index that cannot be read
_NOISE = 2.0**-10  # of a budget: the float64 reference's own rounding is far below


def rows(
    old: Entry | None, old_tensors: Tensors | None, new: Entry | None, new_tensors: Tensors | None
) -> list[dict[str, Any]]:
    """One row for every output that is not the same in both states of an entry.

    None for an entry that is not there; tensors None when they cannot be read.
    """
    entry = new or old
    assert entry is not None
    before, after = (_by_output(one) for one in (old, new))
    found = []
    for name in sorted({*before, *after}):
        if before.get(name) == after.get(name) and _made_of(old) == _made_of(new):
            continue
        row = {
            "case": entry.case,
            "kind": entry.kind,
            "tensor": name,
            **_told(entry.kind, before.get(name), after.get(name)),
            "max_ulp": None,
            "differing": None,
            "reason": new.reason if new is not None else "removed",
        }
        if old_tensors is not None and new_tensors is not None and name in before and name in after:
            dtype = (new or entry).outputs.get(name, "")
            row |= _distance(entry.kind, name, dtype, old_tensors, new_tensors)
        found.append(row)
    return found


def restored(entry: Entry) -> dict[str, Any]:
    """The row of an entry whose tensor file was lost and is written again, content unchanged."""
    return {
        "case": entry.case,
        "kind": entry.kind,
        "tensor": "(its file)",
        "old": None,
        "new": next(iter(entry.tensors.values()), None),
        "max_ulp": None,
        "differing": None,
        "reason": "the file was lost; the same content is there again",
    }


def since(folder: Path, revision: str) -> list[dict[str, Any]]:
    """The rows between a git revision and the folder as it is.

    An index that could not be read at the revision is one row of its own, since a change that
    repairs it must not be stopped. Raises InputFileError when git cannot tell, or the index of
    today cannot be read.
    """
    _refuse_unknown(folder, revision)
    new = store.read(folder)
    try:
        old = _at_revision(folder, revision)
    except _Unreadable:
        return [_unreadable(revision)]
    before = {entry.identity: entry for entry in old}
    after = {entry.identity: entry for entry in new.entries}
    found: list[dict[str, Any]] = []
    for identity in sorted({*before, *after}):
        one, other = before.get(identity), after.get(identity)
        same = _made_of(one) == _made_of(other)
        if one is not None and other is not None and same and one.tensors == other.tensors:
            continue
        old_tensors = _tensors_at(folder, revision, one) if one is not None else None
        new_tensors = packing.load(folder, other) if other is not None else None
        found += rows(one, old_tensors, other, new_tensors)
    return found


class _Unreadable(Exception):
    """The index of a revision is not one."""


def _unreadable(revision: str) -> dict[str, Any]:
    return {
        "case": UNREADABLE,
        "kind": "",
        "tensor": "",
        "old": None,
        "new": None,
        "max_ulp": None,
        "differing": None,
        "reason": f"the index of {revision} cannot be read",
    }


def same_reference(old: Tensors, new: Tensors) -> bool:
    """Whether two float64 goldens judge alike: values within noise, budgets within noise."""
    if set(old) != set(new) or any(old[n].shape != new[n].shape for n in new):
        return False
    ours, theirs = (packing.unpack_reference(one) for one in (new, old))
    for name, mine in ours.items():
        other = theirs[name]
        for value, allowed in (("exact", "budget"), ("unrounded", "margin")):
            limit = getattr(other, allowed)
            for part in (value, allowed):
                far = (getattr(mine, part) - getattr(other, part)).abs()
                if not bool((far <= _NOISE * limit).all()):
                    return False
    return True


def _made_of(entry: Entry | None) -> tuple[str, dict[str, str]] | None:
    """The same bits from other inputs, or beside other outputs, are another golden."""
    return (entry.inputs, dict(entry.outputs)) if entry is not None else None


def _by_output(entry: Entry | None) -> dict[str, str]:
    """Per output its digest; of a float64 golden those of all parts, in the order of PARTS."""
    if entry is None:
        return {}
    if entry.kind != "float64":
        return dict(entry.tensors)
    names = sorted({key.rpartition("/")[0] for key in entry.tensors})
    return {name: " ".join(entry.tensors[f"{name}/{part}"] for part in PARTS) for name in names}


def _told(kind: str, old: str | None, new: str | None) -> dict[str, str | None]:
    """Both digests; of a float64 golden those of the parts that changed, by name, since a budget
    that grew is what a reviewer must not miss."""
    if kind != "float64":
        return {"old": old, "new": new}
    sides = [dict(zip(PARTS, text.split(" "), strict=True)) if text else {} for text in (old, new)]
    names = [part for part in PARTS if sides[0].get(part) != sides[1].get(part)] or list(PARTS)
    texts = [", ".join(f"{n} {_hex(side[n])}" for n in names if side) for side in sides]
    return {"old": texts[0] or None, "new": texts[1] or None}


def _hex(digest: str) -> str:
    """The lower half of lane 0: the upper one is zero for small integers."""
    return digest.rpartition(":")[2][8:16]


def _distance(kind: str, name: str, dtype: str, old: Tensors, new: Tensors) -> dict[str, Any]:
    if kind != "float64":
        compared = compare(old[name], new[name], name)
        if compared.problem:
            return {}
        return {"max_ulp": compared.max_ulp, "differing": compared.num_differing}
    a, b = (one[f"{name}/unrounded"].double() for one in (old, new))
    if a.shape != b.shape:
        return {}
    unlike = (a != b) & ~(a.isnan() & b.isnan())
    finite = unlike & a.isfinite() & b.isfinite()  # only between numbers there is a distance
    kind_of_output = getattr(torch, dtype, None)
    largest: float | None = None if bool(unlike.any()) else 0.0
    if (
        isinstance(kind_of_output, torch.dtype)
        and kind_of_output.is_floating_point
        and bool(finite.any())
    ):
        a, b = a[finite], b[finite]
        far = (a - b).abs() / spacing(torch.maximum(a.abs(), b.abs()), kind_of_output)
        largest = round(float(far.max()), 3)
    return {"max_ulp": largest, "differing": int(unlike.sum())}


def _at_revision(folder: Path, revision: str) -> tuple[Entry, ...]:
    content = _show(folder, revision, INDEX)
    if content is None:
        return ()
    try:
        return store.parse(content.decode("utf-8"), f"{revision}:{folder.name}/{INDEX}")
    except (UnicodeDecodeError, InputFileError) as error:
        raise _Unreadable from error


def _tensors_at(folder: Path, revision: str, entry: Entry) -> Tensors | None:
    """The tensors of an entry as they were; None when they cannot be had (an LFS pointer, say)."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = _show(folder, revision, entry.file)
    if content is None:
        return None
    try:
        tensors: Tensors = load(content)
        packing.check(tensors, entry, entry.file)
    except (SafetensorError, InputFileError, ValueError, KeyError):
        return None
    return tensors


def _refuse_unknown(folder: Path, revision: str) -> None:
    """Of a commit that it does not have, git says of every file that it was not there."""
    if not git.may_be_revision(revision):
        raise InputFileError(f"{revision!r} is no git revision; give a commit, a branch or a tag")
    place = _nearest(folder)
    if git.run("rev-parse", "--show-toplevel", folder=place).returncode:
        raise InputFileError(
            f"{folder}: the folder of goldens lies outside of the repository, so what changed in it"
            " cannot be told; keep goldens in the repository, where a change of them is reviewed"
        )
    done = git.run("rev-parse", "--verify", f"{revision}^{{commit}}", folder=place)
    if done.returncode:
        raise InputFileError(
            f"git does not know {revision!r} in the repository of {folder}: {git.said(done)}"
        )


def _show(folder: Path, revision: str, name: str) -> bytes | None:
    """A file of the folder at a revision; None when it was not there then."""
    place = _nearest(folder)
    path = (Path(os.path.abspath(folder)).relative_to(place) / name).as_posix()
    done = git.run("show", f"{revision}:./{path}", folder=place)
    if done.returncode == 0:
        return done.stdout
    told = git.said(done)
    if "does not exist in" in told or "exists on disk, but not in" in told:
        return None
    raise InputFileError(f"git cannot show {name} at {revision!r}: {told}")


def _nearest(folder: Path) -> Path:
    """The folder of goldens, or the nearest above it when it is not there (any more)."""
    place = Path(os.path.abspath(folder))
    return next(one for one in (place, *place.parents) if one.is_dir())
