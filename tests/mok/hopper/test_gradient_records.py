"""The backward's ctypes records have the layout of csrc/moe/backward/record.cuh."""

from __future__ import annotations

import ctypes
import re
import shutil

import pytest
from header_layouts import compiled_layout, defines, fields, layout_of, own_fields

from mok.hopper import gradient_records, records
from mok.kernel_sources import read_source

HEADER = "moe/backward/record.cuh"
STRUCTURES = (gradient_records.BackGroup, gradient_records.BackPeer, gradient_records.Gradient)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.__name__)
def test_fields_have_the_names_and_the_order_of_the_header(structure):
    assert own_fields(structure) == fields(HEADER, structure.__name__)


def test_every_constant_of_the_header_is_here():
    text = read_source(HEADER)
    found = dict(defines(text))
    assert len(found) > 20
    mine = {name: getattr(gradient_records, name, None) for name in found}
    assert mine == found
    mask = re.search(r"#define PART_NUMBER\(part\) \(\(part\) & (0x[0-9a-f]+)u\)", text)
    assert mask is not None
    assert int(mask[1], 16) == gradient_records.PART_NUMBER
    bits = (gradient_records.PART_NUMBER, gradient_records.PART_FIRST, gradient_records.PART_LAST)
    assert sum(bits) == 2**32 - 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiler_sees_the_same_sizes_and_offsets(tmp_path):
    found = compiled_layout(["moe/rank.cuh", HEADER], STRUCTURES, tmp_path)
    assert found == layout_of(STRUCTURES)


def test_both_records_fit_into_the_parameters_of_a_kernel():
    both = ctypes.sizeof(records.Rank) + ctypes.sizeof(gradient_records.Gradient)
    assert both < 32764 - 64  # bytes that the driver takes on a device of capability 7.0 or later


def test_a_gradient_keeps_what_it_is_given_and_its_array_is_aligned():
    encoded = bytes(range(128))
    grad = gradient_records.Gradient(ring=7, wants=63, scratch=0x1234, main_down=0x5678)
    grad.shared_w_down_out = records.tensor_map(encoded)
    table = records.table([grad, grad])
    again = gradient_records.Gradient.from_buffer_copy(table, ctypes.sizeof(grad))
    assert (again.ring, again.wants, again.scratch, again.main_down) == (7, 63, 0x1234, 0x5678)
    assert bytes(again.shared_w_down_out) == encoded
    assert bytes(again.d_rows) == bytes(128)
    assert ctypes.sizeof(grad) % 64 == 0
