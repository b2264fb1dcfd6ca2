"""Makes text that users control harmless: in a terminal, a CI log, a markdown page and XML.

Names of cases and tensors, messages of exceptions and paths come from the code under test. Printed
as they are they could move a cursor, end a table, start a GitHub command or break an XML reader.
It refuses to drop anything silently: what cannot be shown is shown as a backslash escape.
"""

from __future__ import annotations

import html
import re

_UNUSUAL = re.compile("[^ -~]+")  # all else is printable, and there may be much of it
_COMMAND = "##["  # a GitHub runner takes this for a command anywhere in a line


def printable(text: object) -> str:
    """One line without control characters or lone surrogates; a newline becomes backslash n."""
    shown = _UNUSUAL.sub(lambda found: "".join(map(_escaped, found.group())), str(text))
    return shown.replace(_COMMAND, "##\\x5b")


def clipped(text: object, limit: int) -> str:
    """`printable` of about `limit` characters: the middle of a longer text becomes its length."""
    whole = str(text)
    shown = printable(whole) if len(whole) <= limit else ""
    if shown and len(shown) <= limit:
        return shown
    front, back = whole[: limit * 2 // 3], whole[-(limit // 3) :]
    shown = f"{printable(front)[: limit * 2 // 3]} ... {printable(back)[-(limit // 3) :]}"
    return f"{shown} ({len(whole)} characters)" if whole else ""


def lines(text: object) -> list[str]:
    """The lines of a longer text, each one printable."""
    return [printable(line.expandtabs(4)) for line in str(text).splitlines()] or [""]


def code(text: object) -> str:
    """An inline code element of markdown, in a table too; no mentions, no links, no markup."""
    return f"<code>{prose(text)}</code>"


def prose(text: object) -> str:
    """Text inside a markdown paragraph or cell: every character that could mean something is an
    entity, so that it is shown and does nothing."""
    return "".join(
        character if character.isalnum() or character in " .,;=()/%+" else f"&#{ord(character)};"
        for character in printable(text)
    )


def block(content: list[str]) -> str:
    """A preformatted HTML block, which markdown does not look into."""
    inner = "\n".join(html.escape(printable(line)) for line in content)
    return f"<pre>\n{inner}\n</pre>"


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
