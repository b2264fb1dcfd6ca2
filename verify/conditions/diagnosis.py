"""What is said beside a result that does not fit: causes among the inputs, and a weak reference.

The seam between `references`, which executes and judges, and the modules that know about tensors
only. It executes nothing but what it is given and never changes a verdict, except that a weak
reference leaves none to be given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from verify.budgets import Reference
from verify.explanation import hypotheses, reference_errors, self_checks
from verify.explanation.telling import explained
from verify.staging import Stage


def causes(
    stage: Stage,
    wrong: Mapping[str, Tensor],
    fits: Callable[[Mapping[str, Tensor]], Mapping[str, str]],
    prefix: str,
    seconds: float,
) -> tuple[Mapping[str, list[str]], list[str]]:
    """By output, what the inputs tell of it: changes that it fits, special rows, coarse values; and
    lines on why they tell nothing, where looking failed.

    wrong: mask of every output that does not fit. fits: see `hypotheses.fitting`. seconds: what one
    call of the reference takes; a slow one is not called again.
    """
    told = explained(lambda: {"causes": _causes(stage, wrong, fits, prefix, seconds)})
    return told.get("causes", {}), told.get("lines", [])


def _causes(
    stage: Stage,
    wrong: Mapping[str, Tensor],
    fits: Callable[[Mapping[str, Tensor]], Mapping[str, str]],
    prefix: str,
    seconds: float,
) -> dict[str, list[str]]:
    if not wrong:
        return {}
    coarse = hypotheses.too_coarse(_given(stage))
    quick = seconds <= hypotheses.SECONDS / 2
    fitting = hypotheses.fitting(stage.tensors, fits) if quick else {}
    return {
        name: [
            *(f"{prefix} {text}" for text in fitting.get(name, ())),
            *(hypotheses.common_rows(mask, stage.tensors) if stage.world == 1 else ()),
            *coarse,
        ]
        for name, mask in wrong.items()
    }


def weak_references(
    stage: Stage,
    expected: Mapping[str, Reference],
    again: Mapping[str, Reference],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, str]:
    """By output, why its reference is not the float64 computation that it should be.

    again: the same references of the same inputs in float64; empty when there are none.
    """
    given, found = _given(stage), {}
    for name, reference in expected.items():
        why = self_checks.weakness(reference, again.get(name), given, dtypes[name])
        if why is not None:
            found[name] = why
    return found


def _given(stage: Stage) -> dict[str, Tensor]:
    """Every tensor that the case is given, those of its modules included."""
    given = dict(stage.tensors)
    for module, state in stage.module_state.items():
        given |= {f"{module}.{name}": kept.content for name, kept in state.items()}
    return given


def add_places(difference: dict[str, Any], wrong: Tensor, expected: Tensor, actual: Tensor) -> None:
    """Adds to an explained difference where it is, and selections that are none."""
    difference["lines"] = [*difference["lines"], *reference_errors.places(wrong)]
    repeated = hypotheses.repeated(expected, actual)
    if repeated is not None:
        difference["suggests"] = [repeated, *difference["suggests"]]
