"""What a header of csrc says of its records and constants, by reading it and by a C++ compiler."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from mok.kernel_sources import read_source


def fields(header: str, name: str) -> list[str]:
    """Field names of a struct of the header, in order."""
    found = re.search(rf"struct (?:alignas\(64\) )?{name} \{{(.*?)\}};", read_source(header), re.S)
    assert found is not None, name
    body = re.sub(r"//.*", "", found[1])
    declared: list[str] = []
    for statement in body.split(";"):
        pieces = statement.split(",")
        if pieces[0].strip():
            declared += [re.sub(r"\[.*", "", piece.split()[-1].lstrip("*")) for piece in pieces]
    return declared


def defines(text: str) -> Iterator[tuple[str, int]]:
    """Constants without arguments."""
    for name, value in re.findall(r"#define (\w+) (0x[0-9a-f]+|[0-9]+)u?\b", text):
        yield name, int(value, 0)


def own_fields(structure: type[ctypes.Structure]) -> list[str]:
    """Field names of a record of ours, without what alignment adds."""
    return [name for name, *_ in structure._fields_ if name != "_padding"]


def layout_of(structures: Sequence[type[ctypes.Structure]]) -> list[int]:
    """Sizes and offsets of our records, in the order of compiled_layout."""
    found: list[int] = []
    for structure in structures:
        found.append(ctypes.sizeof(structure))
        found += [getattr(structure, name).offset for name in own_fields(structure)]
    return found


def compiled_layout(
    headers: Sequence[str], structures: Sequence[type[ctypes.Structure]], folder: Path
) -> list[int]:
    """The same as g++ sees them. headers: in the order of their includes."""
    text = "\n".join(re.sub(r"#include .*", "", read_source(header)) for header in headers)
    lines = ["#include <cstddef>", "#include <cstdio>", text, "int main() {"]
    for structure in structures:
        name = structure.__name__
        lines.append(f'  std::printf("%zu\\n", sizeof({name}));')
        lines += [
            f'  std::printf("%zu\\n", offsetof({name}, {field}));'
            for field in own_fields(structure)
        ]
    source, program = folder / "layout.cpp", folder / "layout"
    source.write_text("\n".join([*lines, "}"]))
    subprocess.run(["g++", "-std=c++17", "-w", source, "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [int(line) for line in printed.split()]
