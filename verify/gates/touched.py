"""What a change touches, as git says: files changed since a revision, and what is not committed.

Names travel as bytes that end in NUL, so that a space, a newline or a byte that is no UTF-8 stays
what it is. The index is asked too: what is staged and put back in the working tree is about to be
committed. It refuses to guess: an unknown revision, a history that was not fetched or a folder
that is no repository is an error that says what to do. And it refuses to overlook: of the folder
that a gate reports to, only the files that the gate writes are no change.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from verify import git
from verify.errors import InputFileError

_SHALLOW = (
    "this clone is shallow, so the history is not here; fetch it "
    "(git fetch --unshallow, or fetch-depth: 0 in actions/checkout)"
)
_DIFF = (
    "--raw",
    "--no-renames",
    "--no-relative",
    "--no-ext-diff",
    "--ignore-submodules=none",
    "-z",
)
_SUBMODULE = b"160000"  # the mode of a commit of another repository


@dataclass(frozen=True)
class Changes:
    """Files that differ from `base`, the commit at which a revision and HEAD part.

    Names are relative to the current directory, with slashes, sorted; those above it begin with
    `../`. `gone` are those of `changed` that are no longer there and not staged either. `folders`
    are those that stand for all that is below them: submodules, and repositories inside.
    """

    base: str
    changed: tuple[str, ...]
    gone: tuple[str, ...]
    folders: tuple[str, ...] = ()


def since(revision: str, written: Iterable[Path] = ()) -> Changes:
    """What `git diff REVISION...HEAD` names, and what is uncommitted or untracked.

    `written` are files that the gate itself writes: uncommitted, they are no change.
    """
    top = _top()
    base = _base(revision)
    committed = _diff(top, base, "HEAD")
    pending, staged = _uncommitted(top, written)
    names = {*committed, *pending}
    gone = [name for name in names if not os.path.lexists(name) and name not in staged]
    submodules = {name for some in (committed, pending) for name in some if some[name]}
    folders = [name for name in names if name in submodules or _is_folder(name)]
    return Changes(base, *(tuple(sorted(some)) for some in (names, gone, folders)))


def uncommitted(written: Iterable[Path] = ()) -> tuple[str, ...]:
    """Files that differ from HEAD or that git does not track, without those `written`."""
    return tuple(sorted(_uncommitted(_top(), written)[0]))


def _uncommitted(top: Path, written: Iterable[Path]) -> tuple[dict[str, bool], set[str]]:
    """Names, each with whether it is a submodule, and those of them that the index would commit."""
    if git.run("rev-parse", "--verify", "--quiet", "HEAD^{commit}").returncode != 0:
        raise InputFileError(f"{top}: no commit yet; commit something first")
    staged = _diff(top, "--cached", "HEAD", "--diff-filter=d")
    changed = _diff(top, "HEAD") | _diff(top, "--cached", "HEAD")
    untracked = _fields("ls-files", "--others", "--exclude-standard", "-z", folder=top)
    own = {_place(os.fspath(path)) for path in written}
    names = dict.fromkeys(_from_here(top, untracked), False) | changed
    return {name: is_one for name, is_one in names.items() if _place(name) not in own}, {*staged}


def _diff(top: Path, *words: str) -> dict[str, bool]:
    """The names of a difference, from here, each with whether it is a submodule."""
    fields = _fields("diff", *_DIFF, *words)  # `:old-mode new-mode ...`, name, and so on
    names = _from_here(top, fields[1::2])
    modes = [_SUBMODULE in field.lstrip(b":").split(b" ")[:2] for field in fields[::2]]
    return dict(zip(names, modes, strict=True))


def _is_folder(name: str) -> bool:
    return os.path.isdir(name) and not os.path.islink(name)


def _place(name: str) -> str:
    """A name in its real folder. Where it leads as a link does not count: a report that is a link
    to a source must not hide the source."""
    folder, last = os.path.split(name)
    return os.path.join(os.path.realpath(folder), last)


def _base(revision: str) -> str:
    """The merge base of a revision and HEAD."""
    if not git.may_be_revision(revision):
        raise InputFileError(f"--since {revision!r}: not a revision; give a branch, tag or commit")
    shallow = git.run("rev-parse", "--is-shallow-repository").stdout.strip() == b"true"
    hint = f"; {_SHALLOW}" if shallow else ""
    commits = []
    for name in (revision, "HEAD"):
        found = git.run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if found.returncode != 0:
            known = hint or "; fetch it, or give a branch, tag or commit that is here"
            raise InputFileError(f"--since {revision!r}: git knows no commit {name!r}{known}")
        commits.append(found.stdout.decode("ascii").strip())
    merged = git.run("merge-base", *commits)
    if merged.returncode != 0:
        known = hint or "; give a revision that shares history with HEAD"
        raise InputFileError(f"--since {revision!r}: it shares no commit with HEAD{known}")
    return merged.stdout.decode("ascii").strip()


def _top() -> Path:
    """The root of the working tree that holds the current directory."""
    found = git.run("rev-parse", "--show-toplevel")
    if found.returncode != 0:
        raise InputFileError(
            f"{Path.cwd()}: git finds no working tree here ({git.said(found).splitlines()[0]}); "
            "--since and require_clean need one"
        )
    return Path(os.fsdecode(found.stdout.removesuffix(b"\n")))


def _from_here(top: Path, names: list[bytes]) -> list[str]:
    """Names from the root of the tree as names from the current directory."""
    here = os.path.realpath(os.getcwd())
    root = os.path.realpath(top)
    return [os.path.relpath(os.path.join(root, os.fsdecode(name)), here) for name in names]


def _fields(*words: str, folder: Path | None = None) -> list[bytes]:
    """What git wrote between NULs."""
    done = git.run(*words, folder=folder)
    if done.returncode != 0:
        raise InputFileError(f"git {words[0]} failed: {git.said(done)}")
    return [field for field in done.stdout.split(b"\0") if field]
