"""Writes a recording as the JSON lines of Megatron-LM's tracer (its pull request 6610, version 1).

One file a rank, `rank_000000.jsonl`, one line an event, to be read by that tracer's comparator and
by whatever reads lines. We hold digests, not values, so lines say mode "metadata" and
`value_observed: false`: the format's `sha256` is a hash of another kind, which is not made up here.
Our digest stands in `metadata`, the place that the format leaves free, with what was not recorded.

It refuses to write over a file that is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verify import input_files
from verify.errors import InputFileError
from verify.rendering.escaping import clipped
from verify.tracing.definitions import START, Event, Recording
from verify.tracing.rank_diffs import Range, within

_LONGEST = 400  # characters of a name; the format allows 512
_UNKNOWN = "unknown"
_NOT_RECORDED = ["layout", "stride", "device_type", "requires_grad", "microbatch"]
_PHASES = {
    "input": "forward",
    "output": "forward",
    "probe": "forward",
    "grad_output": "backward",
    "grad_input": "backward",
    "grad": "backward",
}


def export(run: dict[int, Recording], folder: Path, steps: Range = (None, None)) -> int:
    """Writes a file for each rank into a folder, made if it is not there; returns the lines.

    InputFileError when a file exists or cannot be written; then no file of this call is left.
    """
    written: list[Path] = []
    count = 0
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, recording in sorted(run.items()):
            path = folder / f"rank_{rank:06d}.jsonl"
            with path.open("x", encoding="ascii") as file:
                written.append(path)
                for line in lines(recording, steps):
                    file.write(json.dumps(line, allow_nan=False) + "\n")
                    count += 1
    except BaseException as error:
        for made in written:
            made.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise InputFileError(
                f"{path}: exists already; give a folder without rank_*.jsonl files"
            ) from None
        if isinstance(error, OSError):
            raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from error
        raise
    return count


def lines(recording: Recording, steps: Range) -> Iterator[dict[str, Any]]:
    """The records of one rank in the order of execution."""
    sequence = 0
    for step in recording.steps:
        if not within(step.number, steps):
            continue
        seen: dict[tuple[str, str], int] = {}
        for event in step.events:
            one = _record(event, recording)
            key = (one["phase"], one["name"])
            one["occurrence"] = seen.get(key, 0)
            seen[key] = one["occurrence"] + 1
            yield {**one, "sequence": sequence}
            sequence += 1


def _record(event: Event, recording: Recording) -> dict[str, Any]:
    definition = event.definition
    parts = (definition.name or "(model)", definition.kind, definition.path)
    whole = definition.whole
    return {
        "schema_version": 1,
        "rank": recording.header.rank,
        "iteration": None if event.step == START else event.step,
        "microbatch": None,
        "phase": "start" if event.step == START else _PHASES.get(definition.kind, "state"),
        "event": "tensor",
        "name": clipped(":".join(part for part in parts if part), _LONGEST),
        "tensor": {
            "mode": "metadata",
            "shape": list(definition.shape),
            "numel": math.prod(definition.shape),
            "dtype": definition.dtype,
            "layout": _UNKNOWN,
            "device_type": _UNKNOWN,
            "requires_grad": False,
            "value_observed": False,
            "exact_value_certificate": False,
        },
        "metadata": {
            "digest": str(event.digest),
            "digest_scheme": recording.header.scheme,
            "name": definition.name,
            "kind": definition.kind,
            "path": definition.path,
            "call": event.occurrence,
            "module": definition.module,
            "whole": None
            if whole is None
            else {"shape": list(whole.shape), "ranges": [list(one) for one in whole.ranges]},
            "not_recorded": _NOT_RECORDED,
        },
    }
