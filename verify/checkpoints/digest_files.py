"""Files of digests of weights: about 130 bytes a parameter instead of the parameter.

JSON, version 1:

    {"format": "mok-verify digests of weights", "version": 1, "scheme": "lanes4x64-v1",
     "rank": 0, "world": 4,                     null where there are no ranks
     "parameters": {
       "norm": "float32[64]:HEX",               a whole parameter: the text of its Digest
       "w": [{"box": [[0, 16], [0, 64]],        shards: their place, [start, stop) per dimension,
              "digest": "float32[64,64]{1024}:HEX"}]}}     and the digest at that place

Stacked experts are saved as parts, one for gate, up and down of each (`expert_names`). A folder of
such files, one a rank, is one checkpoint. It refuses two files of one rank, a file of another
scheme, and digests that do not count as many elements as their box has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verify import input_files
from verify.checkpoints.parameters import (
    Box,
    Checkpoint,
    Part,
    box_numel,
    box_problem,
    merged,
    whole_box,
)
from verify.digests import SCHEME, Digest
from verify.errors import InputFileError

FORMAT = "mok-verify digests of weights"
VERSION = 1
WHAT = "a file of digests of weights"


def write(
    path: Path, parts: Mapping[str, Sequence[Part]], rank: int | None, world: int | None
) -> None:
    """Writes or replaces the file as a whole: a reader never sees half of it."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "scheme": SCHEME,
        "rank": rank,
        "world": world,
        "parameters": {name: _entry(some) for name, some in parts.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(paths: Sequence[Path], shown: str, *, folder: bool) -> Checkpoint:
    """The checkpoint that these files make up. InputFileError naming file and reason.

    folder: whether all ranks are expected; a missing one keeps the comparison from VERIFIED.
    """
    found: dict[str, list[Part]] = {}
    ranks: dict[int, Path] = {}
    worlds: dict[int, Path] = {}
    for path in paths:
        document = _document(path)
        rank, world = document["rank"], document["world"]
        if rank is not None:
            if rank in ranks:
                raise InputFileError(f"{path}: is of rank {rank}, as {ranks[rank]} is")
            ranks[rank] = path
            worlds.setdefault(world, path)
        for name, entry in document["parameters"].items():
            found.setdefault(name, []).extend(_parts(path, name, entry))
    if len(worlds) > 1:
        (a, first), (b, second), *_ = worlds.items()
        raise InputFileError(f"{second}: is of {b} ranks, but {first} is of {a}")
    if folder and len(paths) > 1 and len(ranks) < len(paths):
        raise InputFileError(f"{shown}: holds several files of digests, and not each says its rank")
    world = next(iter(worlds), 0)
    missing = [rank for rank in range(world) if rank not in ranks]
    unsettled: tuple[str, ...] = ()
    if missing and folder:
        named = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        unsettled = (f"{shown}: of {world} ranks, no file of rank {named}",)
    kind = "digests" if world <= 1 else f"digests of {len(ranks)} of {world} ranks"
    parameters = {name: merged(name, parts) for name, parts in found.items()}
    return Checkpoint(shown, kind, parameters, unsettled=unsettled)


def is_one(path: Path) -> bool:
    """Whether a file says that it is one of ours."""
    try:
        with path.open("rb") as file:
            return FORMAT.encode() in file.read(512)
    except OSError:
        return False


def _entry(parts: Sequence[Part]) -> Any:
    if len(parts) == 1 and parts[0].box == whole_box(parts[0].digest.shape):
        return str(parts[0].digest)
    return [{"box": [list(edge) for edge in p.box], "digest": str(p.digest)} for p in parts]


def _document(path: Path) -> dict[str, Any]:
    document = input_files.parse_json(input_files.read_text(path, WHAT), str(path), WHAT)
    problem = _problem(document)
    if problem:
        raise InputFileError(f"{path}: not {WHAT}: {problem}")
    return document


def _problem(document: Any) -> str:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return f"it does not say {FORMAT!r}; verify.save_weights_digests writes one"
    if document.get("version") != VERSION or document.get("scheme") != SCHEME:
        return (
            f"it is of version {document.get('version')!r} and scheme {document.get('scheme')!r}, "
            f"this is version {VERSION} and scheme {SCHEME!r}; save it again with this version"
        )
    rank, world = document.get("rank"), document.get("world")
    if (rank, world) != (None, None) and not (
        type(rank) is int and type(world) is int and 0 <= rank < world <= 1 << 24
    ):
        return f"rank {rank!r} of {world!r}: both are null, or 0 <= rank < world"
    if not isinstance(document.get("parameters"), dict):
        return "it has no parameters"
    return ""


def _parts(path: Path, name: str, entry: Any) -> list[Part]:
    """The parts that one file holds of a parameter."""
    try:
        if isinstance(entry, str):
            digest = Digest.parse(entry)
            if not digest.whole:
                raise ValueError("covers a part, and does not say which")
            return [Part(whole_box(digest.shape), digest, str(path))]
        if not isinstance(entry, list) or not entry:
            raise ValueError("is neither a digest nor a list of parts")
        return [_part(path, item) for item in entry]
    except (ValueError, TypeError, KeyError) as error:
        told = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InputFileError(f"{path}: parameter {name!r}: {told}") from None


def _part(path: Path, item: Any) -> Part:
    digest = Digest.parse(item["digest"])
    box: Box = tuple((start, stop) for start, stop in item["box"])
    if any(type(edge) is not int for edges in box for edge in edges):
        raise ValueError(f"box {item['box']!r}: edges are integers")
    problem = box_problem(box, digest.shape)
    if problem:
        raise ValueError(problem)
    if digest.count != box_numel(box):
        raise ValueError(f"counts {digest.count} elements, its box has {box_numel(box)}")
    return Part(box, digest, str(path))
