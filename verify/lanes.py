"""The sum that digests are made of (scheme `lanes4x64-v1`), on the CPU, by numpy.

Bytes at their global offset are cut into 32-bit little-endian words m_i; a word cut by a border
counts as two zero-filled parts. With i = 4096 * b + j

    K_l(b, j) = (T[j + l] * B[b] mod 2**64) >> 32         l = 0..3
    lane_l    = sum_i K_l(i) * m_i mod 2**64

where T[0..4098] and B[b] are outputs of splitmix64 (Steele, Lea, Flood 2014) from two seeds, B[b]
made odd. One multiplication makes the keys of 32 blocks, which four shifted windows share; the work
runs in buffers of 2 MB that each thread keeps. `csrc/digest/digest.cu` computes the same sum.
"""

import functools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

Words = npt.NDArray[np.uint64]

DEFAULT_SEED = 0x6D6F6B2D76657231
BLOCK = 4096
_ROWS = 32
_STRETCH = 4096  # blocks whose keys are made and kept together: 32 KB
_MASK = (1 << 64) - 1


def splitmix64(seed: int, start: int, count: int) -> Words:
    """Outputs `start .. start + count - 1` of splitmix64 from `seed`, uint64 [count]."""
    n = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    z = n * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@functools.lru_cache(maxsize=16)
def key_seeds(seed: int) -> tuple[int, int]:
    """The seeds of the tables T and B: the first two outputs of splitmix64 from `seed`."""
    first, second = splitmix64(seed, 0, 2).tolist()
    return first, second


@functools.lru_cache(maxsize=16)
def _table(seed: int) -> Words:
    """T, uint64 [4099]."""
    return splitmix64(key_seeds(seed)[0], 0, BLOCK + 3)


def block_keys(seed: int, start: int, count: int) -> Words:
    """B[start .. start + count - 1], uint64 [count], all odd."""
    return splitmix64(key_seeds(seed)[1], start, count) | np.uint64(1)


@functools.lru_cache(maxsize=64)
def _stretch(seed: int, index: int) -> Words:
    """B from block 4096 * index on, 32 more than the stretch has, so that no chunk crosses it."""
    return block_keys(seed, index * _STRETCH, _STRETCH + _ROWS)


@dataclass(frozen=True)
class _Scratch:
    """Buffers of one running sum: keys [32, 4099], their four windows [4, 32, 4096], and words."""

    keys: Words
    windows: Words
    words: Words


_idle = threading.local()


def _scratch() -> _Scratch:
    """The thread's idle buffers; new ones inside a signal handler that interrupts a sum."""
    found: _Scratch | None = _idle.__dict__.pop("scratch", None)
    if found is not None:
        return found
    keys = np.empty((_ROWS, BLOCK + 3), np.uint64)
    windows = as_strided(keys, (4, _ROWS, BLOCK), (8, *keys.strides))
    return _Scratch(keys, windows, np.empty((_ROWS, BLOCK), np.uint64))


class LaneSum:
    """Four lanes that grow by ranges of bytes, each at its global offset."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._table = _table(seed)
        self._lanes = np.zeros(4, np.uint64)
        self._scratch = _scratch()

    def lanes(self) -> tuple[int, int, int, int]:
        """The lanes so far; the buffers go back to the thread, so this is the last call."""
        _idle.scratch = self._scratch
        a, b, c, d = self._lanes.tolist()
        return a, b, c, d

    def add(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        """Add contiguous bytes (uint8 [n]) that lie at byte `offset` of the whole tensor."""
        if head := min(-offset % 4, data.size):
            self._add_cut_word(data[:head], offset)
            data, offset = data[head:], offset + head
        whole = data.size // 4 * 4
        if whole < data.size:
            self._add_cut_word(data[whole:], offset + whole)
        words = data[:whole].view("<u4")
        block, column = divmod(offset // 4, BLOCK)
        if column and words.size:
            cut = min(BLOCK - column, words.size)
            self._add_rows(words[:cut].reshape(1, -1), block, column)
            words, block = words[cut:], block + 1
        rows = words.size // BLOCK
        for row in range(0, rows, _ROWS):
            some = words[row * BLOCK : min(row + _ROWS, rows) * BLOCK]
            self._add_rows(some.reshape(-1, BLOCK), block + row, 0)
        if rows * BLOCK < words.size:
            self._add_rows(words[rows * BLOCK :].reshape(1, -1), block + rows, 0)

    def _add_cut_word(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        word = np.zeros((1, 4), np.uint8)
        word[0, offset % 4 : offset % 4 + data.size] = data
        self._add_rows(word.view("<u4"), *divmod(offset // 4, BLOCK))

    def _add_rows(self, words: npt.NDArray[Any], block: int, column: int) -> None:
        """Add words [rows <= 32, columns] from `column` on, one row a block from `block` on."""
        rows, columns = words.shape
        stretch, first = divmod(block, _STRETCH)
        multipliers = _stretch(self._seed, stretch)[first : first + rows]
        buffers = self._scratch
        keys = buffers.keys[:rows, : columns + 3]
        table = self._table[column : column + columns + 3]
        np.multiply(table[None, :], multipliers[:, None], out=keys)
        np.right_shift(keys, np.uint64(32), out=keys)
        wide = buffers.words[:rows, :columns]
        wide[...] = words
        # einsum adds products in registers: 0.36 ns each, 0.55 through a buffer
        self._lanes += np.einsum("lrc,rc->l", buffers.windows[:, :rows, :columns], wide)
