"""The ctypes records have the layout of csrc/moe/rank.cuh: names, order, offsets, constants."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from mok.hopper import records
from mok.kernel_sources import read_source

HEADER = "moe/rank.cuh"
STRUCTURES = (
    records.TensorMap,
    records.Group,
    records.Peer,
    records.Failure,
    records.Rank,
)


def _fields(name: str) -> list[str]:
    """Field names of a struct of the header, in order."""
    found = re.search(rf"struct (?:alignas\(64\) )?{name} \{{(.*?)\}};", read_source(HEADER), re.S)
    assert found is not None, name
    body = re.sub(r"//.*", "", found[1])
    declared: list[str] = []
    for statement in body.split(";"):
        pieces = statement.split(",")
        if pieces[0].strip():
            declared += [re.sub(r"\[.*", "", piece.split()[-1].lstrip("*")) for piece in pieces]
    return declared


def _defines(text: str) -> Iterator[tuple[str, int]]:
    for name, value in re.findall(r"#define (\w+) (0x[0-9a-f]+|[0-9]+)u?\b", text):
        yield name, int(value, 0)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.__name__)
def test_fields_have_the_names_and_the_order_of_the_header(structure):
    mine = [name for name, _ in structure._fields_ if name != "_padding"]
    assert mine == _fields(structure.__name__)


def test_constants_are_those_of_the_header():
    found = dict(_defines(read_source(HEADER)))
    shared = {name for name in found if hasattr(records, name)}
    assert {name: getattr(records, name) for name in shared} == {n: found[n] for n in shared}
    assert {"BLOCK", "MAX_RANKS", "PADDING", "COUNTER_HEAD", "PLAN_BAD", "FLAGS"} <= shared
    waits = {name: value for name, value in found.items() if name.startswith("WAIT_")}
    assert {words[0]: value for value, words in records.WAITS.items()} == waits


def test_sizes_of_a_launch_are_those_of_the_pipeline():
    text = read_source("moe/pipeline.cuh")
    found = dict(_defines(text))
    assert found["THREADS"] == records.THREADS
    stages = found["STAGES"] * (found["A_BYTES"] + found["B_BYTES"])
    staging = found["CONSUMER_WARPS"] * found["STAGING"]
    assert stages + staging + 1024 == records.SHARED_BYTES
    assert "STAGES * STAGE_BYTES + CONSUMER_WARPS * STAGING + 1024" in text


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiler_sees_the_same_sizes_and_offsets(tmp_path):
    lines = ["#include <cstddef>", "#include <cstdio>", read_source(HEADER), "int main() {"]
    wanted: list[int] = []
    for structure in STRUCTURES:
        name = structure.__name__
        lines.append(f'  std::printf("%zu\\n", sizeof({name}));')
        wanted.append(ctypes.sizeof(structure))
        for field, *_ in structure._fields_:
            if field != "_padding":
                lines.append(f'  std::printf("%zu\\n", offsetof({name}, {field}));')
                wanted.append(getattr(structure, field).offset)
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text("\n".join([*lines, "}"]))
    subprocess.run(["g++", "-std=c++17", "-w", source, "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == wanted


def test_a_rank_keeps_what_it_is_given_and_its_array_is_aligned():
    encoded = bytes(range(128))
    rank = records.Rank(tokens=7, limit=2.5, counters=0x1234, timeout=10**12)
    rank.shared_down = records.tensor_map(encoded)
    again = records.Rank.from_buffer_copy(records.table([rank, rank]), ctypes.sizeof(rank))
    assert (again.tokens, again.limit, again.counters, again.timeout) == (7, 2.5, 0x1234, 10**12)
    assert bytes(again.shared_down) == encoded
    assert bytes(again.gate) == bytes(128)
    assert ctypes.sizeof(records.Rank) % 64 == 0


def test_a_map_of_another_length_is_refused():
    with pytest.raises(ValueError, match="128 bytes, not 3"):
        records.tensor_map(b"abc")


def test_a_failed_wait_is_told_in_words_and_none_is_none():
    assert records.failed_wait(bytes(32)) is None
    record = records.Failure(state=1, what=2, index=3, rank=1, seen=4, wanted=5, cta=6)
    told = records.failed_wait(bytes(record))
    assert str(told) == (
        "rank 1 waited in vain for rank 3 to enter the launch (wanted 5, seen 4, CTA 6)"
    )
    unknown = records.failed_wait(bytes(records.Failure(state=1, what=99, index=8)))
    assert "something unknown (99) of 8" in str(unknown)
