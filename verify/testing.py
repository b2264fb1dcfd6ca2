"""What the pytest plugin needs once a test asks: the fixture's object, case items, one document.

The plugin itself (`_mok_verify_pytest.py`) imports nothing of this package until then. Every check
leaves an entry of the result document, as JSON text, in the test's list; a failed one raises
VerdictError, whose first line is verdict and case and whose last line reproduces it. It refuses to
let a check that could not be made pass, unless that was allowed on the command line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verify import results
from verify.errors import VerifyError
from verify.reasons import REASONS, Verdict
from verify.rendering import phrases, text
from verify.rendering.escaping import lines, printable
from verify.verdicts import CaseVerdict, ClaimVerdict, Finding, RankEvidence

Json = dict[str, Any]


class VerdictError(AssertionError):
    """A check that was not VERIFIED; `verify_verdict` tells the plugin which of the two it was."""

    def __init__(self, message: str, verdict: str) -> None:
        super().__init__(message)
        self.verify_verdict = verdict


VerdictError.__module__ = "builtins"  # as pytest's own: the first line starts with the verdict


@dataclass(frozen=True)
class Bitwise:
    """The fixture `bitwise`: checks bits and leaves a record in the test's result.

    records: where entries go, as JSON texts. defaults: options of the marker `verify` and of the
    command line; an option given in a call wins. golden: the folder of goldens, for cases that
    promise theirs.
    """

    nodeid: str
    records: list[str] = field(repr=False)
    defaults: Mapping[str, Any] = field(default_factory=dict, repr=False)
    allow_unverified: bool = False
    golden: Path | None = None

    def repeatable(
        self, fn: Callable[..., Any], *args: Any, runs: int | None = None, **kwargs: Any
    ) -> CaseVerdict | None:
        """Asserts that `fn(*args, **kwargs)` gives the same bits again and again.

        Returns the verdict, also when it is UNVERIFIED and that was allowed.
        """
        __tracebackhide__ = True
        from verify import api

        wanted = runs or self.defaults.get("runs") or 5
        told, verdict = "", None
        try:
            verdict = api.assert_repeatable(fn, *args, runs=wanted, **kwargs)
        except AssertionError as error:
            told, verdict = str(error), getattr(error, "verdict", None)
        name = getattr(fn, "__name__", type(fn).__name__)
        self._settle(self._entry(verdict) if verdict else self._told(name, "repeatable", told))
        return verdict

    def equal(self, actual: Any, expected: Any) -> None:
        """Asserts that two tensors, or two nestings of tensors, have the same bits."""
        __tracebackhide__ = True
        from verify import api

        told = ""
        try:
            api.assert_bitwise(actual, expected)
        except AssertionError as error:
            told = str(error)
        self._settle(self._told("equal", "equal", told))

    def check(self, case: Any, **options: Any) -> CaseVerdict:
        """Asserts every promised claim of a case, or the default ones of a function.

        The options are those of `verify.check`. Returns the verdict, also when it is UNVERIFIED
        and that was allowed.
        """
        __tracebackhide__ = True
        from verify import api

        promised = {"golden": self.golden} if "golden" in getattr(case, "claims", ()) else {}
        given = {**promised, **self.defaults, **options}
        verdict = api.check(case, **{name: v for name, v in given.items() if v is not None})
        self._settle(self._entry(verdict))
        return verdict

    def _settle(self, entry: Json) -> None:
        __tracebackhide__ = True
        settle(entry, self.records, allow_unverified=self.allow_unverified)

    def _entry(self, verdict: CaseVerdict) -> Json:
        return entry_of(verdict, self.nodeid, again(self.nodeid, self.defaults.get("runs")))

    def _told(self, name: str, claim: str, told: str) -> Json:
        """An entry for a check of which only the message is known; no message: VERIFIED."""
        found = re.search(r"reason=([a-z-]+)", told)
        reason = found.group(1) if found and found.group(1) in REASONS else "bits-differ"
        detail = told.partition("\n")[2]
        findings = [Finding(reason, detail)] if told else []
        return self._entry(CaseVerdict(name, self.nodeid, [_claim(claim, findings, 1)]))


def again(nodeid: str, runs: int | None) -> str:
    """The pytest command that runs one test again."""
    words = ["pytest", nodeid, *(["--verify-runs", str(runs)] if runs else [])]
    return shlex.join(words)


def settle(entry: Json, records: list[str], *, allow_unverified: bool) -> None:
    """Keeps the entry and raises VerdictError if its verdict does not let the test pass."""
    __tracebackhide__ = True
    records.append(json.dumps(entry))
    verdict = entry["verdict"]
    if verdict == Verdict.VERIFIED or (verdict == Verdict.UNVERIFIED and allow_unverified):
        return
    raise VerdictError(message(entry), verdict)


def message(entry: Json) -> str:
    """Verdict and case, the findings of every claim that is not VERIFIED, the command."""
    said = [f"verdict={entry['verdict']} {printable(entry['case'])} ({printable(entry['target'])})"]
    said += [f"  {line}" for line in text.findings(entry, commands=False)]
    for claim in entry["claims"]:
        if claim["bound"] is not None or claim["rate"] is not None:
            said.append(f"  {printable(claim['claim'])}: {phrases.evidence(claim)}")
    said += [f"  note: {line}" for note in entry["notes"] for line in lines(note)]
    said.append(f"reproduce: {printable(entry['reproduce'])}")
    return "\n".join(said)


def entry_of(verdict: CaseVerdict, nodeid: str, command: str) -> Json:
    """The document's entry for one verdict, reproduced by a pytest command."""
    document = _document([verdict])
    entry: Json = document["cases"][0]
    entry["target"] = nodeid
    entry["reproduce"] = command
    for claim in entry["claims"]:
        claim["reproduce"] = command
        if "update" in claim:
            claim["update"] = shlex.join(["pytest", nodeid, "--verify-update"]) + " REASON"
    return entry


def run_item(
    path: Path,
    name: str,
    options: Mapping[str, Any],
    records: list[str],
    *,
    allow_unverified: bool,
    golden: Path | None = None,
) -> None:
    """Runs one module-level case of a test file as `verify run` would, and settles it.

    golden: the folder of goldens; None where the case shall not be compared with its own.
    """
    __tracebackhide__ = True
    from verify import running

    given = {key: value for key, value in options.items() if value is not None}
    if "claims" in given:
        given["claims"] = tuple(given["claims"])
    target = f"{os.path.relpath(path)}::{name}"
    found = running.run([target], running.RunOptions(**given, golden=golden))
    for entry in found["cases"]:
        if entry["case"] == name:
            settle(entry, records, allow_unverified=allow_unverified)


def update_item(path: Path, name: str, folder: Path, reason: str) -> int:
    """Makes the golden of one module-level case; returns how many goldens changed, 0 or 1.

    Raises VerifyError when it is refused; then nothing was written.
    """
    __tracebackhide__ = True
    from verify.goldens import recording
    from verify.targets import find_exact

    found = find_exact(f"{os.path.relpath(path)}::{name}")
    rows = recording.update([found], folder, reason=reason)
    return len({(row["case"], row["kind"]) for row in rows})


def missing(nodeid: str, reason: str, detail: str) -> Json:
    """The entry of a test that left no evidence."""
    claim = _claim("check", [Finding(reason, detail)], 0)
    return entry_of(CaseVerdict(nodeid, nodeid, [claim]), nodeid, again(nodeid, None))


def document(
    entries: Sequence[Json], environment: Mapping[str, Any], command: str, seconds: float
) -> Json:
    """The result document of a whole pytest run."""
    merged = _document([], environment, command, seconds)
    merged["cases"] = list(entries)
    merged["ranks"] = max([entry["ranks"] for entry in entries], default=1)
    return results.assemble(merged)


def totals(result: Json) -> str:
    """The line of the terminal summary."""
    return phrases.totals(result)


def written(result: Json, folder: Path) -> str:
    """Writes the document into the folder; returns what went wrong, empty if nothing did."""
    try:
        results.write(result, folder / results.FILE_NAME)
    except VerifyError as error:
        return f"; {error}"
    return ""


def _document(
    verdicts: Sequence[CaseVerdict],
    environment: Mapping[str, Any] | None = None,
    command: str = "pytest",
    seconds: float = 0.0,
) -> Json:
    return results.build(
        plans=[],
        verdicts=verdicts,
        executions=[],
        environment=environment or {},
        options={},
        command=command,
        started=datetime.now(UTC),
        seconds=seconds,
    )


def _claim(name: str, findings: Sequence[Finding], executions: int) -> ClaimVerdict:
    verdict = findings[0].verdict if findings else Verdict.VERIFIED
    differing = int(verdict is Verdict.MISMATCH)
    return ClaimVerdict(
        claim=name,
        verdict=verdict,
        findings=findings,
        executions=executions,
        differing=differing,
        bound=None,
        rate=None,
        ranks=[RankEvidence(0, executions, differing, [], {})] if executions else [],
        compared=[],
        not_compared={},
        requested=[],
        effective=[],
    )
