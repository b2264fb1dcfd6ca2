"""Digests of many small tensors together: half of a model is biases, scales and counters.

Tensors of at most one block of words have the same keys, so their bytes are copied when they are
met, into rows that are filled up with zeros, which add nothing, and 32 rows are summed at a time:
8 us a tensor where one alone takes 20.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from verify.lanes import BLOCK, DEFAULT_SEED, block_keys, key_seeds, splitmix64
from verify.tracing.definitions import LANES_BYTES

LARGEST = 4 * BLOCK  # bytes
_ROWS = 32


class SmallDigests:
    """Bytes that wait for their sums, which go to their places in the lanes of a step."""

    def __init__(self) -> None:
        table = splitmix64(key_seeds(DEFAULT_SEED)[0], 0, BLOCK + 3)
        keys = (table * block_keys(DEFAULT_SEED, 0, 1)) >> np.uint64(32)
        self._keys = as_strided(keys, (4, BLOCK), (8, 8))
        self._words = np.zeros((_ROWS, BLOCK), "<u4")
        self._bytes = self._words.view(np.uint8)
        self._places: list[int] = []
        self._width = 0

    def add(self, data: npt.NDArray[np.uint8], place: int, lanes: bytearray) -> None:
        """Takes the bytes of a tensor, at most LARGEST, whose sum belongs to `lanes[place:]`."""
        self._bytes[len(self._places), : data.size] = data
        self._places.append(place)
        self._width = max(self._width, -(-data.size // 4))
        if len(self._places) == _ROWS:
            self.finish(lanes)

    def keep(self, size: int) -> None:
        """Drops tensors whose places are not below `size`, the last ones that were added."""
        self._places = [place for place in self._places if place < size]
        self._words[len(self._places) :] = 0

    def finish(self, lanes: bytearray) -> None:
        """Writes the sums of what waits to their places."""
        if not self._places:
            return
        used = self._words[: len(self._places), : self._width]
        found = np.einsum("lc,rc->rl", self._keys[:, : self._width], used.astype(np.uint64))
        for place, row in zip(self._places, found.astype("<u8"), strict=True):
            lanes[place : place + LANES_BYTES] = row.tobytes()
        used[...] = 0
        self._places, self._width = [], 0
