"""Which backend runs on this machine, and the facts that decide its bits.

It exists so that a report can name what a user does not control: CPU capability, BLAS, torch, the
device, and the compiler of the kernels. Whether kernels can be compiled and loaded is tried, not
guessed from what is installed. Refuses to guess: what cannot be found out is "unknown".
"""

from __future__ import annotations

import os
import platform

import torch

from mok import kernels, toolchain
from mok.hopper import support, tuned


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
        "hopper_backward": support.describe_backward(),
        "tuned": tuned.describe(),
        **_kernels(),
    }


def _kernels() -> dict[str, object]:
    """Whether kernels can be compiled and loaded here, why not, and what compiles them."""
    from mok import compile_cache

    facts: dict[str, object] = {"kernels": _kernel_state(kernels.CATALOGUE)}
    try:
        facts["nvrtc"] = ".".join(map(str, toolchain.nvrtc_version()))
    except toolchain.JitError:
        facts["nvrtc"] = "unknown"
    if torch.cuda.is_available():
        from mok import loading

        facts["cuda_driver"] = loading.driver_version()
        facts["architecture"] = loading.architecture()
    try:
        facts["kernel_cache"] = str(compile_cache.cache_folder())
    except RuntimeError as error:
        facts["kernel_cache"] = f"none: {error}"
    return {**facts, **toolchain.record()}


def _kernel_state(catalogue: tuple[kernels.Variant, ...]) -> str:
    """Compiles, and where there is a device loads, the first kernel that exists for it."""
    from mok import compilation, loading

    try:
        device = torch.cuda.is_available()
        arch = loading.architecture() if device else "sm_90a"
        fits = (one for one in catalogue if not one.needs or arch in one.needs)
        variant = next(fits, None)
        if variant is None:
            return f"none exists for {arch}"
        macros = dict(variant.macros)
        if not device:
            # Asking leaves nothing behind, and an answer from the cache would be one of then.
            compilation.compile_source(variant.source, arch=arch, macros=macros, cache=False)
            return "compiled here; not loaded, since torch sees no CUDA device"
        loading.load(variant.source, variant.entries[0], macros=macros)
    except toolchain.JitError as error:
        return f"not usable here: {error}"
    return f"compiled and loaded here, for {arch}"


def _backend() -> tuple[str, str]:
    """What backend="auto" takes here, and why; why not Hopper where it is not that."""
    return support.backend_here()
