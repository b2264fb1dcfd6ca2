"""What one side says of a parameter: a tensor that can be loaded, or digests of it or its parts.

Parts of a parameter come from several ranks: each says which box of the whole it covers; equal
boxes are replicas, which must have equal bits, and others add up. It refuses parts that overlap
without being equal, since then two ranks count the same elements. No torch is needed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from verify.digests import Digest
from verify.errors import InputFileError

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""[start, stop) in every dimension of the whole."""

_MOST_CELLS = 10_000_000  # of the grid that boxes cut a whole into


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a larger one: an expert in the stacked tensor of all."""

    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """The digest of one box of a parameter, and which file or rank says so."""

    box: Box
    digest: Digest
    origin: str


@dataclass(frozen=True)
class Parameter:
    """dtype: torch's name without the prefix. shape: the global one.

    load: reads the whole tensor on the CPU; None where only digests are known, which are in `parts`
    then. problem: what replicas disagree about, else "". place: where `parts` belong to a larger
    whole, the place in it that this parameter is; their boxes and digests are that whole's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor] | None = None
    parts: tuple[Part, ...] = ()
    problem: str = ""
    place: Place | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def covered(self) -> int:
        """Elements that are known, at most numel."""
        return self.numel if self.load else sum(part.digest.count for part in self.parts)

    @property
    def boxes(self) -> frozenset[Box]:
        """The boxes that hold elements."""
        return frozenset(part.box for part in self.parts if part.digest.count)

    def form(self) -> str:
        """Such as bfloat16[4096,14336]."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def digest(self) -> Digest:
        """Of all that is known; loads the tensor if there is one."""
        if self.load is not None:
            from verify.hashing import digest_tensor

            return digest_tensor(self.load())
        total = Digest.zero(self.dtype, self.place.shape if self.place else self.shape)
        for part in self.parts:
            total += part.digest
        return total


@dataclass(frozen=True)
class Checkpoint:
    """One side of a comparison.

    kind: what it is, for a person. others: names of values that are no tensors, which are not
    compared. unsettled: why equal weights would not be enough, such as a rank without a file.
    """

    path: str
    kind: str
    parameters: Mapping[str, Parameter]
    others: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def equal_digests(a: Parameter, b: Parameter) -> bool:
    """Of two that are known as a whole; a tensor's at the place that the other's digests have."""
    shards, other = (a, b) if a.load is None else (b, a)
    if other.load is None or shards.place is None:
        return a.digest() == b.digest()
    from verify.checkpoints.boxes import digest_placed

    return digest_placed(other.load(), shards.place, shards.place.box) == shards.digest()


def whole_box(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def box_numel(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)


def box_problem(box: Box, shape: Sequence[int]) -> str:
    """Why a box cannot be one of a tensor of this shape, or ""."""
    inside = len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )
    return "" if inside else f"part {told(box)} does not lie in {list(shape)}"


def told(box: Box) -> str:
    """A box as Python's slices."""
    return f"[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def tiling_problem(shape: Sequence[int], boxes: Iterable[Box], *, cover: bool) -> str:
    """Why these boxes are not disjoint, or with `cover` do not make up the whole, or "".

    Boxes lie in the shape (`box_problem`). Their borders cut the whole into a grid, whose cells are
    counted, so the cost does not depend on the number of elements.
    """
    some = [box for box in boxes if box_numel(box)]
    if math.prod(shape) == 0:
        return ""
    cuts = [
        sorted({0, size, *(edge for box in some for edge in box[dim])})
        for dim, size in enumerate(shape)
    ]
    if math.prod(len(edges) - 1 for edges in cuts) > _MOST_CELLS:
        return f"is cut into more than {_MOST_CELLS} cells by its parts"
    places = [{edge: at for at, edge in enumerate(edges)} for edges in cuts]
    grid = np.zeros([len(edges) - 1 for edges in cuts], np.uint32)
    for box in some:
        grid[
            tuple(slice(at[start], at[stop]) for at, (start, stop) in zip(places, box, strict=True))
        ] += 1
    if grid.max() > 1:
        return "has parts that overlap"
    return "has elements that no part holds" if cover and grid.min() == 0 else ""


def merged(name: str, parts: Sequence[Part]) -> Parameter:
    """One parameter of what several ranks say of it.

    Equal boxes with other bits are its `problem`. InputFileError for parts that cannot be of one
    tensor: other dtype, other shape, or overlapping.
    """
    first = parts[0]
    kept: dict[Box, Part] = {}
    problem = ""
    for part in parts:
        if (part.digest.dtype, part.digest.shape) != (first.digest.dtype, first.digest.shape):
            forms = [str(one.digest).partition(":")[0] for one in (first, part)]
            raise InputFileError(
                f"{part.origin}: {name!r} is {forms[1]}, but {forms[0]} in {first.origin}: digests "
                "of one model are expected"
            )
        same = kept.setdefault(part.box, part)
        if same.digest.lanes != part.digest.lanes and not problem:
            where = "" if part.digest.whole else f" at {told(part.box)}"
            problem = f"replicas differ{where}: {same.origin} and {part.origin}"
    overlap = tiling_problem(first.digest.shape, kept, cover=False)
    if overlap:
        origins = ", ".join(sorted({part.origin for part in parts})[:4])
        raise InputFileError(f"{origins}: {name!r} {overlap}: were they saved at one time?")
    return Parameter(
        name, first.digest.dtype, first.digest.shape, None, tuple(kept.values()), problem
    )
