"""The digest value: what is compared across processes, ranks and machines instead of tensors.

A digest is a fingerprint of a tensor's bits in which position counts. It has a header (dtype,
global shape, number of covered elements) and four 64-bit lanes. It exists because tensors are too
large to send around, while "equal" has to mean equal bits: -0.0 is not +0.0 and the payload of a
NaN counts. `verify.hashing` computes it; this file only holds it, adds parts, prints and parses it,
and it imports neither torch nor numpy, so that the deciding half of the package can use it.

The lanes are sums over the 32-bit words m_i of the tensor (scheme `lanes4x64-v1`):

    lane_l = sum_i K_l(i) * m_i  mod 2**64,   l = 0..3,   K_l(i) a 32-bit key

so the digests of disjoint parts, each taken at its own global offset, add up to that of the whole.

What equal digests say. Let two different contents share dtype and shape, and let d_i be the
difference of their words, |d_i| < 2**32, with d_i != 0 for some i. For keys drawn uniformly and
independently of the contents, lane l collides only if K_l(i) * d_i equals one fixed number mod
2**64. The map K -> K * d_i is injective on 0 <= K < 2**32 (two keys differ by less than 2**32, and
a product of two numbers below 2**32 in magnitude is 0 mod 2**64 only if one of them is 0), so at
most one key of 2**32 collides: probability at most 2**-32 for one lane. The lanes read one row of
keys shifted by one (K_l(i) = K_0(i + l)), the Toeplitz construction: taking the last differing
word, lane l still has a fresh key when the lanes below it are fixed, which gives 2**-128 for all
four together (Krawczyk 1994; UMAC, RFC 4418, does the same).

What that rests on. The keys are not ideal: K_l(b, j) is the upper half of T[j + l] * B[b] mod 2**64
with two fixed, public tables made by splitmix64, for i = 4096 * b + j. Inside one block of 4096
words the four lanes have the Toeplitz form above; across blocks they share the multiplier B[b], so
a difference built from the tables can do better than 2**-128, and whoever knows the seed can build
collisions at will. It detects faults, not adversaries: it is NOT cryptographic. The tests try
structured differences (swaps, rectangles across blocks, +1 -2 +1, sign flips, permutations).

It refuses to add parts of different tensors, or more elements than the tensor has. It cannot see
that two parts overlap while others are missing, nor that parts were made with different seeds: that
is up to the caller.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

SCHEME = "lanes4x64-v1"
_MASK = (1 << 64) - 1
_TEXT = re.compile(
    r"(?P<dtype>[A-Za-z0-9_.]+)\[(?P<shape>(?:\d+(?:,\d+)*)?)\]"
    r"(?:\{(?P<count>\d+)\})?:(?P<lanes>[0-9a-f]{64})"
)


@dataclass(frozen=True, slots=True)
class Digest:
    """Header and lanes of one tensor, or of the part of it that has been covered so far.

    dtype: torch's name without the prefix, e.g. `bfloat16`. shape: the global shape. count: covered
    elements, at most numel(shape). lanes: four integers in [0, 2**64).
    """

    dtype: str
    shape: tuple[int, ...]
    count: int
    lanes: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        if self.shape and min(self.shape) < 0:
            raise ValueError(f"digest of {self.dtype}{list(self.shape)}: a size is negative")
        if not 0 <= self.count <= self.numel:
            raise ValueError(
                f"digest of {self.dtype}{list(self.shape)} covers {self.count} elements, "
                f"but the tensor has {self.numel}"
            )
        if len(self.lanes) != 4 or min(self.lanes) < 0 or max(self.lanes) > _MASK:
            raise ValueError(f"a digest has four lanes in [0, 2**64), not {self.lanes}")

    @classmethod
    def zero(cls, dtype: str, shape: tuple[int, ...]) -> "Digest":
        """The digest of no elements of such a tensor: where adding parts starts."""
        return cls(dtype, tuple(shape), 0, (0, 0, 0, 0))

    @classmethod
    def parse(cls, text: str) -> "Digest":
        """Read what `str` wrote; ValueError when the text is anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"not a digest: {text!r}; expected DTYPE[SIZES]:HEX or DTYPE[SIZES]{{COUNT}}:HEX "
                "with 64 lower-case hex digits"
            )
        shape = tuple(int(size) for size in match["shape"].split(",")) if match["shape"] else ()
        count = math.prod(shape) if match["count"] is None else int(match["count"])
        a, b, c, d = (int(match["lanes"][at : at + 16], 16) for at in (0, 16, 32, 48))
        return cls(match["dtype"], shape, count, (a, b, c, d))

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether as many elements are covered as the tensor has (an empty tensor is whole)."""
        return self.count == self.numel

    def __add__(self, other: "Digest") -> "Digest":
        """The digest of two disjoint parts of one tensor; ValueError when they cannot be that."""
        if not isinstance(other, Digest):
            return NotImplemented
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise ValueError(f"digests of different tensors do not add: {self} and {other}")
        if self.count + other.count > self.numel:
            raise ValueError(f"parts cover more than {self.numel} elements: {self} and {other}")
        a, b, c, d = (
            (mine + theirs) & _MASK for mine, theirs in zip(self.lanes, other.lanes, strict=True)
        )
        return Digest(self.dtype, self.shape, self.count + other.count, (a, b, c, d))

    def __str__(self) -> str:
        part = "" if self.whole else f"{{{self.count}}}"
        sizes = ",".join(map(str, self.shape))
        return f"{self.dtype}[{sizes}]{part}:" + "".join(f"{lane:016x}" for lane in self.lanes)


@dataclass(frozen=True)
class StateDigest:
    """Digests of the tensors of a state by name; `str` is one sha256 over all of them."""

    tensors: Mapping[str, Digest]

    def __str__(self) -> str:
        return combine(self.tensors)


def combine(digests: Mapping[str, Digest]) -> str:
    """One sha256 (64 hex digits) of named digests, whatever the order they are given in.

    Names and digests are framed by their lengths, so moving text from a name to its neighbour
    changes the result; the scheme is part of it. An empty mapping has a value too: judge emptiness
    yourself.
    """
    total = hashlib.sha256(SCHEME.encode())
    for name in sorted(digests):
        for text in (name.encode(), str(digests[name]).encode()):
            total.update(len(text).to_bytes(8, "little") + text)
    return total.hexdigest()
