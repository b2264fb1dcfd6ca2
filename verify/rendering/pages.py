"""How templates of HTML pages are loaded: escaped, strict about names, from this package."""

from __future__ import annotations

import functools

import jinja2


@functools.cache
def page_templates() -> jinja2.Environment:
    """The templates of verify/rendering/templates; a name that a template does not get raises."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("verify.rendering"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
