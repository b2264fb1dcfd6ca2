"""From a source to a kernel on a device: compiled for it, loaded, ready for a capture.

Everything that a CUDA graph's capture forbids (compiling, loading, allowing more shared memory)
happens in `load`, once per kernel and device. Loading goes through cuda-core, in the context that
torch uses. Refuses a device of an architecture that the kernel is not written for, by name.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch

from mok import kernel_sources, kernels
from mok.compilation import compile_source
from mok.launching import Kernel, describe_status
from mok.toolchain import (
    ArchitectureUnsupported,
    DeviceMissing,
    LoadFailed,
    SourceMissing,
    cuda_module,
    nvrtc_version,
)

# Two threads that load the same kernel get the same one.
_lock = threading.Lock()


def architecture(device: torch.device | int | None = None) -> str:
    """What to compile for: "sm_90a" on an H100 or H200, "sm_80" on an A100.

    From capability 9.0 on with the suffix a, which allows the features of exactly that one.
    device: None is torch's current one. Raises DeviceMissing.
    """
    major, minor = torch.cuda.get_device_capability(_index(device))
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def load(
    source: str,
    entry: str,
    *,
    macros: Mapping[str, int | str] | None = None,
    device: torch.device | int | None = None,
) -> Kernel:
    """The kernel `entry` of `source`, compiled for and loaded on `device`; memoised.

    source: relative to `source_root()`. device: None is torch's current one. Call it before a
    capture begins. Raises DeviceMissing, LoadFailed, SourceMissing, and what `compile_source` does.
    """
    index = _index(device)
    items = tuple(sorted((macros or {}).items()))
    with _lock:
        return _load(str(kernel_sources.source_root()), source, entry, items, index)


@functools.cache
def _load(
    root: str, source: str, entry: str, macros: tuple[tuple[str, int | str], ...], index: int
) -> Kernel:
    code, entries = _library(root, source, macros, index)
    if entry not in entries:
        raise SourceMissing(f"{source} has no kernel {entry!r}; it has {', '.join(entries)}")
    driver = cuda_module("cuda.bindings.driver")
    with torch.cuda.device(index):
        cuda_module("cuda.core").Device(index).set_current()
        try:
            kernel = code.get_kernel(entry)
            # Modules load at first use unless asked; first use may be inside a capture.
            status, _ = driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle)))
        except Exception as error:
            raise _load_failure(source, index, str(error)) from error
        if int(status) != 0:
            raise _load_failure(source, index, describe_status(int(status)))
        attributes = kernel.attributes[index]
        limit = _allow_shared_memory(driver, int(kernel.handle), attributes, index)
        return Kernel(
            name=entry,
            registers=int(attributes.num_regs),
            device=index,
            shared_limit=limit,
            parameters=_parameters(kernel),
            # A CUkernel stands for itself in every context, so that a stream of a green context
            # runs it there.
            _function=driver.CUfunction(int(kernel.handle)),
            _code=(code, kernel),
        )


@functools.cache
def _library(
    root: str, source: str, macros: tuple[tuple[str, int | str], ...], index: int
) -> tuple[Any, tuple[str, ...]]:
    """One cubin on one device with the kernels in it; all entries of a source share it."""
    del root  # part of the memo's key only
    arch = architecture(index)
    needs = kernels.needed_architectures(source, dict(macros))
    if needs and arch not in needs:
        raise ArchitectureUnsupported(
            f"{source} needs {' or '.join(needs)}; cuda:{index} is "
            f"{torch.cuda.get_device_name(index)} ({arch})"
        )
    compiled = compile_source(source, arch=arch, macros=dict(macros))
    code = cuda_module("cuda.core").ObjectCode.from_cubin(compiled.cubin, name=source)
    return code, tuple(found.entry for found in compiled.resources)


def _allow_shared_memory(driver: Any, kernel: int, attributes: Any, index: int) -> int:
    """Lets launches ask for all that a block may have; returns how many bytes that is."""
    optin = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    status, most = driver.cuDeviceGetAttribute(optin, driver.CUdevice(index))
    if int(status) != 0:
        raise LoadFailed(f"no shared memory known for cuda:{index}: {describe_status(int(status))}")
    limit = int(most) - int(attributes.shared_size_bytes)
    name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(
        name, limit, driver.CUkernel(kernel), driver.CUdevice(index)
    )
    if int(status) != 0:
        raise LoadFailed(f"{limit} bytes of shared memory refused: {describe_status(int(status))}")
    return limit


def _parameters(kernel: Any) -> tuple[int, ...] | None:
    try:
        return tuple(int(found.size) for found in kernel.arguments_info)
    except (NotImplementedError, RuntimeError):
        return None


def _load_failure(source: str, index: int, said: str) -> LoadFailed:
    return LoadFailed(
        f"{source} was compiled but not loaded on cuda:{index}: {said}. The compiler is NVRTC "
        f"{'.'.join(map(str, nvrtc_version()))}, the driver supports CUDA {driver_version()}; a "
        "driver older than the compiler's major version cannot load its code: update the driver, "
        "or install an older nvidia-cuda-nvrtc"
    )


def driver_version() -> str:
    """The newest CUDA version that the driver supports, such as "13.0", or "unknown"."""
    try:
        status, number = cuda_module("cuda.bindings.driver").cuDriverGetVersion()
    except RuntimeError:
        return "unknown"
    return f"{number // 1000}.{number % 1000 // 10}" if int(status) == 0 else "unknown"


def _index(device: torch.device | int | None) -> int:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = "torch sees none" if built else "this torch is built without CUDA"
        raise DeviceMissing(
            f"kernels run on a CUDA device, and {reason}; `mok build` compiles without one"
        )
    if device is None:
        return torch.cuda.current_device()
    index = device if isinstance(device, int) else device.index
    if isinstance(device, torch.device) and device.type != "cuda":
        raise DeviceMissing(f"kernels run on CUDA devices, not on {device}")
    if index is None:
        return torch.cuda.current_device()
    if not 0 <= index < torch.cuda.device_count():
        raise DeviceMissing(
            f"there is no cuda:{index}; there are {torch.cuda.device_count()}, from cuda:0 on"
        )
    return index
