"""What recording costs: steps of a 12-layer mixture-of-experts transformer, recorded and not.

`python ci/gpu/recording.py --json FILE` on a GPU, with `--device cpu` anywhere. In one run, each in
turn, round by round: the step alone, verify.record at module level, at op level, both with
`every=10`, and torch's DebugMode with hash_tensor, which hashes the outputs of all operations. A
ratio is of medians over the rounds. Opening and closing a recording are not in it; the state at
each step's border is, and of every 10th step its share: ten steps are timed, of which one is
recorded in full and the one before it leaves its state.

It also keeps the size of a step on disk, and refuses to compare runs that did not compute the same:
the losses of every contender must be equal bit for bit. So torch's deterministic algorithms are on
for all of them: attention's backward adds by atomics otherwise.

A round is begun only if it ends within `--limit` seconds, judged by the longest before. Exit code
0: the same losses everywhere; what costs more than goals.py allows is told, since it hangs on the
card. 1: a contender trained otherwise, or with `--strict` one that is too dear. 2: usage. 3: no
device for the kernels.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import goals  # both beside this file
import torch
from one_gpu import device_or_exit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import deterministic

import mok
import verify
from verify.tracing.files import read_recording

LAYERS = 12
EVERY = 10


@dataclass(frozen=True)
class Size:
    """tokens of a step, in sequences of `length`; H hidden size, I width, E experts, K slots."""

    tokens: int
    length: int
    hidden: int
    width: int
    experts: int
    slots: int
    words: int
    heads: int


SIZES = {
    "cuda": Size(16384, 2048, 2048, 768, 32, 4, 32768, 16),
    "cpu": Size(1024, 256, 256, 256, 8, 2, 1024, 4),
}


class Layer(nn.Module):
    """Attention and experts, each with its norm and its residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.before_attention = nn.RMSNorm(size.hidden)
        self.attention = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.joined = nn.Linear(size.hidden, size.hidden, bias=False)
        self.before_experts = nn.RMSNorm(size.hidden)
        self.router = nn.Linear(size.hidden, size.experts, bias=False)
        self.experts = mok.MoE(size.experts, size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H]."""
        batch, length, hidden = x.shape
        heads = self.attention(self.before_attention(x)).view(
            batch, length, 3, self.size.heads, hidden // self.size.heads
        )
        q, k, v = (one.transpose(1, 2) for one in heads.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, length, hidden))
        rows = self.before_experts(x).view(-1, hidden)
        weights, experts = torch.topk(F.softmax(self.router(rows).float(), -1), self.size.slots)
        return x + self.experts(rows, experts, weights).view_as(x)


class Transformer(nn.Module):
    """Words in, scores of the next word out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """words int64 [B, S]; bf16 [B, S, V]."""
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass
class Training:
    """A model, its optimizer and its words, in a state that `start` brings back."""

    size: Size
    device: torch.device

    def start(self) -> None:
        """The same model and words, whoever trained before."""
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = Transformer(self.size).to(torch.bfloat16)
            shape = (self.size.tokens // self.size.length, self.size.length + 1)
            self.words = torch.randint(self.size.words, shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> Tensor:
        """One step; its loss, still on the device."""
        self.optimizer.zero_grad()
        scores = self.model(self.words[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1).float(), self.words[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Algorithms of one order of sums inside. Memory that torch makes is not filled beforehand, as
    it would be then: that would cost every contender time."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)  # attention heeds it only where it does not just warn
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


@contextlib.contextmanager
def _debug_mode() -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode() as mode, mode.log_tensor_hashes("hash_tensor"):
        yield


def contenders(training: Training, folder: Path) -> dict[str, Callable[[], Any]]:
    """A context of each, made anew every time."""

    def recorded(level: str, every: int = 1) -> Any:
        where = folder / (level if every == 1 else f"{level}-{every}")
        return verify.record(where, training.model, level=level, every=every, overwrite=True)

    return {
        "alone": contextlib.nullcontext,
        "module": lambda: recorded("module"),
        "op": lambda: recorded("op"),
        f"module-{EVERY}": lambda: recorded("module", EVERY),
        f"op-{EVERY}": lambda: recorded("op", EVERY),
        "debug": _debug_mode,
    }


def timed_steps(name: str, steps: int) -> int:
    """How many of a contender's steps are timed in a round; alone as many as the longest of all."""
    return max(steps, EVERY) if name == "alone" else EVERY if name.endswith(f"-{EVERY}") else steps


def measure(
    training: Training, rounds: int, steps: int, folder: Path, limit: float = math.inf
) -> dict[str, Any]:
    """Seconds of a step by contender, one number a round, and each round's losses of each.

    At most so many rounds, and at least one, that end within `limit` seconds.
    """
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[list[float]]] = {}
    first, longest = time.perf_counter(), 0.0
    for number in range(rounds):
        start = time.perf_counter()
        if number and start - first + longest > limit:
            break
        for name, context in contenders(training, folder).items():
            training.start()
            with context():
                told = [training.step()]  # makes the optimizer's state, and loads kernels
                _wait(training.device)
                began = time.perf_counter()
                count = timed_steps(name, steps)
                told += [training.step() for _ in range(count)]
                _wait(training.device)
                taken = (time.perf_counter() - began) / count
            seconds.setdefault(name, []).append(taken)
            losses.setdefault(name, []).append([float(loss) for loss in told])
            if sys.stderr.isatty():
                click.echo(f"round {number}: {name} {1e3 * taken:.1f} ms", err=True)
        longest = max(longest, time.perf_counter() - start)
    return {"seconds": seconds, "losses": losses}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rows_of(measured: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What is kept of each contender: medians, ratios, events and bytes of a step."""
    alone = statistics.median(measured["seconds"]["alone"])
    whole = measured["losses"]["alone"]
    rows = []
    for name, taken in measured["seconds"].items():
        median = statistics.median(taken)
        row = {
            "name": name,
            "rounds": len(taken),
            "ms": 1e3 * median,
            "ratio": median / alone,
            "spread": (max(taken) - min(taken)) / median,
            "same": all(
                one[: len(other)] == other[: len(one)]
                for one, other in zip(measured["losses"][name], whole, strict=True)
            ),
        }
        path = folder / name / "rank-00000.trace"
        if path.exists():
            steps = read_recording(path).steps
            row |= {"events": max(map(len, steps)), "bytes": path.stat().st_size}
            row["recorded_steps"] = steps[-1].number + 1  # those left out too: its bytes are theirs
        rows.append(row)
    return rows


def otherwise(rows: list[dict[str, Any]]) -> list[str]:
    """Contenders whose times say nothing, since they did not compute the same."""
    return [f"{row['name']} trained otherwise than alone" for row in rows if not row["same"]]


def too_dear(rows: list[dict[str, Any]], device: str) -> list[str]:
    """What costs more than it may, in words."""
    found = goals.judged_recording({"device": device, "rows": rows})
    return [
        f"{one.what} is {one.measured}, not {one.goal}" for one in found if one.met != goals.YES
    ]


@click.command()
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--device", "where", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True)
@click.option("--limit", type=click.FloatRange(1), default=95.0, show_default=True)
@click.option("--strict", is_flag=True, help="Exit code 1 for what is too dear as well.")
def main(
    path: Path | None, where: str, rounds: int, steps: int, limit: float, strict: bool
) -> None:
    """Measure, print a table, and say what recording costs more than it may."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is
    device = device_or_exit() if where == "cuda" else torch.device("cpu")
    training = Training(SIZES[where], device)
    with tempfile.TemporaryDirectory() as folder, repeatable():
        rows = rows_of(measure(training, rounds, steps, Path(folder), limit), Path(folder))
    for row in rows:
        size = f", {row['events']} events, {row['bytes']:,} bytes" if "events" in row else ""
        click.echo(
            f"{row['name']:9} {row['ms']:9.1f} ms, {row['ratio']:.3f} x, spread "
            f"{row['spread']:.3f} of {row['rounds']} rounds, same losses: {row['same']}{size}"
        )
    wrong, dear = otherwise(rows), too_dear(rows, where)
    document = {"device": where, "rows": rows, "problems": [*wrong, *dear], "steps": steps}
    if path is not None:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    click.echo(f"recording: {'; '.join([*wrong, *dear]) or 'as cheap as promised'}")
    sys.exit(1 if wrong or (strict and dear) else 0)


if __name__ == "__main__":
    main()
