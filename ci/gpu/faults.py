"""The table of planted faults on a GPU: in how many of how many runs each condition sees them.

    python ci/gpu/faults.py --json faults.json
    python ci/gpu/faults.py --calibrate

Plain checks come first, in a process that has done nothing else: what an allocation holds then is
what it holds for those who write such checks. Exit code 0 when every fault was caught and every
twin is clean, 1 otherwise, 3 without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import click
import torch

from verify import controls
from verify.conditions.cuda_loads import busy_stream, held_multiprocessors
from verify.controls import gpu_calibration, gpu_kernels, gpu_rates, on_gpu
from verify.environment import environment

LOADS: dict[str, gpu_calibration.Load] = {
    "busy memory": busy_stream,
    "busy tensor": lambda: busy_stream(work="tensor"),
    "hold 1/2": lambda: held_multiprocessors(_multiprocessors() // 2),
    "hold 1/2 memory": lambda: held_multiprocessors(_multiprocessors() // 2, hammer=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the document there")
    parser.add_argument("--runs", type=int, default=30, help="least executions per condition")
    parser.add_argument("--trials", type=int, default=100, help="plain checks of each fault")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only faults of such names")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure the missing barrier's work, nothing else"
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
    return _calibrate() if options.calibrate else _table(chosen, options)


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
    found = gpu_rates.document(rows, environment(), time.perf_counter() - clock)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    click.echo(gpu_rates.drawn(found))
    return 0 if found["passed"] else 1


def _calibrate() -> int:
    handover = next(one for one in on_gpu.CONTROLS if one.fault.execute is on_gpu.without_barrier)
    links, values = gpu_rates.given(handover.fault).values()
    now = gpu_calibration.Choice(gpu_kernels.SHORT_WORK, gpu_kernels.ODDS, 0, 0)
    choice, fillings, step = gpu_calibration.calibrate(links, values, LOADS)
    for one in fillings:
        shares = ", ".join(f"{one.quantile(q)} ({100 * q:g} %)" for q in (0.0, 0.5, 0.97, 1.0))
        click.echo(f"cycles to fill, {one.setting}: {shares}")
    click.echo(f"a step of the reader takes {step:.2f} cycles")
    click.echo(f"proposed: SHORT_WORK = {choice.work}, ODDS = {choice.odds}; apart: {choice.apart}")
    for name, one in (("proposed", choice), ("as it is", now)):
        quiet = gpu_calibration.wrong_runs(links, values, one, 1000)
        cold = gpu_calibration.wrong_runs(links, values, one, 300, cold=True)
        click.echo(f"{name}: wrong in {quiet} of 1000 quiet runs, {cold} of 300 with a cold cache")
        for title, load in LOADS.items():
            with load():
                wrong = gpu_calibration.wrong_runs(links, values, one, 300)
            click.echo(f"{name}: wrong in {wrong} of 300 under {title}")
    return 0 if choice.apart else 1


def _multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def _tell(clock: float, text: str) -> None:
    click.echo(f"[{time.perf_counter() - clock:5.1f} s] {text}", err=True)


if __name__ == "__main__":
    sys.exit(main())
