"""The digest kernel on a device: which variant, and whether it can run there at all.

It can where the CUDA packages are installed and the device is of sm_80 or later. Elsewhere digests
are taken on the host, and `digest_backend` says so. A kernel that should run and does not is told
with a RuntimeWarning: the value would be the same, but nobody should wait for it without knowing.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, fields

import torch

from mok import jit
from verify.device_parts import Geometry
from verify.lanes import BLOCK

SOURCE, ENTRY = "digest/digest.cu", "digest"
KERNEL, HOST = "cuda-kernel", "host"
OLDEST = (8, 0)  # cp.async


@dataclass(frozen=True)
class Tuning:
    """The macros of the kernel; the defaults are those of the source, as `mok build` compiles it.

    words: consecutive words of a thread, 16 or 32; a CTA's threads share a block of 4096. stages:
    tiles on their way to shared memory, a power of 2 from 2 on. prefetch: bytes that a read pulls
    into L2; 0, 128 or 256. striped: no macro; whether CTAs take every n-th tile of long contiguous
    tensors, instead of as many in a row. ValueError for `stages` that are none of these.
    """

    words: int = 16
    stages: int = 4
    prefetch: int = 0
    striped: bool = False

    def __post_init__(self) -> None:
        if self.stages < 2 or self.stages & (self.stages - 1):
            raise ValueError(
                f"stages is {self.stages}; give a power of 2 from 2 on, such as 4: a tile is read "
                "while the next one is on its way"
            )

    @functools.cached_property
    def macros(self) -> dict[str, int]:
        """Macros that differ from the source's own."""
        own = {field.name: field.default for field in fields(self) if field.type == "int"}
        return {n.upper(): getattr(self, n) for n in own if getattr(self, n) != own[n]}

    @functools.cached_property
    def threads(self) -> int:
        """Of a block of the grid."""
        return BLOCK // self.words

    @functools.cached_property
    def geometry(self) -> Geometry:
        return Geometry(4 * BLOCK, 16 * self.threads)

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: its stages, in whose place the table has room."""
        chunk = 16 * 32 + 16  # of a warp's threads, with what lies behind it
        return self.threads // 32 * self.stages * (self.words // 4) * chunk


DEFAULT_TUNING = Tuning()
"""The fastest that was measured: the variant that `mok build` compiles."""


@dataclass(frozen=True)
class Loaded:
    """The kernel on one device and its variant, or why it is not there."""

    kernel: jit.Kernel | None
    tuning: Tuning = DEFAULT_TUNING
    blocks: int = 0  # that run at the same time
    reason: str = ""


@functools.cache
def loaded(index: int, tuning: Tuning = DEFAULT_TUNING) -> Loaded:
    """The digest kernel on device `index`, compiled and loaded at first use."""
    if (found := torch.cuda.get_device_capability(index)) < OLDEST:
        return Loaded(None, reason=f"cuda:{index} has capability {found}, {OLDEST} is needed")
    try:
        kernel = jit.load(SOURCE, ENTRY, macros=tuning.macros, device=index)
        per_sm = kernel.resident_blocks(tuning.threads, tuning.shared_bytes)
    except (jit.CompilerMissing, jit.DeviceMissing, jit.ArchitectureUnsupported) as error:
        return Loaded(None, reason=str(error))
    except jit.JitError as error:
        warnings.warn(f"digests are taken on the host: {error}", RuntimeWarning, stacklevel=2)
        return Loaded(None, reason=str(error))
    count = torch.cuda.get_device_properties(index).multi_processor_count
    return Loaded(kernel, tuning, per_sm * count)


def digest_backend(device: torch.device | int | None = None) -> tuple[str, str]:
    """How a digest on this device is computed, `cuda-kernel` or `host`, and why if on the host.

    device: None is torch's current one. Compiles and loads the kernel, which starts CUDA.
    """
    if not torch.cuda.is_available():
        return HOST, "there is no CUDA device"
    at = torch.device("cuda", device) if isinstance(device, int) else device
    if at is not None and at.type != "cuda":
        return HOST, f"{at} is not a CUDA device"
    index = torch.cuda.current_device() if at is None or at.index is None else at.index
    found = loaded(index)
    return (HOST, found.reason) if found.kernel is None else (KERNEL, "")
