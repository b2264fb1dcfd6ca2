"""What the pickle inside a file of torch.save would do, told without doing any of it.

Reads the instructions one by one with stand-ins in place of values. It refuses whatever torch.save
does not write for tensors, numpy arrays and plain containers, by name; tensors that reach beyond
their storage; and files that would need far more memory than their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verify.onpolicy.formats.torch_globals import (
    CALLS,
    DICT,
    LIST,
    NDARRAY,
    NUMPY_DTYPE,
    STORAGES,
    VALUE,
    Global,
    Kind,
    Refused,
    Storage,
    allowed,
    foreign,
)
from verify.rendering.escaping import clipped

MOST_MEMORY = 16 * 2**30  # bytes that the values may need once they are built
MOST_INSTRUCTIONS = 2**29  # bytes of them, texts not counted
KEPT_NAMES = 512
_LONGEST_NAME = 200  # bytes; longer texts are content


@dataclass(frozen=True)
class Told:
    """What one pickle holds.

    end: the offset behind it. storages: bytes that are claimed of each, by key. names: the first
    strings in it, at most `keep`, each once. objects: how many tensors and arrays.
    """

    end: int
    storages: Mapping[str, int]
    names: tuple[str, ...]
    objects: int


# Bytes that follow an instruction, and about how many its value takes in memory.
_PLAIN = {
    ord("N"): (0, 8, None),
    0x88: (0, 8, True),
    0x89: (0, 8, False),
    ord("G"): (8, 32, VALUE),
    ord(")"): (0, 8, ()),
    ord("]"): (0, 512, LIST),  # more than it takes: millions of lists take minutes to read
    ord("}"): (0, 512, DICT),
    0x8F: (0, 512, VALUE),
}
_INTEGERS = {ord("K"): (1, 8, False), ord("M"): (2, 40, False), ord("J"): (4, 40, True)}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_PUTS, _GETS = {ord("q"): 1, ord("r"): 4}, {ord("h"): 1, ord("j"): 4}
_LATER = frozenset(range(0x8C, 0x99)) | frozenset(b"BC")  # instructions of later protocols
_PER_OBJECT = 700  # bytes of a tensor in Python
_PER_ITEM = 110  # bytes of a dict's entry, or of a note


@dataclass
class _Machine:
    """The stack of the unpickler, with kinds for values."""

    data: memoryview
    at: int
    keep: int
    legacy: bool
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    memory: int = 0
    texts: int = 0  # bytes
    objects: int = 0


def told_of(
    data: bytes | memoryview,
    begin: int = 0,
    *,
    keep: int = KEPT_NAMES,
    legacy: bool = False,
    part: bool = False,
) -> Told:
    """Reads the pickle that begins at `begin`. Raises Refused.

    legacy: whether storages are named as torch.save did before version 1.6. part: the data may end
    before the pickle does; what was told up to there is returned then.
    """
    machine = _Machine(memoryview(data), begin, keep, legacy)
    try:
        _run(machine)
    except IndexError:  # nothing left to read, or to take from the stack
        if not part:
            raise Refused(
                f"its pickle is cut or damaged at byte {machine.at} of {len(data)}; copy or write "
                "the file again"
            ) from None
    except Refused:
        if not part:
            raise
    return Told(machine.at, machine.storages, tuple(machine.names), machine.objects)


def _run(machine: _Machine) -> None:
    data, memo = machine.data, machine.memo
    stack, position, limit = machine.stack, machine.at, len(machine.data)
    memory = check = 0
    while True:
        machine.at = position
        code = data[position]
        position += 1
        if code in _INTEGERS:
            width, cost, signed = _INTEGERS[code]
            stack.append(int.from_bytes(data[position : position + width], "little", signed=signed))
            position += width
            memory += cost
        elif code in _PLAIN:
            width, cost, value = _PLAIN[code]
            stack.append(value)
            position += width
            memory += cost
        elif code in _GETS:
            width = _GETS[code]
            index = int.from_bytes(data[position : position + width], "little")
            if index not in memo:
                raise IndexError
            stack.append(memo[index])
            position += width
            memory += 8
        elif code in _PUTS:
            width = _PUTS[code]
            memo[int.from_bytes(data[position : position + width], "little")] = stack[-1]
            position += width
            memory += _PER_ITEM
        elif code == 0x28:  # MARK
            machine.below.append(stack)
            machine.stack = stack = []
            memory += 64
        elif code == ord("."):
            if machine.below or len(stack) != 1:
                raise IndexError
            machine.at = position
            return
        elif code == ord("X"):
            length = int.from_bytes(data[position : position + 4], "little")
            position += 4
            short = length <= _LONGEST_NAME and position + length <= limit
            stack.append(_text(machine, data[position : position + length]) if short else "")
            position += length
            machine.texts += length
            memory += 60 + 4 * length
        else:
            machine.memory, memory = machine.memory + memory, 0
            position = _rarely(machine, code, position)
            stack = machine.stack
        if position > check:
            check = min(limit, position + 2**16)
            machine.memory, memory = machine.memory + memory, 0
            _check(machine, position)


def _check(machine: _Machine, position: int) -> None:
    if position > len(machine.data):
        raise IndexError
    if machine.memory > MOST_MEMORY:
        raise Refused(
            f"its values would take more than {MOST_MEMORY} bytes of memory; give fewer samples, "
            "or save tensors in place of lists"
        )
    if position - machine.texts > MOST_INSTRUCTIONS:
        raise Refused(
            f"its pickle has more than {MOST_INSTRUCTIONS} bytes beside its texts; give fewer "
            "samples, or save tensors in place of lists"
        )


def _text(machine: _Machine, raw: memoryview) -> str:
    try:
        text = str(raw, "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Refused(f"a text at byte {machine.at} of its pickle is not UTF-8") from None
    if len(machine.names) < machine.keep:
        machine.names[text] = None
    return text


def _rarely(machine: _Machine, code: int, position: int) -> int:
    """Every other instruction; returns the position behind it."""
    stack, data = machine.stack, machine.data
    if code in _TUPLES:
        count = _TUPLES[code]
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]
        machine.memory += 40 + 8 * count
    elif code in b"te":  # TUPLE, APPENDS
        items = _unmarked(machine)
        if code == ord("t"):
            machine.stack.append(tuple(items))
            machine.memory += 40 + 8 * len(items)
        else:
            _expect(machine, LIST)
    elif code == ord("a"):
        stack.pop()
        _expect(machine, LIST)
    elif code in b"us":  # SETITEMS, SETITEM
        items = _unmarked(machine) if code == ord("u") else [stack.pop() for _ in range(2)]
        if len(items) % 2:
            raise IndexError
        _expect(machine, DICT)
        machine.memory += _PER_ITEM * len(items) // 2
    elif code == ord("c"):
        name, position = _name(data, position)
        stack.append(allowed(name))
    elif code == ord("R"):
        arguments, callee = stack.pop(), stack.pop()
        if not isinstance(callee, Global) or not isinstance(arguments, tuple):
            raise Refused("its pickle calls something that is no name; only torch.save's are read")
        rule = CALLS.get(callee.name)
        if rule is None:
            raise foreign(callee.name, "it calls")
        stack.append(rule(callee.name, arguments))
        machine.memory += _PER_OBJECT
        machine.objects += 1
    elif code == ord("b"):
        stack.pop()
        if not any(stack[-1] is kind for kind in (NDARRAY, NUMPY_DTYPE, DICT)):
            raise Refused("its pickle sets the state of something that is no numpy array or dict")
    elif code == ord("Q"):
        stack.append(_storage(machine, stack.pop()))
    elif code == 0x8A:  # LONG1
        length = data[position]
        if position + 1 + length > len(data):
            raise IndexError
        stack.append(int.from_bytes(data[position + 1 : position + 1 + length], "little"))
        position += 1 + length
        machine.memory += 64 + length
    elif code == ord("U"):
        position += 1 + data[position]
        stack.append(VALUE)
        machine.memory += 300
    elif code == 0x80:
        if data[position] != 2:
            raise _protocol(f"of protocol {data[position]}")
        position += 1
    elif code in _LATER:
        raise _protocol(f"with instruction 0x{code:02x} of a later protocol")
    elif code == 0x8B:
        raise Refused("its pickle holds an integer of more than 255 bytes, which no id has")
    elif code == 0x81:
        made = stack[-2] if len(stack) > 1 else None
        raise foreign(made.name if isinstance(made, Global) else "an object", "it makes")
    else:
        raise Refused(
            f"its pickle has instruction 0x{code:02x} at byte {machine.at}, which torch.save does "
            "not write: the file is damaged, or not of torch.save"
        )
    return position


def _unmarked(machine: _Machine) -> list[Any]:
    items, machine.stack = machine.stack, machine.below.pop()
    return items


def _expect(machine: _Machine, kind: Kind) -> None:
    if machine.stack[-1] is not kind:
        raise IndexError


def _name(data: memoryview, position: int) -> tuple[str, int]:
    lines = []
    for _ in range(2):
        end = position
        while data[end] != 10:
            end += 1
            if end - position > 500:
                raise Refused("its pickle holds a name of more than 500 bytes")
        lines.append(str(data[position:end], "utf-8", "replace"))
        position = end + 1
    module, name = lines
    return f"{'builtins' if module == '__builtin__' else module}.{name}", position


def _protocol(what: str) -> Refused:
    return Refused(f"its pickle is {what}; save it with torch.save's own protocol, 2")


def _storage(machine: _Machine, claim: Any) -> Storage:
    """The storage that a persistent id names, as torch.save writes it."""
    length = 6 if machine.legacy else 5
    if not isinstance(claim, tuple) or len(claim) != length or claim[0] != "storage":
        raise Refused("its pickle names a storage in another way than torch.save does")
    _, kind, key, place, count = claim[:5]
    named = isinstance(kind, Global) and kind.name in STORAGES
    if not named or not isinstance(key, str) or not isinstance(place, str):
        raise Refused("its pickle names a storage in another way than torch.save does")
    if type(count) is not int or count < 0 or (machine.legacy and claim[5] is not None):
        raise Refused(f"the storage {clipped(key, 40)!r} has no number of elements")
    width = STORAGES[kind.name]
    size = machine.storages.setdefault(key, count * width)
    if size != count * width:
        raise Refused(f"the storage {clipped(key, 40)!r} is said to be of two sizes")
    return Storage(key, size, width)
