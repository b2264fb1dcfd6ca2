"""The report for a pull request or a job summary: totals first, then what is wrong, then the rest.

GitHub drops a summary above 1 MiB without a word, so this one stays below 200 kB and says what it
left out. Names are written so that they can neither end a table nor mention anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verify.rendering import gates, goldens, phrases
from verify.rendering.escaping import block, clipped, code, printable, prose

LIMIT = 200_000
SHOWN_MISMATCHES = 50
SHOWN_VERIFIED = 300
LONGEST = 200  # characters of a name in the table
_RESERVE = 500  # for the sentence that says what is missing
_ORDER = ("MISMATCH", "UNVERIFIED")
Json = Mapping[str, Any]


def render(result: Json) -> str:
    """The page, at most LIMIT bytes of UTF-8, ending in a newline."""
    page = f"### {prose(phrases.totals(result))}\n\n"
    size = len(page.encode())
    left_out = 0
    for part in _parts(result):
        length = len(part.encode())
        if left_out or size + length > LIMIT - _RESERVE:
            left_out += 1
            continue
        page += part
        size += length
    if left_out:
        page += (
            f"\n\n{phrases.number(left_out, 'part')} of this report left out to stay below "
            f"{LIMIT // 1000} kB; the result document (result.json) holds everything.\n"
        )
    return page


def _parts(result: Json) -> Iterator[str]:
    """Pieces in order of importance; each one can be left out with all that follow it."""
    if result.get("gate"):
        yield from _gate(result)
    pairs = [(case, claim) for case in result["cases"] for claim in case["claims"]]
    bad = [pair for verdict in _ORDER for pair in pairs if pair[1]["verdict"] == verdict]
    for case, claim in bad[:SHOWN_MISMATCHES]:
        yield _finding(case, claim)
    if len(bad) > SHOWN_MISMATCHES:
        more = phrases.number(len(bad) - SHOWN_MISMATCHES, "claim")
        yield f"{more} more not verified; see the table and the result document.\n\n"
    if pairs:
        yield "| case | claim | verdict | evidence | ranks |\n|---|---|---|---|---|\n"
    good = [pair for pair in pairs if pair[1]["verdict"] not in _ORDER]
    for case, claim in [*bad, *good[:SHOWN_VERIFIED]]:
        yield _row(case, claim)
    yield "\n"
    if len(good) > SHOWN_VERIFIED:
        more = phrases.number(len(good) - SHOWN_VERIFIED, "claim")
        yield f"{more} more VERIFIED; see the result document.\n\n"
    for case in result["cases"]:
        if not case["claims"]:
            yield f"- {code(case['case'])}: verdict={case['verdict']}, no claim was checked\n"
        for note in case["notes"]:
            yield f"- {code(case['case'])}: {code(note)}\n"
    yield _provenance(result)


def _gate(result: Json) -> Iterator[str]:
    """What keeps the gate from passing, what it looked at, and the goldens that changed."""
    gate = result["gate"]
    for finding in gate["findings"]:
        yield f"**{code(gates.headline(gate, finding))}**\n\n{block(gates.card(finding))}\n\n"
    yield "".join(f"- {prose(line)}\n" for line in gates.about(result)) + "\n"
    changed = gate["golden_changes"]
    if changed:
        yield from goldens.markdown(changed)
        yield "".join(f"\n{line}\n" for line in goldens.more(changed)) + "\n"


def _row(case: Json, claim: Json) -> str:
    cells = (
        code(clipped(case["case"], LONGEST)),
        code(clipped(claim["claim"], LONGEST)),
        prose(phrases.state(claim)),
        prose(phrases.evidence(claim)),
        prose(phrases.ranks(claim, case["ranks"])),
    )
    return f"| {' | '.join(cells)} |\n"


def _finding(case: Json, claim: Json) -> str:
    first = claim["findings"][0] if claim["findings"] else None
    content = phrases.card(first, [claim]) if first else []
    if len(claim["findings"]) > 1:
        content.append(f"and {phrases.number(len(claim['findings']) - 1, 'finding')} more")
    if claim["reproduce"]:
        content.append(f"reproduce: {printable(claim['reproduce'])}")
    name, verdict = printable(claim["claim"]), claim["verdict"]
    headline = phrases.headline(case, name, first, verdict)
    return f"**{code(headline)}**\n\n{block(content)}\n\n"


def _provenance(result: Json) -> str:
    tool, environment = result["tool"], result["environment"]
    shown = [f"{tool['name']} {tool['version']}", f"digests {tool['digest_scheme']}"]
    for name in ("torch", "python", "cpu_model", "cpu_capability"):
        if environment.get(name):
            shown.append(f"{name} {environment[name]}")
    shown += [phrases.commit(environment), f"controls {result['controls']['status']}"]
    return f"\n<sub>{prose('; '.join(filter(None, shown)))}</sub>\n"
