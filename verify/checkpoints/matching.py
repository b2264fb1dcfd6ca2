"""Which parameter of A belongs to which of B: renames and what is left out, by patterns.

`*` stands for any text, dots included; the texts go into the new name in their order. A rename
changes names only. It refuses to give several parameters one name (fused parameters such as q, k
and v are other tensors than their parts) and to give one parameter several names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from verify import input_files
from verify.errors import InputFileError, VerifyError


class Patterns:
    """Texts with `*`; remembers which of them matched something."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._all = list(dict.fromkeys(patterns))
        self.unused = list(self._all)

    def match(self, name: str) -> bool:
        found = [one for one in self._all if _texts(one, name) is not None]
        for pattern in found:
            if pattern in self.unused:
                self.unused.remove(pattern)
        return bool(found)


class Renames:
    """OLD=NEW rules, the first that matches counts; remembers which of them matched something."""

    def __init__(self, rules: Sequence[str]) -> None:
        self._all: dict[str, str] = {}
        for rule in rules:
            old, equals, new = rule.partition("=")
            if not equals or not old or not new or "=" in new:
                raise VerifyError(f"rename {rule!r}: give OLD=NEW, such as 'model.*=*'")
            if old.count("*") != new.count("*"):
                raise VerifyError(
                    f"rename {rule!r}: OLD and NEW need the same number of *; each stands for the "
                    "same text on both sides"
                )
            if self._all.get(old, new) != new:
                raise VerifyError(
                    f"rename gives {old!r} two names, {self._all[old]!r} and {new!r}: a "
                    "parameter that is split on one side is not compared; save it whole on both, "
                    "or leave it out with --ignore"
                )
            self._all[old] = new
        self.unused = list(self._all)

    def __call__(self, name: str) -> str:
        for old, new in self._all.items():
            found = _texts(old, name)
            if found is not None:
                if old in self.unused:
                    self.unused.remove(old)
                pieces = new.split("*")
                return pieces[0] + "".join(map("".join, zip(found, pieces[1:], strict=True)))
        return name


def read_rules(path: Path) -> list[str]:
    """The rules of a file: a line each, OLD=NEW; empty lines and lines with # are left out."""
    lines = input_files.read_text(path, "a file of renames").splitlines()
    rules = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not rules:
        raise InputFileError(f"{path}: holds no rename: a line is OLD=NEW, such as model.*=*")
    for number, rule in enumerate(rules):
        if "=" not in rule:
            raise InputFileError(f"{path}: rule {number + 1}, {rule!r}: a line is OLD=NEW")
    return rules


def renamed(names: Iterable[str], renames: Renames) -> dict[str, list[str]]:
    """New names, each with the old ones that it is given to."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(renames(name), []).append(name)
    return found


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key by which layers.10 comes after layers.9."""
    pieces = re.split(r"([0-9]{1,18})", name)
    return [
        (0, int(piece)) if piece.isascii() and piece.isdigit() else (1, piece) for piece in pieces
    ]


def prefix_rule(old: Iterable[str], new: Iterable[str]) -> str:
    """The rename by a prefix that would match most of these names, at least two, or ""."""
    counts: dict[str, int] = {}
    olds, news = set(old), set(new)
    for longer, shorter, rule in ((olds, news, "{}*=*"), (news, olds, "*={}*")):
        for name in sorted(longer):
            for found in re.finditer(r"\.", name):
                prefix = name[: found.end()]
                if name[found.end() :] in shorter and "*" not in prefix and "=" not in prefix:
                    key = rule.format(prefix)
                    counts[key] = counts.get(key, 0) + 1
    best = max(counts, key=lambda key: counts[key], default="")
    return best if best and counts[best] > 1 else ""


def _texts(pattern: str, name: str) -> list[str] | None:
    """What each star of a pattern stands for in a name, the first as short as it can be, then the
    second, and so on; None if it does not fit. One pass, where a regular expression may take ages.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return [] if name == pattern else None
    at, end = len(first), len(name) - len(rest[-1])
    if at > end or not name.startswith(first) or not name.endswith(rest[-1]):
        return None
    texts = []
    for piece in rest[:-1]:
        found = name.find(piece, at, end)
        if found < 0:
            return None
        texts.append(name[at:found])
        at = found + len(piece)
    return [*texts, name[at:end]]
