"""The same tokens in other company: alone, in a batch, padded, packed, in chunks.

A layout is a list of runs; the passes of a run share a key-value cache, if the layout has one. What
a model cannot be given is refused with the reason: a layout that was not run is not equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from verify.errors import UnsupportedError
from verify.onpolicy.live.calling import Convention, Pass
from verify.onpolicy.live.sequences import NOWHERE, Sampled, places

_EXTRA = 4  # pad tokens, where all sequences are equally long
ALONE, DECODE = "alone", "decode"


@dataclass(frozen=True, eq=False)
class Layout:
    """runs: passes by cache. cached: whether there is one. padding: pad tokens left of each."""

    name: str
    runs: tuple[tuple[Pass, ...], ...]
    cached: bool = False
    padding: tuple[int, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What a layout is made with. chunk: tokens of a chunk. pad: the id of padding."""

    chunk: int
    pad: int


def alone(samples: Sequence[Sampled], how: Convention, setting: Setting) -> Layout:
    """One pass over each sequence, as a trainer scores it: what everything is compared with."""
    runs = tuple((Pass(_ids([one]), _places(samples, [n])),) for n, one in enumerate(samples))
    return Layout(ALONE, runs)


def decode(samples: Sequence[Sampled], how: Convention, setting: Setting) -> Layout:
    """The prompt in one pass, then a token a pass, with a cache: as a sampler does."""
    _needs_cache(how)
    runs = []
    for n, one in enumerate(samples):
        borders = [0, *range(len(one.prompt), len(one.given) + 1)]
        runs.append(_pieces(n, one, borders))
    return Layout(DECODE, tuple(runs), cached=True)


def chunked(samples: Sequence[Sampled], how: Convention, setting: Setting) -> Layout:
    """Chunks of a few tokens with a cache: chunked prefill."""
    _needs_cache(how)
    runs = []
    for n, one in enumerate(samples):
        size = max(1, min(setting.chunk, len(one.given) // 2))
        runs.append(_pieces(n, one, [*range(0, len(one.given), size), len(one.given)]))
    return Layout("chunked", tuple(runs), cached=True)


def batch(samples: Sequence[Sampled], how: Convention, setting: Setting) -> Layout:
    """All sequences side by side, without a mask: shorter ones go on with tokens of others, which
    nothing before them may see."""
    _needs_company(samples)
    ids, where, _ = _grid(samples, setting, left=False)
    filler = torch.tensor([token for one in samples for token in one.given])
    at = where == NOWHERE
    ids[at] = filler[torch.arange(int(at.sum())) % len(filler)]
    return Layout("batch", ((Pass(ids, where),),))


def padded_right(samples: Sequence[Sampled], how: Convention, setting: Setting) -> Layout:
    """A batch with pad tokens behind the shorter sequences, and a mask."""
    _needs_mask(how)
    ids, where, _ = _grid(samples, setting, left=False)
    return Layout("padded-right", ((Pass(ids, where, (where != NOWHERE).long()),),))


def padded_left(samples: Sequence[Sampled], how: Convention, setting: Setting) -> Layout:
    """A batch with pad tokens before the shorter sequences, a mask, and position ids from it where
    the model takes any."""
    _needs_mask(how)
    ids, where, padding = _grid(samples, setting, left=True)
    mask = (where != NOWHERE).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0) if how.positions else None
    return Layout("padded-left", ((Pass(ids, where, mask, positions),),), padding=padding)


def packed(samples: Sequence[Sampled], how: Convention, setting: Setting) -> Layout:
    """All sequences behind each other in one row; position ids begin anew with each."""
    _needs_company(samples)
    if not how.positions:
        raise UnsupportedError("the model takes no position_ids, which tell packed sequences apart")
    ids = torch.cat([torch.tensor(one.given) for one in samples])[None]
    where = torch.cat([places(n, 0, len(one.given)) for n, one in enumerate(samples)])[None]
    positions = torch.cat([torch.arange(len(one.given)) for one in samples])[None]
    return Layout("packed", ((Pass(ids, where, None, positions),),))


Maker = Callable[[Sequence[Sampled], Convention, Setting], Layout]
LAYOUTS: Mapping[str, Maker] = MappingProxyType(
    {
        "batch": batch,
        "padded-left": padded_left,
        "padded-right": padded_right,
        "packed": packed,
        "chunked": chunked,
    }
)
"""What a sequence alone is compared with, beside the sampler itself."""


def _pieces(n: int, one: Sampled, borders: Sequence[int]) -> tuple[Pass, ...]:
    whole = torch.tensor(one.given)[None]
    return tuple(
        Pass(whole[:, start:stop], places(n, start, stop)[None])
        for start, stop in pairwise(borders)
        if stop > start
    )


def _ids(samples: Sequence[Sampled]) -> Tensor:
    return torch.tensor([one.given for one in samples])


def _places(samples: Sequence[Sampled], which: Sequence[int]) -> Tensor:
    return torch.stack([places(n, 0, len(samples[n].given)) for n in which])


def _grid(
    samples: Sequence[Sampled], setting: Setting, *, left: bool
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """ids and places [B, S], and the pad tokens of each sequence."""
    sizes = [len(one.given) for one in samples]
    width = max(sizes) + (_EXTRA if len(set(sizes)) == 1 else 0)
    ids = torch.full((len(samples), width), setting.pad, dtype=torch.int64)
    where = torch.full((len(samples), width), NOWHERE, dtype=torch.int64)
    for n, (one, size) in enumerate(zip(samples, sizes, strict=True)):
        at = slice(width - size, width) if left else slice(0, size)
        ids[n, at] = torch.tensor(one.given)
        where[n, at] = places(n, 0, size)
    return ids, where, tuple(width - size for size in sizes)


def _needs_cache(how: Convention) -> None:
    if not how.cache:
        raise UnsupportedError("the model takes no cache (cache or past_key_values)")


def _needs_mask(how: Convention) -> None:
    if not how.mask:
        raise UnsupportedError("the model takes no attention_mask, which tells what padding is")


def _needs_company(samples: Sequence[Sampled]) -> None:
    if len(samples) < 2:
        raise UnsupportedError("one sample is no batch; give --samples 2 or more")
