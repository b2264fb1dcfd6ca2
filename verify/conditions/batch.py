"""batch: the same batch entries alone, in smaller batches, elsewhere, among other neighbours.

What must stay equal is each entry's own result: outputs and gradients that have a batch dimension.
Sums over the batch, such as weight gradients, are named as not compared. Three questions are kept
apart, since they have different causes: another batch size (a library picks another algorithm),
another position (tiles), other neighbours (a leak).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verify.assembly import Part, pick
from verify.evidence import Trouble
from verify.execution import Capture, execute
from verify.placements import batch_dim_of, placement_of
from verify.sessions import Session, settle_sum
from verify.staging import batch_size, give

SIZES = (1, 2, 3, 5, 7)


@dataclass(frozen=True)
class Variant:
    """Which entries of the base batch stand where; `replaced` ones are refilled, not compared."""

    name: str
    rows: Tensor
    replaced: Tensor | None = None


def variants(entries: int) -> list[Variant]:
    """The batches to try for a base batch of `entries`."""
    found = [
        Variant(f"size={size}", torch.arange(size) + (entries - size) // 2)
        for size in (*SIZES, entries // 2, entries - 1)
        if 0 < size < entries
    ]
    if entries > 1:
        found.append(Variant("position=reversed", torch.arange(entries).flip(0)))
        found.append(Variant("position=rotated", torch.arange(entries).roll(entries // 3 + 1)))
        # one half, then the other: a leak may go from even entries to odd ones only
        odd = torch.arange(entries) % 2 == 1
        found.append(Variant("neighbours=replaced", torch.arange(entries), odd))
        found.append(Variant("neighbours=others replaced", torch.arange(entries), ~odd))
    names = [variant.name for variant in found]
    return [v for i, v in enumerate(found) if v.name not in names[:i]]


def run(session: Session, runs: int) -> None:
    """Every variant once, and again until there are `runs` executions."""
    stage, base = session.stage, session.base
    assert base is not None
    entries = batch_size(stage)
    if not entries or entries < 2:
        session.emit(
            Trouble(
                session.plan.case,
                "no-batch-dim",
                "no input has a declared batch dimension of at least two entries",
                claim="batch",
                rank=stage.rank,
            )
        )
        return
    todo = variants(entries)
    for index in range(max(runs, len(todo))):
        variant = todo[index % len(todo)]
        given = give(stage, stage.world, stage.rank, rows=variant.rows, refill=variant.replaced)
        capture = execute(stage, given, group=session.group)
        _settle(session, capture, variant, index)


def _settle(session: Session, capture: Capture, variant: Variant, index: int) -> None:
    base, case = session.base, session.stage.case
    assert base is not None
    count = len(variant.rows)
    keep = torch.ones(count, dtype=torch.bool)
    if variant.replaced is not None:
        keep &= ~variant.replaced[variant.rows]
    expected: dict[str, Part] = {}
    actual: dict[str, Part] = {}
    skipped: dict[str, str] = {}
    for name, kept in base.kept.items():
        dim, placement = batch_dim_of(case.batch, name), placement_of(case.placement, name)
        layout = base.layouts[name]
        if dim is None or dim >= kept.dim():
            skipped[name] = "no batch dimension"
        elif layout is not None and layout.dim != dim:
            skipped[name] = f"sharded along dimension {layout.dim}, batch is {dim}"
        else:
            same = placement is not None and placement.kind == "replicated"
            expected[name] = replace(pick(kept, layout, dim, variant.rows, keep), replicated=same)
            if same:
                expected[name] = replace(expected[name], count=None)
    for name, tensor in capture.outputs.items():
        if name in skipped:
            continue
        layout = capture.layouts[name]
        dim = batch_dim_of(case.batch, name)
        size = layout.full_shape[layout.dim] if layout is not None else None
        if dim is not None and dim < tensor.dim() and (size or tensor.shape[dim]) == count:
            actual[name] = pick(tensor, layout, dim, torch.arange(count), keep)
            if name in expected and expected[name].replicated:
                actual[name] = replace(actual[name], count=None, replicated=True)
        else:
            actual[name] = Part(tensor, layout)  # of another size, or new: it will not agree
    settle_sum(
        session,
        capture,
        claim="batch",
        variant=variant.name,
        run=index,
        expected=expected,
        actual=actual,
        group=session.group,
        not_compared=skipped,
        requested={"entries": count, "of": len(keep), "kind": variant.name.partition("=")[0]},
    )
