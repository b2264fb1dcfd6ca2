"""Runs git for what asks about revisions and uncommitted files: the gate and the goldens.

It takes no lock, reads no terminal and answers in English, since its words are read. It refuses to
guess: a git that is missing or does not end is an error, and text that git would take for an option
is no revision.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from verify.errors import InputFileError

_TIMEOUT = 120.0  # seconds
_SETTINGS = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """What git did in a folder (the current directory without one), whatever its exit code.

    Raises InputFileError when it is not there or does not end.
    """
    where = [] if folder is None else ["-C", os.fspath(folder)]
    try:
        return subprocess.run(
            ["git", *where, *words],
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT,
            env={**os.environ, **_SETTINGS},
        )
    except FileNotFoundError:
        raise InputFileError(
            "git is not installed, or not on PATH; it is asked what changed since a revision "
            "(--since) and what is not committed (require_clean)"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise InputFileError(f"git {words[0]} failed: {error}") from error


def said(done: subprocess.CompletedProcess[bytes]) -> str:
    """Its complaint, or its exit code when it made none."""
    told = done.stderr.decode("utf-8", "replace").strip()
    return told or f"exit code {done.returncode}"


def may_be_revision(text: str) -> bool:
    """Whether git may be given the text as a revision: an empty one would be the index, one with a
    dash an option, and a NUL character ends an argument."""
    return bool(text) and not text.startswith("-") and "\0" not in text
