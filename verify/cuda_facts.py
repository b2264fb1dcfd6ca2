"""The CUDA part of the environment record: devices, driver, and the libraries that choose kernels.

Everything is read without a CUDA context in this process: from nvidia-smi, from the libraries'
own versions, and from the metadata of installed packages. What cannot be found is None.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

_PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas", "triton")
_QUERY = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
_TOPOLOGY = ["nvidia-smi", "topo", "-m"]

Output = Callable[[list[str]], str | None]


def cuda_facts(output: Output) -> dict[str, Any] | None:
    """The record, or None where torch sees no CUDA device; `output` runs a command.

    links: how each pair of several devices is joined, as nvidia-smi writes it (NV18, PIX, SYS).
    """
    if not torch.cuda.is_available():
        return None
    rows = [line.split(", ") for line in (output(_QUERY) or "").splitlines()]
    rows = [row for row in rows if len(row) == 3]
    runtime = torch.version.cuda
    return {
        "runtime": runtime,
        "driver": rows[0][2] if rows else None,
        "devices": [{"name": row[0], "capability": row[1]} for row in rows],
        "visible": torch.cuda.device_count(),
        "links": links(output(_TOPOLOGY) or "") if len(rows) > 1 else {},
        "cublas": _cublas((runtime or "").partition(".")[0]),
        "cudnn": _integer_version(torch.backends.cudnn.version),
        "nccl": _nccl(),
        "packages": {name: _installed(name) for name in _PACKAGES},
        **_kernels(rows[0][1] if rows else ""),
    }


def links(topology: str) -> dict[str, str]:
    """`GPU0-GPU1` -> NV18 and so on, from the matrix that `nvidia-smi topo -m` prints."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    names = [word for word in rows[0] if re.fullmatch(r"GPU\d+", word)] if rows else []
    found: dict[str, str] = {}
    for row in rows[1:]:
        if not row or row[0] not in names:
            continue
        for name, link in zip(names, row[1:], strict=False):
            if name > row[0]:
                found[f"{row[0]}-{name}"] = link
    return found


def _cublas(major: str) -> str | None:
    """From the library itself, which torch has loaded: `13.1.0`."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{major}")
        parts = []
        for kind in range(3):
            value = ctypes.c_int(-1)
            if library.cublasGetProperty(kind, ctypes.byref(value)) != 0:
                return None
            parts.append(str(value.value))
    except (OSError, AttributeError):
        return _installed("nvidia-cublas")
    return ".".join(parts)


def _nccl() -> str | None:
    try:
        version: Sequence[int] = torch.cuda.nccl.version()
    except (RuntimeError, AttributeError, ImportError):
        return None
    return ".".join(map(str, version))


def _integer_version(reader: Callable[[], int | None]) -> str | None:
    try:
        found = reader()
    except RuntimeError:
        return None
    return None if found is None else str(found)


def _kernels(capability: str) -> dict[str, Any]:
    """What compiles this project's own kernels, with which numerics, and how digests are taken."""
    from mok import toolchain

    facts: dict[str, Any] = {"kernel_flags": dict(toolchain.NUMERICS)}
    try:
        facts["nvrtc"] = ".".join(map(str, toolchain.nvrtc_version()))
    except toolchain.JitError:
        facts["nvrtc"] = None
    backend, why = _digest_backend(capability)
    return {**facts, "digest_backend": backend, "digest_backend_why": why}


def _digest_backend(capability: str) -> tuple[str, str]:
    """How digests of CUDA tensors are taken, and why if on the host.

    A process that has used CUDA knows. One that has not, and should not begin here, compiles the
    kernel, which needs no device and is kept for those that load it.
    """
    from mok import jit
    from verify import device_kernel

    if torch.cuda.is_initialized():
        return device_kernel.digest_backend()
    numbers = [int(part) for part in re.findall(r"\d+", capability)[:2]]
    if tuple(numbers) < device_kernel.OLDEST:
        return device_kernel.HOST, f"capability {capability or 'unknown'}"
    arch = f"sm_{numbers[0]}{numbers[1]}{'a' if numbers[0] >= 9 else ''}"
    macros = device_kernel.DEFAULT_TUNING.macros
    try:
        jit.compile_source(device_kernel.SOURCE, arch=arch, macros=macros)
    except jit.JitError as error:
        return device_kernel.HOST, str(error)[:300]
    return device_kernel.KERNEL, ""


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
