"""README's tables of what was measured on GPUs, made from the evidence in ci/evidence/.

    python ci/gpu/tables.py            write them; a table that README lacks is added
    python ci/gpu/tables.py --check    exit code 1 when README's are not those of the evidence

Exit code 2: the evidence or README cannot be read, or has no place for the tables.

A table stands between `<!-- evidence: NAME -->` and `<!-- end -->`. No figure is typed by hand: a
table without evidence, evidence without its table, and another text than the one made here are
errors alike. Where the sources that a part measured are not those of this tree any more, the line
under its table says so. README's Limits say as well that nothing was measured, or which parts of
ci/gpu.sh were not on a device that has evidence of others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
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

README = ROOT / "README.md"
SECTION = "## Measured on GPUs"
BEFORE = "## Files"
UNMEASURED = "- Nothing of this was measured on a GPU yet: `ci/evidence/` is empty.\n"
LACKING = "- Not measured on a GPU yet: "
LIMITS = "## Limits\n\n"
END = "<!-- end -->"
_BLOCK = re.compile(r"<!-- evidence: (?P<name>[\w-]+) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)

_LACKING = re.compile(rf"^{re.escape(LACKING)}.*\n", re.MULTILINE)

Json = Mapping[str, Any]
Evidence = Mapping[str, Json]


class ReadmeError(ValueError):
    """A README into which the tables cannot be put; the message says why."""


def unmeasured(found: Evidence) -> str:
    """The line of README's Limits that names what was not measured; empty when all was."""
    if not found:
        return UNMEASURED
    lacking = evidence.missing(found)
    return f"{LACKING}{', '.join(f'`{name}`' for name in lacking)}.\n" if lacking else ""


def made(found: Evidence, now: Mapping[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """By name of each table that there is evidence for, its title and its text.

    now: digests of the sources by folder (sources.py); this tree's unless given.
    """
    now = sources.of_tree() if now is None else now
    tables: dict[str, tuple[str, str]] = {}

    def order(name: str) -> tuple[str, int]:
        return name.partition("/")[0], found[name]["ranks"]

    for name, (title, draw) in TABLES.items():
        own = [found[at] for at in sorted(found, key=order) if found[at]["part"] == name]
        if own:
            lines = "\n\n".join(_source(one, now) for one in own)
            tables[name] = (title, f"{draw(own)}\n\n{lines}\n")
    return tables


def problems(readme: str, found: Evidence) -> list[str]:
    """Where README's tables and the evidence do not say the same."""
    tables, shown = made(found), {m["name"]: m["text"] for m in _BLOCK.finditer(readme)}
    told = [f"table {name!r} has no evidence" for name in shown if name not in tables]
    told += [f"evidence of {name!r} has no table" for name in tables if name not in shown]
    told += [
        f"table {name!r} is not that of the evidence"
        for name, text in shown.items()
        if name in tables and text != tables[name][1]
    ]
    return [*told, *_unclosed(readme), *_unsaid(readme, found)]


def _unclosed(readme: str) -> list[str]:
    names = [match["name"] for match in _BLOCK.finditer(readme)]
    counts = {readme.count("<!-- evidence:"), readme.count(END), len(names), len(set(names))}
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
    return [f"all was measured, but README says: {said.strip()}"]


def written(readme: str, found: Evidence) -> str:
    """README with every table as the evidence has it; tables without evidence are taken out.

    Raises ReadmeError for a README with a marker that is not closed, or without the headings that
    the tables and the limits stand at.
    """
    unclosed = _unclosed(readme)
    if unclosed:
        raise ReadmeError(f"README has {unclosed[0]}; mend that by hand")
    tables = made(found)
    line = unmeasured(found)
    if line and LIMITS not in readme:
        raise ReadmeError(f"README has no heading {LIMITS.strip()!r} with an empty line after it")

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return _block(name, tables[name][1]) if name in tables else ""

    text = _BLOCK.sub(block, readme)
    shown = {match["name"] for match in _BLOCK.finditer(text)}
    missing = [name for name in tables if name not in shown]
    if missing:
        added = "".join(f"### {tables[n][0]}\n\n{_block(n, tables[n][1])}\n\n" for n in missing)
        if SECTION not in text and f"{BEFORE}\n" not in text:
            raise ReadmeError(f"README has neither heading {SECTION!r} nor {BEFORE!r}")
        if SECTION not in text:
            text = text.replace(f"{BEFORE}\n", f"{SECTION}\n\n{BEFORE}\n", 1)
        start = text.index(SECTION)
        end = text.find("\n## ", start + 1)
        end = len(text) if end < 0 else end + 1
        text = text[:end] + added + text[end:]
    text = _LACKING.sub("", text.replace(UNMEASURED, ""))
    return text.replace(LIMITS, LIMITS + line, 1)


def _block(name: str, text: str) -> str:
    return f"<!-- evidence: {name} -->\n{text}{END}"


def _source(one: Json, now: Mapping[str, str]) -> str:
    """Where the figures come from, in a line, and what is not as it was measured any more."""
    cuda = one["environment"]["cuda"]
    devices = [device["name"] for device in cuda["devices"]]
    facts = [
        f"{one['ranks']} x {devices[0]}" if one["ranks"] > 1 else devices[0],
        f"driver {cuda['driver']}",
        f"torch {one['environment']['torch']}",
    ]
    if one["ranks"] > 1:
        facts += [f"NCCL {cuda.get('nccl')}", *dict.fromkeys((cuda.get("links") or {}).values())]
    state = "" if one["status"] == "passed" else f" ({one['status']})"
    since = sources.changed(one["sources"], now)
    stale = f" Stale: since then {', '.join(f'`{name}`' for name in since)} changed." * bool(since)
    return (
        f"`{one['command']}`{state} at commit `{one['commit'][:12]}`, "
        f"{one['measured'][:10]}; {', '.join(facts)}.{stale}"
    )


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


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit code 1 when something differs.")
def main(check: bool) -> None:
    """Make README's tables from ci/evidence/."""
    try:
        found = evidence.read()
        readme = README.read_text(encoding="utf-8")
        if check:
            told = problems(readme, found)
        else:
            README.write_text(written(readme, found), encoding="utf-8")
    except (OSError, ValueError) as error:  # EvidenceError and ReadmeError among them
        click.echo(f"tables: {error}", err=True)
        sys.exit(2)
    if check:
        for problem in told:
            click.echo(f"tables: {problem}; run python ci/gpu/tables.py", err=True)
        sys.exit(1 if told else 0)
    click.echo(f"{len(made(found))} tables from {len(found)} files")


if __name__ == "__main__":
    main()
