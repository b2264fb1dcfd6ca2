"""A loaded kernel, and how it is launched on torch's stream.

Launches go through the driver with the context and the current stream of torch, so a kernel takes
its place among torch's own and is recorded by torch's CUDA graphs. Arguments are packed once for as
many launches as wanted, and checked against what the kernel declares: a 4-byte integer where 8
bytes are read would give other bits from run to run. Refuses plain Python numbers, whose width
nobody wrote down.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mok.toolchain import LaunchFailed, cuda_module

_SCALARS = (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)
_INVALID_CONTEXT = 201
_HINTS = {
    1: "a size is out of range: at most 1024 threads a block and 65535 blocks in y and z",
    209: "the driver has no code for this device in the cubin",
    700: "an earlier kernel touched memory that is not its own; run under compute-sanitizer",
    701: "a block needs more registers or threads than an SM has; make it smaller",
    900: "the operation is not allowed while a stream is captured",
}


@dataclass(frozen=True, eq=False)
class Kernel:
    """One `extern "C"` kernel on one device; made by `mok.loading.load`.

    name: the entry. registers: a thread's. device: the device's index. shared_limit: the most bytes
    of dynamic shared memory that a launch may ask for. parameters: sizes in bytes of what it takes,
    or None where the driver cannot tell (before CUDA 12.4).
    """

    name: str
    registers: int
    device: int
    shared_limit: int
    parameters: tuple[int, ...] | None
    _function: Any
    _code: Any  # keeps the library loaded

    def launch(
        self,
        *args: object,
        grid: int | tuple[int, ...],
        block: int,
        shared: int = 0,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Launches once. `prepare` is cheaper for the same arguments again.

        args: a tensor goes in as the pointer to its first element, whatever its strides: a kernel
        that expects contiguous rows must be given a contiguous tensor. None goes in as a null
        pointer, a ctypes value (c_uint32, c_uint64, c_float, a Structure) by value. grid: blocks,
        or up to three numbers. block: threads. shared: bytes of dynamic shared memory. stream: None
        is torch's current stream of the kernel's device. Does not wait. Raises LaunchFailed.
        """
        self.prepare(*args, grid=grid, block=block, shared=shared)(stream)

    def prepare(
        self, *args: object, grid: int | tuple[int, ...], block: int, shared: int = 0
    ) -> PreparedLaunch:
        """Checks and packs the arguments of `launch` once; calling the result launches.

        The tensors are held, and their addresses are those of now. Raises LaunchFailed.
        """
        sizes = (grid,) if isinstance(grid, int) else tuple(grid)
        if not 1 <= len(sizes) <= 3:
            raise LaunchFailed(f"{self.name}: grid is {grid!r}; give one to three numbers")
        x, y, z = (*sizes, 1, 1)[:3]
        if min(x, y, z, block) < 1 or shared < 0:
            raise LaunchFailed(
                f"{self.name}: grid {x}x{y}x{z}, {block} threads, {shared} bytes of shared memory; "
                "grid and block are at least 1, shared at least 0"
            )
        if shared > self.shared_limit:
            raise LaunchFailed(
                f"{self.name}: {shared} bytes of dynamic shared memory asked for, and cuda:"
                f"{self.device} allows {self.shared_limit} beside what is static; ask for less"
            )
        packed = self._pack(args)
        pointers = (ctypes.c_void_p * max(1, len(packed)))(*map(ctypes.addressof, packed))
        return PreparedLaunch(
            kernel=self,
            shape=(x, y, z, block, 1, 1, shared),
            _address=ctypes.addressof(pointers),
            _held=(args, packed, pointers),
            _call=self._launcher,
        )

    def resident_blocks(self, block: int, shared: int = 0) -> int:
        """Blocks of `block` threads and `shared` bytes that an SM holds at once."""
        driver = cuda_module("cuda.bindings.driver")
        with torch.cuda.device(self.device):
            status, count = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, block, shared
            )
        if int(status) != 0:
            raise LaunchFailed(
                f"{self.name}: no occupancy for {block} threads and {shared} bytes: "
                f"{describe_status(int(status))}"
            )
        return int(count)

    @functools.cached_property
    def _launcher(self) -> Callable[..., tuple[Any, ...]]:
        """Found once: looking the module up takes as long as packing an argument."""
        launcher: Callable[..., tuple[Any, ...]] = cuda_module(
            "cuda.bindings.driver"
        ).cuLaunchKernel
        return launcher

    def _pack(self, args: tuple[object, ...]) -> list[Any]:
        if self.parameters is not None and len(args) != len(self.parameters):
            raise LaunchFailed(
                f"{self.name} takes {len(self.parameters)} arguments and got {len(args)}"
            )
        packed = [
            value if isinstance(value, _SCALARS) else self._packed(number, value)
            for number, value in enumerate(args)
        ]
        found = (*map(ctypes.sizeof, packed),)
        if self.parameters is not None and found != self.parameters:
            number = next(n for n, size in enumerate(self.parameters) if found[n] != size)
            raise LaunchFailed(
                f"{self.name}: argument {number} ({type(args[number]).__name__}) has "
                f"{found[number]} bytes, and the kernel declares {self.parameters[number]}"
            )
        return packed

    def _packed(self, number: int, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.index != self.device and not (value.is_cpu and value.is_pinned()):
                raise LaunchFailed(
                    f"{self.name}: argument {number} is a tensor on {value.device}; it must be on "
                    f"cuda:{self.device}, or in pinned memory"
                )
            return ctypes.c_void_p(value.data_ptr())
        if value is None:
            return ctypes.c_void_p(None)
        raise LaunchFailed(
            f"{self.name}: argument {number} is {value!r}; give a tensor, None for a null pointer, "
            "or a ctypes value such as ctypes.c_uint32(7), whose width is the kernel's"
        )


@dataclass(frozen=True, eq=False)
class PreparedLaunch:
    """A launch whose arguments are packed; call it, with a stream or without, as often as wanted.

    shape: blocks x, y, z, threads x, y, z, bytes of dynamic shared memory.
    """

    kernel: Kernel
    shape: tuple[int, int, int, int, int, int, int]
    _address: int
    _held: tuple[object, ...]
    _call: Callable[..., tuple[Any, ...]]

    def __call__(self, stream: torch.cuda.Stream | None = None) -> None:
        """Launches on `stream`, else on torch's current stream of the kernel's device."""
        device = self.kernel.device
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                self._launch(stream)
        else:
            self._launch(stream)

    def _launch(self, stream: torch.cuda.Stream | None) -> None:
        kernel = self.kernel
        if stream is None:
            handle = raw_stream(kernel.device)
        elif stream.device_index == kernel.device:
            handle = stream.cuda_stream
        else:
            raise LaunchFailed(
                f"{kernel.name} is loaded on cuda:{kernel.device}, and the stream is one of "
                f"cuda:{stream.device_index}"
            )
        (status,) = self._call(kernel._function, *self.shape, handle, self._address, 0)
        if status == _INVALID_CONTEXT:
            # A thread that has not touched CUDA yet has no context; torch binds it at first use,
            # the driver does not.
            cuda_module("cuda.core").Device(kernel.device).set_current()
            (status,) = self._call(kernel._function, *self.shape, handle, self._address, 0)
        if status != 0:
            x, y, z, threads, _, _, shared = self.shape
            raise LaunchFailed(
                f"{kernel.name} was not launched with grid {x}x{y}x{z}, {threads} threads and "
                f"{shared} bytes of dynamic shared memory: {describe_status(int(status))}"
            )


def describe_status(status: int) -> str:
    """A driver's status as its name, what the driver says about it, and what to do."""
    driver = cuda_module("cuda.bindings.driver")
    hint = f"; {_HINTS[status]}" if status in _HINTS else ""
    try:
        known = driver.CUresult(status)
    except ValueError:
        return f"status {status}, which cuda-bindings does not know{hint}"
    try:
        found, text = driver.cuGetErrorString(known)
    except RuntimeError:  # no driver library
        found, text = 1, b""
    said = f" ({text.decode()})" if int(found) == 0 else ""
    return f"{known.name}{said}{hint}"


def raw_stream(index: int) -> int:
    """Torch's current stream of device `index` as the driver's number, 0 for the default one.

    The public way builds an object, at 5 us a call.
    """
    return _stream_reader()(index)


@functools.cache
def _stream_reader() -> Callable[[int], int]:
    direct: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if direct is not None:
        return direct
    return lambda index: int(torch.cuda.current_stream(index).cuda_stream)
