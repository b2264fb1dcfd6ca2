"""Faults that only a stored golden sees, and goldens that say nothing: none stored, other machine.

The goldens lie beside this file in `golden/` and ship with the package; `write` makes them anew,
and a test holds that it would write the same.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from verify.controls.one_process import in_order
from verify.controls.planting import backwards, cases_of, flip_lowest_bit, fold, plant
from verify.goldens.store import Entry

FOLDER = Path(__file__).with_name("golden")
ELSEWHERE = {"machine": "none", "torch": "none", "flags": "none"}


def one_bit_off(x: Tensor) -> Tensor:
    """The same wrong bit in every execution: only what was stored before tells it."""
    return flip_lowest_bit(fold(x), 3)


def backwards_sum(x: Tensor) -> Tensor:
    """The same sum in another order than when its golden was made."""
    return backwards(x)


CONTROLS = (
    plant(
        "condition/golden",
        one_bit_off,
        in_order,
        claim="golden",
        reason="golden-differs",
        also=("repeat",),
        alone=True,
        golden="exact",
    ),
    plant(
        "reason/golden-differs",
        backwards_sum,
        in_order,
        claim="golden",
        reason="golden-differs",
        alone=True,
        golden="exact",
    ),
    plant(
        "reason/no-golden",
        in_order,
        in_order,
        claim="golden",
        reason="no-golden",
        alone=True,
        golden="exact",
    ),
    plant(
        "reason/env-unknown",
        in_order,
        in_order,
        claim="golden",
        reason="env-unknown",
        alone=True,
        fault={"golden": "bits"},
        twin={"golden": "exact"},
    ),
)
CASES = cases_of(CONTROLS)


def goldens() -> tuple[list[Entry], dict[str, bytes]]:
    """The entries and files of FOLDER: of every case but the one that is to lack its own."""
    from verify.conditions.goldens import inputs_digest
    from verify.goldens import packing
    from verify.staging import prepare

    entries: list[Entry] = []
    files: dict[str, bytes] = {}
    for case in CASES:
        if case.name == "reason/no-golden/fault":
            continue
        stage = prepare(case)
        tensors = {"out": in_order(stage.tensors["x"])}
        digests = packing.digests_of(tensors)
        entry = Entry(
            case=case.name,
            kind=case.golden,
            key=ELSEWHERE if case.golden == "bits" else None,
            reason="for the controls of goldens",
            target=f"verify.controls.stored:{case.name}",
            file=packing.file_name(case.name, case.golden, digests),
            inputs=inputs_digest(stage),
            source_digest="",
            made={},
            outputs={"out": "float32"},
            tensors=digests,
        )
        entries.append(entry)
        files[entry.file] = packing.to_bytes(tensors, case.name, case.golden)
    return entries, files


def write() -> None:
    """Writes FOLDER anew."""
    from verify.goldens import store

    made, contents = goldens()
    with store.locked(FOLDER):
        store.write(FOLDER, made, contents)
