"""The GPU for a script that runs the Hopper kernel on one, or the script's end."""

from __future__ import annotations

import sys

import click
import torch


def device_or_exit() -> torch.device:
    """The current CUDA device; where that cannot run the kernel, says why and exits with code 3."""
    from mok.hopper.support import device_problem

    why: str | None = "needs a CUDA device"
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        why = device_problem(device)
        if why is None:
            return device
    click.echo(f"nothing ran: {why}", err=True)
    sys.exit(3)
