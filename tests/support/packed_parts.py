"""Reads packed parts as the digest kernel does, tile by tile, with numpy; slow and plain."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from verify.device_parts import QUAD_BYTES, Geometry, Range
from verify.hashing import digest_on_host

Bytes = npt.NDArray[np.uint8]
M64 = 2**64 - 1


def lanes_of(
    packed: npt.NDArray[np.uint64], num_tiles: int, outputs: int, geometry: Geometry
) -> list[tuple[int, int, int, int]]:
    """Lanes of every output of a launch. AssertionError if tiles overlap or miss a byte."""
    rows = [[int(value) for value in row] for row in packed]
    index, tile = 0, 0
    # for every part and group: first byte, bytes so far, where it has to end, and its output
    tasks: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    while tile < num_tiles:
        if index + 1 < len(rows) and rows[index + 1][4] <= tile:
            index += 1
        row = rows[index]
        _, offset, num_bytes, group, first_tile, group_tiles = row[:6]
        number = (tile - first_tile) // group_tiles
        first = first_tile + number * group_tiles
        step = geometry.gather_bytes if row[8] & 0xFFFFFFFF else geometry.tile_bytes
        low = offset + number * group
        if low >= offset + num_bytes:  # a tile without bytes
            tile += 1
            continue
        high = min(low + group, offset + num_bytes)
        if row[27]:
            visits = step // QUAD_BYTES * group_tiles
            assert _visited(row, visits) == list(range(low // 16, -(-high // 16)))
            tasks[index, 0] = (low, high, high, row[7] & 0xFFFFFFFF)
            tile = first_tile + group_tiles
            continue
        at = tile - first + low // step
        begin, end = max(low, at * step), min(high, (at + 1) * step)
        if begin < end:
            before = tasks.get((index, number), (low, low, high, 0))
            assert before[1] == begin, "tiles miss bytes or overlap"
            tasks[index, number] = (low, end, high, (row[7] & 0xFFFFFFFF) + number)
        tile += 1
    for at, row in enumerate(rows):
        groups = -(-row[2] // row[3])
        assert all((at, number) in tasks for number in range(groups)), "a group has no tiles"
    lanes = [(0, 0, 0, 0)] * outputs
    for (at, _), (begin, end, high, slot) in tasks.items():
        assert end == high, "tiles end too early"
        data = torch.from_numpy(_bytes(rows[at], begin, end))
        found = digest_on_host(data, Range(begin, (end,))).lanes
        a, b, c, d = ((x + y) & M64 for x, y in zip(lanes[slot], found, strict=True))
        lanes[slot] = (a, b, c, d)
    return lanes


def _visited(row: list[int], visits: int) -> list[int]:
    """The quads of a visit along lines, sorted."""
    offset, high, (lines, line_bytes, line_quads) = row[1], row[1] + row[2], row[27:]
    found = []
    for number in range(visits):
        rest, across = divmod(number, lines)
        line, along = divmod(rest, line_quads)
        line = line * lines + across
        begin = offset + line * line_bytes
        quad = (begin + 15 if line else begin) // QUAD_BYTES + along
        if QUAD_BYTES * quad < min(begin + line_bytes, high):
            found.append(quad)
    return sorted(found)


def _bytes(row: list[int], begin: int, end: int) -> Bytes:
    """Bytes [begin, end) of the whole that a part lies in, zero in holes."""
    address, offset = row[0], row[1]
    axes, cut = row[8] & 0xFFFFFFFF, row[8] >> 32
    unit = row[7] >> 32
    at = np.arange(begin, end, dtype=np.int64)
    if axes == 0:
        return _memory(address + begin - offset, end - begin)
    digits, within = np.divmod(at - offset, unit)
    place = np.zeros_like(digits)
    there = np.ones(len(digits), bool)
    for axis in reversed(range(axes)):
        size, stride = row[11 + axis], row[19 + axis]
        digits, digit = (digits // size, digits % size) if axis else (digits, digits)
        if axis == cut:
            there &= digit < row[6]
        place += digit * stride
    places = (place * unit + within)[there]
    found = np.zeros(len(at), np.uint8)
    if len(places):
        found[there] = _memory(address, int(places.max()) + 1)[places]
    flips = np.array([row[9], row[10]], np.uint64).view(np.uint8)
    found[there] ^= flips[at[there] % 16]
    return found


def _memory(address: int, size: int) -> Bytes:
    return np.frombuffer(ctypes.string_at(address, size), np.uint8).copy()
