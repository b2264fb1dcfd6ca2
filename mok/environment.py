"""Which backend runs on this machine, and the facts that decide its bits.

It exists so that a report can name what a user does not control: CPU capability, BLAS, torch and
the device. Refuses to guess: what cannot be found out is "unknown".
"""

from __future__ import annotations

import os
import platform

import torch


def describe() -> dict[str, object]:
    """Facts by name; JSON-ready."""
    backend, reason = _backend()
    return {
        "backend": backend,
        "reason": reason,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "not mkl",
        "torch_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "MOK_CHECK": os.environ.get("MOK_CHECK", ""),
    }


def _backend() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "portable", "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    return (
        "portable",
        f"{name} (compute capability {major}.{minor}); mok.functional and mok.moe run the "
        "portable backend on every device",
    )
