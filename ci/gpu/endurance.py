"""Many forwards under load on one GPU, one digest each: how many distinct digests there are.

    python ci/gpu/endurance.py --json endurance.json
    python ci/gpu/endurance.py --shape small --forwards 500

10,000 forwards of shapes that take 1 ms or less, and 300 of kimi-shard. A tenth are calls, the rest
replays of a CUDA graph. A forward's output is filled with NaNs after it was digested, so that rows
which the next one leaves out are seen. Digests are made on the device, in the same order, and kept
there: nothing waits for the host between two forwards. The loads are those of verify's
`contention`, each beside a whole batch; a batch counts as under load only if every block of the
load ran from before it until after it.

Exit code 0: one digest for each shape, and enough forwards under load. 1: not so. 3: no device for
the kernel.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from one_gpu import device_or_exit  # beside this file
from torch import Tensor

from mok.bench.layer_inputs import make_inputs
from mok.bench.shapes import Shape, parse_shape
from verify.conditions.cuda_contention import Variant, variants
from verify.conditions.cuda_loads import BUSY_SHARE, opened
from verify.conditions.overlap import Overlap
from verify.device_digests import DigestPlan

MEDIUM = "T=2048,E=32,H=2048,I=768,K=8"
FORWARDS = {"small": 5000, MEDIUM: 5000, "kimi-shard": 300}
CALLS = 10  # one forward of so many is a call, the others are replays
BATCH_SECONDS = 2.0  # of forwards beside one load, about
LONGEST_LOAD = 60.0  # seconds until a load ends by itself
TRIES = 2  # further batches for one whose load was not there throughout


@dataclass(frozen=True)
class Batch:
    """Forwards beside one load. seconds: on the host, the wait for them included."""

    load: str
    forwards: int
    overlapped: bool
    seconds: float


@dataclass
class Tally:
    """What a shape gave so far. first: the digest of the first forward of all."""

    digests: Counter[tuple[int, ...]] = field(default_factory=Counter)
    batches: list[Batch] = field(default_factory=list)

    @property
    def under_load(self) -> int:
        """Forwards of batches that had their load throughout."""
        return sum(one.forwards for one in self.batches if one.overlapped)


def slowed(load: Variant, multiprocessors: int) -> float:
    """How many times longer a forward takes beside a load, about: it needs whole multiprocessors,
    of which a busy stream takes three quarters."""
    taken = load.held or multiprocessors * BUSY_SHARE[0] // BUSY_SHARE[1]
    return multiprocessors / max(1, multiprocessors - taken)


def batches(
    forwards: int, loads: Sequence[Variant], multiprocessors: int, alone: float
) -> Iterator[tuple[Variant, int]]:
    """(load, forwards) until there are `forwards` in all: as many beside every load, in turn.

    alone: seconds of a forward without a load. A batch takes about BATCH_SECONDS, a forward at
    least.
    """
    share, more = divmod(forwards, len(loads))
    left = [share + (index < more) for index in range(len(loads))]
    while any(left):
        for index, load in enumerate(loads):
            most = math.floor(BATCH_SECONDS / max(alone * slowed(load, multiprocessors), 1e-9))
            count = min(left[index], max(1, most))
            if count:
                left[index] -= count
                yield load, count


def distinct(rows: Tensor) -> Counter[tuple[int, ...]]:
    """How often each digest occurs. rows: int64 [forwards, 4]."""
    found, counts = torch.unique(rows, dim=0, return_counts=True)
    return Counter(dict(zip(map(tuple, found.tolist()), counts.tolist(), strict=True)))


class Recorded:
    """Calls, also from a graph, and the digests of what each gave. run: one call, whose results are
    the caller's to overwrite. room: calls between two times that digests are collected."""

    def __init__(
        self, run: Callable[[], Sequence[Tensor]], device: torch.device, room: int
    ) -> None:
        self._run = run
        self.kept = [torch.empty_like(one) for one in run()]  # and whatever a first call makes
        self._plan = DigestPlan(self.kept)
        lanes = 4 * len(self.kept)
        self._rows = torch.zeros(room, lanes, dtype=torch.int64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self.call()
        torch.cuda.current_stream().synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.call()

    def call(self) -> None:
        """One call and its digests, without waiting."""
        for kept, found in zip(self.kept, self._run(), strict=True):
            kept.copy_(found)
            found.fill_(torch.nan)
        self._plan.launch()
        self._rows.index_copy_(0, self._at, self._plan.lanes.view(1, -1))
        self._at.add_(1)

    def replay(self) -> None:
        """The same from the graph."""
        self._graph.replay()

    def launch(self, count: int) -> None:
        """So many calls, one of CALLS by the host."""
        for index in range(count):
            if index % CALLS == 0:
                self.call()
            else:
                self.replay()

    def collect(self) -> Counter[tuple[int, ...]]:
        """Waits; the digests since the last time, how often each."""
        count = int(self._at)
        self._at.zero_()
        return distinct(self._rows[:count].cpu())


class Forward(Recorded):
    """The forward of one shape."""

    names = ("out",)

    def __init__(self, shape: Shape, device: torch.device, room: int) -> None:
        from mok.layer import moe

        given = make_inputs(shape, "gaussian", device)
        gate, up = (half.contiguous() for half in given.w_gate_up.chunk(2, 1))
        self.x = given.x
        arguments = (given.x, given.topk_experts, given.router_weights, gate, up, given.w_down)

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [moe(*arguments, backend="hopper")]

        super().__init__(forward, device, room)


def measure(
    shape: Shape,
    forwards: int,
    device: torch.device,
    say: Callable[[str], None],
    make: Callable[[Shape, torch.device, int], Any] | None = None,
) -> dict[str, Any]:
    """One row of the document. make: what is launched; None: Forward."""
    began = time.perf_counter()
    count = torch.cuda.get_device_properties(device).multi_processor_count
    forward = (make or Forward)(shape, device, forwards + 64)
    tally, alone = Tally(), 0.0
    for _ in range(2):  # the second time is that of a forward without a load
        start = time.perf_counter()
        forward.launch(CALLS)
        torch.cuda.current_stream().synchronize()
        alone = (time.perf_counter() - start) / CALLS
    tally.digests += forward.collect()
    say(f"{shape.name}: {1e3 * alone:.3f} ms alone, {len(tally.digests)} digest(s)")
    for load, size in batches(forwards, variants(count), count, alone):
        for _ in range(1 + TRIES):
            batch, found = _beside(forward, load, size, device)
            tally.digests += found
            tally.batches.append(batch)
            if batch.overlapped:
                break
    row = row_of(shape.name, forwards, alone, tally, time.perf_counter() - began)
    return {**row, "outputs": by_output(tally.digests, forward.names)}


def by_output(digests: Iterable[tuple[int, ...]], names: Sequence[str]) -> dict[str, int]:
    """How many digests each output has. digests: of all calls, four numbers for each output."""
    found = list(digests)
    return {name: len({one[4 * at : 4 * at + 4] for one in found}) for at, name in enumerate(names)}


def _beside(
    forward: Recorded, load: Variant, count: int, device: torch.device
) -> tuple[Batch, Counter[tuple[int, ...]]]:
    with opened(device, held=load.held, work=load.work, timeout=LONGEST_LOAD) as beside:
        beside.start()
        start = time.perf_counter()
        beside.begin()
        forward.launch(count)
        overlap: Overlap = beside.overlap()
        seconds = time.perf_counter() - start
        beside.release()
    return Batch(load.name, count, overlap.complete, seconds), forward.collect()


def row_of(shape: str, forwards: int, alone: float, tally: Tally, seconds: float) -> dict[str, Any]:
    """A shape's row. distinct: digests of all its forwards, those without a load included."""
    names = dict.fromkeys(one.load for one in tally.batches)
    loads = []
    for name in names:
        own = [one for one in tally.batches if one.load == name]
        done = sum(one.forwards for one in own)
        loads.append(
            {
                "load": name,
                "forwards": done,
                "under_load": sum(one.forwards for one in own if one.overlapped),
                "ms": 1e3 * sum(one.seconds for one in own) / done,
            }
        )
    most = tally.digests.most_common(1)
    busy = sum(one.seconds for one in tally.batches)
    return {
        "shape": shape,
        "wanted": forwards,
        "forwards": tally.digests.total(),
        "under_load": tally.under_load,
        "distinct": len(tally.digests),
        "differing": tally.digests.total() - (most[0][1] if most else 0),
        "digest": "".join(f"{lane % 2**64:016x}" for lane in most[0][0]) if most else "",
        "ms_alone": 1e3 * alone,
        "per_second": sum(one.forwards for one in tally.batches) / busy if busy else 0.0,
        "loads": loads,
        "seconds": round(seconds, 1),
    }


def passed(row: dict[str, Any]) -> bool:
    """One digest, and as many forwards under load as were wanted."""
    return bool(row["distinct"] == 1 and row["under_load"] >= row["wanted"] > 0)


def chosen(
    names: Sequence[str], count: int | None, counts: Mapping[str, int]
) -> list[tuple[Shape, int]]:
    """Shapes, and how many calls of each; those of `counts` unless told. InputError for others than
    mok.bench.shapes knows."""
    some = names or tuple(counts)
    return [(parse_shape(name), count or counts.get(name, 1000)) for name in some]


@dataclass(frozen=True)
class Calls:
    """What is called many times. name: in words and as an option. counts: of each shape, unless
    told. make: what is launched. passed: whether a row shows what it should."""

    name: str
    counts: Mapping[str, int]
    make: Callable[[Shape, torch.device, int], Recorded]
    passed: Callable[[dict[str, Any]], bool]


def command(calls: Calls) -> click.Command:
    """The command line of a script that measures these."""

    @click.command(help=f"Count the distinct digests of many {calls.name} under load.")
    @click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
    @click.option("--shape", "names", multiple=True, metavar="NAME|T=..,E=..,H=..,I=..,K=..")
    @click.option(f"--{calls.name}", "each", type=click.IntRange(1), help="Of each shape.")
    def main(path: Path | None, names: tuple[str, ...], each: int | None) -> None:
        from mok.errors import InputError

        try:
            wanted = chosen(names, each, calls.counts)
        except InputError as error:
            raise click.UsageError(str(error)) from error
        device = device_or_exit()
        document: dict[str, Any] = {"calls": f"1 of {CALLS}, the others replays", "rows": []}
        for shape, count in wanted:
            row = measure(shape, count, device, click.echo, calls.make)
            document["rows"].append(row)
            click.echo(f"{shape.name}: {row}")
            if path is not None:  # a run that is cut short keeps what it had
                text = json.dumps(document, indent=1, allow_nan=False)
                path.write_text(f"{text}\n", encoding="utf-8")
        sys.exit(0 if all(map(calls.passed, document["rows"])) else 1)

    return main


main = command(Calls("forwards", FORWARDS, Forward, passed))

if __name__ == "__main__":
    main()
