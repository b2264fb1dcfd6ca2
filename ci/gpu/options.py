"""What the command line of ci/gpu.sh allows; checked before any time on a GPU is spent.

What is not allowed raises click.UsageError: one line that says what was given and what is allowed,
and exit code 2.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

NAMES = (
    *("tests", "digest", "faults", "verify", "degrees", "backward-degrees", "training", "peers"),
    *("forward", "backward", "bench", "sanitize", "endurance", "backward-endurance"),
    "recording",
)
"""The parts, in the order in which they run."""
BY_NAME = ("backward", "endurance", "backward-endurance", "recording")
TOGETHER = ("tests", "verify", "training", "peers", "forward", "backward", "bench")
"""Those that ranks run together; the others have one GPU whatever the number of ranks."""
USUAL = tuple(name for name in NAMES if name not in BY_NAME)
"""Those that run when none are named: the others do not fit 8 minutes beside them."""


def names(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Parts by name, separated by commas; in the order in which they run, each once."""
    asked = tuple(name.strip() for name in value.split(",") if name.strip())
    unknown = [name for name in asked if name not in NAMES]
    if unknown or not asked:
        raise click.BadParameter(f"no part {value!r}; allowed are {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in asked)


def of_ranks(chosen: Sequence[str], ranks: int, *, default: bool) -> tuple[str, ...]:
    """The parts that run on so many ranks. default: none were named, so that others are left out.

    Raises click.BadParameter for one that was named and has one GPU: its evidence would be of as
    many as there are ranks.
    """
    alone = [name for name in chosen if ranks > 1 and name not in TOGETHER]
    if alone and not default:
        raise click.BadParameter(
            f"part {alone[0]} has one GPU, {ranks} ranks were given; allowed with several are "
            f"{', '.join(TOGETHER)}. Run it without --ranks.",
            param_hint="'--parts'",
        )
    return tuple(name for name in chosen if name not in alone)


def limits(
    _context: click.Context, _parameter: click.Parameter, values: Sequence[str]
) -> dict[str, float]:
    """Whole seconds by part, from texts such as `peers=200`; the last of several counts."""
    found = {}
    for value in values:
        name, _, text = value.partition("=")
        if name not in NAMES or not re.fullmatch(r"0*[1-9][0-9]{0,5}", text):
            raise click.BadParameter(
                f"{value!r}; allowed is PART=SECONDS with 1 to 999999 whole seconds, "
                "such as peers=200"
            )
        found[name] = float(text)
    return found


def finite(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    """A number; a range alone lets NaN through, which compares with nothing."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value}; allowed is a finite number of seconds")
    return value


def commit(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """The full name of a commit, as evidence wants it; not checked against any history here."""
    if value is not None and not re.fullmatch(r"[0-9a-f]{40}", value):
        raise click.BadParameter(
            f"{value!r}; allowed are 40 lower-case hex digits, as `git rev-parse HEAD` prints them"
        )
    return value


def make_usable(out: Path, chosen: Sequence[str]) -> None:
    """Makes the folder for run.json and the logs of the chosen parts, or says why it cannot be.

    Raises click.BadParameter.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _no_folder(f"cannot write into {str(out)!r}: {error.strerror or error}") from error
    for name in ("run.json", "run.partial", *(f"{part}.log" for part in chosen)):
        if (out / name).is_dir():
            raise _no_folder(f"{str(out / name)!r} is a folder; a file is to be written there")


def _no_folder(why: str) -> click.BadParameter:
    return click.BadParameter(f"{why}; give another folder", param_hint="'--out'")
