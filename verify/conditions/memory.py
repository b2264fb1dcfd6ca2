"""memory: allocations that are not zero, twice with different fills, and recycled NaNs.

A read of memory that nothing wrote gives zeros on a quiet machine and anything elsewhere. On glibc
`mallopt(M_PERTURB, b)` fills every allocation with ~b and every freed block with b. torch's own
deterministic fill is not used: it changes the algorithms under test. For tensors on a GPU see
`cuda_memory`.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from verify.conditions import cuda_memory
from verify.conditions.availability import Unavailable, available, on_any_rank, unsupported
from verify.conditions.watching import cuda_devices, uses_cpu
from verify.sessions import Session, perform

M_PERTURB, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -6, -3, -1
FILLS = (0x01, 0x7F)  # allocations then hold 0xFE (huge negative) and 0x80 (tiny negative) bytes
DIRTY = 3
LARGEST_HEAP_BLOCK = 32 * 2**20


def run(session: Session, runs: int) -> None:
    """With filled allocations on every device that the case has tensors on."""
    devices = cuda_devices(session)
    if on_any_rank(session, bool(devices)):
        if on_any_rank(session, not devices):
            unsupported(session, "memory", "only some ranks use a GPU")
        else:
            cuda_memory.run(session, runs, devices)
    if on_any_rank(session, uses_cpu(session)):
        _run_on_cpu(session, runs)


def _run_on_cpu(session: Session, runs: int) -> None:
    """Executions under two fill values and after freed NaN buffers, in turn, at least `runs`."""
    libc = available(session, "memory", _libc_that_fills)
    if libc is None:
        return
    variants = [("fill", fill) for fill in FILLS] + [("recycled-nan", 0)]
    for index in range(max(runs, len(variants))):
        kind, fill = variants[index % len(variants)]
        with _recycling(libc), _perturbed(libc, fill):
            if kind == "recycled-nan":
                guards = _dirty(session)
                effective = partial(_recycled, session)
            else:
                guards = []
                effective = partial(_filled, fill)
            before = effective()
            perform(
                session,
                "memory",
                kind if not fill else f"fill=0x{fill ^ 0xFF:02x}",
                run=index,
                requested={"fill": f"0x{fill ^ 0xFF:02x}" if fill else "0xff, recycled"},
                effective=before,
            )
            guards.clear()


def _libc_that_fills() -> ctypes.CDLL:
    libc = _glibc()
    if libc is None:
        raise Unavailable(
            f"filled allocations need glibc; this is {platform.system()}"
            f" with {platform.libc_ver()[0] or 'another C library'}"
        )
    return libc


def _glibc() -> ctypes.CDLL | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None


@contextmanager
def _perturbed(libc: ctypes.CDLL, fill: int) -> Iterator[None]:
    libc.mallopt(M_PERTURB, fill)
    try:
        yield
    finally:
        libc.mallopt(M_PERTURB, 0)


@contextmanager
def _recycling(libc: ctypes.CDLL) -> Iterator[None]:
    """Keeps freed blocks in the heap instead of giving them back as zero pages."""
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK)
    libc.mallopt(M_TRIM_THRESHOLD, 2**30)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
        libc.mallopt(M_TRIM_THRESHOLD, 128 * 1024)


def _sizes(session: Session) -> list[int]:
    """The sizes in bytes of the case's own tensors, and small ones as temporaries have them."""
    base = session.base
    assert base is not None
    own = [*base.kept.values(), *base.given.tensors.values()]
    return sorted({t.numel() * t.element_size() for t in own} | {64 * 2**k for k in range(12)})


def _dirty(session: Session) -> list[torch.Tensor]:
    """Frees NaN buffers of the case's sizes, and returns the guards that keep them apart.

    Without a live block behind it a freed block would be merged with its neighbours and given back.
    """
    held, guards = [], []
    for size in _sizes(session):
        for _ in range(DIRTY):
            held.append(torch.full((max(size, 1),), 0xFF, dtype=torch.uint8))
            guards.append(torch.zeros(64, dtype=torch.uint8))
    held.clear()
    return guards


def _filled(fill: int) -> tuple[dict[str, Any], bool]:
    """What a fresh torch allocation holds: the proof that the fill reaches tensors."""
    fresh = torch.empty(4096, dtype=torch.uint8)
    share = float((fresh == (fill ^ 0xFF)).float().mean())
    return {"fresh_bytes_filled": share}, share > 0.99


def _recycled(session: Session) -> tuple[dict[str, Any], bool]:
    """How many fresh allocations of such sizes hold bytes of freed NaN buffers."""
    fresh = [torch.empty(max(size, 64), dtype=torch.uint8) for size in _sizes(session)]
    dirty = sum(bool((one == 0xFF).float().mean() > 0.5) for one in fresh)
    return {"recycled_allocations": dirty, "of": len(fresh)}, dirty > 0
