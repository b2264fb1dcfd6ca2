"""Tables of what was measured on GPUs, made from the evidence in ci/evidence/.

    python ci/gpu/tables.py            write them; a table that its page lacks is added
    python ci/gpu/tables.py --check    exit code 1 when a page's are not those of the evidence

docs/measured.md has all of them, a table for each part; README.md has short ones and every goal
that was missed. Exit code 2: the evidence or a page cannot be read or written, or has no place for
the tables; then no page is changed.

A table stands between `<!-- evidence: NAME -->` and `<!-- end -->`. No figure is typed by hand: a
table without evidence, evidence without its table, another text than the one made here, and a table
on the page that is not its own are errors alike. Where the sources that a part measured are not
those of this tree any more, the line under its table says so. README's Limits say as well that
nothing was measured, or which parts of ci/gpu.sh were not on a device that has evidence of others.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]

import evidence  # noqa: E402 - all five beside this file
import forward_tables  # noqa: E402
import sources  # noqa: E402
import speed_tables  # noqa: E402
import verdict_tables  # noqa: E402

README = "README.md"
MEASURED = "docs/measured.md"
UNMEASURED = "- Nothing of this was measured on a GPU yet: `ci/evidence/` is empty.\n"
LACKING = "- Not measured on a GPU yet: "
LIMITS = "## Limits\n\n"
END = "<!-- end -->"
_BLOCK = re.compile(r"<!-- evidence: (?P<name>[\w-]+) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)

_LACKING = re.compile(rf"^{re.escape(LACKING)}.*\n", re.MULTILINE)

Json = Mapping[str, Any]
Evidence = Mapping[str, Json]
Tables = Mapping[str, tuple[str, str]]
"""By name of each table its title and its text."""


class PageError(ValueError):
    """A page into which the tables cannot be put; the message says which and why."""


@dataclass(frozen=True)
class Short:
    """A table of README: its title, the heading that it stands under, and the parts it is of.

    ranks: only evidence of so many; all when None.
    """

    title: str
    section: str
    parts: tuple[str, ...]
    draw: Callable[[Sequence[Json]], str]
    ranks: int | None = None


def unmeasured(found: Evidence) -> str:
    """The line of README's Limits that names what was not measured; empty when all was."""
    if not found:
        return UNMEASURED
    lacking = evidence.missing(found)
    return f"{LACKING}{', '.join(f'`{name}`' for name in lacking)}.\n" if lacking else ""


def made(found: Evidence, now: Mapping[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """The tables of docs/measured.md: of each part that there is evidence for.

    now: digests of the sources by folder (sources.py); this tree's unless given.
    """
    now = sources.of_tree() if now is None else now
    tables: dict[str, tuple[str, str]] = {}
    for name, (title, draw) in TABLES.items():
        own = _own(found, name)
        if own:
            lines = "\n\n".join(_source([one], now) for one in own)
            tables[name] = (title, f"{draw(own)}\n\n{lines}\n")
    return tables


def shortened(found: Evidence, now: Mapping[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """The tables of README: each for which there is evidence of one of its parts; `now` as above.

    What differs by its command only is named in one line.
    """
    now = sources.of_tree() if now is None else now
    tables: dict[str, tuple[str, str]] = {}
    for name, short in SHORT.items():
        own = [
            one
            for part in short.parts
            for one in _own(found, part)
            if short.ranks in (None, one["ranks"])
        ]
        if own:
            alike: dict[str, list[Json]] = {}
            for one in own:
                alike.setdefault(_measured(one, now), []).append(one)
            lines = "\n\n".join(_source(some, now) for some in alike.values())
            tables[name] = (short.title, f"{short.draw(own)}\n\n{lines}\n")
    return tables


def _own(found: Evidence, part: str) -> list[Json]:
    """The evidence of a part, by device and number of ranks."""

    def order(name: str) -> tuple[str, int]:
        return name.partition("/")[0], found[name]["ranks"]

    return [found[at] for at in sorted(found, key=order) if found[at]["part"] == part]


def problems(pages: Mapping[str, str], found: Evidence) -> list[str]:
    """Where the tables of README and docs/measured.md and the evidence do not say the same.

    pages: text by name. Each problem begins with the name of its page.
    """
    known = {README: shortened(found), MEASURED: made(found)}
    told = [
        f"{page}: {problem}"
        for page, tables in known.items()
        for problem in (*_differing(page, pages[page], tables), *_unclosed(pages[page]))
    ]
    return [*told, *(f"{README}: {problem}" for problem in _unsaid(pages[README], found))]


def _differing(page: str, text: str, tables: Tables) -> list[str]:
    """Tables that are not those of the evidence, missing, or on the wrong page."""
    shown = {match["name"]: match["text"] for match in _BLOCK.finditer(text)}
    told = []
    for name in shown:
        home = MEASURED if name in TABLES else README if name in SHORT else page
        if home != page:
            told.append(f"table {name!r} belongs in {home}")
        elif name not in tables:
            told.append(f"table {name!r} has no evidence")
    told += [f"evidence of {name!r} has no table" for name in tables if name not in shown]
    return told + [
        f"table {name!r} is not that of the evidence"
        for name, own in shown.items()
        if name in tables and own != tables[name][1]
    ]


def _unclosed(text: str) -> list[str]:
    names = [match["name"] for match in _BLOCK.finditer(text)]
    counts = {text.count("<!-- evidence:"), text.count(END), len(names), len(set(names))}
    if len(counts) == 1:
        return []
    return [f"a marker `<!-- evidence: NAME -->` without its own `{END}`, or a table twice"]


def _unsaid(readme: str, found: Evidence) -> list[str]:
    """Where README's Limits do not say of what was not measured what they must."""
    wanted = unmeasured(found)
    said = UNMEASURED * readme.count(UNMEASURED) + "".join(_LACKING.findall(readme))
    _, _, after = readme.partition(LIMITS)
    limits = f"\n{after}".partition("\n## ")[0]
    if said == wanted and wanted in limits:
        return []
    if wanted:
        return [f"Limits must say, once and nothing else of it: {wanted.strip()}"]
    return [f"all was measured, but it says: {said.strip()}"]


def written(pages: Mapping[str, str], found: Evidence) -> dict[str, str]:
    """Both pages, by name, with every table as the evidence has it; others are taken out.

    Raises PageError for a page with a marker that is not closed, or without the headings that the
    tables and the limits stand at.
    """
    for page in (README, MEASURED):
        unclosed = _unclosed(pages[page])
        if unclosed:
            raise PageError(f"{page} has {unclosed[0]}; mend that by hand")
    line, readme = unmeasured(found), pages[README]
    if line and LIMITS not in readme:
        raise PageError(f"{README} has no heading {LIMITS.strip()!r} with an empty line after it")
    readme = _filled(README, readme, shortened(found))
    readme = _LACKING.sub("", readme.replace(UNMEASURED, ""))
    return {
        README: readme.replace(LIMITS, LIMITS + line, 1),
        MEASURED: _filled(MEASURED, pages[MEASURED], made(found)),
    }


def _filled(page: str, text: str, tables: Tables) -> str:
    """One page with its tables: README's new ones under their headings, the other's at its end."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return _block(name, tables[name][1]) if name in tables else ""

    text = _BLOCK.sub(block, text)
    shown = {match["name"] for match in _BLOCK.finditer(text)}
    for name in (name for name in tables if name not in shown):
        title, own = tables[name]
        section = SHORT[name].section if page == README else ""
        if section and f"\n{section}\n" not in f"\n{text}":
            raise PageError(f"{page} has no heading {section!r}")
        start = f"\n{text}".index(f"\n{section}\n") if section else len(text)
        end = text.find("\n## ", start + 1)
        before, after = (text, "") if end < 0 else (text[:end], text[end + 1 :])
        level = "###" if section else "##"
        added = f"{level} {title}\n\n{_block(name, own)}\n"
        text = f"{before.rstrip()}\n\n{added}" + f"\n{after}" * bool(after)
    return text


def _block(name: str, text: str) -> str:
    return f"<!-- evidence: {name} -->\n{text}{END}"


def _source(alike: Sequence[Json], now: Mapping[str, str]) -> str:
    """Where the figures come from, in a line: commands of which all else is the same."""
    commands = [
        f"`{one['command']}`" + ("" if one["status"] == "passed" else f" ({one['status']})")
        for one in alike
    ]
    return f"{', '.join(commands)} {_measured(alike[0], now)}"


def _measured(one: Json, now: Mapping[str, str]) -> str:
    """Commit, day and machine, and what is not as it was measured any more."""
    cuda = one["environment"]["cuda"]
    devices = [device["name"] for device in cuda["devices"]]
    facts = [
        f"{one['ranks']} x {devices[0]}" if one["ranks"] > 1 else devices[0],
        f"driver {cuda['driver']}",
        f"torch {one['environment']['torch']}",
    ]
    if one["ranks"] > 1:
        facts += [f"NCCL {cuda.get('nccl')}", *dict.fromkeys((cuda.get("links") or {}).values())]
    since = sources.changed(one["sources"], now)
    stale = f" Stale: since then {', '.join(f'`{name}`' for name in since)} changed." * bool(since)
    return f"at commit `{one['commit'][:12]}`, {one['measured'][:10]}; {', '.join(facts)}.{stale}"


TABLES: Mapping[str, tuple[str, Callable[[Sequence[Json]], str]]] = {
    "tests": ("GPU tests", verdict_tables.tests),
    "verify": ("The layer under verify run", verdict_tables.layer),
    "peers": ("Determinism of peers", verdict_tables.peers),
    "degrees": ("Degrees of expert parallelism on one GPU", forward_tables.degrees),
    "backward-degrees": (
        "Gradients at degrees of expert parallelism on one GPU",
        forward_tables.backward_degrees,
    ),
    "training": ("Training a small transformer", forward_tables.training),
    "forward": ("Speed and energy of the forward", speed_tables.forward),
    "backward": ("Speed and energy of the backward", speed_tables.backward),
    "endurance": ("Many forwards under load", forward_tables.endurance),
    "backward-endurance": ("Many backwards under load", forward_tables.backward_endurance),
    "recording": ("What recording costs", speed_tables.recording),
    "bench": ("Speed and energy", speed_tables.bench),
    "faults": ("Planted faults on the GPU", verdict_tables.faults),
    "digest": ("Digest speed", speed_tables.digest),
    "sanitize": ("compute-sanitizer", verdict_tables.sanitize),
}
"""By part, the title of its table in docs/measured.md and what draws it."""

SHORT: Mapping[str, Short] = {
    "verified": Short("Verified on a GPU", "## Determinism", ("verify",), verdict_tables.verified),
    "speed": Short(
        "The kernels on a GPU",
        "## Speed",
        ("forward", "backward"),
        speed_tables.short_speed,
        ranks=1,
    ),
    "digests": Short("Digests on a GPU", "## Speed", ("digest",), speed_tables.short_digest),
    "recorded": Short(
        "Recording on a GPU", "## Speed", ("recording",), speed_tables.short_recording
    ),
    "missed": Short(
        "Goals that were missed",
        "## Speed",
        ("digest", "forward", "backward", "endurance", "backward-endurance", "recording"),
        speed_tables.missed,
    ),
}
"""README's, by name; no name is one of `TABLES`."""


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit code 1 when something differs.")
def main(check: bool) -> None:
    """Make the tables of README.md and docs/measured.md from ci/evidence/."""
    try:
        found = evidence.read()
        pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in (README, MEASURED)}
        if check:
            told = problems(pages, found)
        else:
            _replace(written(pages, found))
    except (OSError, ValueError) as error:  # EvidenceError and PageError among them
        click.echo(f"tables: {error}", err=True)
        sys.exit(2)
    if check:
        for problem in told:
            click.echo(f"tables: {problem}; run python ci/gpu/tables.py", err=True)
        sys.exit(1 if told else 0)
    click.echo(f"{len(made(found))} tables from {len(found)} files")


def _replace(pages: Mapping[str, str]) -> None:
    """Each page by its new text, which is whole before any of them is renamed."""
    moves = [(ROOT / page, (ROOT / page).with_name(f".{Path(page).name}.new")) for page in pages]
    try:
        for (path, new), text in zip(moves, pages.values(), strict=True):
            new.write_text(text, encoding="utf-8")
            shutil.copymode(path, new)
        for path, new in moves:
            new.replace(path)
    finally:
        for _, new in moves:
            new.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
