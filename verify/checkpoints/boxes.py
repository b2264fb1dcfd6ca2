"""Digests of boxes of a tensor, at their place in the whole.

A digest is taken along one dimension of a whole; a box that is cut in several is filled with zeros
to what is cut in one, since words of zeros add nothing to a sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from verify.checkpoints.parameters import Box
from verify.device_parts import Shard
from verify.digests import Digest
from verify.hashing import digest_all


def digest_box(whole: Tensor, box: Box) -> Digest:
    """The digest of one box of a tensor, as the rank that holds only that box takes it."""
    piece = whole.detach()[tuple(slice(*edge) for edge in box)]
    filled, shard = along_one_dimension(piece, box, tuple(whole.shape))
    return replace(digest_all({"box": filled}, {"box": shard})["box"], count=piece.numel())


def along_one_dimension(
    piece: Tensor, box: Box, shape: tuple[int, ...]
) -> tuple[Tensor, Shard | None]:
    """A box's tensor as `verify.hashing.digest_all` takes it: itself or filled, and its place."""
    cut = [dim for dim, size in enumerate(shape) if box[dim] != (0, size)]
    if not cut:
        return piece, None
    dim = cut[0]
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
