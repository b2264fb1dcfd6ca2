"""`verify replay`: a training script afresh twice, and once stopped and resumed, all compared.

Four runs, each in a fresh process: `whole` and `again` from the beginning, `stopped` after some
steps, and `resumed` from what that left. Three pairs must agree: whole and again; whole and stopped
as far as that went; whole and resumed from where that goes on. `judge` is pure: recordings in, a
verdict out. It refuses to call a resume VERIFIED that began at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from verify.errors import CaseError
from verify.reasons import Verdict
from verify.replaying.borders import Border, States, border_of, cut, resumed_at, write_rest
from verify.replaying.findings import Finding
from verify.replaying.lost_state import Narrow, narrow_values
from verify.replaying.orders import STOPPED, Orders
from verify.replaying.processes import Run, Script, recorded
from verify.replaying.resuming import findings
from verify.replaying.suspects import Suspect, suspects
from verify.tracing.definitions import START
from verify.tracing.divergence import diff
from verify.tracing.files import read_folder
from verify.tracing.findings import TraceDiff

Progress = Callable[[str], None]
OWN_FOLDER = (
    "give each run a folder of its own: write {run} in the arguments for where checkpoints go, or "
    "read the variable VERIFY_RUN"
)


@dataclass(frozen=True)
class ReplayOptions:
    """command: the script with its arguments. again_args, resume_args: what `again` and `resumed`
    get besides. stop_after: steps, None for half of them. resume: whether to resume at all.
    timeout: seconds without a step."""

    command: tuple[str, ...]
    again_args: tuple[str, ...] = ()
    resume_args: tuple[str, ...] = ()
    stop_after: int | None = None
    resume: bool = True
    timeout: float = 600.0


@dataclass(frozen=True)
class Pair:
    """Two runs that must agree. name: "repeat", "stopped" or "resumed". findings: of the resumed
    one, more exactly than the comparison says it."""

    name: str
    verdict: Verdict
    diff: TraceDiff
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Replay:
    """What replaying a script found. steps: of the whole run. stop_after: None when nothing was
    resumed. border: behind which step the resumed run went on. reasons: why it is not VERIFIED
    though nothing differs. again_args: what `again` got besides."""

    command: tuple[str, ...]
    verdict: Verdict
    steps: int
    stop_after: int | None
    border: Border | None
    pairs: tuple[Pair, ...]
    suspects: tuple[Suspect, ...]
    reasons: tuple[str, ...]
    again_args: tuple[str, ...] = ()


def run(options: ReplayOptions, folder: Path, progress: Progress = lambda text: None) -> Replay:
    """Runs a script four times, with all that they leave in `folder`, and judges.

    CaseError when a run fails, or records nothing, or when it cannot be stopped as asked.
    """
    script = Script(options.command, options.timeout)
    everything = Orders("", states=True)
    whole = recorded(script, folder / "whole", everything, progress=progress)
    steps = steps_of(whole)
    stop_after = _stop_after(options, steps)
    other = replace(script, command=(*script.command, *options.again_args))
    recorded(other, folder / "again", everything, progress=progress)
    if stop_after is not None:
        stopped = recorded(
            script, folder / "stopped", Orders("", stop_after, states=True), progress=progress
        )
        if not all((one.reason or "").startswith(STOPPED) for one in stopped.values()):
            raise CaseError(
                f"stopped: it could not be stopped after {stop_after} steps: it ended before, or "
                "went on after SystemExit was raised in its optimizer's step"
            )
        recorded(
            replace(script, command=(*script.command, *options.resume_args)),
            folder / "resumed",
            Orders("", states=True, narrow=True),
            files=folder / "stopped" / "files",
            progress=progress,
        )
    return judge(options.command, folder, stop_after, options.again_args)


def judge(
    command: tuple[str, ...],
    folder: Path,
    stop_after: int | None,
    again_args: tuple[str, ...] = (),
) -> Replay:
    """What the recordings in a folder say, without torch. stop_after: None for `whole` and `again`.

    CaseError when `again` or `resumed` went on from the checkpoint of another run.
    """
    whole = read_folder(folder / "whole")
    _refuse_checkpoints(whole, read_folder(folder / "again"))
    pairs = [_pair("repeat", diff(folder / "whole", folder / "again"))]
    reasons: list[str] = []
    border = None
    if stop_after is not None:
        until = (None, stop_after)
        pairs.append(_pair("stopped", diff(folder / "whole", folder / "stopped", until)))
        resumed = read_folder(folder / "resumed")
        border = resumed_at(_states(whole), _states(resumed), stop_after - 1)
        _refuse_late_loading(whole, resumed, border)
        if border.whole and border.step >= stop_after:
            raise CaseError(
                f"resumed: it went on at step {border.step + 1}, though its run was stopped before "
                f"step {stop_after}: it loaded the checkpoint of another run; {OWN_FOLDER}"
            )
        if border.step == START:
            reasons.append(
                "resumed: it began at the beginning, so no resume was tested: no checkpoint was "
                f"saved within {stop_after} steps (--stop-after), or none was loaded "
                "(--resume-args), or not before `with verify.record`"
            )
        narrow = {rank: narrow_values(folder / "resumed", rank) for rank in resumed}
        rest = {rank: cut(one, border.step + 1, border.part) for rank, one in whole.items()}
        other = {rank: cut(one, 0, border.begun) for rank, one in resumed.items()}
        pairs.append(_resumed(folder, rest, other, border, narrow))
    for pair in pairs:
        reasons += [f"{pair.name}: {reason}" for reason in pair.diff.reasons]
    verdict = Verdict.UNVERIFIED if reasons else Verdict.VERIFIED
    if any(pair.verdict is Verdict.MISMATCH for pair in pairs):
        verdict = Verdict.MISMATCH
    return Replay(
        command,
        verdict,
        steps_of(whole),
        stop_after,
        border,
        tuple(pairs),
        tuple(suspects(whole)),
        tuple(reasons),
        again_args,
    )


def steps_of(run: Run) -> int:
    """How many steps a run made, the start not counted."""
    return min(sum(step.number > START for step in one.steps) for one in run.values())


def _stop_after(options: ReplayOptions, steps: int) -> int | None:
    if not options.resume:
        return None
    wanted = options.stop_after if options.stop_after is not None else steps // 2
    if not 1 <= wanted < steps:
        raise CaseError(
            f"the script makes {steps} step{'s' * (steps != 1)}, so it cannot be stopped after "
            f"{wanted} and go on; give --stop-after 1 to {steps - 1}, or --no-resume"
            if steps > 1
            else "the script makes a single step, so nothing can be resumed; train for more, or "
            "give --no-resume. Without an optimizer.step() all of it is one step: mark steps with "
            "recording.step()"
        )
    return wanted


def _refuse_checkpoints(whole: Run, again: Run) -> None:
    border = resumed_at(_states(whole), _states(again), START)
    if border.whole and border.step > START:
        raise CaseError(
            f"again: it began with the state of the first run after step {border.step}: it loaded "
            f"that run's checkpoint; {OWN_FOLDER}"
        )


def _refuse_late_loading(whole: Run, resumed: Run, border: Border) -> None:
    """Of a checkpoint that is loaded behind the first event of a recording: its first step begins
    with the initial state, and its second one with that of a later border."""
    if border.step > START or not border.whole:
        return
    later = {
        rank: states.opening(1) for rank, states in _states(resumed).items() if 1 in states.steps
    }
    after = border_of(_states(whole), later, 0)
    if after.whole and after.step > 0:
        raise CaseError(
            f"resumed: its first step is step {after.step}, and it begins with the initial state: "
            "it loads its checkpoint behind the first event that it records; load it before"
        )


def _resumed(
    folder: Path, whole: Run, resumed: Run, border: Border, narrow: dict[int, Narrow]
) -> Pair:
    first = border.step + 1
    a = write_rest(whole, first, 0, folder / f"whole-from-step-{first}")
    b = write_rest(resumed, 0, first, folder / f"resumed-from-step-{first}")
    found = diff(a, b)
    details = tuple(findings(whole, resumed, border, narrow))
    verdict = Verdict.MISMATCH if details else found.verdict
    return Pair("resumed", verdict, found, details)


def _pair(name: str, found: TraceDiff) -> Pair:
    return Pair(name, found.verdict, found)


def _states(run: Run) -> dict[int, States]:
    return {rank: States(one) for rank, one in run.items()}
