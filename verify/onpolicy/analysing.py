"""From files to a verdict: read, pair, measure, look for causes, judge.

It prints nothing and decides nothing itself; every step is a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from verify import input_files
from verify.errors import InputFileError
from verify.onpolicy import routing
from verify.onpolicy.causes.dropout import values_of
from verify.onpolicy.causes.ranking import diagnose
from verify.onpolicy.causes.table import Cause, Evidence
from verify.onpolicy.causes.weights import problem
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.gates import Gate
from verify.onpolicy.metrics import field_metrics
from verify.onpolicy.numbers import Numbers, measure
from verify.onpolicy.pairing import Pairs, pair
from verify.onpolicy.samples import META, ROLLOUT, TRAINER, Dump
from verify.onpolicy.verdicts import OnPolicyVerdict, judge
from verify.rendering.escaping import clipped

LARGEST_CONFIG = 1 << 26  # bytes of a JSON file with settings or weights


@dataclass(frozen=True, eq=False)
class Analysis:
    """All that was found. trainer, rollout: (path, format); rollout is None where one holds both.

    metrics: the field's own, by the names of metrics.METRICS. routing: None where no sample has a
    record of experts.
    """

    trainer: tuple[str, str]
    rollout: tuple[str, str] | None
    pairs: Pairs
    numbers: Numbers
    metrics: Mapping[str, float | int | None]
    routing: routing.RoutingCheck | None
    causes: tuple[Cause, ...]
    verdict: OnPolicyVerdict


def analyse(
    trainer: Path,
    rollout: Path | None = None,
    *,
    read_as: str | None = None,
    evidence: Evidence | None = None,
    gates: Sequence[Gate] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Analysis:
    """Reads one dump that holds both sides, or one of each, and says what, where and probably why.

    read_as: a name of formats.table.NAMES, where it should not be found from the content. gates:
    the user's bounds. progress is told what begins. Raises InputFileError for what cannot be read
    at all; what is read in part is in the pairs' problems.
    """
    progress(f"reading {trainer}")
    ours = read_dump(trainer, TRAINER, read_as)
    theirs = None
    if rollout is not None:
        progress(f"reading {rollout}")
        theirs = read_dump(rollout, ROLLOUT, read_as)
    return analyse_dumps(ours, theirs, evidence=evidence, gates=gates, progress=progress)


def analyse_dumps(
    trainer: Dump,
    rollout: Dump | None = None,
    *,
    evidence: Evidence | None = None,
    gates: Sequence[Gate] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Analysis:
    """The same of dumps that are in memory. Raises nothing."""
    progress("aligning")
    pairs = pair(trainer, rollout)
    evidence = evidence or Evidence()
    pairs = replace(pairs, notes=(*pairs.notes, *_rescored(pairs, evidence)))
    numbers = measure(pairs)
    progress("looking for causes")
    causes = diagnose(pairs, numbers, evidence)
    routes = routing.check(pairs)
    return Analysis(
        _named(trainer),
        None if rollout is None else _named(rollout),
        pairs,
        numbers,
        field_metrics(pairs),
        routes,
        causes,
        judge(pairs, numbers, causes, gates, routes),
    )


def evidence_from(
    *,
    run_config: Path | None = None,
    generation_config: Path | None = None,
    weights: Path | None = None,
    trainer_again: Path | None = None,
    versions: Mapping[str, Path] | None = None,
    read_as: str | None = None,
) -> Evidence:
    """Evidence in files. run_config, generation_config: JSON objects, of which the names of
    samples.META count. weights: what `verify weights --format json` printed. trainer_again,
    versions: dumps of the trainer's values, a second time or by other versions of its weights.
    read_as: the format of these dumps, where it should not be found from the content.

    Raises InputFileError for what is no JSON object, holds no setting, or is no dump.
    """
    dumps = {name: read_dump(path, TRAINER, read_as) for name, path in (versions or {}).items()}
    return Evidence(
        run_config=_settings(run_config),
        generation_config=_settings(generation_config),
        weights=None if weights is None else _weights(weights),
        trainer_again=None if trainer_again is None else read_dump(trainer_again, TRAINER, read_as),
        steps=dumps or None,
    )


def _rescored(pairs: Pairs, evidence: Evidence) -> Iterator[str]:
    """A note for each further scoring that does not hold all of these tokens."""
    scorings = {f"version {name}": dump for name, dump in (evidence.steps or {}).items()}
    if evidence.trainer_again is not None:
        scorings["the trainer's second scoring"] = evidence.trainer_again
    for name, dump in scorings.items():
        held = int(np.isfinite(values_of(pairs, dump)[pairs.scored]).sum())
        scored = int(np.count_nonzero(pairs.scored))
        if held < scored:
            yield (
                f"{name} has values of {held:,} of {scored:,} tokens: its samples are found by id, "
                "and must have the same token ids"
            )


def _named(dump: Dump) -> tuple[str, str]:
    files = dump.files
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0] if files else '(memory)'}{more}", dump.format


def _settings(path: Path | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    held = _object(path)
    found = {name: value for name, value in held.items() if name in META}
    if not found:
        names = ", ".join(repr(name) for name in list(held)[:8]) or "nothing"
        raise InputFileError(
            f"{path}: holds {names}, and no setting of sampling; allowed are {', '.join(META)}"
        )
    for name, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if META[name].startswith(("float", "int")) and not number and value is not None:
            raise InputFileError(f"{path}: {name} is {clipped(repr(value), 60)}; give a number")
    return found


def _weights(path: Path) -> Mapping[str, Any]:
    held = _object(path)
    wrong = problem(held)
    if wrong:
        raise InputFileError(f"{path}: is not what `verify weights --format json` prints: {wrong}")
    return held


def _object(path: Path) -> Mapping[str, Any]:
    what = "a JSON object"
    text = input_files.read_text(path, what, largest=LARGEST_CONFIG)
    held = input_files.parse_json(text.removeprefix("\ufeff"), str(path), what)
    if not isinstance(held, dict):
        raise InputFileError(f"{path}: holds a {type(held).__name__}; {what} is needed")
    return held
