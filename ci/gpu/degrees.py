"""One problem at every degree of expert parallelism on one GPU: its bits, and what occurred in it.

    python ci/gpu/degrees.py --json degrees.json

A global problem (degree_problem.py) is shared out among the ranks of a `LocalGroup`, whose launch
is that of real ranks; degree 0 is one rank alone, with the kernel of one rank. That what the
problem is made for did occur (rings that begin anew, tails, borders crossed) is read from the
device's own tables after the launch; `lacking` names what did not. The same launches with the
kernel that logs its tickets are held to mok.hopper.ticket_logs.

Exit code 0: the same bits everywhere, all of it occurred, and no log broke a rule. 1: not so. 3: no
device for the kernel.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from degree_problem import (  # both beside this file
    I_SHARED,
    E,
    H,
    I,
    K,
    T,
    shares,
    sizes_of,
    split,
    to_device,
    whole_problem,
)
from one_gpu import device_or_exit
from torch import Tensor

from mok.hopper import packing, records
from mok.hopper.forward import launch, launch_kernels, on_device_of
from mok.hopper.layout import Segments, Sizes, down_columns, up_columns
from mok.hopper.local_group import LocalGroup, launch_local_group, on_device, open_local_group
from mok.hopper.packing import Problem
from mok.hopper.protocol import UP, Group, Work
from mok.hopper.ticket_logs import Record, Replay, replay
from mok.hopper.workspace import HopperWorkspace, Kernels, Timeouts, load_kernels, open_workspace
from mok.loading import load

DEGREES = (0, 1, 2, 4, 8, 64)
GRIDS = (1, 2, 7, 0)
"""CTAs of the forward, at least one a rank; 0: one on each multiprocessor."""
SEGMENTS = ((1, 1), (1, 2), (2, 3))
SMALLEST = Segments(*SEGMENTS[0])
"""With these, rings begin anew twice on the crowded expert's rank, however few experts it has."""
WRAPS = 2
TAIL = 64  # rows: at so many or fewer half of a tile is idle
LOG_ROOM = 1 << 16  # records of a rank; these launches write less than a third
TIMEOUTS = Timeouts(60.0, 30.0)


@dataclass(frozen=True)
class Facts:
    """What the device's tables say of one launch; of several ranks the most that one had.

    blocks: of 128 rows. wraps_x, wraps_h: how often a ring began anew. tails: last blocks with at
    most 64 rows. empty_experts: without a row. crossing: experts in several segments. tokens: of
    each rank.
    """

    tokens: tuple[int, ...]
    blocks: int
    wraps_x: int
    wraps_h: int
    tails: int
    empty_experts: int
    crossing: int


def facts_of(workspaces: Sequence[HopperWorkspace], tokens: Sequence[int]) -> Facts:
    """What the tables of all ranks say after a launch; waits for it on the current stream."""
    found = [_facts_of_rank(one) for one in workspaces]
    most = {name: max(one[name] for one in found) for name in found[0]}
    return Facts(tuple(tokens), **most)


def _facts_of_rank(workspace: HopperWorkspace) -> dict[str, int]:
    blocks = int(workspace.words("counters")[records.PLAN_BLOCKS])
    segment_of = [
        index
        for index, group in enumerate(one for one in groups_of(workspace) if one.kind == UP)
        for _ in range(group.blocks)
    ]
    layout = workspace.layout
    return {
        "wraps_x": max(0, blocks - 1) // layout.ring_x,
        "wraps_h": max(0, blocks - 1) // layout.ring_h,
        **facts_of_blocks(workspace, blocks, segment_of),
    }


def facts_of_blocks(
    workspace: HopperWorkspace, blocks: int, segment_of: Sequence[int]
) -> dict[str, int]:
    """What a rank's blocks say, by names as in `Facts`. segment_of: the segment of each."""
    placed = workspace.words("blocks")[:blocks].tolist()  # expert << 16 | valid rows
    segments: dict[int, set[int]] = {}
    for word, segment in zip(placed, segment_of, strict=True):
        segments.setdefault(word >> 16, set()).add(segment)
    return {
        "blocks": blocks,
        "tails": sum(0 < word & 0xFFFF <= TAIL for word in placed),
        "empty_experts": int((workspace.words("expert_rows") == 0).sum()),
        "crossing": sum(len(some) > 1 for some in segments.values()),
    }


def groups_of(workspace: HopperWorkspace) -> tuple[Group, ...]:
    """The table of tickets that the device made."""
    count = int(workspace.words("counters")[records.PLAN_GROUPS])
    rows = workspace.words("groups").view(-1, 4)[:count].tolist()
    return tuple(Group(*row) for row in rows)


def lacking(facts: Facts) -> list[str]:
    """What the problem was made for and did not occur, in words."""
    several = len(facts.tokens) > 1
    occurred = {
        f"a ring of rows that began anew {WRAPS} times": facts.wraps_x >= WRAPS,
        f"a ring of hidden rows that began anew {WRAPS} times": facts.wraps_h >= WRAPS,
        f"a tail of at most {TAIL} rows": facts.tails > 0,
        "an expert without rows": facts.empty_experts > 0,
        "an expert across a border of segments": facts.crossing > 0,
        "unequal numbers of tokens": not several or len(set(facts.tokens)) > 1,
        "a rank without tokens": not several or 0 in facts.tokens,
    }
    return [what for what, did in occurred.items() if not did]


@dataclass(frozen=True)
class Ranks:
    """Open workspaces of one degree; 0: one rank alone."""

    degree: int
    workspaces: tuple[HopperWorkspace, ...]

    def wait(self, written: Sequence[Tensor] = ()) -> None:
        """For the current stream, never for the device; raises for a wait in vain."""
        torch.cuda.current_stream(self.workspaces[0].device).synchronize()
        for one in self.workspaces:
            one.raise_pending()


def open_ranks(
    degree: int,
    sizes: Sizes,
    device: torch.device,
    segments: Segments | None,
    *,
    logs: bool = False,
    timeouts: Timeouts = TIMEOUTS,
) -> Ranks:
    """Workspaces of one degree. logs: with the kernel that logs its tickets."""
    kernels = _logging_kernels(device, degree > 0) if logs else None
    if degree:
        made = open_local_group(
            *(LocalGroup(degree), sizes, device),
            segments=segments,
            timeouts=timeouts,
            kernels=kernels,
        )
        return Ranks(degree, made)
    one = open_workspace(sizes, device, segments=segments, timeouts=timeouts)
    return Ranks(0, (one if kernels is None else dataclasses.replace(one, kernels=kernels),))


def _logging_kernels(device: torch.device, group: bool) -> Kernels:
    macros = {"GROUP": int(group), "LOG": 1}
    forward = load("moe/forward.cu", "forward", macros=macros, device=device)
    return dataclasses.replace(load_kernels(device, shared=group), forward=forward)


def run(ranks: Ranks, parts: Sequence[Problem], num_sms: int = 0) -> Tensor:
    """out bf16 [all tokens, H] in rank order, by the launch that everybody uses."""
    if ranks.degree:
        found = launch_local_group(ranks.workspaces, parts, save=False, num_sms=num_sms)
    else:
        found = [launch(ranks.workspaces[0], parts[0], saved=None, num_sms=num_sms)]
    return torch.cat([one.out for one in found])


def run_logged(
    ranks: Ranks,
    parts: Sequence[Problem],
    num_sms: int,
    wait: Callable[[Sequence[Tensor]], None] | None = None,
    room: int = LOG_ROOM,
) -> tuple[Tensor, list[Record], Replay]:
    """out, the log of all ranks, and what the rules say of it. The kernels must be logging ones.

    wait: for the launch, which writes the tensors that it is given; by default for the current
    stream.
    """
    workspaces = ranks.workspaces
    device = workspaces[0].device
    logs = [torch.zeros(room, 4, dtype=torch.int32, device=device) for _ in workspaces]
    given = [packing.aligned(part) for part in parts]
    results, packed = [], []
    with on_device_of(workspaces[0]):
        for workspace, part, log in zip(workspaces, given, logs, strict=True):
            packing.check_fits(workspace, part)
            results.append(packing.make_results(part, None))
            packed.append(packing.pack(workspace, part, results[-1]))
            packed[-1].log, packed[-1].log_room = log.data_ptr(), room
            workspace.words("counters")[records.COUNT_LOG] = 0
            workspace.begin()
        if ranks.degree:
            many = on_device(records.table(packed), device)
            addresses = torch.tensor([part.topk.data_ptr() for part in given], dtype=torch.int64)
            ids: tuple[Tensor | None, Tensor | None] = (None, addresses.to(device))
            launch_kernels(workspaces, packed[0], many, ids, num_sms)
        else:
            launch_kernels(workspaces, packed[0], None, (given[0].topk, None), num_sms)
        for workspace in workspaces:
            workspace.end()
        (wait or ranks.wait)([*(one.out for one in results), *logs])
    found: list[Record] = []
    short = []
    for rank, (workspace, log) in enumerate(zip(workspaces, logs, strict=True)):
        count = int(workspace.words("counters")[records.COUNT_LOG])
        if not 0 < count <= room:
            short.append(f"rank {rank} logged {count} records; there is room for {room}")
        words = log[: min(count, room)].cpu().to(torch.int64) & 0xFFFFFFFF
        found += [(who, what, where, tick) for who, what, where, tick in words.tolist()]
    judged = replay(found, [_work_of(one) for one in workspaces])
    judged = dataclasses.replace(judged, findings=(*short, *judged.findings))
    return torch.cat([one.out for one in results]), found, judged


def _work_of(workspace: HopperWorkspace) -> Work:
    layout, sizes = workspace.layout, workspace.sizes
    columns = up_columns(sizes.width), down_columns(sizes.hidden), up_columns(sizes.shared_width)
    return Work(groups_of(workspace), layout.ring_x, layout.ring_h, *columns)


def settings() -> list[tuple[int, tuple[int, int], int]]:
    """(degree, segments, CTAs) of every row; grids that would be the same once."""
    found = []
    for degree in DEGREES:
        for segments in SEGMENTS:
            for grid in GRIDS:
                ctas = grid and max(grid, degree)
                if (degree, segments, ctas) not in found:
                    found.append((degree, segments, ctas))
    return found


def row_of(
    whole: Problem, base: Tensor | None, setting: tuple[int, tuple[int, int], int]
) -> tuple[dict[str, Any], Tensor]:
    """One row of the document, and its out. base: what out must be; None for the first."""
    degree, segments, ctas = setting
    tokens = shares(whole, degree)
    parts, device = split(whole, tokens), whole.x.device
    sizes, chosen = sizes_of(parts), Segments(*segments)
    plain = open_ranks(degree, sizes, device, chosen)
    first = run(plain, parts, ctas)
    again = run(plain, parts, ctas)
    plain.wait()
    facts = facts_of(plain.workspaces, tokens)
    logged, log, judged = run_logged(
        open_ranks(degree, sizes, device, chosen, logs=True), parts, ctas
    )
    base = first if base is None else base
    row = {
        "degree": degree,
        "segments": f"{segments[0]} to {segments[1]}",
        "ctas": ctas or plain.workspaces[0].num_sms,
        "equal": all(torch.equal(bits(base), bits(one)) for one in (first, again, logged)),
        **dataclasses.asdict(facts),
        "tokens": [min(tokens), max(tokens)],
        "lacking": lacking(facts) if chosen == SMALLEST else [],
        "records": len(log),
        "findings": list(judged.findings[:5]),
        "broken": len(judged.findings),
        "longest_wait_us": max(judged.longest_ns.values(), default=0) / 1000,
    }
    return row, first


def bits(tensor: Tensor) -> Tensor:
    """bf16 as integers, which NaNs and zeros are compared as."""
    return tensor.view(torch.int16)


def passed(row: dict[str, Any]) -> bool:
    """Whether a row shows what it should."""
    return bool(row["equal"] and not row["lacking"] and not row["broken"])


def judge(
    title: str,
    path: Path | None,
    problem: Mapping[str, int],
    rows: Iterable[dict[str, Any]],
    passed: Callable[[dict[str, Any]], bool],
) -> None:
    """Tells of each row as it comes, writes the document, and ends with 1 if a row did not pass."""
    began = time.perf_counter()
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(row)
        told = "passed" if passed(row) else f"FAILED {row}"
        click.echo(f"degree {row['degree']} segments {row['segments']} ctas {row['ctas']}: {told}")
    document = {
        "problem": problem,
        "rows": found,
        "passed": all(map(passed, found)),
        "seconds": round(time.perf_counter() - began, 1),
    }
    if path is not None:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    failed = sum(not passed(row) for row in found)
    click.echo(f"{title}: {len(found)} rows, {failed} failed, {document['seconds']} s")
    sys.exit(1 if failed else 0)


def rows_of(device: torch.device) -> Iterator[dict[str, Any]]:
    """The document's rows."""
    whole = to_device(whole_problem(), device)
    base: Tensor | None = None
    for setting in settings():
        row, out = row_of(whole, base, setting)
        base = out if base is None else base
        yield row


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
def main(path: Path | None) -> None:
    """Every degree, segment size and grid on one GPU: bits, occurrences, and logs of tickets."""
    problem = {"T": T, "H": H, "I": I, "E": E, "K": K, "shared": I_SHARED}
    judge("degrees", path, problem, rows_of(device_or_exit()), passed)


if __name__ == "__main__":
    main()
