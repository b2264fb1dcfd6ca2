"""Which contender is deterministic, as `verify` found it: read from result documents, not judged.

A case belongs to a contender and a shape when its name, after the file and an optional `peers/`, is
the contender's name and then the shape's with anything but letters and digits between
(`peer_cases.py::peers/sonicmoe/small`, `torch_kimi_shard`); with `ranks` for the shape it tells of
several ranks. verify's own case `moe` belongs to our layer. Without a case of the timed shape the
one of another shape is quoted, and says so; so does one that was checked with another version,
torch, commit or GPU, as far as the result document tells. Refuses cases of another kind of device,
and to turn a missing case into a claim: it is "not checked", also on several ranks when only one
was.
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
class Here:
    """What is timed. device: "cpu" or "cuda"; gpu: its name; commit: of the checkout. None: not
    known."""

    device: str
    gpu: str | None
    torch: str
    commit: str | None


@dataclass(frozen=True)
class Finding:
    """What one case said. verdict: of the case; text: claims by verdict, with what differed.

    version (of the contender), torch, commit, gpu: as checked, None where the document does not
    tell; differs: which of them are others than here.
    """

    contender: str
    shape: str
    verdict: str
    text: str
    case: str
    version: str | None = None
    torch: str | None = None
    commit: str | None = None
    gpu: str | None = None
    differs: str = ""


def read_findings(
    paths: Sequence[Path], versions: Mapping[str, str | None], here: Here
) -> list[Finding]:
    """From result documents of `verify`; versions: of the known contenders, by name.

    Cases of no known contender, and cases on another kind of device than here, are left out. Raises
    verify's InputFileError with file and reason when a file is not such a document.
    """
    from verify import results

    found = []
    for path in paths:
        document = results.read(path)
        for case in document["cases"]:
            finding = _finding(document, case, versions, here)
            if finding is not None:
                found.append(finding)
    return found


def _finding(
    document: Mapping[str, Any],
    case: Mapping[str, Any],
    versions: Mapping[str, str | None],
    here: Here,
) -> Finding | None:
    words = _plain(str(case["case"]).rsplit("::", 1)[-1]).removeprefix("peers-")
    known = {
        f"{_plain(contender)}-{_plain(shape)}": (contender, shape)
        for contender in versions
        for shape in (*SHAPES, RANKS)
    }
    known[_OWN_CASE] = (OURS, _OWN_CASE)
    # A case without a device has its tensors where it makes them: on a CPU, as far as is known.
    device = str(case.get("device") or "cpu").partition(":")[0]
    if words not in known or device != here.device:
        return None
    contender, shape = known[words]
    gpus = _at(document, "environment", "cuda", "devices") if device == "cuda" else None
    gpu = _text(_at(gpus[0], "name")) if isinstance(gpus, list) and gpus else None
    version = _version(document, case, contender)
    torch = _text(_at(document, "environment", "torch"))
    commit = _text(_at(document, "environment", "source", "commit"))
    timed = (versions.get(contender) or "").partition(" ")[0]  # ours adds its backend
    pairs = (
        (f"{contender} {version}", version, timed),
        (f"torch {torch}", torch, here.torch),
        (f"commit {(commit or '')[:12]}", commit, here.commit),
        (str(gpu), gpu, here.gpu),
    )
    others = [name for name, checked, own in pairs if checked and own and checked != own]
    differs = ", ".join(dict.fromkeys(others))
    said = (str(case["verdict"]), _said(case), str(case["case"]))
    return Finding(contender, shape, *said, version, torch, commit, gpu, differs)


def _version(document: Mapping[str, Any], case: Mapping[str, Any], contender: str) -> str | None:
    """Ours is the tool's; a peer's stands after its name in the description of its case."""
    if contender == OURS:
        return _text(_at(document, "tool", "version"))
    pattern = rf"{re.escape(contender)} (\d\S*?),?(?:\s|$)"
    found = re.match(pattern, str(case.get("description") or ""))
    return found.group(1) if found else None


def _at(value: Any, *path: str) -> Any:
    """The value at a path of keys; None where one is missing."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


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
    wanted = (RANKS,) if ranks > 1 else (shape, *_FALLBACKS)
    found = next((own[name] for name in wanted if name in own), None)
    if found is None:
        return NOT_CHECKED
    notes = [f"on {found.shape}"] if found.shape not in (shape, RANKS) else []
    notes += [f"checked with {found.differs}"] if found.differs else []
    return found.text + (f" ({'; '.join(notes)})" if notes else "")
