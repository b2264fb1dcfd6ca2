"""The style of the HTML page: readable in light and dark, and plain text in the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verify import rendering


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme):
    colours = _colours(scheme)
    pairs = [(ink, ground) for ink in ("ink", "muted") for ground in ("page", "surface", "soft")]
    for name in ("good", "bad", "open"):
        pairs += [(name, f"{name}-bg"), (name, "surface")]
    pairs.append(("bad", "soft"))
    for ink, ground in pairs:
        light, dark = sorted((_luminance(colours[ink]), _luminance(colours[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)  # WCAG 2.2, 1.4.3


def _colours(scheme: str) -> dict[str, str]:
    style = (Path(rendering.__file__).parent / "templates" / "style.jinja").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    found = {}
    for block in blocks[: 1 if scheme == "light" else 2]:
        found.update(re.findall(r"--([\w-]+): #([0-9a-f]{6});", block))
    return found


def _luminance(colour: str) -> float:
    """Relative luminance of sRGB by WCAG."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_templates_are_ascii():
    for file in (Path(rendering.__file__).parent / "templates").iterdir():
        assert file.read_bytes().isascii(), file.name
