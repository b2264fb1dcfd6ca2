"""Which contender is deterministic, as `verify` found it: read from result documents, not judged.

A case belongs to a contender and a shape when its name, after the file and an optional `peers/`, is
the contender's name and then the shape's with anything but letters and digits between
(`peer_cases.py::peers/sonicmoe/small`, `torch_kimi_shard`); with `ranks` for the shape it tells of
several ranks. verify's own case `moe` belongs to our layer. Without a case of the timed shape the
one of another shape is quoted, and says so. Refuses to turn a missing case into a claim: it is "not
checked", also on several ranks when only one was checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok.bench.contenders import OURS
from mok.bench.shapes import SHAPES

NOT_CHECKED = "not checked"
RANKS = "ranks"
_OWN_CASE = "moe"
_FALLBACKS = (_OWN_CASE, "small", *(name for name in SHAPES if name != "small"))


@dataclass(frozen=True)
class Finding:
    """What one case said. verdict: of the case; text: claims by verdict, with what differed."""

    contender: str
    shape: str
    verdict: str
    text: str
    case: str


def read_findings(paths: Sequence[Path], contenders: Sequence[str]) -> list[Finding]:
    """From result documents of `verify`; cases of no known contender are left out.

    Raises verify's InputFileError with file and reason when a file is not such a document.
    """
    from verify import results

    return [
        finding
        for path in paths
        for case in results.read(path)["cases"]
        if (finding := _finding(case, contenders)) is not None
    ]


def _finding(case: Mapping[str, Any], contenders: Sequence[str]) -> Finding | None:
    words = _plain(str(case["case"]).rsplit("::", 1)[-1]).removeprefix("peers-")
    known = {
        f"{_plain(contender)}-{_plain(shape)}": (contender, shape)
        for contender in contenders
        for shape in (*SHAPES, RANKS)
    }
    known[_OWN_CASE] = (OURS, _OWN_CASE)
    if words not in known:
        return None
    return Finding(*known[words], str(case["verdict"]), _said(case), str(case["case"]))


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def _said(case: Mapping[str, Any]) -> str:
    by_verdict: dict[str, list[str]] = {}
    for claim in case["claims"]:
        ran, differing = int(claim.get("executions", 0)), int(claim.get("differing", 0))
        share = f" ({differing} of {ran} runs differ)" if differing else ""
        by_verdict.setdefault(str(claim["verdict"]), []).append(f"{claim['claim']}{share}")
    return "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by_verdict.items())


def quoted(findings: Sequence[Finding], contender: str, shape: str, ranks: int = 1) -> str:
    """What a row says of its contender."""
    own = {finding.shape: finding for finding in findings if finding.contender == contender}
    if ranks > 1:
        return own[RANKS].text if RANKS in own else NOT_CHECKED
    if shape in own:
        return own[shape].text
    for other in _FALLBACKS:
        if other in own:
            return f"{own[other].text} (on {other})"
    return NOT_CHECKED
