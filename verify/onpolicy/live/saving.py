"""Writes what was sampled and scored as JSON lines of our own, both sides in one file.

`verify onpolicy FILE` reads it again. The file appears whole or not at all.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verify.errors import InputFileError
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Routing, Sample

_NAMES = ((ROLLOUT, "sampler"), (TRAINER, "trainer"))


def refuse(path: Path) -> None:
    """InputFileError where the file could not be written, before anything is computed."""
    if path.is_dir():
        raise InputFileError(f"{path}: is a folder; give --save a file, such as {path}/pair.jsonl")
    if not path.parent.is_dir():
        raise InputFileError(f"{path}: there is no folder {path.parent}; make it first")


def save(path: Path, trainer: Dump, rollout: Dump) -> None:
    """One line a sample, with the values of both sides."""
    config = {"onpolicy": 1, "config": dict(rollout.config)}
    lines = [json.dumps(config)]
    for one, other in zip(trainer.samples, rollout.samples, strict=True):
        lines.append(json.dumps(_line((one, other))))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text("\n".join(lines) + "\n", encoding="ascii")
        os.replace(partial, path)
    except OSError as error:
        raise InputFileError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _line(both: Sequence[Sample]) -> dict[str, Any]:
    first = both[0]
    assert first.prompt is not None
    assert first.tokens is not None
    line: dict[str, Any] = {
        "id": first.key,
        "prompt_ids": first.prompt.tolist(),
        "response_ids": first.tokens.tolist(),
    }
    routes = {}
    for side, name in _NAMES:
        sample = next(one for one in both if side in one.series)
        series = sample.series[side]
        line[f"{name}_logprobs"] = series.values.tolist()
        line[f"{name}_dtype"] = series.stored
        if side in sample.routing:
            routes[name] = _routes(sample.routing[side])
    if routes:
        line["routing"] = routes
    line["meta"] = {name: value for one in both for name, value in one.meta.items()}
    return line


def _routes(routing: Routing) -> dict[str, Any]:
    experts = routing.experts.astype("<i4")
    found: dict[str, Any] = {
        "experts": {
            "data": base64.b64encode(experts.tobytes()).decode("ascii"),
            "dtype": "int32",
            "shape": list(experts.shape),
        },
        "start": routing.start,
        "layers": None if routing.layers is None else list(routing.layers),
    }
    if routing.margins is not None:
        margins = np.asarray(routing.margins, dtype=np.float64)
        found["margins"] = [[float(f"{one:.3g}") for one in row] for row in margins.tolist()]
    return found
