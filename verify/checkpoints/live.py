"""Digests of the weights of a running process: `weights_digests` and `save_weights_digests`.

A tensor on a device is digested there. A DTensor counts as the part that this rank holds, at its
place in the whole, so what the ranks save adds up. It refuses values that are no tensors, unless
they are named to be left out: what is skipped silently would count as equal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from verify.checkpoints import digest_files
from verify.checkpoints.boxes import along_one_dimension
from verify.checkpoints.expert_names import cuts
from verify.checkpoints.matching import Patterns
from verify.checkpoints.parameters import Box, Part, box_problem, whole_box
from verify.device_parts import Shard
from verify.digests import Digest
from verify.errors import UnsupportedError
from verify.hashing import digest_all

Place = tuple[int, int, Sequence[int]]
"""(dimension, first entry, shape of the whole) of a plain tensor that is a shard."""


def weights_digests(
    state_dict: Mapping[str, object],
    *,
    ignore: Sequence[str] = (),
    places: Mapping[str, Place] | None = None,
) -> dict[str, Digest]:
    """The digest of every tensor of a state_dict by name, nested names joined by dots.

    A DTensor gives the digest of this rank's part (`count` says how much); those of all ranks add
    up to the whole's if no part is there twice. ignore: patterns (`*` is any text) of names to
    leave out. places: by name, where a plain tensor that is a shard lies: (dim, start, full_shape).

    UnsupportedError for what is no tensor, for Partial placements, and for names in `places` that
    are not there; ValueError for a shard that does not fit into its whole.
    """
    found = parts_of(state_dict, ignore, places, "here")
    return {name: _total(parts) for name, parts in found.items()}


def save_weights_digests(
    path: str | os.PathLike[str],
    state_dict: Mapping[str, object],
    *,
    ignore: Sequence[str] = (),
    places: Mapping[str, Place] | None = None,
    rank: int | None = None,
    world: int | None = None,
) -> None:
    """Writes the digests as a file that `verify weights` takes as A or B; replaces an older one.

    Stacked experts get a digest each, so that a difference has the expert's number.
    On several ranks each writes a file of its own into one folder, which is given as A or B. rank,
    world: those of torch.distributed where it is initialised, else none. The rest, and errors, as
    for `weights_digests`; ValueError for a rank outside of the world.
    """
    here = torch.distributed
    if rank is None and world is None and here.is_available() and here.is_initialized():
        rank, world = here.get_rank(), here.get_world_size()
    if (rank is None) != (world is None) or (
        rank is not None and world is not None and not 0 <= rank < world
    ):
        raise ValueError(f"rank {rank} of {world}: give both, 0 <= rank < world, or neither")
    target = Path(path)
    digest_files.write(target, parts_of(state_dict, ignore, places, str(target)), rank, world)


def parts_of(
    state_dict: Mapping[str, object],
    ignore: Sequence[str],
    places: Mapping[str, Place] | None,
    origin: str,
) -> dict[str, tuple[Part, ...]]:
    """What this process holds of every parameter."""
    if not isinstance(state_dict, Mapping):
        raise UnsupportedError(
            f"digests of weights are taken of a mapping of names to tensors, not of a "
            f"{type(state_dict).__name__}: give module.state_dict(), with "
            "dict(module.named_buffers()) for buffers that it leaves out"
        )
    ignored = Patterns(ignore)
    tensors: dict[str, Tensor] = {}
    for name, value in leaves("", state_dict):
        if ignored.match(name):
            continue
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"{name!r} is no tensor but a {type(value).__name__}: leave it out with "
                f"ignore=[{name!r}], or give only the part of the state that holds weights"
            )
        if name in tensors:
            raise UnsupportedError(f"two tensors are named {name!r}: rename one of them")
        tensors[name] = value
    unknown = sorted(set(places or {}) - set(tensors))
    if unknown:
        raise UnsupportedError(f"places names {unknown[0]!r}, which the state does not hold")
    return _digested(tensors, places or {}, origin)


def _digested(
    tensors: Mapping[str, Tensor], places: Mapping[str, Place], origin: str
) -> dict[str, tuple[Part, ...]]:
    """All digests together: on a device they take one launch."""
    pieces: dict[str, Tensor] = {}
    layouts: dict[str, Shard | None] = {}
    owners: dict[str, tuple[str, Box, int, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        for number, (piece, box, shape) in enumerate(
            cut
            for given in _pieces(name, tensor, places.get(name))
            for cut in _by_expert(name, *given)
        ):
            key = f"{number} {name}"
            pieces[key], layouts[key] = along_one_dimension(piece, box, shape)
            owners[key] = (name, box, piece.numel(), shape)
    digests = digest_all(pieces, layouts)
    # a rank outside of a parameter's mesh holds none of it, and knows that it exists
    found: dict[str, list[Part]] = {}
    for key, (name, box, count, shape) in owners.items():
        digest = replace(digests[key], shape=shape, count=count)  # without the zeros around it
        found.setdefault(name, []).append(Part(box, digest, origin))
    return {name: tuple(parts) for name, parts in found.items()}


def _pieces(
    name: str, tensor: Tensor, place: Place | None
) -> list[tuple[Tensor, Box, tuple[int, ...]]]:
    """The plain tensors that this process holds of a parameter: (tensor, place, global shape)."""
    shape = tuple(tensor.shape)
    if hasattr(tensor, "__create_chunk_list__"):
        if place is not None:
            raise UnsupportedError(f"{name!r} is a DTensor and knows its place: not in places")
        return _chunks(name, tensor)
    if place is None:
        return [(tensor, whole_box(shape), shape)]
    dim, start, full = place[0], place[1], tuple(place[2])
    if not 0 <= dim < len(full) or len(full) != len(shape):
        raise ValueError(f"places[{name!r}]: dimension {dim} of {list(full)} for {list(shape)}")
    box = tuple((start, start + size) if at == dim else (0, size) for at, size in enumerate(shape))
    problem = box_problem(box, full)
    if problem or any(shape[at] != full[at] for at in range(len(full)) if at != dim):
        raise ValueError(f"places[{name!r}]: {list(shape)} at {start} is no shard of {list(full)}")
    return [(tensor, box, full)]


def _by_expert(
    name: str, tensor: Tensor, box: Box, shape: tuple[int, ...]
) -> Iterator[tuple[Tensor, Box, tuple[int, ...]]]:
    """Stacked experts one by one, so that a difference has a number, and that a checkpoint that
    stores them one by one can be compared."""
    for part in cuts(name, box, shape):
        edges = zip(part, box, strict=True)
        inside = tuple(slice(at - first, stop - first) for (at, stop), (first, _) in edges)
        yield (tensor if part == box else tensor.detach()[inside]), part, shape


def _chunks(name: str, tensor: Tensor) -> list[tuple[Tensor, Box, tuple[int, ...]]]:
    """By the protocol through which torch.distributed.checkpoint asks DTensors."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shape, found = tuple(tensor.shape), []
    if _interleaved(tensor):
        raise UnsupportedError(
            f"{name!r} is sharded so that this rank holds rows from several places: call "
            "full_tensor() first"
        )
    try:
        chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UnsupportedError(f"{name!r}: no place in the whole: {error}") from error
    for number, chunk in enumerate(chunks):
        if len(chunk.offsets) != len(shape):  # this rank is not in the parameter's mesh
            continue
        index = MetadataIndex(name, chunk.offsets, number)
        local = tensor.__get_tensor_shard__(index)  # type: ignore[attr-defined]
        wait = getattr(local, "wait", None)  # the result of a collective that is under way
        local = wait() if wait is not None else local
        box = tuple((at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if tuple(local.shape) != tuple(chunk.sizes):
            raise UnsupportedError(
                f"{name!r}: the part of this rank is {list(local.shape)}, its place says "
                f"{list(chunk.sizes)}: call full_tensor() first"
            )
        found.append((local, box, shape))
    return found


def _interleaved(tensor: Tensor) -> bool:
    """Whether a strided shard is not, as under FSDP over tensor parallelism, cut once more by the
    mesh dimensions that it is strided for: then its place cannot be said by one box."""
    placements = getattr(tensor, "placements", ())
    for at, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            continue
        for mesh_dim in range(at + 1, len(placements)):
            if getattr(placements[mesh_dim], "dim", None) == placement.dim:
                factor //= tensor.device_mesh.size(mesh_dim)  # type: ignore[attr-defined]
        if factor != 1:
            return True
    return False


def _total(parts: Sequence[Part]) -> Digest:
    total = parts[0].digest
    for part in parts[1:]:
        total += part.digest
    return total


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Values inside mappings, lists and tuples, with their names joined by dots."""
    if isinstance(value, Mapping | list | tuple) and not isinstance(value, Tensor):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from leaves(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, value
