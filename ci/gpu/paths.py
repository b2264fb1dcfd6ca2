"""Paths of the machine that measured: found in any text, and taken out of what evidence keeps.

Absolute paths, those of a home folder, of Windows, and file: URLs count; relative paths, other URLs
and fractions such as 3.2 GB/s do not. Of a path its last component stays. One with a space that is
neither quoted nor escaped has no end that can be known: words go with it while they go on a path.
"""

from __future__ import annotations

import re
from typing import Any

# a slash after what can end a relative component, an expression or a URL starts no path
_AFTER = r"(?<![\w.)\]}%*~/\\-])"
_START = "|".join(
    (
        r"\bfile:/+(?=[\w.~])",
        r"(?<![\w.)/])~(?:[A-Za-z_][\w.-]*)?/+(?=[\w.])",
        r"(?<!\w)[A-Za-z]:[\\/]+(?=[\w.])",
        r"(?<!\\)\\\\(?=\w[\w.-]*\\)",  # \\server\share
        _AFTER + r"/(?=[\w.])",
        _AFTER.replace("[", "[:", 1) + r"//+(?=[\w.][^\s/]*/)",  # not that of a URL
        r"(?<=^-[ILBFo])/(?=[\w.-]+/)",  # -I/home/x
        r"(?<=\W-[ILBFo])/(?=[\w.-]+/)",
    )
)
_WORD = r"(?:\\ |[^\s'\"`<>|;,:()\[\]{}])*"
_REST = r"(?: (?=[^\W\d][\w.+-]*[/\\])(?<![.]\w\s)(?<![.]\w\w\s)(?<![.]\w\w\w\s)" + _WORD + ")*"
_FOUND = re.compile(_START)
_WHOLE = re.compile(
    rf"(?<=')(?:{_START})[^'\n]*(?=')"
    rf'|(?<=")(?:{_START})[^"\n]*(?=")'
    rf"|(?:{_START}){_WORD}{_REST}"
)
_HOMES = ("home", "users")  # what is below names a person


def removed(text: str) -> str:
    """The text with the last component of every path instead of the path."""
    while True:  # what is left of one may stand beside what looks like another
        cleaned = _WHOLE.sub(lambda found: _last(found.group()), text)
        if cleaned == text:
            return text
        text = cleaned


def _last(path: str) -> str:
    components = [one.strip() for one in re.split(r"[/\\]+", path) if one.strip()]
    named = len(components) > 1 and components[-2].lower() in _HOMES
    return "..." if named or not components else components[-1]


def without_paths(value: Any) -> Any:
    """A JSON value, with all its texts so cleaned; names in objects stay, see `first_path`."""
    if isinstance(value, dict):
        return {name: without_paths(one) for name, one in value.items()}
    if isinstance(value, list):
        return [without_paths(one) for one in value]
    return removed(value) if isinstance(value, str) else value


def first_path(value: Any) -> str | None:
    """The first text with a path of a machine in a JSON value, names in objects included."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return next((path for one in value if (path := first_path(one))), None)
    return value if isinstance(value, str) and _FOUND.search(value) else None


def command_without_report(command: str) -> str:
    """A command line of `verify`, as shlex joins it, without paths and where its report went."""
    return removed(re.sub(r" --report(?: |=)(?:'[^']*'|\S+)", "", command))
