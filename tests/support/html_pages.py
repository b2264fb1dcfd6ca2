"""Reads a page that we wrote, and fails where it is not well-formed."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "path", "rect", "br", "circle", "input"}
ACTIVE = {"script", "link", "img", "iframe", "object", "embed", "form", "base", "audio", "video"}


class Page(HTMLParser):
    """Tags, attributes, ids, links and text of a page; an error for what is not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.radios: dict[str, list[bool]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.names |= {name for name, _ in attributes}
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name == "href"]
        if tag == "input":
            held = dict(attributes)
            assert held["type"] == "radio"
            self.radios.setdefault(held["name"], []).append("checked" in held)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def harmless(text: str) -> Page:
    """The page, once it is known to need nothing from outside and to execute nothing."""
    page = Page(text)
    assert ACTIVE.isdisjoint(page.tags)
    assert not {name for name in page.names if name.startswith("on")} | ({"src"} & page.names)
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(|@import", text)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "##[" not in text
    assert text.endswith("</html>\n")
    return page
