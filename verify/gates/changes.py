"""What a change touches, as git says: files changed since a revision, and what is not committed.

Names travel as bytes that end in NUL, so that a space, a newline or a byte that is no UTF-8 stays
what it is. It refuses to guess: an unknown revision, a history that was not fetched or a folder
that is no repository is an error that says what to do.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from verify.errors import InputFileError

_TIMEOUT = 120.0  # seconds
_SHALLOW = (
    "this clone is shallow, so the history is not here; fetch it "
    "(git fetch --unshallow, or fetch-depth: 0 in actions/checkout)"
)


@dataclass(frozen=True)
class Changes:
    """Files that differ from `base`, the commit at which a revision and HEAD part.

    Names are relative to the current directory, with slashes, sorted; those above it begin with
    `../`. `gone` are those of `changed` that are no longer there.
    """

    base: str
    changed: tuple[str, ...]
    gone: tuple[str, ...]


def since(revision: str, report: Path | None = None) -> Changes:
    """What `git diff REVISION...HEAD` names, and what is uncommitted or untracked.

    `report` is a folder that the gate writes and that is therefore no change.
    """
    top = _top()
    base = _base(revision)
    committed = _names("diff", *_DIFF, base, "HEAD")
    names = {*_from_here(top, committed), *_uncommitted(top, report)}
    gone = [name for name in names if not os.path.lexists(name)]
    return Changes(base, tuple(sorted(names)), tuple(sorted(gone)))


def uncommitted(report: Path | None = None) -> tuple[str, ...]:
    """Files that differ from HEAD or that git does not track, without those below `report`."""
    return tuple(sorted(_uncommitted(_top(), report)))


_DIFF = ("--name-only", "--no-renames", "--no-relative", "--no-ext-diff", "-z")


def _uncommitted(top: Path, report: Path | None) -> set[str]:
    if _git("rev-parse", "--verify", "--quiet", "HEAD^{commit}").returncode != 0:
        raise InputFileError(f"{top}: no commit yet; commit something first")
    changed = _names("diff", *_DIFF, "HEAD")
    untracked = _names("-C", os.fspath(top), "ls-files", "--others", "--exclude-standard", "-z")
    names = set(_from_here(top, [*changed, *untracked]))
    if report is None:
        return names
    folder = Path(os.path.realpath(report))
    return {name for name in names if not Path(os.path.realpath(name)).is_relative_to(folder)}


def _base(revision: str) -> str:
    """The merge base of a revision and HEAD."""
    if not revision or revision.startswith("-") or "\0" in revision:
        raise InputFileError(f"--since {revision!r}: not a revision; give a branch, tag or commit")
    shallow = _git("rev-parse", "--is-shallow-repository").stdout.strip() == b"true"
    hint = f"; {_SHALLOW}" if shallow else ""
    commits = []
    for name in (revision, "HEAD"):
        found = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if found.returncode != 0:
            known = hint or "; fetch it, or give a branch, tag or commit that is here"
            raise InputFileError(f"--since {revision!r}: git knows no commit {name!r}{known}")
        commits.append(found.stdout.decode("ascii").strip())
    merged = _git("merge-base", *commits)
    if merged.returncode != 0:
        known = hint or "; give a revision that shares history with HEAD"
        raise InputFileError(f"--since {revision!r}: it shares no commit with HEAD{known}")
    return merged.stdout.decode("ascii").strip()


def _top() -> Path:
    """The root of the working tree that holds the current directory."""
    found = _git("rev-parse", "--show-toplevel")
    if found.returncode != 0:
        said = found.stderr.decode("utf-8", "replace").strip().splitlines()
        raise InputFileError(
            f"{Path.cwd()}: git finds no working tree here ({said[0] if said else 'no reason'}); "
            "--since and require_clean need one"
        )
    return Path(os.fsdecode(found.stdout.removesuffix(b"\n")))


def _from_here(top: Path, names: list[bytes]) -> list[str]:
    """Names from the root of the tree as names from the current directory."""
    here = os.path.realpath(os.getcwd())
    root = os.path.realpath(top)
    return [os.path.relpath(os.path.join(root, os.fsdecode(name)), here) for name in names]


def _names(*words: str) -> list[bytes]:
    done = _git(*words)
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise InputFileError(f"git {words[0]} failed: {said or f'exit code {done.returncode}'}")
    return [name for name in done.stdout.split(b"\0") if name]


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Runs git; it takes no lock, asks nothing, and answers in English."""
    try:
        return subprocess.run(
            ["git", *words],
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT,
            env={
                **os.environ,
                "GIT_OPTIONAL_LOCKS": "0",
                "GIT_TERMINAL_PROMPT": "0",
                "LC_ALL": "C",
            },
        )
    except FileNotFoundError:
        raise InputFileError(
            "git is not installed, or not on PATH; --since and require_clean need it"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise InputFileError(f"git {words[0]} failed: {error}") from error
