"""`verify gate`: read and find everything, ask git, run the controls, run the cases, conclude.

The order is fixed. Whatever can be wrong with the file, the cases or the revision is an error
before anything runs; then the checker is checked, then the cases. It refuses to run under torchrun,
since a gate starts ranks of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verify import results
from verify.decision import decide
from verify.errors import CaseError, InputFileError, UnsupportedError
from verify.evidence import Execution, Trouble
from verify.gates import touched
from verify.gates.config import Config, load
from verify.gates.coverage import Coverage, coverage
from verify.gates.findings import findings
from verify.gates.pacing import Budget, ordered, paced
from verify.gates.patterns import all_below, any_file, below, linked, matches
from verify.gates.unclaimed import Stored, stored_goldens
from verify.plans import plans_of, with_options
from verify.running import collect, find_all, joined_by_torchrun, refuse_unreadable, shown
from verify.targets import Found

Progress = Callable[[str], None]
_NOTHING = Coverage(frozenset(), (), {})


def run(
    path: Path,
    since: str | None = None,
    written: Sequence[Path] = (),
    *,
    progress: Progress = lambda text: None,
) -> dict[str, Any]:
    """Runs the gate of a file and returns the result document.

    since: a revision; sources that changed since HEAD left it must be covered by a case. written:
    files that the caller writes, which are no change. Raises VerifyError before anything runs for
    a file, case, pattern or revision that is not as it should be.
    """
    started, clock = datetime.now(UTC), time.perf_counter()
    if joined_by_torchrun():
        raise UnsupportedError(
            "verify gate was started by torchrun; start it alone, it starts its ranks itself"
        )
    config = load(path)
    found, controls = find_cases(config), _controls(config)
    _refuse_idle_patterns(config)
    _refuse_links(config)
    plans = plans_of(found, config.options)
    refuse_unreadable(found, config.options)
    goldens_here = stored_goldens(config.options.golden_folder, found)
    change = touched.since(since, written) if since is not None else None
    dirty = touched.uncommitted(written) if config.require_clean else ()
    stored = golden_changes(config.options.golden_folder, change.base) if change else []
    covered = coverage(config, change, found, stored) if change else _NOTHING

    progress(f"{_runnable(controls)} controls, then {len(plans)} cases")
    checked = _check_the_checker(controls, progress)

    budget = Budget(config.seconds, config.executions, lambda: time.perf_counter() - clock)
    pairs = list(zip(found, plans, strict=True))
    ran = paced(ordered(pairs, covered.affected), config.options, budget, collect, progress)
    affected = [plans[position].case for position in sorted(covered.affected)]
    # without --since nobody said which cases matter less, so all have to run
    wanted = affected if change else [plan.case for plan in plans]
    cut_off = [plan.case for plan in ran.left if plan.case in wanted]
    left_out = [plan.case for plan in ran.left if plan.case not in wanted]
    kept = [plan for plan in plans if plan.case not in left_out]
    records = [
        *ran.records,
        *(Trouble(name, "not-run", f"budget of the gate: {ran.spent}") for name in cut_off),
    ]
    return results.build(
        plans=kept,
        verdicts=[decide(plan, records) for plan in kept],
        executions=[one for one in records if isinstance(one, Execution)],
        environment=_environment(),
        options=shown(config.options),
        command=["verify", *sys.argv[1:]],
        ranks=max(plan.ranks for plan in plans),
        started=started,
        seconds=time.perf_counter() - clock,
        controls=checked,
        gate={
            **_asked(config, since, change, goldens_here),
            "affected": affected,
            "uncovered": covered.uncovered,
            "left_out": left_out,
            "golden_changes": stored,
            "budget": {
                "seconds": config.seconds,
                "executions": config.executions,
                "used_seconds": budget.clock(),
                "used_executions": ran.executions,
            },
            "findings": findings(
                uncovered=covered.uncovered,
                elsewhere=covered.elsewhere,
                failed_controls=checked["failed"],
                # A checker that nothing was planted for was not checked.
                idle_controls=checked["not_run"] if checked["status"] == "not-run" else None,
                dirty=dirty,
                cut_off=cut_off,
                spent=ran.spent,
                unclaimed=goldens_here.unclaimed,
            ),
        },
    )


def find_cases(config: Config) -> list[Found]:
    """The cases of a gate, each once, with the options of its file. A case that declares a golden
    promises it here whatever `claims` says.

    Raises InputFileError that names the entry, for one that cannot be found or planned.
    """
    found: dict[str, Found] = {}
    for position, target in enumerate(config.cases):
        try:
            found |= {one.target: _promised(one, config) for one in find_all([target])}
        except CaseError as error:
            where = f"{config.path}: cases[{position}] = {target!r}"
            raise InputFileError(f"{where}: {error}") from error
    return list(found.values())


def _promised(found: Found, config: Config) -> Found:
    """A case with the options of the gate, and with the claim `golden` if it declares one."""
    case = with_options(found, config.options).case
    if case.golden and "golden" not in case.claims:
        case = replace(case, claims=(*case.claims, "golden"))
    return Found(case, found.target)


def golden_changes(folder: Path, base: str) -> list[dict[str, Any]]:
    """Goldens that differ from those of the commit `base`, one row per tensor."""
    from verify import goldens

    return goldens.changes_since(folder, base)


def _controls(config: Config) -> list[str]:
    from verify import controls

    names = controls.names(config.controls)
    if not names:
        raise InputFileError(
            f"{config.path}: controls.only = {config.controls!r} matches no control; "
            "`verify controls --list` prints them"
        )
    return names


def _refuse_idle_patterns(config: Config) -> None:
    """A pattern without a file is misspelt, or its files are gone: either way it checks nothing."""
    for key, patterns in (("kernels", config.kernels), ("exempt", config.exempt)):
        for pattern in patterns:
            if not any_file(pattern, Path.cwd()):
                raise InputFileError(
                    f"{config.path}: sources.{key} holds {pattern!r}, which matches no file below "
                    f"{Path.cwd()}; correct it or take it out"
                )


def _refuse_links(config: Config) -> None:
    """Git names files by their real folders, so a pattern through a link would match no change."""
    for pattern in config.kernels:
        for name, real in linked(pattern, Path.cwd()):
            if matches(name, config.exempt) or all_below(name, config.exempt):
                continue
            if not matches(real, config.kernels) and not below(real, config.kernels):
                raise InputFileError(
                    f"{config.path}: sources.kernels holds {pattern!r}, which reaches {name} "
                    f"through a link; git names changes of it as {real}: write the real path"
                )


def _runnable(names: Sequence[str]) -> str:
    """`57`, or `57 of 66` where this machine lacks what the others need."""
    from verify import controls

    here, left_out = controls.parted(one for one in controls.CONTROLS if one.name in names)
    return f"{len(here)} of {len(names)}" if left_out else str(len(here))


def _check_the_checker(names: Sequence[str], progress: Progress) -> dict[str, Any]:
    from verify import controls

    outcome = controls.run(names, progress=progress)
    kept = {key: outcome[key] for key in ("status", "passed", "failed")}
    left_out = outcome.get("not_run")
    return {**kept, "not_run": left_out} if left_out else kept


def _asked(
    config: Config, since: str | None, change: touched.Changes | None, goldens_here: Stored
) -> dict[str, Any]:
    return {
        "config": os.fspath(config.path),
        "since": since,
        "base": change.base if change else None,
        "kernels": config.kernels,
        "changed": change.changed if change else (),
        "goldens_not_checked": goldens_here.not_checked,
    }


def _environment() -> dict[str, Any]:
    from verify.environment import environment

    return environment()
