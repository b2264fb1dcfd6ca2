"""Safetensors as a checkpoint: one file, or a folder of shards with or without an index.

A shard that the index, or the numbers in the shards' names, promises and that is not there is
named, and so is a tensor that two shards hold: which of them a loader takes is left to chance.
Tensors are read one at a time, and none before it is asked for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verify import input_files
from verify.checkpoints.parameters import Checkpoint, Parameter
from verify.errors import InputFileError
from verify.tensor_files import TensorFile, opened

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_WHAT = "an index of safetensors files"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{4,6})-of-(?P<total>\d{4,6})\.safetensors")
_NAMED = 5  # missing files in a message
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


@contextmanager
def file(path: Path) -> Iterator[Checkpoint]:
    """One file. InputFileError naming file and reason."""
    with opened(path) as handle:
        yield Checkpoint(str(path), "safetensors", _parameters(handle))


@contextmanager
def folder(top: Path, index: Path | None = None) -> Iterator[Checkpoint]:
    """All shards of a folder; with an index those that it names. InputFileError as above.

    index: the file; found by its name where there is exactly one.
    """
    indices = [index] if index else sorted(top.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        named = ", ".join(path.name for path in indices)
        raise InputFileError(f"{top}: holds several indices, {named}: give the one that is meant")
    there = sorted(path for path in top.iterdir() if path.name.endswith(SUFFIX))
    notes: tuple[str, ...] = ()
    homes: dict[str, str] = {}
    if indices:
        homes = _weight_map(indices[0])
        paths = [top / name for name in sorted(set(homes.values()))]
        _refuse_missing(top, [path.name for path in paths if not input_files.exists(path)])
        rest = [path.name for path in there if path not in paths]
        if rest:
            notes = (f"{indices[0]} does not name {', '.join(rest[:_NAMED])}: not read",)
    else:
        paths = there
        _refuse_missing(top, _unnumbered([path.name for path in paths]))
    with ExitStack() as stack:
        handles = [stack.enter_context(opened(path)) for path in paths]
        found: dict[str, Parameter] = {}
        seen: dict[str, Path] = {}
        for handle in handles:
            for name, parameter in _parameters(handle).items():
                if name in seen:
                    raise InputFileError(
                        f"{handle.path}: holds tensor {name!r}, as {seen[name]} does: which is "
                        "meant? Shards of one tensor are read from torch.distributed.checkpoint "
                        "or files of digests, not from safetensors"
                    )
                seen[name], found[name] = handle.path, parameter
        if indices:
            _refuse_unlike(indices[0], homes, {name: path.name for name, path in seen.items()})
        files = "1 file" if len(paths) == 1 else f"{len(paths)} files"
        yield Checkpoint(str(top), f"safetensors, {files}", found, notes=notes)


def _parameters(handle: TensorFile) -> dict[str, Parameter]:
    """dtype and shape from the header, which `opened` has checked to be one."""
    with handle.path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = input_files.strict_json(stream.read(length))
    found = {}
    for name in handle.names:
        load = functools.partial(handle.tensor, name)
        dtype = _DTYPES.get(str(header[name].get("dtype")))
        shape = tuple(header[name].get("shape", ()))
        if dtype is None:
            tensor = load()
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        found[name] = Parameter(name, dtype, shape, load)
    return found


def _weight_map(index: Path) -> dict[str, str]:
    document = input_files.parse_json(input_files.read_text(index, _WHAT), str(index), _WHAT)
    homes = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(homes, dict) or not homes:
        raise InputFileError(f"{index}: not {_WHAT}: it has no weight_map")
    for name, home in homes.items():
        if not isinstance(home, str) or Path(home).name != home or home in ("", ".", ".."):
            raise InputFileError(f"{index}: {name!r} lies in {home!r}, which is no name of a file")
    return homes


def _unnumbered(names: Sequence[str]) -> list[str]:
    """What the numbers in names such as model-00001-of-00004.safetensors say is missing."""
    found = {name: match for name in names if (match := _NUMBERED.fullmatch(name))}
    expected = {
        f"{match['stem']}-{number:0{len(match['number'])}d}-of-{match['total']}{SUFFIX}"
        for match in found.values()
        for number in range(1, min(int(match["total"]), 100_000) + 1)
    }
    zeroth = {name for name, match in found.items() if int(match["number"]) == 0}
    return sorted(expected - set(found)) if not zeroth else []


def _refuse_missing(top: Path, missing: Sequence[str]) -> None:
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        named = ", ".join(missing[:_NAMED])
        raise InputFileError(f"{top}: lacks {named}{more}: the checkpoint is not complete")


def _refuse_unlike(index: Path, homes: dict[str, str], seen: dict[str, str]) -> None:
    for name, home in homes.items():
        if seen.get(name) != home:
            other = f"; {seen[name]} holds it" if name in seen else ""
            raise InputFileError(f"{index}: tensor {name!r} is not in {home}{other}")
    extra = sorted(set(seen) - set(homes))
    if extra:
        raise InputFileError(
            f"{index}: does not name tensor {extra[0]!r}, which {seen[extra[0]]} holds"
        )
