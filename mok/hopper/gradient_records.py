"""The records that only the backward's kernels read: the layout of csrc/moe/backward/record.cuh.

They exist beside `records`, whose Rank goes to the same kernels: a launch passes both by value, so
that a recorded graph keeps them. Constants are those of the header, by test. Data only: no torch,
no driver.
"""

from __future__ import annotations

import ctypes

from mok.hopper.records import TensorMap, alignment_padding

BACK_HIDDEN = 0
BACK_INPUT = 1
BACK_WEIGHTS = 2
BACK_SHARED_HIDDEN = 3
BACK_SHARED_INPUT = 4
BACK_SHARED_WEIGHTS = 5
BACK_AGAIN = 6
BACK_SHARED_AGAIN = 7
BACK_SUM = 9
BACK_END = 10
PART_NUMBER = 0x3FFFFFFF
"""A mask of BackGroup.part; a macro with an argument in the header."""
PART_FIRST = 0x40000000
PART_LAST = 0x80000000
WANT_GATE = 1
WANT_UP = 2
WANT_DOWN = 4
WANT_SHARED_GATE = 8
WANT_SHARED_UP = 16
WANT_SHARED_DOWN = 32
BACK_HEAD = 8
COUNT_SHARED_AGAIN = 0
COUNT_SHARED_HIDDEN = 1
COUNT_CUT = 2
BACK_TABLES = 4

WANT_ROUTED = WANT_GATE | WANT_UP | WANT_DOWN
WANT_SHARED = WANT_SHARED_GATE | WANT_SHARED_UP | WANT_SHARED_DOWN


class BackGroup(ctypes.Structure):
    """A run of tickets of one kind, and what they wait for."""

    _fields_ = (
        ("ticket", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("segment", ctypes.c_uint32),
        ("wanted", ctypes.c_uint32),
        ("expert", ctypes.c_uint32),
        ("part", ctypes.c_uint32),
    )


class BackPeer(ctypes.Structure):
    """Addresses of one rank's symmetric memory, as the device that reads this sees them."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("d_out", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("d_x", ctypes.c_void_p),
        ("d_router", ctypes.c_void_p),
    )


MAPS = (
    *("d_rows", "x_rows", "d_gate", "d_up", "weighted", "d_gate_out", "d_up_out", "weighted_out"),
    *("gate", "up", "down", "saved_gate", "saved_up"),
    *("w_gate_out", "w_up_out", "w_down_out", "d_out", "x"),
    *("shared_d_gate", "shared_d_up", "shared_weighted"),
    *("shared_d_gate_out", "shared_d_up_out", "shared_weighted_out"),
    *("shared_gate", "shared_up", "shared_down", "shared_saved_gate", "shared_saved_up"),
    *("shared_w_gate_out", "shared_w_up_out", "shared_w_down_out"),
)
OUTPUTS = ("own_d_out", "d_x", "d_router")
WORK = ("shared_d_x", "d_ring", "x_ring", "row_weights", "partials", "scratch")
MAINS = (
    *("main_gate", "main_up", "main_down"),
    *("shared_main_gate", "shared_main_up", "shared_main_down"),
)
TABLES = ("peers", "groups", "counters", "segment_of", "used_target")
NUMBERS = ("ring", "saved_blocks", "shared_again", "wants", "fresh", "uncut", "max_groups")
_GRADIENT_FIELDS: tuple[tuple[str, type], ...] = (
    *((name, TensorMap) for name in MAPS),
    *((name, ctypes.c_void_p) for name in (*OUTPUTS, *WORK, *MAINS, *TABLES)),
    *((name, ctypes.c_uint32) for name in NUMBERS),
)


class Gradient(ctypes.Structure):
    """What the backward's kernels know of one rank beside its Rank; see the header."""

    _fields_ = (
        *_GRADIENT_FIELDS,
        ("_padding", ctypes.c_uint8 * alignment_padding(_GRADIENT_FIELDS)),
    )
