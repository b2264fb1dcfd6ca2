"""The state of one `mok bench layer` run, and how a step of it may fail.

A step that raises becomes a line of the document and leaves the others alone; on several ranks all
of them take the same way. A device that no longer answers, or the time limit, ends the run with
everything before it written. Refuses to swallow what is no contender's fault: KeyboardInterrupt and
the like pass through.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mok.bench import document
from mok.bench.contenders import DIRECTIONS, OURS, Contender, Inputs, Prepared
from mok.bench.determinism import Finding
from mok.bench.document import Document
from mok.bench.instruments import Instruments
from mok.bench.protocols import ContenderFailed
from mok.bench.ranks import Together
from mok.bench.shapes import Shape

DEFAULT_ALONE = (OURS, "sonicmoe", "torch")


@dataclass(frozen=True)
class Options:
    """What to measure. contenders, alone: None for the defaults; sample_tokens: 0 for no sample.
    gemms: peers' grouped GEMMs by themselves too (one rank).

    seconds: of a tight loop, 0 for no loops; rounds: 0 for no rotation; limit: seconds after which
    no new step begins. direction: "forward", "backward" or "both" of every contender; None for
    those that each one names. by_shape: each shape's rotation and loops before the next shape.
    """

    shapes: tuple[Shape, ...]
    routing: str = "gaussian"
    device: str = "cuda"
    ranks: int = 1
    rounds: int = 25
    seconds: float = 2.0
    contenders: tuple[str, ...] | None = None
    alone: tuple[str, ...] | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    accuracy: bool = True
    sample_tokens: int = 0
    sample_experts: int = 2
    gemms: bool = False
    limit: float | None = None
    direction: str | None = None
    by_shape: bool = False


class RunEnded(Exception):
    """The run cannot go on; its document says why."""


@dataclass(frozen=True)
class Run:
    """One run in progress. document grows; save() is called after every step, on rank 0."""

    options: Options
    instruments: Instruments
    together: Together
    contenders: Mapping[str, Contender]
    findings: Sequence[Finding]
    document: Document
    say: Callable[[str], None]
    save: Callable[[Document], None]
    started: float = field(default_factory=time.perf_counter)


def wanted_alone(options: Options, contenders: Mapping[str, Contender]) -> list[str]:
    """Contenders to loop alone, of those that can run."""
    wanted = DEFAULT_ALONE if options.alone is None else options.alone
    return [name for name in contenders if name in wanted]


def directions_of(options: Options, contender: Contender) -> tuple[str, ...]:
    """The directions in which a contender is timed."""
    if options.direction is None:
        return contender.directions
    return DIRECTIONS if options.direction == "both" else (options.direction,)


def save_now(run: Run, ended: str = "not finished") -> None:
    """Brings the document up to date and writes it, on rank 0."""
    run.document["seconds"] = round(time.perf_counter() - run.started, 1)
    run.document["ended"] = ended
    run.document["ratios"] = document.ratios(run.document["rows"], OURS)
    if run.together.rank == 0:
        run.save(run.document)


def go_on(run: Run) -> None:
    """Raises RunEnded when the time limit has passed on any rank."""
    limit = run.options.limit
    over = limit is not None and time.perf_counter() - run.started > limit
    if not run.together.all_true(not over):
        raise RunEnded(f"stopped at the time limit of {limit:g} s")


def attempt(run: Run, shape: Shape, name: str, stage: str, step: Callable[[], None]) -> bool:
    """Whether the step succeeded on all ranks; a failure becomes a line of the document.

    Raises RunEnded when the device no longer answers.
    """
    problem: BaseException | None = None
    try:
        step()
        run.instruments.synchronize()
    except Exception as error:
        problem = error.cause if isinstance(error, ContenderFailed) else error
        name = error.who if isinstance(error, ContenderFailed) else name
        problem = problem.with_traceback(None)  # its frames hold tensors
    if problem is not None:
        _note(run, shape, name, stage, f"{type(problem).__name__}: {problem}")
        try:
            run.instruments.synchronize()
            run.instruments.release()
        except Exception as broken:
            said = str(broken).strip().splitlines() or [type(broken).__name__]
            raise RunEnded(
                f"the device stopped answering after {name} on {shape.name} ({stage}): "
                f"{said[0][:200]}"
            ) from broken
    everywhere = run.together.all_true(problem is None)
    if problem is None and not everywhere:
        _note(run, shape, name, stage, "another rank failed")
    return everywhere


def _note(run: Run, shape: Shape, name: str, stage: str, error: str) -> None:
    text = " ".join(error.split())[:500]
    run.document["failures"].append(
        {
            "shape": shape.name,
            "contender": name,
            "stage": stage,
            "error": text,
            "rank": run.together.rank,
        }
    )
    run.say(f"{shape.name}: {name} failed in {stage}: {text[:200]}")


def prepare(run: Run, shape: Shape, name: str, inputs: Inputs) -> Prepared | None:
    """The contender with these inputs, or None when any rank failed to prepare it."""
    made: list[Prepared] = []

    def step() -> None:
        made.append(run.contenders[name].prepare(inputs))

    return made[0] if attempt(run, shape, name, "prepare", step) else None


def close(run: Run, prepared: dict[str, Prepared]) -> None:
    """Closes and drops all of them, and gives their memory back."""
    while prepared:
        prepared.popitem()[1].close()
    run.instruments.release()


def setting(run: Run, shape: Shape) -> document.Setting:
    """What the rows of a shape have in common."""
    device = str(run.instruments.facts.get("device", run.instruments.device.type))
    return document.Setting(shape, run.options.routing, run.together.ranks, device)
