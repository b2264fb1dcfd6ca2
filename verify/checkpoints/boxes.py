"""Digests of boxes of a tensor, at their place in the whole.

A digest is taken along one dimension of a whole. A box that is cut in several and lies in one
piece of memory (rows of one expert) is taken as rows; another is filled with zeros to what is cut
in one, since words of zeros add nothing to a sum.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from verify.checkpoints.parameters import Box, Place
from verify.device_parts import Shard
from verify.digests import Digest
from verify.hashing import digest_all


def digest_box(whole: Tensor, box: Box) -> Digest:
    """The digest of one box of a tensor, as the rank that holds only that box takes it."""
    piece = whole.detach()[tuple(slice(*edge) for edge in box)]
    return _digest(piece, box, tuple(whole.shape))


def digest_placed(tensor: Tensor, place: Place | None, box: Box) -> Digest:
    """As `digest_box`, of a tensor that lies at `place` in a larger whole; None: it is the whole.

    box: of that whole, inside of the place. The tensor has the place's elements, in their order.
    """
    if place is None:
        return digest_box(tensor, box)
    inner = tensor.detach().reshape([stop - start for start, stop in place.box])
    inside = tuple(
        slice(start - edge[0], stop - edge[0])
        for (start, stop), edge in zip(box, place.box, strict=True)
    )
    return _digest(inner[inside], box, place.shape)


def _digest(piece: Tensor, box: Box, shape: tuple[int, ...]) -> Digest:
    filled, shard = along_one_dimension(piece, box, shape)
    digest = digest_all({"box": filled}, {"box": shard})["box"]
    return replace(digest, shape=shape, count=piece.numel())


def along_one_dimension(
    piece: Tensor, box: Box, shape: tuple[int, ...]
) -> tuple[Tensor, Shard | None]:
    """A box's tensor as `verify.hashing.digest_all` takes it: itself, as rows or filled, and its
    place. The digest's shape may be another than the whole's: its lanes count the same words."""
    cut = [dim for dim, size in enumerate(shape) if box[dim] != (0, size)]
    if not cut:
        return piece, None
    dim, last = cut[0], cut[-1]
    if len(cut) > 1 and piece.numel() and all(stop - at == 1 for at, stop in box[:last]):
        row = 0
        for (start, _), size in zip(box[: last + 1], shape, strict=False):
            row = row * size + start
        whole = (math.prod(shape[: last + 1]), *shape[last + 1 :])
        return piece.reshape(piece.shape[last:]), Shard(0, row, whole)
    if len(cut) > 1 and piece.numel():
        sizes = [piece.shape[at] if at == dim else size for at, size in enumerate(shape)]
        filled = torch.zeros(sizes, dtype=piece.dtype, device=piece.device)
        filled[tuple(slice(*edge) if at != dim else slice(None) for at, edge in enumerate(box))] = (
            piece.detach()
        )
        piece = filled
    elif len(cut) > 1:
        sizes = [0 if at == dim else size for at, size in enumerate(shape)]
        return piece.detach().new_empty(sizes), Shard(dim, 0, shape)
    return piece, Shard(dim, box[dim][0], shape)
