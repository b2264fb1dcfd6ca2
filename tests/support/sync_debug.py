"""Runs something on a device where waiting for the device is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def synchronising_raises() -> Iterator[None]:
    """RuntimeError from every call inside that torch knows to wait; the mode is put back after.

    Torch warns that the mode is a prototype after it has set it, so a warning that raises would
    leave it on for everything that follows.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Synchronization debug mode", category=UserWarning
        )
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
