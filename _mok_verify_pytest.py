"""The pytest plugin: fixture `bitwise`, marker `verify`, module-level cases as items, a report.

It is a top-level module that imports neither torch nor verify until a test asks, so that installing
the package costs other test suites nothing. MISMATCH fails a test; UNVERIFIED is an error, since a
skip would be a green lie. Under xdist every test report carries its own evidence, so that what a
worker reported before it crashed is kept, and `workeroutput` carries what should have been checked;
what is missing then is UNVERIFIED. It refuses to work with another module called `verify`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

_HOME = Path(__file__).resolve().parent / "verify"
_RECORDS = pytest.StashKey[list[str]]()
_UPDATED = pytest.StashKey[int]()
_OPTIONS = ("claims", "runs", "ranks", "timeout")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, and where goldens lie for those who do not want to say it each time."""
    group = parser.getgroup("verify", "bit-determinism (mok-verify)")
    group.addoption("--verify-runs", type=_positive, metavar="N", help="executions of each check")
    group.addoption("--verify-report", metavar="DIR", help="write DIR/result.json")
    group.addoption(
        "--verify-allow-unverified",
        action="store_true",
        help="let tests pass that could not be verified; the report still says UNVERIFIED",
    )
    group.addoption(
        "--verify-update",
        metavar="REASON",
        help="make the goldens of cases that declare one instead of checking these cases",
    )
    group.addoption("--verify-golden", metavar="DIR", help="compare with the goldens in DIR")
    parser.addini("verify_golden", "the folder of goldens, from the rootdir", default="golden")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker and the one object that remembers."""
    config.addinivalue_line(
        "markers",
        "verify(claims=None, runs=None, ranks=None, timeout=None): options of this test's checks",
    )
    folder = config.getoption("verify_report")
    if folder and Path(folder).exists() and not Path(folder).is_dir():
        raise pytest.UsageError(f"--verify-report {folder}: it is a file, not a folder")
    reason = config.getoption("verify_update")
    if reason is not None and (not reason.strip() or os.path.exists(reason)):
        raise pytest.UsageError(
            f"--verify-update {reason!r}: give the reason why goldens change, as one word of the"
            " command line: --verify-update 'bias added before the activation'"
        )
    config.pluginmanager.register(Recorder(config), "mok_verify_recorder")


class CaseItem(pytest.Item):
    """A module-level `verify.case` of a test file as a test of its own.

    With --verify-update one that declares a golden gets it made and is not checked.
    """

    def __init__(self, *, case: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case_name: str = case.name
        self.updates = bool(case.golden) and self.config.getoption("verify_update") is not None
        self.promised = "golden" in case.claims

    def runtest(self) -> None:
        __tracebackhide__ = True
        if self.updates:
            given = (_golden(self.config), self.config.getoption("verify_update"))
            self.stash[_UPDATED] = _testing().update_item(self.path, self.case_name, *given)
            return
        options = _options(self)
        asked = self.promised or "claims" in options or self.config.getoption("verify_golden")
        _testing().run_item(
            self.path,
            self.case_name,
            options,
            self.stash[_RECORDS],
            allow_unverified=self.config.getoption("verify_allow_unverified"),
            golden=_golden(self.config) if asked else None,
        )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Our own errors explain themselves; anything else gets its traceback."""
        errors = getattr(sys.modules.get("verify.errors"), "VerifyError", ())
        if hasattr(excinfo.value, "verify_verdict") or isinstance(excinfo.value, errors):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"case {self.case_name}"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: Any, name: str, obj: object
) -> CaseItem | list[CaseItem] | None:
    """A case object can only exist where `verify.cases` has been imported.

    Those in a list or tuple of the module become `name[case]`, unless they have a name of their
    own or stand in an earlier list.
    """
    kind = getattr(sys.modules.get("verify.cases"), "Case", None)
    if kind is None or not isinstance(collector, pytest.Module):
        return None
    if isinstance(obj, kind):
        item: CaseItem = CaseItem.from_parent(collector, name=name, case=obj)
        return item
    if not isinstance(obj, list | tuple) or not any(isinstance(one, kind) for one in obj):
        return None
    cases = {id(one): one for one in obj if isinstance(one, kind)}
    for key, value in vars(collector.obj).items():
        if value is obj and key != name:
            return []  # the same list under an earlier name
        if value is obj:
            break
        for one in value if isinstance(value, list | tuple) else ():
            cases.pop(id(one), None)
    for value in vars(collector.obj).values():
        cases.pop(id(value), None)
    return [
        CaseItem.from_parent(collector, name=f"{name}[{case.name}]", case=case)
        for case in cases.values()
    ]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Adds to an import error that a file of the user's own is called verify, if that is so."""
    report = yield
    if report.failed and re.search(r"'verify['.]", str(report.longrepr)):
        shadow = shadowed()
        if shadow:
            report.longrepr = f"{report.longrepr}\n\n{shadow}"
    return report


@pytest.fixture
def bitwise(request: pytest.FixtureRequest) -> Any:
    """Checks bits: `.repeatable(fn, *args)`, `.equal(actual, expected)`, `.check(case)`."""
    item = request.node
    return _testing().Bitwise(
        item.nodeid,
        item.stash[_RECORDS],
        _options(item),
        item.config.getoption("verify_allow_unverified"),
        _golden(item.config),
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_RECORDS] = []  # anew for every try, should another plugin run a test twice


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes an error of UNVERIFIED and attaches the evidence to the report.

    pytest has no third outcome, but what fails outside of the call is an error, in JUnit too.
    """
    report = yield
    if report.when == "call" and _UPDATED in item.stash:
        report.verify_updated = item.stash[_UPDATED]  # type: ignore[attr-defined]
    if not _asks(item):
        return report
    records = item.stash.get(_RECORDS, [])
    error = call.excinfo.value if call.excinfo else None
    verdict = getattr(error, "verify_verdict", None)
    if report.when == "call" and report.passed and not records:
        allowed = item.config.getoption("verify_allow_unverified")
        report.outcome = "passed" if allowed else "failed"
        report.longrepr = f"verdict=UNVERIFIED {item.nodeid}: nothing was checked with `bitwise`"
        verdict = None if allowed else "UNVERIFIED"
    if verdict == "UNVERIFIED" or (
        report.failed and verdict is None and isinstance(item, CaseItem)
    ):
        report.when = "setup"
    if call.when == "call":
        item.user_properties += _properties(records)  # JUnit takes them from the last report
    # as text: xdist cannot carry lone surrogates
    report.verify_records = json.dumps(records)  # type: ignore[attr-defined]
    return report


class Recorder:
    """What one pytest process knows of its run; under xdist the controller's one writes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = time.monotonic()
        self.records: dict[str, list[str]] = {}  # by test: entries of the document, as JSON
        self.outcomes: dict[str, str] = {}
        self.expected: list[str] = []
        self.told = False
        self.crashed: set[str] = set()
        self.environment: dict[str, Any] = {}
        self.summary: list[str] = []
        self.updated: dict[str, int] = {}  # by test: goldens that changed

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expected = [item.nodeid for item in session.items if _asks(item)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A worker's first report says what it will check, should it not live to say it."""
        report = yield
        if not self.told and hasattr(self.config, "workeroutput"):
            report.verify_expected = json.dumps(self.expected)  # type: ignore[attr-defined]
            self.told = True
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._expect(getattr(report, "verify_expected", "[]"))
        if hasattr(report, "verify_updated"):
            self.updated[report.nodeid] = report.verify_updated
        carried = getattr(report, "verify_records", None)
        if carried is not None:
            self.records[report.nodeid] = json.loads(carried)
        if str(report.when) == "???":  # how xdist reports the test in which a worker died
            self.crashed.add(report.nodeid)
        elif not report.passed or report.nodeid not in self.outcomes:
            self.outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker ended; one that crashed has no output."""
        output = getattr(node, "workeroutput", None) or {}
        self._expect(output.get("verify_expected", "[]"))
        self.environment = self.environment or json.loads(output.get("verify_environment", "{}"))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.getoption("collectonly"):
            return
        folder = self.config.getoption("verify_report")
        if folder and any(self.records.values()):
            from verify.environment import environment

            self.environment = self.environment or environment()
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["verify_expected"] = json.dumps(self.expected)
            output["verify_environment"] = json.dumps(self.environment)
        else:
            if self.config.getoption("verify_update") is not None:
                self._tell_updates()
            if folder or self.expected or self.records:
                self._conclude(session, folder)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.summary:
            terminalreporter.write_line(f"verify: {line}")

    def _expect(self, nodeids: str) -> None:
        known = set(self.expected)
        self.expected += [nodeid for nodeid in json.loads(nodeids) if nodeid not in known]

    def _conclude(self, session: pytest.Session, folder: str | None) -> None:
        """Puts the document together, writes it, and leaves the lines of the summary."""
        shadow = shadowed()
        if shadow:
            self.summary.append(shadow)
            return
        testing = _testing()
        result = testing.document(
            self._entries(testing),
            self.environment,
            shlex.join(["pytest", *map(str, self.config.invocation_params.args)]),
            time.monotonic() - self.started,
        )
        line = testing.totals(result)
        if result["verdict"] == "UNVERIFIED" and self.config.getoption("verify_allow_unverified"):
            line += " (allowed to pass)"
        if folder:
            problem = testing.written(result, Path(folder))
            line += problem or f"; {Path(folder) / 'result.json'}"
            if problem:
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        self.summary.append(line)

    def _tell_updates(self) -> None:
        """How many goldens changed; a refused one is not among them but has failed its test."""
        changed, made = sum(self.updated.values()), len(self.updated)
        where = os.path.relpath(_golden(self.config))
        self.summary.append(f"{changed} of {made} goldens changed in {where}")

    def _entries(self, testing: Any) -> list[Any]:
        """Of every test that asked; one that left none is UNVERIFIED.

        A crashed test may have asked: only a worker that lived could have said that it did not.
        """
        known = set(self.expected) | set(self.records)
        unknown = set() if self.expected else self.crashed - known
        entries = []
        for nodeid in dict.fromkeys([*self.expected, *self.records, *sorted(unknown)]):
            entries += [json.loads(text) for text in self.records.get(nodeid, [])]
            if nodeid in self.crashed:
                entries.append(testing.missing(nodeid, "crashed", "the xdist worker died in it"))
            elif not self.records.get(nodeid):
                outcome = self.outcomes.get(nodeid)
                detail = f"the test {outcome} without a check" if outcome else "the test never ran"
                entries.append(testing.missing(nodeid, "not-run", detail))
        return entries


def shadowed() -> str:
    """What to do when `import verify` does not find this package; empty when it does."""
    module = sys.modules.get("verify")
    if module is not None:
        origin = getattr(module, "__file__", None) or str(list(getattr(module, "__path__", [])))
    else:
        spec = importlib.util.find_spec("verify")
        origin = (spec.origin or str(spec.submodule_search_locations)) if spec else "nothing"
    if Path(origin).resolve() == _HOME / "__init__.py":
        return ""
    return (
        f"`import verify` finds {origin}, which is not the package of mok-verify ({_HOME}). "
        "Rename that file, or keep its folder off sys.path: pytest --import-mode=importlib, "
        "started as `pytest`, not as `python -m pytest`"
    )


def _testing() -> Any:
    """The module that does the work, imported when the first test asks."""
    shadow = shadowed()
    if shadow:
        pytest.fail(f"verdict=UNVERIFIED {shadow}", pytrace=False)
    import verify.testing

    return verify.testing


def _properties(records: list[str]) -> list[tuple[str, object]]:
    """Verdicts and reasons of one test, for JUnit."""
    entries = [json.loads(text) for text in records]
    verdicts = {entry["verdict"] for entry in entries}
    worst = [name for name in ("MISMATCH", "UNVERIFIED", "VERIFIED") if name in verdicts]
    reasons = {
        finding["reason"]
        for entry in entries
        for claim in entry["claims"]
        for finding in claim["findings"]
    }
    found: list[tuple[str, object]] = [("verify_verdict", (worst or ["UNVERIFIED"])[0])]
    return found + ([("verify_reason", ", ".join(sorted(reasons)))] if reasons else [])


def _asks(item: pytest.Item) -> bool:
    """Whether a test has to leave evidence; one that makes a golden checks nothing."""
    if isinstance(item, CaseItem):
        return not item.updates
    return "bitwise" in getattr(item, "fixturenames", ())


def _golden(config: pytest.Config) -> Path:
    """The folder of goldens: of the command line from here, of the ini file from the rootdir."""
    given = config.getoption("verify_golden")
    return Path(given).absolute() if given else config.rootpath / config.getini("verify_golden")


def _options(item: Any) -> Mapping[str, Any]:
    """Of the closest marker `verify`; the command line's --verify-runs wins."""
    marker = item.get_closest_marker("verify")
    given = dict(marker.kwargs) if marker else {}
    wrong = sorted(set(given) - set(_OPTIONS))
    if wrong or (marker and marker.args):
        raise pytest.UsageError(
            f"{item.nodeid}: the marker verify takes {', '.join(_OPTIONS)} by name, "
            f"not {', '.join(wrong) or 'positional arguments'}"
        )
    runs = item.config.getoption("verify_runs")
    return {**given, **({"runs": runs} if runs else {})}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
