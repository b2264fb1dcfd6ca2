"""Reads what the compiler says: registers, shared memory, spills and warnings.

`ptxas -v` prints a section for each kernel; functions that are not inlined have properties of their
own inside it, and their spills are the kernel's. Refuses a log in which a kernel has no numbers:
"no spills found" must never mean that nothing was read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")
# Advisories arrive as "info", not as "warning": "(C7510) Potential Performance Loss:
# wgmma.mma_async instructions are serialized due to ...", "(C7508) ... 'setmaxnreg' ignored". Notes
# such as C7517 and C7519 (a fence was added) say nothing of that kind and are not findings.
_ADVISORY = re.compile(
    r"\(C(?:7508|7510|7602)\)|Potential Performance Loss|instructions are serialized"
)
_PTXAS_WARNING = re.compile(r"^ptxas\b.*\bwarning\b", re.IGNORECASE)
_WARNING = re.compile(r"\bwarning\b(?: #\S+)?:", re.IGNORECASE)


@dataclass(frozen=True)
class Resources:
    """What one kernel needs: registers a thread, and bytes of memory; spills are bytes moved."""

    entry: str
    registers: int
    static_shared: int
    stack: int
    spill_stores: int
    spill_loads: int
    barriers: int

    @property
    def spills(self) -> bool:
        """Whether registers go through local memory."""
        return self.spill_stores > 0 or self.spill_loads > 0


def parse_resources(log: str) -> tuple[Resources, ...]:
    """One record per kernel, in the order of their names.

    Raises ValueError if a kernel is named without its registers or frame, or none is named.
    """
    sections = _sections(log)
    if not sections:
        raise ValueError("the compiler's log names no kernel")
    return tuple(_resources(entry, lines) for entry, lines in sorted(sections.items()))


def find_advisories(log: str) -> tuple[str, ...]:
    """Lines in which ptxas warns, or says that it gave up speed; each once, in order."""
    lines = (line.strip() for line in log.splitlines())
    found = (line for line in lines if _ADVISORY.search(line) or _PTXAS_WARNING.search(line))
    return tuple(dict.fromkeys(found))


def find_warnings(log: str) -> tuple[str, ...]:
    """Lines in which the C++ front end warns (not ptxas); each once, in order."""
    lines = (line.strip() for line in log.splitlines())
    found = (line for line in lines if _WARNING.search(line) and not line.startswith("ptxas"))
    return tuple(dict.fromkeys(found))


def _sections(log: str) -> dict[str, list[str]]:
    """Lines after each "Compiling entry function", by kernel."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in log.splitlines():
        entry = _ENTRY.search(line)
        if entry:
            current = sections.setdefault(entry.group(1), [])
        else:
            current.append(line)
    return sections


def _resources(entry: str, lines: list[str]) -> Resources:
    text = "\n".join(lines)
    frames = [tuple(map(int, found)) for found in _FRAME.findall(text)]
    registers = _USED.findall(text)
    if not frames or len(registers) != 1:
        raise ValueError(f"the compiler's log gives no registers or no frame for kernel {entry!r}")
    return Resources(
        entry=entry,
        registers=int(registers[0]),
        static_shared=_sum(_SHARED, text),
        stack=max(max(frame[0] for frame in frames), _sum(_STACK, text)),
        spill_stores=sum(frame[1] for frame in frames),
        spill_loads=sum(frame[2] for frame in frames),
        barriers=_sum(_BARRIERS, text),
    )


def _sum(pattern: re.Pattern[str], text: str) -> int:
    return sum(int(found) for found in pattern.findall(text))
