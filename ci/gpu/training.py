"""A small MoE transformer trained with AdamW, again and again: the same losses and weights?

    python ci/gpu/training.py --json training.json
    python ci/gpu/training.py --ranks 2            two GPUs, and one rank alone to compare with
    python ci/gpu/training.py --ranks 8            as many ranks as sequences: each has one
    python ci/gpu/training.py --device cpu --steps 3 --ranks 2

A step of a model this small waits for the host, so that on a GPU one rank's settings run at once,
each in a process of its own (`--at-once`; a rank alone shares its GPU with others).

Every setting runs twice: with a shared expert or without, with activations of a layer computed
again in the backward (torch.utils.checkpoint) or kept. Losses and gradients of what ranks replicate
are one for each sequence, added in the order of all sequences; those of the shared expert, which
are sums of a rank's own tokens, in the order of ranks. So without a shared expert one rank and
several must have the same bits. On a GPU the Hopper kernels run both directions, which is counted.

Exit code 0: the same bits, and losses that fall. 1: not so. 2: usage. 3: no device for the kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from one_gpu import device_or_exit  # all four beside this file
from side_by_side import PATIENCE, grown, run_side_by_side
from torch import Tensor
from training_model import (
    B,
    E,
    Model,
    losses_and_gradients,
    make_model,
    sequences,
    set_gradients,
)
from training_rows import STEPS, Setting, Trained, name_of, problems, row_of, settings

from mok.endings import end_process
from mok.hopper import passes
from mok.hopper.support import BACKWARD_VARIABLE
from mok.variables import variables_set

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", BACKWARD_VARIABLE: "1"}
UNLESS_GIVEN = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""As in ci/gpu.sh, which says why."""
TIMES = 2
AT_ONCE = {"cuda": 4, "cpu": 1}
"""Settings of one rank at a time: of a GPU as many as there are, which leaves it cores enough."""


def variables() -> dict[str, str]:
    """What a training sets: of UNLESS_GIVEN only what the environment lacks."""
    more = {name: value for name, value in UNLESS_GIVEN.items() if name not in os.environ}
    return {**VARIABLES, **more}


def shares(ranks: int) -> list[int]:
    """Sequences of each rank, at least one: of several the first has fewer, where that leaves it
    one; of as many as there are sequences each has one."""
    even = B // ranks
    if ranks == 1:
        return [B]
    fewer = 1 if even > 1 else 0
    return [even - fewer, *([even] * (ranks - 2)), B - even * (ranks - 1) + fewer]


def _allowed(_context: click.Context, _parameter: click.Parameter, value: int) -> int:
    """Ranks that get a sequence each and equal numbers of experts."""
    allowed = [ranks for ranks in range(1, B + 1) if E % ranks == 0]
    if value not in allowed:
        raise click.BadParameter(
            f"{value} ranks for {B} sequences and {E} experts; allowed are "
            f"{', '.join(map(str, allowed))}"
        )
    return value


def train(
    setting: Setting, steps: int, device: torch.device, group: dist.ProcessGroup | None
) -> Trained:
    """One training from the same beginning. Collective over the group."""
    began = time.perf_counter()
    counts = shares(setting.ranks)
    rank = 0 if group is None else dist.get_rank(group)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    model = make_model(setting.shared, group, device)
    optimizer = torch.optim.AdamW(model.parameters, lr=2e-3, foreach=True)
    history = []
    with _counted() as launched:
        for step in range(steps):
            words = sequences(step)[own].to(device)
            losses, rows, layers = losses_and_gradients(model, words, setting.recompute)
            both = torch.cat([rows, losses[:, None]], 1)  # one gathering, and one sum
            both = _added(_all_rows(both, counts, group))
            history.append(both[-1:].clone())  # without what it is beside
            set_gradients(model, both[:-1], [_summed(some, group) for some in layers])
            optimizer.step()
        told = torch.cat(history).cpu()
    return Trained(
        hashlib.sha256(told.numpy().tobytes()).hexdigest(),
        _digest(model, group),
        len(launched),
        float(told[0]),
        float(told[-1]),
        round(time.perf_counter() - began, 2),
    )


def _all_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Rows of all ranks in their order. rows: [this rank's count, any]."""
    if group is None:
        return rows
    padded = rows.new_zeros(max(counts), rows.shape[1])
    padded[: rows.shape[0]] = rows
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded, group=group)
    return torch.cat([one[:count] for one, count in zip(found, counts, strict=True)])


def _added(rows: Tensor) -> Tensor:
    """The sum of rows, from zero, one after another."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


def _summed(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """A layer's gradients: experts' as they are, the shared expert's added in order of ranks."""
    if group is None:
        return list(gradients)
    ones = [1] * dist.get_world_size(group)
    return [
        grad
        if grad.dim() == 3
        else _added(_all_rows(grad.reshape(1, -1), ones, group)).view_as(grad)
        for grad in gradients
    ]


def _digest(model: Model, group: dist.ProcessGroup | None) -> str:
    """Of all weights, those of all ranks' experts in their order."""
    found = hashlib.sha256()
    for value in model.replicated.values():
        found.update(value.detach().cpu().numpy().tobytes())
    for layer in model.layers:
        for parameter in layer.parameters():
            value = parameter.detach()
            if parameter.dim() == 3 and group is not None:
                ones = [1] * dist.get_world_size(group)
                value = _all_rows(value.reshape(1, -1), ones, group)
            found.update(value.cpu().contiguous().view(torch.int16).numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def _counted() -> Iterator[list[None]]:
    """One entry for each backward that is launched on the kernels inside."""
    seen: list[None] = []
    launch = passes.launch_backward

    def counting(*given: Any, **options: Any) -> Any:
        seen.append(None)
        return launch(*given, **options)

    passes.launch_backward = counting
    try:
        yield seen
    finally:
        passes.launch_backward = launch


def run_settings(
    chosen: Sequence[Setting],
    steps: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    times: int = TIMES,
) -> list[dict[str, Any]]:
    """A row for each setting, which is trained so often."""
    rows = []
    for setting in chosen:
        runs = [train(setting, steps, device, group) for _ in range(times)]
        rows.append(row_of(setting, steps, runs, device.type == "cuda"))
    return rows


def _as_rank(rank: int, ranks: int, store: Path, steps: int, where: str) -> list[dict[str, Any]]:
    """Joins the others, and trains with them."""
    device = torch.device("cuda", rank) if where == "cuda" else torch.device("cpu")
    options: dict[str, Any] = {}
    if where == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group(
        "nccl" if where == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        **options,
    )
    rows = run_settings(settings(ranks), steps, device, dist.group.WORLD)
    from mok.functional import clear_workspace_cache

    clear_workspace_cache()
    dist.barrier()
    dist.destroy_process_group()
    return rows


def _apart(
    chosen: Sequence[Setting], steps: int, times: int, where: str, at_once: int
) -> list[dict[str, Any]]:
    """Rows of settings of one rank, each trained in a process of its own; RuntimeError when one
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [
                *_command(1, steps, where, folder),
                *("--as-setting", str(settings(1).index(one)), "--times", str(times)),
            ]
            for one in chosen
        ]
        run_side_by_side(commands, at_once)
        return [
            row
            for one in chosen
            for row in json.loads(_file(Path(folder), "setting", settings(1).index(one)))
        ]


def _several(ranks: int, steps: int, where: str) -> list[dict[str, Any]]:
    """Rows of ranks that are processes of their own; RuntimeError when one fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = _command(ranks, steps, where, folder)
        commands = [[*command, "--as-rank", str(rank)] for rank in range(ranks)]
        run_side_by_side(commands, ranks, grown(PATIENCE, ranks))
        told = [json.loads(_file(Path(folder), "rank", rank)) for rank in range(ranks)]
    for rows in zip(*told, strict=True):
        bits = {(row["losses"], row["weights"], row["equal"]) for row in rows}
        rows[0]["equal"] = rows[0]["equal"] and len(bits) == 1
        rows[0]["kernels"] = min(row["kernels"] for row in rows)
    return list(told[0])


def _command(ranks: int, steps: int, where: str, folder: str) -> list[str]:
    words = ["--ranks", str(ranks), "--steps", str(steps), "--device", where, "--folder", folder]
    return [sys.executable, __file__, *words]


def _file(folder: Path, kind: str, number: int) -> str:
    return (folder / f"{kind}-{number}.json").read_text(encoding="utf-8")


def _write(folder: Path, kind: str, number: int, rows: list[dict[str, Any]]) -> None:
    (folder / f"{kind}-{number}.json").write_text(json.dumps(rows), encoding="utf-8")


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--ranks", type=int, callback=_allowed, default=1, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True)
@click.option("--device", "where", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option(
    "--at-once",
    type=click.IntRange(1, len(settings(1))),
    help="Settings of one rank at a time, each a process; 1: in this one. Default: "
    f"{AT_ONCE['cuda']} on a GPU, {AT_ONCE['cpu']} on a CPU.",
)
@click.option("--as-rank", type=click.IntRange(0), hidden=True)
@click.option("--as-setting", type=click.IntRange(0, len(settings(1)) - 1), hidden=True)
@click.option("--times", type=click.IntRange(1), default=TIMES, hidden=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), hidden=True)
def main(
    path: Path | None,
    ranks: int,
    steps: int,
    where: str,
    at_once: int | None,
    as_rank: int | None,
    as_setting: int | None,
    times: int,
    folder: Path | None,
) -> None:
    """Train in every setting, twice each, and compare losses and weights bit for bit."""
    click.get_current_context().with_resource(variables_set(variables()))  # before CUDA is
    torch.use_deterministic_algorithms(True, warn_only=True)
    if as_rank is not None and folder is not None:
        _write(folder, "rank", as_rank, _as_rank(as_rank, ranks, folder / "store", steps, where))
        end_process()
    device = device_or_exit() if where == "cuda" else torch.device("cpu")
    if as_setting is not None and folder is not None:
        mine = settings(1)[as_setting : as_setting + 1]
        _write(folder, "setting", as_setting, run_settings(mine, steps, device, None, times))
        return
    if where == "cuda" and torch.cuda.device_count() < ranks:
        click.echo(f"{ranks} ranks need {ranks} GPUs, {torch.cuda.device_count()} here", err=True)
        sys.exit(3)
    began = time.perf_counter()
    # One rank alone is what several are compared with: once, and without a shared expert.
    alone = settings(1) if ranks == 1 else [one for one in settings(1) if not one.shared]
    times, at_once = TIMES if ranks == 1 else 1, at_once or AT_ONCE[where]
    if at_once == 1:
        rows = run_settings(alone, steps, device, None, times)
    else:
        rows = _apart(alone, steps, times, where, at_once)
    rows += _several(ranks, steps, where) if ranks > 1 else []
    for row in rows:
        told = f"losses {row['losses'][:16]} weights {row['weights'][:16]}"
        same = f"{row['times']} trainings of {row['steps']} steps, equal: {row['equal']}"
        losses = f"loss {row['first']:.3f} to {row['last']:.3f}, {row['seconds']:.1f} s"
        click.echo(f"{name_of(row)}: {told}; {same}; {losses}")
    wrong = problems(rows)
    document = {
        "device": where,
        "at_once": at_once,
        "rows": rows,
        "problems": wrong,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if path is not None:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    click.echo(f"training: {'; '.join(wrong) if wrong else 'the same bits in every setting'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
