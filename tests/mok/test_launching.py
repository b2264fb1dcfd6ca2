"""What a launch hands to the driver, and what it refuses. The driver here is one that remembers."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from mok import launching, loading
from mok.kernels import Variant
from mok.launching import Kernel, describe_status
from mok.toolchain import ArchitectureUnsupported, LaunchFailed, LoadFailed, SourceMissing

pytest.importorskip("cuda.bindings.driver")

STREAM = 77


class _Driver:
    """Remembers launches with the values behind the argument pointers; answers `statuses`."""

    def __init__(self, sizes, statuses=(0,)):
        self.sizes = sizes
        self.statuses = list(statuses)
        self.launches = []
        self.bound = []

    def cuLaunchKernel(self, function, *rest):
        *shape, stream, address, extra = rest
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(address)
        values = [
            int.from_bytes(ctypes.string_at(pointer, size), "little")
            for pointer, size in zip(pointers, self.sizes, strict=True)
        ]
        self.launches.append(SimpleNamespace(shape=shape, stream=stream, values=values))
        assert extra == 0
        return (self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0],)

    def Device(self, index):
        return SimpleNamespace(set_current=lambda: self.bound.append(index))


@pytest.fixture
def driver(monkeypatch):
    driver = _Driver((8, 4, 8, 8))
    monkeypatch.setattr(launching, "cuda_module", lambda name: driver)
    monkeypatch.setattr(launching, "raw_stream", lambda index: STREAM)
    monkeypatch.setattr(launching, "describe_status", lambda status: f"status {status}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return driver


def _kernel(parameters=(8, 4, 8, 8), device=0):
    return Kernel("k", 32, device, 1000, parameters, 5, None)


class _Tensor(torch.Tensor):
    """A CPU tensor that says it is on a device."""

    device = torch.device("cuda", 0)


def _tensor():
    return torch.zeros(4).as_subclass(_Tensor)


def _arguments(tensor):
    return (tensor, ctypes.c_uint32(7), None, ctypes.c_uint64(1 << 40))


def test_arguments_grid_and_stream_reach_the_driver(driver):
    tensor = _tensor()
    _kernel().launch(*_arguments(tensor), grid=(3, 2), block=64, shared=128)
    (launch,) = driver.launches
    assert launch.shape == [3, 2, 1, 64, 1, 1, 128]
    assert launch.values == [tensor.data_ptr(), 7, 0, 1 << 40]
    assert launch.stream == STREAM


def test_a_prepared_launch_repeats_itself_and_takes_a_stream(driver):
    prepared = _kernel().prepare(*_arguments(_tensor()), grid=132, block=256)
    stream = SimpleNamespace(device_index=0, cuda_stream=99)
    prepared()
    prepared(stream)
    first, second = driver.launches
    assert (first.stream, second.stream) == (STREAM, 99)
    assert first.values == second.values
    assert first.shape == second.shape == [132, 1, 1, 256, 1, 1, 0]


@pytest.mark.parametrize(
    ("position", "value", "said"),
    [
        (1, 7, "ctypes value such as"),
        (1, 1.5, "ctypes value such as"),
        (1, True, "ctypes value such as"),
        (1, ctypes.c_uint64(7), "argument 1 .c_ulong. has 8 bytes, and the kernel declares 4"),
        (3, ctypes.c_uint32(7), "argument 3 .c_uint. has 4 bytes, and the kernel declares 8"),
        (0, torch.zeros(2), "argument 0 is a tensor on cpu; it must be on cuda:0"),
    ],
)
def test_arguments_that_the_kernel_would_read_wrongly_are_refused(driver, position, value, said):
    arguments = list(_arguments(_tensor()))
    arguments[position] = value
    with pytest.raises(LaunchFailed, match=said):
        _kernel().launch(*arguments, grid=1, block=1)
    assert driver.launches == []


def test_another_number_of_arguments_is_refused_where_the_driver_knows(driver):
    tensor = _tensor()
    with pytest.raises(LaunchFailed, match="takes 4 arguments and got 3"):
        _kernel().launch(*_arguments(tensor)[:3], grid=1, block=1)
    _kernel(parameters=None).launch(*_arguments(tensor), grid=1, block=1)
    assert len(driver.launches) == 1


def test_a_kernel_without_arguments_is_launched(driver):
    driver.sizes = ()
    _kernel(parameters=()).launch(grid=1, block=32)
    assert driver.launches[0].values == []


@pytest.mark.parametrize("grid", [(), (1, 1, 1, 1)])
def test_grids_have_one_to_three_numbers(driver, grid):
    with pytest.raises(LaunchFailed, match="one to three numbers"):
        _kernel(()).launch(grid=grid, block=1)


@pytest.mark.parametrize("sizes", [{"grid": 0}, {"grid": (1, -1)}, {"block": 0}, {"shared": -1}])
def test_sizes_below_their_least_are_refused(driver, sizes):
    with pytest.raises(LaunchFailed, match="grid and block are at least 1"):
        _kernel(()).launch(**{"grid": 1, "block": 1, **sizes})
    assert driver.launches == []


def test_more_shared_memory_than_there_is_is_refused_with_the_limit(driver):
    with pytest.raises(LaunchFailed, match=r"1001 bytes .* cuda:0 allows 1000"):
        _kernel(()).prepare(grid=1, block=1, shared=1001)


def test_a_stream_of_another_device_is_refused(driver):
    driver.sizes = ()
    stream = SimpleNamespace(device_index=1, cuda_stream=99)
    with pytest.raises(LaunchFailed, match="loaded on cuda:0, and the stream is one of cuda:1"):
        _kernel(()).launch(grid=1, block=1, stream=stream)


def test_a_refused_launch_says_what_was_asked(driver):
    driver.sizes, driver.statuses = (), [701]
    with pytest.raises(LaunchFailed, match=r"grid 9x1x1, 2048 threads and 16 bytes .*status 701"):
        _kernel(()).launch(grid=9, block=2048, shared=16)


def test_a_thread_without_a_context_gets_one_and_launches_once_more(driver):
    driver.sizes, driver.statuses = (), [201, 0]
    _kernel(()).launch(grid=1, block=1)
    assert driver.bound == [0]
    assert len(driver.launches) == 2


def test_a_launch_on_another_device_sets_it_and_puts_it_back(driver, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def on(index):
        entered.append(index)
        yield
        entered.append("left")

    driver.sizes = ()
    monkeypatch.setattr(torch.cuda, "device", on)
    _kernel((), device=1).launch(grid=1, block=1)
    assert entered == [1, "left"]


def test_a_status_is_named_with_what_to_do():
    assert "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" in describe_status(701)
    assert "make it smaller" in describe_status(701)
    assert describe_status(99999).startswith("status 99999, which")


@pytest.fixture
def a100(monkeypatch):
    """Loading, up to the driver, as on an A100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    loading._load.cache_clear()
    loading._library.cache_clear()


def test_a_device_that_the_kernel_is_not_written_for_is_named(a100, monkeypatch):
    variant = Variant("digest/digest.cu", ("digest",), needs=("sm_90a",))
    monkeypatch.setattr(loading.kernels, "CATALOGUE", (variant,))
    with pytest.raises(ArchitectureUnsupported, match=r"needs sm_90a; cuda:0 is NVIDIA A100 .sm_8"):
        loading.load("digest/digest.cu", "digest")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), "sm_75"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 3), "sm_103a")],
)
def test_architectures_have_the_suffix_from_hopper_on(a100, monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert loading.architecture() == expected
    assert loading.architecture(0) == loading.architecture(torch.device("cuda:0")) == expected


def _fake_library(monkeypatch, refuse):
    def get_kernel(entry):
        raise RuntimeError(refuse)

    code = SimpleNamespace(get_kernel=get_kernel)
    monkeypatch.setattr(loading, "_library", lambda *_: (code, ("scale",)))
    fake = SimpleNamespace(Device=lambda index: SimpleNamespace(set_current=lambda: None))
    monkeypatch.setattr(loading, "cuda_module", lambda name: fake)
    monkeypatch.setattr(loading, "driver_version", lambda: "12.4")


def test_a_driver_that_is_too_old_is_named_beside_the_compiler(a100, monkeypatch):
    _fake_library(monkeypatch, "CUDA_ERROR_INVALID_IMAGE")
    with pytest.raises(
        LoadFailed, match=r"cuda:0: CUDA_ERROR_INVALID_IMAGE.*NVRTC 13\.\d.*supports CUDA 12\.4"
    ):
        loading.load("digest/digest.cu", "scale")


def test_an_unknown_entry_lists_those_that_exist(a100, monkeypatch):
    _fake_library(monkeypatch, "")
    with pytest.raises(SourceMissing, match="has no kernel 'gone'; it has scale"):
        loading.load("digest/digest.cu", "gone")
