"""Streams that reach only some multiprocessors of a GPU: the driver's green contexts.

A kernel that is launched on such a stream gets no other multiprocessor, whatever grid it asks for.
Forward and backward of a case both follow torch's current stream, so nothing else changes. What a
device says about itself stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class GreenContextUnavailable(RuntimeError):
    """The driver has no green contexts, or not of this size; the message says which call failed."""


@contextmanager
def limited_stream(
    device: torch.device, multiprocessors: int
) -> Iterator[tuple[torch.cuda.ExternalStream, int]]:
    """A non-blocking stream that reaches at least so many multiprocessors, and how many they are.

    The driver rounds up to what it can part (8 on Hopper). Raises GreenContextUnavailable.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise GreenContextUnavailable(
            f"green contexts are made through cuda-bindings, which cannot be imported ({error});"
            ' do: pip install "mok-verify[cuda]"'
        ) from error
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch.cuda.synchronize(index)
    with torch.cuda.device(index):
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        place = driver.CUdevice(index)
        whole = _call(driver, "cuDeviceGetDevResource", place, kind)[0]
        parted = _call(driver, "cuDevSmResourceSplitByCount", 1, whole, 0, multiprocessors)
        groups, count = parted[:2]
        if count < 1:
            raise GreenContextUnavailable(f"{device} cannot be parted at {multiprocessors}")
        group = groups[0]
        described = _call(driver, "cuDevResourceGenerateDesc", [group], 1)[0]
        default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM.value
        context = _call(driver, "cuGreenCtxCreate", described, place, default)[0]
        try:
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
            handle = _call(driver, "cuGreenCtxStreamCreate", context, flags, 0)[0]
            stream = torch.cuda.ExternalStream(int(handle), device=torch.device("cuda", index))
            try:
                yield stream, int(group.sm.smCount)
            finally:
                with suppress(RuntimeError):  # a CUDA error of the case is raised elsewhere
                    torch.cuda.synchronize(index)
                driver.cuStreamDestroy(handle)
        finally:
            driver.cuGreenCtxDestroy(context)


def _call(driver: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    function = getattr(driver, name, None)
    if function is None:
        raise GreenContextUnavailable(f"cuda-bindings here has no {name}; update it")
    try:
        status, *found = function(*arguments)
    except RuntimeError as error:  # a driver that lacks the function
        raise GreenContextUnavailable(f"{name}: {error}; update the driver") from error
    if int(status) != 0:
        raise GreenContextUnavailable(f"{name}: the driver says {status.name}")
    return tuple(found)
