"""Checks to call from one's own code and tests: in this process, with an AssertionError that says
what differed and a result that names what could not be checked from here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verify import allocations, devices, randomness
from verify.captures import flatten
from verify.cases import Case, case_of, device_name
from verify.comparison import compare
from verify.conduct import conduct, report_setup_failure, set_up
from verify.decision import decide
from verify.errors import CaseError
from verify.evidence import Failure, Plan, Record, Trouble
from verify.execution import restore_modules
from verify.explanation import suggest
from verify.messages import failure_text
from verify.plans import RunOptions, plan_of, with_options
from verify.reasons import Verdict
from verify.running import refuse_unreadable, run_here
from verify.sessions import Session
from verify.staging import Stage
from verify.targets import Found, cases_in, loaded_from
from verify.verdicts import CaseVerdict

IN_PROCESS = ("repeat", "memory", "threads", "history")


def check(
    case_or_function: Case | Callable[..., Any],
    *,
    claims: Sequence[str] | None = None,
    runs: int | None = None,
    ranks: int | None = None,
    timeout: float = 300.0,
    golden: Path | None = None,
    device: str | torch.device | None = None,
) -> CaseVerdict:
    """The verdict on every promised claim of a case, or on the default ones of a function.

    A case that other processes can import (a module-level name in a file) is checked in worker
    processes, all claims. One that they cannot is checked in this process, and the claims that
    need others are UNVERIFIED(unsupported). golden: the folder of goldens, `golden` in the current
    folder unless given. device: "cpu", "cuda" or "cuda:N" instead of where the case puts its
    tensors. Raises CaseError for a wrong declaration or a device that is not here, InputFileError
    for a golden that cannot be read.
    """
    case = case_or_function
    if not isinstance(case, Case):
        case = case_of(case_or_function)
    options = RunOptions(
        ranks=ranks,
        runs=5 if runs is None else runs,
        claims=tuple(claims) if claims is not None else None,
        timeout=timeout,
        golden=golden,
        device=None if device is None else device_name(device),
    )
    target = target_of(case)
    found = with_options(Found(case, target or case.name), options)
    wanted_ranks = ranks or case.ranks
    refuse_unreadable([found], options)
    if target is not None:
        _, verdicts, _ = run_here([found], options, lambda text: None)
        return verdicts[0]
    if wanted_ranks > 1:
        raise CaseError(
            f"case {case.name!r} cannot be imported by other processes, so it cannot run on"
            f" {wanted_ranks} ranks; define it at the top level of a file"
        )
    return check_here(found, plan_of(found, options, 1), options.golden_folder)


def check_here(found: Found, plan: Plan, golden: Path | None = None) -> CaseVerdict:
    """All claims that one process can check, in this process, and the verdict."""
    records: list[Record] = []
    generators, device = randomness.snapshot(), devices.current()
    stage: Stage | Failure | None = None
    allocations.give_back()
    try:
        stage = set_up(found, 0, 1, None, lambda failure: failure)
        if isinstance(stage, Stage):
            conduct(Session(stage, plan, records.append, golden=golden))
        else:
            report_setup_failure(records.append, plan, 0, stage)
    finally:
        randomness.restore(generators)
        if isinstance(stage, Stage):
            restore_modules(stage)
        devices.restore(device)
    for claim in ("process",):
        if claim in plan.claims:
            detail = "other processes cannot import it; define it at the top level of a file"
            records.append(Trouble(plan.case, "unsupported", detail, claim))
    return decide(plan, records)


def assert_repeatable(
    function: Callable[..., Any], *args: Any, runs: int = 5, **kwargs: Any
) -> CaseVerdict:
    """Asserts that `function(*args, **kwargs)` gives the same bits again and again.

    Forward and, where inputs require gradients, backward; repeated, with filled memory, other
    thread counts, and after other calls. Tensors and modules among the arguments are copied and
    restored for every execution. Returns the verdict; its notes name what was not checked (other
    processes, other inputs). Raises AssertionError on MISMATCH and on UNVERIFIED.
    """
    __tracebackhide__ = True
    named = _name_arguments(function, args, kwargs)
    positions = list(named)[: len(args)]
    owner = _module_behind(function)
    key = "module"
    while key in named:
        key += "_"

    def setup() -> Mapping[str, Any]:
        return {**named, **({key: owner} if owner is not None else {})}

    def execute(**values: Any) -> Any:
        # the module is passed for its state to be restored; it is reached through the function
        return function(*(values[n] for n in positions), **{n: values[n] for n in kwargs})

    name = getattr(function, "__name__", type(function).__name__)
    case = Case(name=name, execute=execute, setup=setup, claims=IN_PROCESS)
    found = Found(case, name)
    verdict = check_here(found, plan_of(found, RunOptions(runs=runs), 1))
    verdict = replace(
        verdict,
        notes=[
            *verdict.notes,
            "not checked: process (a call stays in its own process; use a case and `verify run`)",
        ],
    )
    if verdict.verdict is not Verdict.VERIFIED:
        error = AssertionError(failure_text(verdict))
        error.verdict = verdict  # type: ignore[attr-defined]
        raise error
    return verdict


def _name_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by their parameters' names, positional ones first."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = [
            p.name
            for p in inspect.signature(target).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        parameters = []
    named: dict[str, Any] = {}
    for position, value in enumerate(args):
        name = parameters[position] if position < len(parameters) else f"arg{position}"
        while name in named or name in kwargs or name in parameters[position + 1 :]:
            name += "_"
        named[name] = value
    return {**named, **kwargs}


def _module_behind(function: Callable[..., Any]) -> torch.nn.Module | None:
    """The module whose state a call depends on: itself, its bound method, or a partial of these."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Asserts that two tensors, or two nestings of tensors, have the same bits.

    dtype, shape and every bit count: -0.0 is not 0.0, and NaN payloads must be equal. Raises
    AssertionError with tensor, index, both values and both bit patterns; also when there is
    nothing to compare.
    """
    __tracebackhide__ = True
    ours, unknown = flatten(actual)
    theirs, unknown_too = flatten(expected)
    if unknown or unknown_too:
        names = ", ".join(dict.fromkeys([*unknown, *unknown_too]))
        raise AssertionError(f"verdict=UNVERIFIED reason=unsupported: cannot compare {names}")
    if not any(t.numel() for t in (*ours.values(), *theirs.values())):
        raise AssertionError("verdict=UNVERIFIED reason=nothing-compared: no elements were given")
    lines: list[str] = []
    for name in theirs.keys() - ours.keys():
        lines.append(f"{name} is missing")
    for name in ours.keys() - theirs.keys():
        lines.append(f"{name} is not expected")
    for name in [name for name in theirs if name in ours]:
        comparison = compare(theirs[name], ours[name], name)
        if not comparison.equal:
            lines += comparison.describe()
            lines += [f"suggests: {s}" for s in suggest(comparison, theirs[name], ours[name], None)]
    if lines:
        raise AssertionError("\n".join(["verdict=MISMATCH reason=bits-differ", *lines]))


def target_of(case: Case) -> str | None:
    """How another process finds this very case, or None when it cannot."""
    function = inspect.unwrap(case.execute)
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        return None
    if path is None or "<locals>" in getattr(function, "__qualname__", "<locals>"):
        return None
    module = loaded_from(Path(path))
    if module is None or not any(one is case for one in cases_in(module)):
        return None
    return f"{path}::{case.name}"
