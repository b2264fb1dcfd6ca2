"""Which sources were measured: one digest per folder, of the tree on disk or of a commit in git.

The machine that measures may have a copy of the tree without its history, so that the name of a
commit is only a claim there. A run therefore records what its files held; `of_commit` says what
git knows, and both must agree. A digest can be had by hand as well:

    find csrc -type f | LC_ALL=C sort | xargs sha256sum | sha256sum

where the folder holds nothing but files of `SUFFIXES`.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "_mok_verify_pytest.py"
MEASURED = ("csrc", "verify", "mok", "ci/gpu")
FOLDERS = (*MEASURED, "tests", PLUGIN)
SUFFIXES = (".py", ".cu", ".cuh", ".sh", ".json", ".jinja", ".safetensors")
READERS = tuple(
    f"ci/gpu/{name}.py"
    for name in (
        *("evidence", "extracts", "forward_tables", "goals", "paths", "shapes", "speed_tables"),
        *("table_grids", "tables", "verdict_tables"),
    )
)
"""What reads evidence and measures nothing; it may change without making evidence stale."""
_PATIENCE = 60.0  # seconds for a git command


class NoHistory(ValueError):
    """Git cannot tell: it is not there, the tree is no checkout, or its shallow clone lacks it."""


def folders_of(part: str) -> tuple[str, ...]:
    """Whose contents decide what a part measures."""
    return FOLDERS if part == "tests" else MEASURED


def of_tree(root: Path = ROOT) -> dict[str, str]:
    """SHA-256 by folder of the files on disk, committed or not."""
    found: dict[str, bytes] = {}
    for folder in FOLDERS:
        place = root / folder
        for path in (place,) if place.is_file() else place.rglob("*"):
            name = path.relative_to(root).as_posix()
            if _counts(name) and path.is_file() and not path.is_symlink():
                found[name] = path.read_bytes()
    return _digests(found)


@cache
def of_commit(commit: str, root: Path = ROOT) -> Mapping[str, str] | None:
    """SHA-256 by folder as git has them at `commit`; None when the history here lacks it.

    Raises NoHistory where git cannot tell.
    """
    if _git(root, "rev-parse", "--show-cdup") != b"\n":  # of an outer repository, or of none
        raise NoHistory("this tree has no git history of its own")
    if _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        if _git(root, "rev-parse", "--is-shallow-repository") != b"false\n":
            raise NoHistory(f"this clone is shallow and lacks commit {commit}")
        return None
    listing = _git(root, "ls-tree", "-r", "-z", "--full-tree", commit, "--", *FOLDERS)
    entries = [entry.split("\t", 1) for entry in (listing or b"").decode().split("\0") if entry]
    blobs = {
        name: about.split()[2]
        for about, name in entries
        if about.startswith("100") and _counts(name)  # regular files, no links
    }
    return _digests(dict(zip(blobs, _contents(root, blobs.values()), strict=True)))


def changed(measured: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The folders of `measured` that hold something else now."""
    return [name for name in FOLDERS if name in measured and measured[name] != now.get(name)]


def _counts(name: str) -> bool:
    return PurePosixPath(name).suffix in SUFFIXES and name not in READERS


def _digests(contents: Mapping[str, bytes]) -> dict[str, str]:
    lines: dict[str, list[str]] = {folder: [] for folder in FOLDERS}
    for name in sorted(contents):
        folder = next(one for one in FOLDERS if name == one or name.startswith(f"{one}/"))
        lines[folder].append(f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n")
    return {
        folder: hashlib.sha256("".join(some).encode()).hexdigest() for folder, some in lines.items()
    }


def _contents(root: Path, blobs: Iterable[str]) -> list[bytes]:
    """What each blob holds, by one process."""
    asked = list(blobs)
    answer = _git(root, "cat-file", "--batch", given="".join(f"{one}\n" for one in asked))
    if answer is None:
        raise NoHistory("git cannot read the blobs of the commit")
    found, at = [], 0
    for one in asked:
        end = answer.index(b"\n", at)
        words = answer[at:end].split()
        if words[:2] != [one.encode(), b"blob"]:
            raise NoHistory(f"git lacks blob {one}")
        size = int(words[2])
        found.append(answer[end + 1 : end + 1 + size])
        at = end + 1 + size + 1
    return found


def _git(root: Path, *words: str, given: str = "") -> bytes | None:
    """What git printed, or None when it failed or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            input=given.encode(),
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
