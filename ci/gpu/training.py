"""A small MoE transformer trained with AdamW, again and again: the same losses and weights?

    python ci/gpu/training.py --json training.json
    python ci/gpu/training.py --ranks 2            two GPUs, and one rank alone to compare with
    python ci/gpu/training.py --device cpu --steps 3 --ranks 2

Every setting runs twice: with a shared expert or without, with activations of a layer computed
again in the backward (torch.utils.checkpoint) or kept. Losses and gradients of what ranks replicate
are one for each sequence, added in the order of all sequences; those of the shared expert, which
are sums of a rank's own tokens, in the order of ranks. So without a shared expert one rank and two
must have the same bits. On a GPU the Hopper kernels run both directions, which is counted.

Exit code 0: the same bits, and losses that fall. 1: not so. 2: usage. 3: no device for the kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from one_gpu import device_or_exit  # both beside this file
from torch import Tensor
from training_model import (
    LAYERS,
    B,
    Model,
    losses_and_gradients,
    make_model,
    sequences,
    set_gradients,
)

from mok.endings import end_process
from mok.hopper import passes
from mok.hopper.support import BACKWARD_VARIABLE
from verify.interrupts import interrupts_held

STEPS, TIMES = 200, 2
PATIENCE = 300.0  # seconds for ranks that the script started


@dataclass(frozen=True)
class Setting:
    """ranks: that train together. shared: with a shared expert. recompute: activations anew."""

    ranks: int
    shared: bool
    recompute: bool


@dataclass(frozen=True)
class Trained:
    """What one training gave. losses, weights: SHA-256 of all losses' bits, of all weights.

    kernels: backwards that the Hopper kernels ran on this rank. first, last: losses.
    """

    losses: str
    weights: str
    kernels: int
    first: float
    last: float
    seconds: float


def settings(ranks: int) -> list[Setting]:
    """All of so many ranks."""
    return [Setting(ranks, *both) for both in itertools.product((True, False), repeat=2)]


def shares(ranks: int) -> list[int]:
    """Sequences of each rank: of several the first has fewer."""
    even = B // ranks
    return [B] if ranks == 1 else [even - 1, *([even] * (ranks - 2)), B - even * (ranks - 1) + 1]


def train(
    setting: Setting, steps: int, device: torch.device, group: dist.ProcessGroup | None
) -> Trained:
    """One training from the same beginning. Collective over the group."""
    began = time.perf_counter()
    counts = shares(setting.ranks)
    rank = 0 if group is None else dist.get_rank(group)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    model = make_model(setting.shared, group, device)
    optimizer = torch.optim.AdamW(model.parameters, lr=2e-3, foreach=False)
    history = []
    with _counted() as launched:
        for step in range(steps):
            words = sequences(step)[own].to(device)
            losses, rows, layers = losses_and_gradients(model, words, setting.recompute)
            history.append(_added(_all_rows(losses[:, None], counts, group)))
            replicated = _added(_all_rows(rows, counts, group))
            set_gradients(model, replicated, [_summed(some, group) for some in layers])
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


def row_of(setting: Setting, steps: int, runs: Sequence[Trained], on_gpu: bool) -> dict[str, Any]:
    """What a setting's trainings show. equal: all have the same losses and weights."""
    first = runs[0]
    return {
        **asdict(setting),
        "steps": steps,
        "times": len(runs),
        "equal": len({(one.losses, one.weights) for one in runs}) == 1,
        "losses": first.losses,
        "weights": first.weights,
        "first": first.first,
        "last": first.last,
        "kernels": min(one.kernels for one in runs),
        "wanted": LAYERS * steps * on_gpu,
        "seconds": sum(one.seconds for one in runs),
    }


def problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it should be, in words."""
    told = []
    for row in rows:
        name = name_of(row)
        if not row["equal"]:
            told.append(f"{name}: not the same bits in {row['times']} trainings")
        if row["kernels"] != row["wanted"]:
            told.append(f"{name}: kernels ran {row['kernels']} of {row['wanted']} backwards")
        if row["steps"] >= STEPS and not row["last"] < 0.8 * row["first"]:
            told.append(f"{name}: losses went from {row['first']:.3f} to {row['last']:.3f}")
    told += _unlike(rows, ("ranks", "shared"), "recomputed and kept activations")
    told += _unlike([row for row in rows if not row["shared"]], ("shared",), "numbers of ranks")
    return told


def _unlike(rows: Sequence[dict[str, Any]], same: Sequence[str], what: str) -> list[str]:
    """Settings that are alike in `same` and should have the same bits, but have not."""
    found: dict[tuple[Any, ...], set[tuple[str, str]]] = {}
    for row in rows:
        key = tuple(row[name] for name in same)
        found.setdefault(key, set()).add((row["losses"], row["weights"]))
    return [
        f"{', '.join(f'{name} {value}' for name, value in zip(same, key, strict=True))}: {what} "
        f"give {len(bits)} different results"
        for key, bits in found.items()
        if len(bits) > 1
    ]


def name_of(row: dict[str, Any]) -> str:
    """A setting in words."""
    shared = "with" if row["shared"] else "without"
    recompute = "computed again" if row["recompute"] else "kept"
    return f"{row['ranks']} rank(s), {shared} a shared expert, activations {recompute}"


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


def _several(ranks: int, steps: int, where: str) -> list[dict[str, Any]]:
    """Rows of ranks that are processes of their own; RuntimeError when one fails."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--ranks", str(ranks), "--steps", str(steps), "--device", where]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                own = ["--as-rank", str(rank), "--folder", folder]
                command = [sys.executable, __file__, *words, *own]
                with interrupts_held():
                    started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            codes = [one.wait(PATIENCE) for one in started]
        finally:
            for one in started:
                one.kill()
                one.wait()
        if any(codes):
            raise RuntimeError(f"ranks ended with exit codes {codes}")
        told = [json.loads((Path(folder) / f"rank-{n}.json").read_text()) for n in range(ranks)]
    for rows in zip(*told, strict=True):
        bits = {(row["losses"], row["weights"], row["equal"]) for row in rows}
        rows[0]["equal"] = rows[0]["equal"] and len(bits) == 1
        rows[0]["kernels"] = min(row["kernels"] for row in rows)
    return list(told[0])


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--ranks", type=click.IntRange(1, B // 2), default=1, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True)
@click.option("--device", "where", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--as-rank", type=click.IntRange(0), hidden=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), hidden=True)
def main(
    path: Path | None,
    ranks: int,
    steps: int,
    where: str,
    as_rank: int | None,
    folder: Path | None,
) -> None:
    """Train in every setting, twice each, and compare losses and weights bit for bit."""
    os.environ |= {BACKWARD_VARIABLE: "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # before CUDA is
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.use_deterministic_algorithms(True, warn_only=True)
    if as_rank is not None and folder is not None:
        rows = _as_rank(as_rank, ranks, folder / "store", steps, where)
        (folder / f"rank-{as_rank}.json").write_text(json.dumps(rows))
        end_process()
    device = device_or_exit() if where == "cuda" else torch.device("cpu")
    if where == "cuda" and torch.cuda.device_count() < ranks:
        click.echo(f"{ranks} ranks need {ranks} GPUs, {torch.cuda.device_count()} here", err=True)
        sys.exit(3)
    began = time.perf_counter()
    # One rank alone is what several are compared with: once, and without a shared expert.
    alone = settings(1) if ranks == 1 else [one for one in settings(1) if not one.shared]
    rows = run_settings(alone, steps, device, None, TIMES if ranks == 1 else 1)
    rows += _several(ranks, steps, where) if ranks > 1 else []
    for row in rows:
        told = f"losses {row['losses'][:16]} weights {row['weights'][:16]}"
        same = f"{row['times']} trainings of {row['steps']} steps, equal: {row['equal']}"
        losses = f"loss {row['first']:.3f} to {row['last']:.3f}, {row['seconds']:.1f} s"
        click.echo(f"{name_of(row)}: {told}; {same}; {losses}")
    wrong = problems(rows)
    document = {
        "device": where,
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
