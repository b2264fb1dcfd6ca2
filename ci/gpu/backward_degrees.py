"""Gradients of one problem at every degree of expert parallelism on one GPU, by the kernels.

    python ci/gpu/backward_degrees.py --json backward-degrees.json

The problem is that of ci/gpu/degrees.py, shared out in the same way; degree 0 is one rank alone. A
row is one degree, size of segments and grid: a forward that keeps g and u with a backward to bf16,
and a backward that computes all again, to fp32. Gradients of x, of router weights and of routed
weights have to be those of one rank bit for bit, and those of the shared expert, which are a rank's
own sums, those of one rank with that rank's tokens. What the problem is made for is read from the
device's own tables after the launch; `lacking` names what did not occur.

Exit code 0: the same bits everywhere, and all of it occurred. 1: not so. 3: no device for the
kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import degree_problem as problems  # all three beside this file
import degrees
import torch
from one_gpu import device_or_exit
from torch import Tensor

from mok.hopper import gradient_records, records
from mok.hopper.backward import launch_backward
from mok.hopper.backward_problem import WEIGHTS, BackwardProblem, Gradients
from mok.hopper.forward import launch
from mok.hopper.gradient_records import WANT_ROUTED, WANT_SHARED
from mok.hopper.layout import Segments, saved_rows
from mok.hopper.local_group import (
    launch_local_group,
    launch_local_group_backward,
    open_local_group_backward,
)
from mok.hopper.packing import Problem, Results
from mok.hopper.pools import ensure_backward
from mok.hopper.workspace import HopperWorkspace
from verify.inputs import generate

ALL = WANT_ROUTED | WANT_SHARED
ROUTED = ("d_x", "d_router", "d_gate", "d_up", "d_down")
SHARED = ("d_shared_gate", "d_shared_up", "d_shared_down")


@dataclass(frozen=True)
class Facts:
    """What the device's tables say of one launch; of several ranks the most that one had.

    blocks: of 128 rows. wraps: how often the ring began anew. tails: last blocks with at most 64
    rows. empty_experts: without a row. crossing: experts in several segments. parts: those whose
    sums went through memory. tokens: of each rank.
    """

    tokens: tuple[int, ...]
    blocks: int
    wraps: int
    tails: int
    empty_experts: int
    crossing: int
    parts: int


def facts_of(workspaces: Sequence[HopperWorkspace], tokens: Sequence[int]) -> Facts:
    """What the tables of all ranks say after a backward; waits for it on the current stream."""
    found = [_facts_of_rank(one) for one in workspaces]
    return Facts(tuple(tokens), **{name: max(one[name] for one in found) for name in found[0]})


def _facts_of_rank(workspace: HopperWorkspace) -> dict[str, int]:
    memory = workspace.backward
    assert memory is not None
    counters = workspace.words("counters")[: records.COUNTER_HEAD].tolist()
    blocks = counters[records.PLAN_BLOCKS]
    segment_of = memory.words("segment_of")[:blocks].tolist()
    groups = memory.words("groups").view(-1, 8)[: counters[records.PLAN_GROUPS]].tolist()
    cut = {
        expert
        for _, kind, _, _, _, _, expert, part in groups
        if kind == gradient_records.BACK_WEIGHTS and part & gradient_records.PART_NUMBER
    }
    return {
        **degrees.facts_of_blocks(workspace, blocks, segment_of),
        "wraps": max(0, blocks - 1) // memory.layout.ring,
        "parts": len(cut),
    }


def lacking(facts: Facts) -> list[str]:
    """What the problem was made for and did not occur, in words."""
    several = len(facts.tokens) > 1
    occurred = {
        f"a ring that began anew {degrees.WRAPS} times": facts.wraps >= degrees.WRAPS,
        f"a tail of at most {degrees.TAIL} rows": facts.tails > 0,
        "an expert without rows": facts.empty_experts > 0,
        "an expert across a border of segments": facts.crossing > 0,
        "an expert in parts": facts.parts > 0,
        "unequal numbers of tokens": not several or len(set(facts.tokens)) > 1,
        "a rank without tokens": not several or 0 in facts.tokens,
    }
    return [what for what, did in occurred.items() if not did]


def upstream(tokens: int = problems.T, hidden: int = problems.H) -> Tensor:
    """d_out bf16 of all tokens, on the CPU."""
    return generate("degrees.d_out", (tokens, hidden), torch.bfloat16)


def open_ranks(
    degree: int, parts: Sequence[Problem], segments: Segments | None, **options: Any
) -> degrees.Ranks:
    """Workspaces of one degree with memory for backwards; `segments` are those of both."""
    device, sizes = parts[0].x.device, problems.sizes_of(parts)
    ranks = degrees.open_ranks(degree, sizes, device, segments, **options)
    if degree:
        open_local_group_backward(ranks.workspaces, segments=segments)
    else:
        ensure_backward(ranks.workspaces[0], segments=segments)
    return ranks


def forward(ranks: degrees.Ranks, parts: Sequence[Problem], num_sms: int = 0) -> list[Results]:
    """out, and as much of g and u as a layer keeps, of each rank."""
    if ranks.degree:
        return launch_local_group(ranks.workspaces, parts, save=True, num_sms=num_sms)
    workspace = ranks.workspaces[0]
    rows = saved_rows(parts[0].x.shape[0], workspace.sizes)
    return [launch(workspace, parts[0], saved=rows, num_sms=num_sms)]


def backward(
    ranks: degrees.Ranks,
    parts: Sequence[Problem],
    d_outs: Sequence[Tensor],
    kept: Sequence[Results | None],
    *,
    num_sms: int = 0,
    wants: int = ALL,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Gradients]:
    """Gradients of each rank, by the launch that everybody uses."""
    asked = [
        BackwardProblem(d_out, mine, wants, dtype=dtype)
        for d_out, mine in zip(d_outs, kept, strict=True)
    ]
    if ranks.degree:
        return launch_local_group_backward(ranks.workspaces, parts, asked, num_sms=num_sms)
    workspace = ranks.workspaces[0]
    assert workspace.backward is not None
    return [launch_backward(workspace, workspace.backward, parts[0], asked[0], num_sms=num_sms)]


def joined(found: Sequence[Gradients]) -> dict[str, Tensor]:
    """Of all ranks: rows and experts in order; the shared expert's one rank behind another."""
    return {
        name: torch.cat([getattr(one, name) for one in found])
        for name in (*ROUTED, *(f"d_{name}" for name in WEIGHTS[3:]))
        if getattr(found[0], name) is not None
    }


def shared_sums(whole: Problem, d_out: Tensor, tokens: Sequence[int]) -> dict[str, Tensor]:
    """The shared expert's gradients, fp32, of one rank that has each rank's tokens in turn."""
    sizes = problems.sizes_of([whole])
    workspace = degrees.open_ranks(0, sizes, whole.x.device, None).workspaces[0]
    ensure_backward(workspace)
    found, first = [], 0
    for count in tokens:
        own = slice(first, first + count)
        first += count
        rows = {name: getattr(whole, name)[own].contiguous() for name in ("x", "topk", "router")}
        mine = dataclasses.replace(whole, **rows)
        ranks = degrees.Ranks(0, (workspace,))
        given = ([mine], [d_out[own].contiguous()], [None])
        found += backward(ranks, *given, wants=WANT_SHARED, dtype=torch.float32)
    ranks.wait()
    return {name: torch.cat([getattr(one, name) for one in found]) for name in SHARED}


def different(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Names whose bits are not the same, in the dtype that was found."""
    assert found.keys() == wanted.keys()
    return [name for name, one in found.items() if not _same(one, wanted[name].to(one.dtype))]


def _same(one: Tensor, other: Tensor) -> bool:
    kind = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
    return torch.equal(one.view(kind), other.view(kind))


@dataclass(frozen=True)
class Base:
    """What all rows are held to: one rank's out, its gradients, and sums of the shared expert by
    numbers of tokens."""

    whole: Problem
    d_out: Tensor
    out: Tensor
    gradients: Mapping[str, Tensor]
    shared: dict[tuple[int, ...], Mapping[str, Tensor]]

    def wanted(self, tokens: Sequence[int]) -> dict[str, Tensor]:
        """Gradients of ranks with so many tokens, those of weights in fp32."""
        key = tuple(tokens)
        if key not in self.shared:
            self.shared[key] = shared_sums(self.whole, self.d_out, tokens)
        routed = {name: self.gradients[name] for name in ROUTED}
        return {**routed, **self.shared[key]}


def make_base(whole: Problem, d_out: Tensor) -> Base:
    """One rank alone with the segments that a layer takes."""
    ranks = open_ranks(0, [whole], None)
    kept = forward(ranks, [whole])
    found = backward(ranks, [whole], [d_out], kept, dtype=torch.float32)
    ranks.wait()
    gradients = joined(found)
    assert all(bool(one.isfinite().all()) for one in gradients.values())
    own = {name: gradients[name] for name in SHARED}
    return Base(whole, d_out, kept[0].out, gradients, {(whole.x.shape[0],): own})


def row_of(base: Base, setting: tuple[int, tuple[int, int], int]) -> dict[str, Any]:
    """One row of the document."""
    degree, segments, ctas = setting
    tokens = problems.shares(base.whole, degree)
    parts, chosen = problems.split(base.whole, tokens), Segments(*segments)
    d_outs = list(base.d_out.split(tokens))
    ranks = open_ranks(degree, parts, chosen)
    wanted, wrong = base.wanted(tokens), []
    kept = forward(ranks, parts, ctas)
    first = backward(ranks, parts, d_outs, kept, num_sms=ctas)
    again = backward(
        *(ranks, parts, d_outs, [None] * len(parts)), num_sms=ctas, dtype=torch.float32
    )
    ranks.wait()
    facts = facts_of(ranks.workspaces, tokens)
    wrong += different({"out": torch.cat([one.out for one in kept])}, {"out": base.out})
    wrong += different(joined(first), wanted)
    wrong += [f"{name} computed again" for name in different(joined(again), wanted)]
    return {
        "degree": degree,
        "segments": f"{segments[0]} to {segments[1]}",
        "ctas": ctas or ranks.workspaces[0].num_sms,
        "equal": not wrong,
        "wrong": wrong,
        **dataclasses.asdict(facts),
        "tokens": [min(tokens), max(tokens)],
        "lacking": lacking(facts) if chosen == degrees.SMALLEST else [],
    }


def passed(row: dict[str, Any]) -> bool:
    """Whether a row shows what it should."""
    return bool(row["equal"] and not row["lacking"])


def rows_of(device: torch.device) -> Iterator[dict[str, Any]]:
    """The document's rows."""
    base = make_base(problems.to_device(problems.whole_problem(), device), upstream().to(device))
    for setting in degrees.settings():
        yield row_of(base, setting)


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
def main(path: Path | None) -> None:
    """Every degree, segment size and grid on one GPU: bits of all gradients, and occurrences."""
    problem = {name: getattr(problems, name) for name in ("T", "H", "I", "E", "K", "I_SHARED")}
    rows = rows_of(device_or_exit())
    degrees.judge("degrees of the backward", path, problem, rows, passed)


if __name__ == "__main__":
    main()
