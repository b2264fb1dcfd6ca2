"""The records that the layer's kernels read, as ctypes: the layout of csrc/moe/rank.cuh, by test.

They exist so that a launch can pass a rank by value (a recorded graph keeps it) and a table of
ranks or peers can be written into device memory as bytes. Constants are those of the header. Data
only: no torch, no driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 128
MAX_RANKS = 64
ROUTE_BITS = 25
PADDING = 0xFFFFFFFF
TICKET_ROWS = 4
SUM_TOKENS = 8
FLAGS = 3
COUNTER_HEAD = 32
COUNT_FAILED = 5
COUNT_EPOCH = 6
COUNT_SCHEDULE = 7
PLAN_BLOCKS = 8
PLAN_GROUPS = 9
PLAN_DISPATCH = 10
PLAN_DOWN = 11
PLAN_ROWS = 12
PLAN_BAD = 13
COUNT_LOG = 16

THREADS = 384
"""Threads of a CTA of `forward` (csrc/moe/pipeline.cuh)."""
SHARED_BYTES = 4 * 49152 + 8 * 4096 + 1024
"""Dynamic shared memory of `forward` (csrc/moe/pipeline.cuh)."""

WAITS = {
    1: ("WAIT_SCHEDULED", "the expert ids of rank {index}"),
    2: ("WAIT_ENTERED", "rank {index} to enter the launch"),
    4: ("WAIT_PUSHED", "the results of rank {index}"),
    5: ("WAIT_ROWS", "the dispatched rows of block {index}"),
    6: ("WAIT_RING_X", "the readers of the ring place that block {index} takes"),
    7: ("WAIT_HIDDEN", "the hidden rows of block {index}"),
    8: ("WAIT_RING_H", "the place in the ring of hidden rows for block {index}"),
    9: ("WAIT_RESULTS", "all results of this rank's experts"),
}
"""What a failed wait waited for: the header's name, and words with the index in them."""

_ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """An encoded tensor map; 128 bytes, all zero where a kernel does not use it."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class Group(ctypes.Structure):
    """A run of tickets of one kind."""

    _fields_ = (
        ("ticket", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
    )


class Peer(ctypes.Structure):
    """Addresses of one rank's symmetric memory, as the device that reads this sees them."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
    )


class Failure(ctypes.Structure):
    """A failed wait; state 0: there is none."""

    _fields_ = (
        ("state", ctypes.c_uint32),
        ("what", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("seen", ctypes.c_uint32),
        ("wanted", ctypes.c_uint32),
        ("cta", ctypes.c_uint32),
        ("ticket", ctypes.c_uint32),
    )


MAPS = (
    *("x_rows", "gate", "up", "hidden", "hidden_out", "down", "saved_gate", "saved_up", "x"),
    *("shared_gate", "shared_up", "shared_hidden", "shared_hidden_out", "shared_down"),
    *("shared_saved_gate", "shared_saved_up"),
)
POINTERS = (
    *("own_x", "out", "router", "shared_y", "x_ring", "peers", "routes", "blocks", "groups"),
    *("counters", "expert_rows", "counts", "failure"),
)
_TIMES = ("timeout_enter", "timeout")
NUMBERS = (
    *("rank", "ranks", "experts", "slots"),
    *("tokens", "max_tokens", "hidden_size", "width", "shared_width"),
    *("ring_x", "ring_h", "max_blocks", "max_shared_blocks", "max_groups", "max_chunks"),
    *("save", "segment_least", "segment_most"),
)
_RANK_FIELDS: tuple[tuple[str, type], ...] = (
    *((name, TensorMap) for name in MAPS),
    *((name, ctypes.c_void_p) for name in POINTERS),
    *((name, ctypes.c_uint64) for name in _TIMES),
    *((name, ctypes.c_uint32) for name in NUMBERS),
    ("limit", ctypes.c_float),
    ("log", ctypes.c_void_p),
    ("log_room", ctypes.c_uint32),
)


def alignment_padding(fields: Sequence[tuple[str, type]]) -> int:
    """Bytes that alignas adds behind the last field; ctypes before Python 3.13 cannot say it."""
    plain = type("Plain", (ctypes.Structure,), {"_fields_": tuple(fields)})
    return -ctypes.sizeof(plain) % _ALIGNMENT


class Rank(ctypes.Structure):
    """All that the kernels know of one rank; see csrc/moe/rank.cuh for every field."""

    _fields_ = (*_RANK_FIELDS, ("_padding", ctypes.c_uint8 * alignment_padding(_RANK_FIELDS)))


def tensor_map(encoded: bytes) -> TensorMap:
    """A map from its 128 bytes; raises ValueError for another length."""
    if len(encoded) != ctypes.sizeof(TensorMap):
        raise ValueError(f"a tensor map has {ctypes.sizeof(TensorMap)} bytes, not {len(encoded)}")
    return TensorMap.from_buffer_copy(encoded)


def table(records: Sequence[ctypes.Structure]) -> bytes:
    """Records one after another, as an array of them lies in memory."""
    return b"".join(bytes(record) for record in records)


@dataclass(frozen=True)
class FailedWait:
    """A Failure in words. wanted, seen: the counter or epoch waited for, and what it was."""

    what: str
    rank: int
    seen: int
    wanted: int
    cta: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} waited in vain for {self.what} (wanted {self.wanted}, seen "
            f"{self.seen}, CTA {self.cta})"
        )


def failed_wait(record: bytes) -> FailedWait | None:
    """What a Failure record says; None if no wait failed."""
    found = Failure.from_buffer_copy(record)
    if found.state == 0:
        return None
    _, words = WAITS.get(found.what, ("", f"something unknown ({found.what}) of {{index}}"))
    what = words.format(index=found.index)
    return FailedWait(what, found.rank, found.seen, found.wanted, found.cta)
