"""Draws a result document as text, markdown, HTML, JUnit or JSON.

Renderers read only the document, so a report can be drawn again from a CI artifact, on a machine
without torch. They refuse to judge: verdicts are printed as the document states them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verify.errors import VerifyError
from verify.rendering import junit, markdown, text

FORMATS = ("text", "markdown", "html", "junit", "json")


def render(result: Mapping[str, Any], format: str, *, timings: bool = False) -> str:
    """The report in one of FORMATS, ending in a newline; `timings` adds them to the text."""
    if format == "text":
        return text.render(result, timings=timings)
    if format == "markdown":
        return markdown.render(result)
    if format == "html":
        from verify.rendering import html  # here, since only this one needs a template engine

        return html.render(result)
    if format == "junit":
        return junit.render(result)
    if format == "json":
        return json.dumps(result, indent=1, allow_nan=False) + "\n"
    raise VerifyError(f"unknown format {format!r}; allowed are {', '.join(FORMATS)}")
