"""Compiles peers' Triton and DeepGEMM kernels on all cores, before anything is timed.

    python -m mok.bench.peers.warming --workers 15 --peers sonicmoe,liger --shapes small,kimi-shard

Triton compiles one candidate after the other in one process; here each worker process takes a
share of the candidates, on small tensors with the shape's H, I and K, and leaves them in Triton's
cache on disk (TRITON_CACHE_DIR). It needs a GPU, changes nothing but caches, and a worker that
fails says so and goes on: what it left out is compiled when it is needed. Autotuners still choose
in every process; this makes that a matter of seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import click
import torch

from mok.bench.contenders import Inputs, Missing
from mok.bench.peers import deepgemm, liger, sonic, tuning
from mok.bench.peers.adapting import Peer, contender_of, prepare_peer
from mok.bench.shapes import PEER_SHAPES, Shape, parse_shape

CHOICES = ("deepgemm", "sonicmoe", "liger")
_TOKENS = 64
_EXPERTS = 16

Task = tuple[str, Callable[[], None]]


def inputs_of(shape: Shape, tokens: int, experts: int) -> Inputs:
    """Random inputs on the current CUDA device with the shape's H, I and K."""
    experts = max(experts, shape.K)
    random = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    scores, chosen = torch.randn(tokens, experts, device="cuda").topk(shape.K, 1)
    return Inputs(
        random(tokens, shape.H),
        random(experts, 2 * shape.I, shape.H) * shape.H**-0.5,
        random(experts, shape.H, shape.I) * shape.I**-0.5,
        chosen,
        scores.softmax(1).bfloat16().float(),
        random(tokens, shape.H),
    )


def _run(peer: Peer, shape: Shape) -> None:
    prepared = prepare_peer(peer, inputs_of(shape, _TOKENS, _EXPERTS))
    prepared.backward(prepared.forward(), False)


def _liger_candidate(shape: Shape, number: int) -> None:
    """A whole pass in which every kernel has one candidate, the `number`-th of its list."""
    from liger_kernel.ops import fused_moe_kernels

    liger.load()
    kernels = [
        getattr(fused_moe_kernels, name)
        for name in (*liger.GEMMS, *liger.WEIGHT_GRADIENTS, *liger.GATHERS)
    ]
    whole = [kernel.configs for kernel in kernels]
    try:
        for kernel in kernels:
            kernel.configs = [kernel.configs[number % len(kernel.configs)]]
        _run(replace(liger.PEER, load=partial(liger.loaded, kernels)), shape)
    finally:
        for kernel, configs in zip(kernels, whole, strict=True):
            kernel.configs = configs


def _sonic_candidates(shape: Shape, part: int, parts: int) -> None:
    """SonicMoE's gather-sum, with and without weights, for a share of its candidates."""
    from sonicmoe.functional.reduction_over_k_gather import (
        token_gather_and_sum_varlen_K_triton,
        token_gather_sum_kernel,
    )

    sonic.load()
    rows = _TOKENS * shape.K
    y = torch.randn(rows, shape.H, dtype=torch.bfloat16, device="cuda")
    order = torch.arange(rows, device="cuda", dtype=torch.int32)
    weights, out = torch.rand(rows, device="cuda"), torch.empty_like(y[:_TOKENS])
    sizes = {"H": shape.H, "MAX_K": shape.K}
    whole = token_gather_sum_kernel.configs
    for config in token_gather_sum_kernel.early_config_prune(whole, {}, **sizes)[part::parts]:
        token_gather_sum_kernel.configs = [config]
        for given in (weights, None):
            token_gather_and_sum_varlen_K_triton(
                y, given, out, order, None, _TOKENS, shape.K, shape.H, False
            )
    token_gather_sum_kernel.configs = whole


def _deepgemm(shape: Shape) -> None:
    for gemm in deepgemm.grouped_gemms(inputs_of(shape, shape.T, shape.E)):
        gemm.run()


def tasks(peers: list[str], shapes: list[Shape]) -> Iterator[Task]:
    """Every piece of work with its name, in an order that spreads the slow ones over workers."""
    for peer in peers:
        for shape in shapes:
            label = f"{peer} {shape.name}"
            if peer == "deepgemm":
                yield label, partial(_deepgemm, shape)
            elif peer == "sonicmoe":
                for part in range(3):
                    yield f"{label} {part}", partial(_sonic_candidates, shape, part, 3)
            else:
                for number in range(liger.CANDIDATES[tuning.mode()]):
                    yield f"{label} {number}", partial(_liger_candidate, shape, number)


def _work(mine: list[Task]) -> None:
    for label, task in mine:
        started = time.monotonic()
        try:
            task()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            print(f"warming {label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if time.monotonic() - started > 60:
            print(f"warming {label}: {time.monotonic() - started:.0f} s", flush=True)


def installed(names: list[str]) -> list[str]:
    """Those that can be loaded here; the others are named on stdout with the reason."""
    entries: dict[str, Any] = {
        "deepgemm": deepgemm.missing(),
        "sonicmoe": contender_of(sonic.PEER),
        "liger": contender_of(liger.PEER),
    }
    for name in names:
        if isinstance(entries[name], Missing):
            print(f"warming {name}: left out: {entries[name].reason}", flush=True)
    return [name for name in names if not isinstance(entries[name], Missing)]


@click.command(epilog="Example: python -m mok.bench.peers.warming --peers sonicmoe --shapes small")
@click.option("--workers", type=click.IntRange(1), help="Processes; by default one a core less 1.")
@click.option("--peers", default=",".join(CHOICES), show_default=True)
@click.option("--shapes", help="Names or sizes, separated by semicolons; by default all measured.")
@click.option("--part", type=click.IntRange(0), hidden=True, help="The share of one worker.")
def main(workers: int | None, peers: str, shapes: str | None, part: int | None) -> None:
    """Compile what the peers will ask for, on all cores."""
    wanted = peers.split(",")
    unknown = [name for name in wanted if name not in CHOICES]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r}; allowed are {', '.join(CHOICES)}")
    chosen = [parse_shape(s) for s in (shapes.split(";") if shapes else (*PEER_SHAPES, "small"))]
    count = workers or max(1, (os.cpu_count() or 2) - 1)
    if part is not None:
        _work(list(tasks(wanted, chosen))[part::count])
        return
    ready = installed(wanted)
    if not ready:
        return
    started = time.monotonic()
    names = ";".join(shape.name for shape in chosen)
    common = ["--workers", str(count), "--peers", ",".join(ready), "--shapes", names]
    command = [sys.executable, "-m", "mok.bench.peers.warming", *common]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(count):
            running.append(subprocess.Popen([*command, "--part", str(index)]))
        failed = sum(process.wait() != 0 for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()
    seconds = time.monotonic() - started
    print(f"warming: {count - failed} of {count} workers done in {seconds:.0f} s", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
