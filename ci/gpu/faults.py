"""The table of planted faults on a GPU: in how many of how many runs each condition sees them.

    python ci/gpu/faults.py --json faults.json
    python ci/gpu/faults.py --margins

`--margins` only measures what the missing barrier rests on: when its tile is filled, quiet and
under each load, against when its reader looks. The table measures that as well, and states it.

Plain checks come first, in a process that has done nothing else: what an allocation holds then is
what it holds for those who write such checks. Exit code 0 when every fault was caught and every
twin is clean, 1 otherwise, 3 without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from verify import controls
from verify.conditions.cuda_loads import busy_stream, held_multiprocessors
from verify.controls import gpu_margins, gpu_rates, on_gpu
from verify.environment import environment

PATIENCE = 10.0  # seconds until a load ends by itself; what runs beside it takes less than one
BARRIER = "gpu/missing-barrier"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the document there")
    parser.add_argument("--runs", type=int, default=30, help="least executions per condition")
    parser.add_argument("--trials", type=int, default=100, help="plain checks of each fault")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only faults of such names")
    parser.add_argument(
        "--margins", action="store_true", help="measure the missing barrier's margins, nothing else"
    )
    options = parser.parse_args()
    names = controls.names(options.only)
    chosen = [one for one in controls.CONTROLS if one.needs == "cuda" and one.name in names]
    if not chosen:
        click.echo(f"no planted fault on the GPU matches {options.only!r}", err=True)
        return 2
    _, left_out = controls.parted(chosen)
    if left_out:
        click.echo(f"nothing ran: {next(iter(left_out.values()))}", err=True)
        return 3
    if options.margins:
        return _margins(options.json)
    return _table(chosen, options)


def _table(chosen: list[controls.Control], options: argparse.Namespace) -> int:
    clock = time.perf_counter()
    seen: dict[str, int] = {}
    # those that hang on what memory holds come before anything has filled it
    for control in sorted(chosen, key=lambda one: one.claim != "memory"):
        inputs = gpu_rates.given(control.fault)
        seen[control.name] = sum(
            gpu_rates.plain_check(control.fault, inputs) for _ in range(options.trials)
        )
        _tell(clock, f"{control.name}: plain checks that noticed: {seen[control.name]}")
    rows = []
    for control in chosen:
        row = gpu_rates.measure(control, options.runs, seen[control.name], options.trials)
        rows.append(row)
        _tell(clock, f"{control.name}: {'passed' if row.passed else 'FAILED'}")
    margins = _measured().to_json() if any(one.name == BARRIER for one in chosen) else None
    found = gpu_rates.document(rows, environment(), time.perf_counter() - clock, margins)
    _write(options.json, found)
    click.echo(gpu_rates.drawn(found))
    return 0 if found["passed"] else 1


def _margins(path: Path | None) -> int:
    margins = _measured()
    _write(path, margins.to_json())
    click.echo(gpu_margins.drawn(margins.to_json()))
    click.echo(f"hides when quiet: {margins.hides}; shows under: {', '.join(margins.shows)}")
    return 0 if margins.hides and margins.shows else 1


def _measured() -> gpu_margins.Margins:
    barrier = next(one for one in on_gpu.CONTROLS if one.name == BARRIER)
    return gpu_margins.measure(gpu_rates.given(barrier.fault)["values"], loads())


def loads() -> dict[str, gpu_margins.Load]:
    """What the missing barrier is measured under, by name: contention's own loads."""
    found: dict[str, gpu_margins.Load] = {
        f"busy {work}": partial(busy_stream, work=work, timeout=PATIENCE)
        for work in ("memory", "tensor")
    }
    total = int(torch.cuda.get_device_properties(0).multi_processor_count)
    for held in (total // 4, total // 2, total - max(1, total // 32)):
        found[f"hold={held}"] = partial(held_multiprocessors, held, timeout=PATIENCE)
    found[f"hold={total // 2} memory"] = partial(
        held_multiprocessors, total // 2, hammer=True, timeout=PATIENCE
    )
    return found


def _write(path: Path | None, found: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def _tell(clock: float, text: str) -> None:
    click.echo(f"[{time.perf_counter() - clock:5.1f} s] {text}", err=True)


if __name__ == "__main__":
    sys.exit(main())
