"""A model whose tensors are sentences: recordings of it are made in a moment, and a planted fault
spreads to whatever was made of it and to nothing else.

Every value is a text that names what it was made of; its digest is a hash of the text. A fault
appends a mark to one value. So what a comparison should find is known without running anything.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from verify.tracing.choices import STATE, Choice, has_border, in_full
from verify.tracing.files import Header, TraceWriter, Whole

LEAVES = (
    "embed",
    *(f"blocks.{index}.{leaf}" for index in (0, 1) for leaf in ("norm", "mlp", "drop")),
    "head",
)
WEIGHTED = tuple(leaf for leaf in LEAVES if not leaf.endswith("drop"))
SHAPE = (4, 6)
Fault = tuple[int, str, str]
"""Step, where (see `Toy`), and the module or parameter."""


def lanes(text: str) -> bytes:
    """32 bytes that stand for a value."""
    return hashlib.sha256(text.encode()).digest()


def added(parts: Iterable[bytes]) -> bytes:
    """The lanes of disjoint parts together."""
    total = [0, 0, 0, 0]
    for part in parts:
        total = [(a + b) % 2**64 for a, b in zip(total, struct.unpack("<4Q", part), strict=True)]
    return struct.pack("<4Q", *total)


@dataclass
class Entries:
    """A step's entries, in order, and what a recording needs to know of each."""

    made: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, name: str, kind: str, path: str, value: str) -> str:
        self.made.append((name, kind, path, value))
        return value


class Toy:
    """embed, two blocks of norm, mlp and dropout with a probe and a residual, head; an optimizer.

    Faults are planted at forward, between (a block's own code, before its mlp), probe, data, loss,
    backward, gradient, optimizer, rng, and in step -1 at start and seed.
    """

    def __init__(self, faults: Iterable[Fault] = (), seed: str = "0") -> None:
        self._faults = set(faults)
        self._step = -1
        self.weights = {
            leaf: self._made("start", f"{leaf}.weight", f"w({leaf})") for leaf in WEIGHTED
        }
        self.moments = dict.fromkeys(WEIGHTED, "0")
        self.running = {f"blocks.{index}.norm": "0" for index in (0, 1)}
        self.rng = self._made("seed", "", f"rng({seed})")

    def _made(self, where: str, name: str, text: str) -> str:
        made = hashlib.sha256(text.encode()).hexdigest()
        return made + "!" if (self._step, where, name) in self._faults else made

    def start(self) -> Entries:
        """The state before the first step."""
        entries = Entries()
        self._border(entries)
        return entries

    def step(self) -> Entries:
        """One training step."""
        self._step += 1
        entries = Entries()
        given: dict[str, str] = {}
        x = entries.add("", "input", "0", self._made("data", "", f"data({self._step})"))
        x = self._leaf(entries, "embed", x, given)
        for index in (0, 1):
            block = f"blocks.{index}"
            entries.add(block, "input", "0", x)
            y = self._leaf(entries, f"{block}.norm", x, given)
            y = self._made("between", block, f"scale({y})")
            y = self._leaf(entries, f"{block}.mlp", y, given)
            y = self._leaf(entries, f"{block}.drop", y, given)
            x = self._made("forward", block, f"add({x},{y})")
            entries.add(block, "output", "", x)
        x = self._leaf(entries, "head", x, given)
        entries.add("", "output", "", x)
        self._backward(entries, self._made("loss", "", f"loss({x})"), given)
        self.rng = self._made("rng", "", f"next({self.rng})")
        self._border(entries)
        return entries

    def _leaf(self, entries: Entries, name: str, x: str, given: dict[str, str]) -> str:
        entries.add(name, "input", "0", x)
        given[name] = x
        if name.endswith("mlp"):
            x = entries.add(
                f"{name}.hidden", "probe", "", self._made("probe", name, f"hidden({x})")
            )
        used = self.rng if name.endswith("drop") else self.weights[name]
        x = self._made("forward", name, f"{name}({x},{used})")
        if name.endswith("norm"):
            self.running[name] = self._made("buffer", name, f"mean({self.running[name]},{x})")
        return entries.add(name, "output", "", x)

    def _backward(self, entries: Entries, g: str, given: dict[str, str]) -> None:
        entries.add("", "grad_output", "0", g)
        gradients = {}
        skipped = ""
        for name in reversed(LEAVES):
            block = name.rpartition(".")[0]
            if name.endswith("drop"):
                entries.add(block, "grad_output", "0", g)
                skipped = g
            entries.add(name, "grad_output", "0", g)
            used = self.weights.get(name, "")
            gradients[name] = self._made("gradient", name, f"dw({name},{g},{given[name]})")
            if name != "embed":
                g = self._made("backward", name, f"dx({name},{g},{given[name]},{used})")
                entries.add(name, "grad_input", "0", g)
            if name.endswith("norm"):
                g = self._made("backward", block, f"add({g},{skipped})")
                entries.add(block, "grad_input", "0", g)
        for name in WEIGHTED:
            gradient = entries.add(f"{name}.weight", "grad", "", gradients[name])
            self.moments[name] = f"m({self.moments[name]},{gradient})"
            self.weights[name] = self._made(
                "optimizer", name, f"w({self.weights[name]},{self.moments[name]})"
            )
            self.moments[name] = hashlib.sha256(self.moments[name].encode()).hexdigest()

    def _border(self, entries: Entries) -> None:
        for name, value in self.weights.items():
            entries.add(f"{name}.weight", "parameter", "", value)
        for name, value in self.running.items():
            entries.add(f"{name}.running_mean", "buffer", "", value)
        for name, value in self.moments.items():
            entries.add(f"{name}.weight", "optimizer", "exp_avg", value)
        entries.add("cpu", "rng", "", self.rng)


def header(rank: int = 0, world: int = 1, **fields: object) -> Header:
    given = {"level": "module", "created": "2026-11-30T12:00:00+00:00", "environment": {}, **fields}
    return Header(rank=rank, world=world, **given)  # type: ignore[arg-type]


def record_toy(
    folder: Path,
    faults: Iterable[Fault] = (),
    *,
    steps: int = 3,
    rank: int = 0,
    world: int = 1,
    close: bool = True,
    dtypes: dict[str, str] | None = None,
    shards: int = 1,
    seed: str = "0",
    environment: dict[str, object] | None = None,
    choice: Choice = None,
) -> Path:
    """Writes one rank's recording. close: whether its end is there, which a kill loses. dtypes:
    of names, instead of float32. shards: how many ranks hold a part of the parameters' rows each.
    choice: the steps that are recorded in full.
    """
    toy = Toy(faults, seed)
    said = header(rank, world, environment=environment or {}, steps=choice)
    writer = TraceWriter(folder, said)
    for number in range(-1, steps):
        entries = (toy.start() if number < 0 else toy.step()).made
        if not in_full(choice, number):
            if not has_border(choice, number) and number != steps - 1:
                continue
            entries = [one for one in entries if one[1] in STATE]
        write_step(writer, number, entries, dtypes=dtypes, rank=rank, shards=shards)
    size = writer.path.stat().st_size
    writer.close()
    if not close:
        os.truncate(writer.path, size)
    return folder


def write_step(
    writer: TraceWriter,
    number: int,
    entries: Iterable[tuple[str, str, str, str]],
    *,
    dtypes: dict[str, str] | None = None,
    rank: int = 0,
    shards: int = 1,
    failed: bool = False,
) -> None:
    """Writes entries (name, kind, path, value) as one step."""
    ids, content = [], b""
    for name, kind, path, value in entries:
        whole, shape, piece = None, SHAPE, lanes(value)
        if shards > 1 and kind in ("parameter", "grad", "optimizer"):
            rows = SHAPE[0] // shards
            shape = (rows, SHAPE[1])
            whole = Whole(SHAPE, ((rank * rows, (rank + 1) * rows), (0, SHAPE[1])))
            piece = _piece(value, rank, shards)
        dtype = (dtypes or {}).get(name, "float32")
        ids.append(writer.define(name, kind, path, dtype, shape, module=_class(name), whole=whole))
        content += piece
    writer.step(number, ids, content, failed=failed)


def _piece(value: str, rank: int, shards: int) -> bytes:
    """Lanes of a rank's part; those of all ranks add up to the lanes of the value."""
    if rank:
        return lanes(f"part {rank} of {value}")
    rest = added(lanes(f"part {other} of {value}") for other in range(1, shards))
    whole, parts = (struct.unpack("<4Q", one) for one in (lanes(value), rest))
    return struct.pack("<4Q", *((a - b) % 2**64 for a, b in zip(whole, parts, strict=True)))


def _class(name: str) -> str:
    last = name.rpartition(".")[2]
    names = {"": "Toy", "drop": "Dropout", "mlp": "MLP", "norm": "Norm", "0": "Block", "1": "Block"}
    return names.get(last, "Linear" if last in ("embed", "head") else "")
