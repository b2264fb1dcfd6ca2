"""Safetensors of named tensors: what any code can save with one call, in one of two layouts.

One sample after another, as one tensor for each field of each sample, named KEY/FIELD; or all
samples in one tensor for each field, named FIELD, with cu_seqlens [samples + 1], the borders
0, n1, n1 + n2, ... between responses, as variable-length attention has them. Fields:

    response_ids      integers [R]
    prompt_ids        integers [P]; packed: with prompt_cu_seqlens
    sampler_logprobs  floats [R], natural logarithm; NaN stays NaN
    trainer_logprobs  floats [R]
    logprobs          floats [R], of the side that the place on the command line says
    mask              bool or 0 and 1 [R], 1 where the token counts
    sampler_routing, trainer_routing
                      integers [rows, layers, k], -1 for none, row 0 at the prompt's first token;
                      packed: with routing_cu_seqlens

Metadata of the file, both optional: "ids", a JSON list with the key of each packed sample; "meta",
a JSON object of settings by the names of samples.META. Without ids packed samples are numbered.
Numbers are read here from the bytes, bfloat16 too, so neither torch nor safetensors is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify import input_files, tensor_files
from verify.errors import InputFileError
from verify.onpolicy.formats import experts, values
from verify.onpolicy.formats.heads import SAFETENSORS, Head
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Place, Routing, Sample, Series

LARGEST = 64 * 2**30  # bytes of a file, which is mapped
_VALUES = {ROLLOUT: "sampler_logprobs", TRAINER: "trainer_logprobs"}
_ROUTING = {ROLLOUT: "sampler_routing", TRAINER: "trainer_routing"}
_FIELDS = frozenset(
    ("response_ids", "prompt_ids", "logprobs", "mask", *_VALUES.values(), *_ROUTING.values())
)
_BORDERS = {  # of packed fields; those of all others are cu_seqlens
    "prompt_ids": "prompt_cu_seqlens",
    "sampler_routing": "routing_cu_seqlens",
    "trainer_routing": "routing_cu_seqlens",
}
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor lies in the file. kind: its dtype, as the format calls it."""

    kind: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class _File:
    path: Path
    tensors: Mapping[str, _Tensor]
    metadata: Mapping[str, Any]

    def part(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Rows begin to end of a tensor; bfloat16 as float32, which holds it exactly."""
        tensor = self.tensors[name]
        dtype = np.dtype(_DTYPES[tensor.kind])
        row = math.prod(tensor.shape[1:]) if len(tensor.shape) else 1
        shape = (end - begin, *tensor.shape[1:])
        if not (end - begin) * row:
            return np.zeros(shape, dtype)
        found = np.fromfile(
            self.path,
            dtype,
            count=(end - begin) * row,
            offset=tensor.begin + begin * row * dtype.itemsize,
        ).reshape(shape)
        if tensor.kind == "BF16":
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found

    def whole(self, name: str) -> NDArray[Any]:
        return self.part(name, 0, self.tensors[name].shape[0] if self.tensors[name].shape else 1)


def fits(head: Head) -> bool:
    """A safetensors file in which some tensor has the name of a field, alone or after KEY/."""
    return head.container == SAFETENSORS and any(
        name.rpartition("/")[2] in _FIELDS for name in head.first
    )


def read(path: Path, side: str) -> Dump:
    """The samples of one file. Raises InputFileError where it cannot be read or has no field."""
    problems = Problems()
    whole = Spot(Place(str(path)), problems)
    try:
        file = _opened(path, whole)
        packed = [name for name in file.tensors if name in _FIELDS]
        keyed = sorted({name.rpartition("/")[0] for name in file.tensors if _is_keyed(name)})
        if not packed and not keyed:
            raise InputFileError(
                f"{path}: has no tensor named as a field; fields are {', '.join(sorted(_FIELDS))}, "
                "alone or after a sample's key and a slash"
            )
        notes: list[str] = []
        samples = [*_packed(file, side, whole, notes)] if packed else []
        for key in sorted(keyed, key=_natural)[: values.MOST_SAMPLES]:
            spot = Spot(Place(str(path), f"tensors {values.described(key)}"), problems)
            fields = {
                name: file.whole(f"{key}/{name}")
                for name in sorted(_FIELDS)
                if f"{key}/{name}" in file.tensors
            }
            kinds = {name: file.tensors[f"{key}/{name}"].kind for name in fields}
            sample = _sample(key, fields, kinds, side, spot)
            if sample is not None:
                samples.append(sample)
    except (OSError, ValueError) as error:  # the file was changed while it was read
        raise InputFileError(f"{path}: cannot read: {error}") from None
    config = values.meta(_json(file.metadata.get("meta"), whole, "metadata meta"), whole)
    return Dump("tensors", (str(path),), tuple(samples), problems.listed(), tuple(notes), config)


def _packed(file: _File, side: str, whole: Spot, notes: list[str]) -> Iterator[Sample]:
    borders = {
        name: _borders(file, name, whole)
        for name in dict.fromkeys(("cu_seqlens", *_BORDERS.values()))
    }
    main = borders["cu_seqlens"]
    if main is None:
        whole.unreadable(
            "is missing or cannot be read; packed fields need it to tell responses apart",
            "cu_seqlens",
        )
        return
    count = len(main) - 1
    usable: dict[str, NDArray[np.int64]] = {}
    for name in sorted(_FIELDS & set(file.tensors)):
        own = borders[_BORDERS.get(name, "cu_seqlens")]
        shape = file.tensors[name].shape
        rows = shape[0] if shape else 0
        if own is None or len(own) - 1 != count:
            given = "missing" if own is None else f"for {len(own) - 1} samples"
            whole.bad(name, f"its {_BORDERS[name]} is {given}; there are {count} samples")
        elif int(own[-1]) != rows:
            border = _BORDERS.get(name, "cu_seqlens")
            whole.bad(name, f"has {rows} rows, and {border} ends at {int(own[-1])}")
        else:
            usable[name] = own
    keys = _keys(file, count, whole, notes)
    for at in range(count):
        spot = Spot(Place(whole.place.file, f"packed[{at}]"), whole.problems)
        fields = {
            name: file.part(name, int(own[at]), int(own[at + 1])) for name, own in usable.items()
        }
        kinds = {name: file.tensors[name].kind for name in fields}
        sample = _sample(keys[at], fields, kinds, side, spot)
        if sample is not None:
            yield sample


def _sample(
    key: str, fields: Mapping[str, NDArray[Any]], kinds: Mapping[str, str], side: str, spot: Spot
) -> Sample | None:
    series: dict[str, Series] = {}
    routing: dict[str, Routing] = {}
    for name, whose in (("logprobs", side), *((name, own) for own, name in _VALUES.items())):
        stored = "bfloat16" if kinds.get(name) == "BF16" else ""
        one = values.series(fields.get(name), spot, name, stored)
        if one is not None:
            series[whose] = one
    for own, name in _ROUTING.items():
        chosen = experts.routing(fields.get(name), spot, name, start=0)
        if chosen is not None:
            routing[own] = chosen
    tokens = values.ids(fields.get("response_ids"), spot, "response_ids")
    if tokens is None and not series:
        spot.unreadable("holds neither token ids nor log-probabilities that can be read")
        return None
    return Sample(
        key=key,
        place=spot.place,
        prompt=values.ids(fields.get("prompt_ids"), spot, "prompt_ids"),
        tokens=tokens,
        mask=values.mask(fields.get("mask"), spot, "mask"),
        series=series,
        routing=routing,
    )


def _keys(file: _File, count: int, whole: Spot, notes: list[str]) -> list[str]:
    given = _json(file.metadata.get("ids"), whole, "metadata ids")
    if isinstance(given, list) and len(given) == count:
        keys = [values.key(key, whole, f"metadata ids[{at}]") for at, key in enumerate(given)]
        return [key or f"packed {at}" for at, key in enumerate(keys)]
    if given is not None:
        whole.bad("metadata ids", f"is {values.described(given)}; it is a list of {count} keys")
    notes.append("packed samples without ids are paired by their place in the file")
    return [f"packed {at}" for at in range(count)]


def _borders(file: _File, name: str, whole: Spot) -> NDArray[np.int64] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind == "BF16" or len(tensor.shape) != 1 or tensor.shape[0] > values.MOST_SAMPLES:
        what = f"is {tensor.kind} {list(tensor.shape)}"
        whole.bad(name, f"{what}; it is one list of at most {values.MOST_SAMPLES} integers")
        return None
    found = values.integers(file.whole(name))
    if isinstance(found, str):
        whole.bad(name, f"{found}; it is one list of integers")
        return None
    if not len(found) or found[0] != 0 or bool(np.any(found[1:] < found[:-1])):
        whole.bad(name, "does not begin with 0, or falls; it is 0, n1, n1 + n2, ...")
        return None
    return found


def _json(text: Any, whole: Spot, field: str) -> Any:
    if text is None:
        return None
    try:
        return input_files.strict_json(text)
    except (ValueError, TypeError, RecursionError) as error:
        whole.bad(field, f"is no JSON: {error}")
        return None


def _opened(path: Path, whole: Spot) -> _File:
    problem = tensor_files.problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    if path.stat().st_size > LARGEST:
        raise InputFileError(f"{path}: {path.stat().st_size} bytes, at most {LARGEST} are read")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = input_files.strict_json(file.read(length).decode("utf-8"))
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    if sum(end - begin for begin, end in spans) > path.stat().st_size:
        raise InputFileError(f"{path}: is no safetensors file: its tensors overlap")
    tensors: dict[str, _Tensor] = {}
    for name, entry in header.items():
        field = name.rpartition("/")[2]
        if name == "__metadata__" or not (field in _FIELDS or field.endswith("cu_seqlens")):
            continue
        begin, end = entry["data_offsets"]
        kind, shape = entry.get("dtype"), entry.get("shape")
        if not isinstance(kind, str) or kind not in _DTYPES:
            shown = values.described(name)
            whole.bad(shown, f"is of {values.described(kind)}; read are {', '.join(_DTYPES)}")
        elif not _are_sizes(shape) or (
            math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize != end - begin
        ):
            whole.bad(values.described(name), "has another number of bytes than its shape says")
        else:
            tensors[name] = _Tensor(kind, tuple(shape), 8 + length + begin)
    metadata = header.get("__metadata__")
    return _File(path, tensors, metadata if isinstance(metadata, Mapping) else {})


def _are_sizes(shape: Any) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= 16
        and all(type(size) is int and 0 <= size < 2**40 for size in shape)
    )


def _is_keyed(name: str) -> bool:
    key, _, field = name.rpartition("/")
    return bool(key) and field in _FIELDS and len(key) <= values.LONGEST_KEY


def _natural(key: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d{1,18})", key)
    return [(int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts)]
