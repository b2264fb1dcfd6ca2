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
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]

import evidence  # noqa: E402 - all three beside this file
import goals  # noqa: E402
import sources  # noqa: E402

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
    for name, (title, draw) in TABLES.items():
        own = [one for one in found.values() if one["part"] == name]
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


def _grid(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    clean = [[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return tabulate(clean, headers=headers, tablefmt="github", disable_numparse=True)


def _layer(own: Sequence[Json]) -> str:
    """`verify run moe` on GPUs: a line for each case and number of ranks."""
    rows = []
    for one in own:
        for step in one["results"].values():
            for case in step.get("cases", ()):
                rows.append([case["case"], _ranks(case, one), _claims(case), *_counts(case)])
    return _grid(rows, ["case", "ranks", "claims", "executions", "differing", "verdict"])


def _ranks(case: Json, one: Json) -> str:
    shared = case["ranks"] > 1 and case["ranks"] > one["environment"]["cuda"].get("visible", 0)
    return f"{case['ranks']}{' on one GPU' if shared else ''}"


def _claims(case: Json) -> str:
    found: dict[str, list[str]] = {}
    for claim in case["claims"]:
        found.setdefault(claim["verdict"], []).append(claim["claim"])
    if list(found) == ["VERIFIED"]:
        return ", ".join(found["VERIFIED"])
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in found.items())


def _counts(case: Json) -> list[object]:
    claims = case["claims"]
    executions = sum(claim["executions"] for claim in claims)
    return [executions, sum(claim["differing"] for claim in claims), case["verdict"]]


def _peers(own: Sequence[Json]) -> str:
    """Which peers give the same bits again: a line for each case, and what differs."""
    rows = []
    for one in own:
        for called, step in one["results"].items():
            if "cases" not in step:  # it took too long: that row is not left out
                rows.append([called.removeprefix("peers-"), "-", step["status"], *["-"] * 4])
            for case in step.get("cases", ()):
                name = case["case"].rpartition("::")[2].removeprefix("peers/")
                rows.append([name, case["ranks"], case["verdict"], *_per_claim(case)])
    headers = ["peer and shape", "ranks", "verdict", "repeat", "process", "others", "what differs"]
    return _grid(rows, headers)


def _per_claim(case: Json) -> list[str]:
    claims = {claim["claim"]: claim for claim in case["claims"]}
    others = [
        f"{name} {_differing(claim)}"
        for name, claim in claims.items()
        if name not in ("repeat", "process")
    ]
    first = [_differing(claims[name]) if name in claims else "-" for name in ("repeat", "process")]
    return [*first, "; ".join(others) or "-", _difference(case)]


def _differing(claim: Json) -> str:
    """Of a claim that compares bits, how many differed; of others the verdict and its reason."""
    reasons = list(dict.fromkeys(finding["reason"] for finding in claim["findings"]))
    if claim["verdict"] == "VERIFIED" or "bits-differ" in reasons:
        return f"{claim['differing']} of {claim['executions']}"
    return f"{claim['verdict']} ({', '.join(reasons)})"


def _difference(case: Json) -> str:
    tensors = [
        finding["tensor"]
        for claim in case["claims"]
        if claim["verdict"] == "MISMATCH"
        for finding in claim["findings"]
        if finding["tensor"]
    ]
    if tensors:
        return ", ".join(dict.fromkeys(tensors))
    details = [f["detail"] for claim in case["claims"] for f in claim["findings"]]
    return details[0][:120] if details and case["verdict"] != "VERIFIED" else "-"


def _faults(own: Sequence[Json]) -> str:
    """Planted faults: in how many of how many runs each is seen, and by a plain check."""
    rows = []
    for one in own:
        for step in one["results"].values():
            for fault in step.get("document", {}).get("faults", ()):
                tally = fault["claims"].get(fault["claim"])
                plain, twin = fault["plain_check"], fault["twin"]
                rows.append(
                    [
                        fault["fault"],
                        fault["claim"],
                        "caught" if fault["caught"] else "MISSED",
                        _share(tally),
                        _share(fault["claims"].get("repeat")),
                        f"{plain['noticed']} of {plain['trials']}",
                        f"{twin['differing']} of {twin['executions']}"
                        + "".join(f"; {text}" for text in twin["not_verified"]),
                    ]
                )
    headers = ["planted fault", "claim", "", "differs there", "in repeat"]
    return _grid(rows, [*headers, "plain check notices", "clean twin differs"])


def _share(tally: Json | None) -> str:
    if tally is None or not tally["executions"]:
        return "-"
    low, high = tally["interval_95"]
    return f"{tally['differing']} of {tally['executions']}, {100 * low:.1f} to {100 * high:.1f} %"


def _digest(own: Sequence[Json]) -> str:
    """The benchmark's rows as they are, its other figures, and each goal beside what was met."""
    parts = []
    for one in own:
        for step in one["results"].values():
            document = step.get("document") or {}
            rows = document.get("rows", [])
            names = list(dict.fromkeys(name for row in rows for name in row))
            unit = document.get("unit", "")
            parts.append(_grid([[_cell(row.get(n)) for n in names] for row in rows], names))
            others = [
                f"{name} {_cell(value)}"
                for name, value in document.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            ]
            told = [f"Unit: {unit}" if unit else "", document.get("protocol", ""), *others]
            parts.append("; ".join(text for text in told if text) + ".")
            parts += _goals(goals.judged(document))
    return "\n\n".join(parts)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _bench(own: Sequence[Json]) -> str:
    """Speed and energy, as the benchmark draws its own document."""
    from mok.bench import tables

    texts = []
    for one in own:
        for name, step in one["results"].items():
            document = step.get("document")
            state = "" if step["status"] == "passed" else f" ({step['status']})"
            if len(one["results"]) > 1 or state:
                texts.append(f"Step `{name}`{state}:" if document else f"Step `{name}`{state}.")
            if document:
                texts.append(tables.markdown(_terse(document)).strip())
                if document["ended"] != "finished":
                    texts.append(
                        f"This step {document['ended']}: rows that are not here were not reached."
                    )
    return "\n\n".join(texts)


def _forward(own: Sequence[Json]) -> str:
    """The benchmark's tables; of one rank also each goal beside what was met."""
    alone = [one for one in own if one["ranks"] == 1]
    steps = [step for one in alone for step in one["results"].values()]
    found = goals.judged_forward([step["document"] for step in steps if step.get("document")])
    return "\n\n".join([_bench(own), *(_goals(found) if alone else ())])


def _goals(found: list[goals.Judged]) -> list[str]:
    cells = [one.cells() for one in found]
    return [_grid(cells, ["", "goal", "measured", "met"]), goals.summary(found)]


def _degrees(own: Sequence[Json]) -> str:
    """Degrees on one GPU: a line for each and each size of segments, over all grids."""
    found: dict[tuple[int, int, str], list[Json]] = {}
    for at, one in enumerate(own):
        for step in one["results"].values():
            for row in step.get("document", {}).get("rows", ()):
                found.setdefault((at, row["degree"], row["segments"]), []).append(row)
    lines = []
    for (_, degree, segments), rows in found.items():
        facts = [
            max(row[name] for row in rows)
            for name in ("blocks", "wraps_x", "wraps_h", "tails", "empty_experts", "crossing")
        ]
        least = min(count for row in rows for count in row["tokens"])
        most = max(count for row in rows for count in row["tokens"])
        lines.append(
            [
                degree or "one rank",
                segments,
                ", ".join(str(row["ctas"]) for row in rows),
                f"{least} to {most}" if least != most else most,
                *facts,
                f"{sum(row['equal'] for row in rows)} of {len(rows)}",
                sum(row["records"] for row in rows),
                sum(row["broken"] for row in rows),
            ]
        )
    headers = ["ranks", "segments", "CTAs", "tokens of a rank", "blocks", "rings of x began anew"]
    headers += ["of hidden rows", "tails", "empty experts", "experts across segments"]
    return _grid(lines, [*headers, "same bits", "log records", "rules broken"])


def _endurance(own: Sequence[Json]) -> str:
    """Forwards under load: how many digests, how fast, under what; and the goals."""
    parts = []
    for one in own:
        for step in one["results"].values():
            document = step.get("document", {})
            lines = [
                [
                    row["shape"],
                    row["forwards"],
                    row["under_load"],
                    row["distinct"],
                    f"{row['ms_alone']:.3f}",
                    f"{row['per_second']:.0f}",
                    "; ".join(
                        f"{load['load']} {load['under_load']} ({load['ms']:.2f} ms)"
                        for load in row["loads"]
                    ),
                ]
                for row in document.get("rows", ())
            ]
            headers = ["shape", "forwards", "under load", "distinct digests", "ms alone"]
            parts.append(_grid(lines, [*headers, "a second under load", "loads: forwards (ms)"]))
            parts += _goals(goals.judged_endurance(document))
    return "\n\n".join(parts)


def _terse(document: Json) -> Json:
    """The benchmark's document with what `verify` found as a verdict: that has its own table."""
    verdict = re.compile(r"^(MISMATCH|VERIFIED|UNVERIFIED):.*(?= \(on )")
    rows = [
        row | {"determinism": verdict.sub(r"\1", str(row["determinism"]))}
        for row in document["rows"]
    ]
    return document | {"rows": rows}


def _sanitize(own: Sequence[Json]) -> str:
    rows = [
        [name, step["status"], step.get("said", "-")]
        for one in own
        for name, step in one["results"].items()
    ]
    return _grid(rows, ["tool and script", "", "it says"])


def _tests(own: Sequence[Json]) -> str:
    rows = []
    for one in own:
        steps = [step for step in one["results"].values() if "passed" in step]
        passed = sum(step["passed"] for step in steps)
        failed = sum(len(step["failed"]) for step in steps)
        skipped = sum(step["skipped"] for step in steps)
        rows.append([one["ranks"], passed, failed, skipped, one["seconds"]])
    return _grid(rows, ["GPUs", "passed", "failed", "skipped", "seconds"])


TABLES: Mapping[str, tuple[str, Callable[[Sequence[Json]], str]]] = {
    "tests": ("GPU tests", _tests),
    "verify": ("The layer under verify run", _layer),
    "peers": ("Determinism of peers", _peers),
    "degrees": ("Degrees of expert parallelism on one GPU", _degrees),
    "forward": ("Speed and energy of the forward", _forward),
    "endurance": ("Many forwards under load", _endurance),
    "bench": ("Speed and energy", _bench),
    "faults": ("Planted faults on the GPU", _faults),
    "digest": ("Digest speed", _digest),
    "sanitize": ("compute-sanitizer", _sanitize),
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
