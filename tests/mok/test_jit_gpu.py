"""Kernels on a device: right values, torch's streams and graphs, threads, and refused launches."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from small_kernels import plant_sources

from mok import jit, loading
from mok.jit import LaunchFailed

pytestmark = pytest.mark.gpu

FILL = """
extern "C" __global__ void fill(unsigned *out, unsigned count, unsigned long long value) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) out[at] = (unsigned)(value >> 32) + at * STEP;
}
extern "C" __global__ void add_one(unsigned *out) { out[threadIdx.x] += 1; }
extern "C" __global__ void reverse(unsigned *out, unsigned count) {
  extern __shared__ unsigned held[];
  for (unsigned at = threadIdx.x; at < count; at += blockDim.x) held[count - 1 - at] = at;
  __syncthreads();
  for (unsigned at = threadIdx.x; at < count; at += blockDim.x) out[at] = held[at];
}
extern "C" __global__ void __launch_bounds__(256) bounded(unsigned *out) { out[threadIdx.x] = 1; }
"""
VALUE = 5 << 32
MACROS = {"STEP": 3}


@pytest.fixture(autouse=True)
def _source(tmp_path, monkeypatch):
    plant_sources(monkeypatch, tmp_path, {"fill.cu": FILL})
    yield
    torch.cuda.synchronize()
    loading._load.cache_clear()
    loading._library.cache_clear()


def _load(entry, device=None):
    return jit.load("fill.cu", entry, macros=MACROS, device=device)


def _filled(count, device="cuda"):
    return 5 + 3 * torch.arange(count, dtype=torch.int32, device=device)


def _arguments(out):
    return (out, ctypes.c_uint32(out.numel()), ctypes.c_uint64(VALUE))


def test_values_are_right_and_the_kernel_is_loaded_once():
    out = torch.zeros(1000, dtype=torch.int32, device="cuda")
    kernel = _load("fill")
    kernel.launch(*_arguments(out), grid=4, block=256)
    assert torch.equal(out, _filled(1000))
    assert _load("fill") is kernel
    assert kernel.parameters == (8, 4, 8)
    assert 1 <= kernel.registers <= 64
    assert kernel.name == "fill"


def test_nearly_all_shared_memory_of_an_sm_may_be_asked_for():
    kernel = _load("reverse")
    count = kernel.shared_limit // 4
    assert count * 4 > 48 * 1024
    out = torch.zeros(count, dtype=torch.int32, device="cuda")
    kernel.launch(out, ctypes.c_uint32(count), grid=1, block=512, shared=4 * count)
    assert torch.equal(out.cpu(), torch.arange(count - 1, -1, -1, dtype=torch.int32))
    assert kernel.resident_blocks(512, 4 * count) == 1
    assert kernel.resident_blocks(512) > 1


def test_a_launch_takes_its_place_on_the_current_stream():
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    add = _load("add_one").prepare(out, grid=1, block=64)
    out.mul_(2)  # torch's kernel is loaded now: loading may wait for the device
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for _ in range(3):
            out.mul_(2)
            add()
    assert stream.query() is False
    add(stream)
    stream.synchronize()
    assert out.tolist() == [8] * 64


def test_a_graph_captures_a_first_launch_and_replays_it():
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    kernel = _load("add_one")
    out.mul_(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(out, grid=1, block=64)
        out.mul_(2)
    torch.cuda.synchronize()
    assert out.tolist() == [0] * 64
    for _ in range(3):
        graph.replay()
    assert out.tolist() == [14] * 64


def test_a_fresh_thread_may_launch():
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    add = _load("add_one").prepare(out, grid=1, block=64)
    failed = []

    def work():
        try:
            add()
        except LaunchFailed as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert failed == []
    assert out.tolist() == [1] * 64


def test_a_refused_launch_is_told_and_later_ones_run():
    out = torch.zeros(2048, dtype=torch.int32, device="cuda")
    kernel = _load("bounded")
    with pytest.raises(LaunchFailed, match=r"2048 threads.*CUDA_ERROR_"):
        kernel.launch(out, grid=1, block=2048)
    with pytest.raises(LaunchFailed, match=r"grid 1x70000x1.*CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(out, grid=(1, 70000), block=32)
    kernel.launch(out, grid=1, block=256)
    assert int(out.sum()) == 256


def test_the_driver_knows_what_a_kernel_takes():
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    kernel = _load("fill")
    with pytest.raises(LaunchFailed, match="takes 3 arguments and got 1"):
        kernel.launch(out, grid=1, block=64)
    with pytest.raises(LaunchFailed, match="has 4 bytes, and the kernel declares 8"):
        kernel.launch(out, ctypes.c_uint32(64), ctypes.c_uint32(5), grid=1, block=64)
    with pytest.raises(LaunchFailed, match="is a tensor on cpu"):
        kernel.launch(out.cpu(), *_arguments(out)[1:], grid=1, block=64)
    assert int(out.abs().sum()) == 0


def test_pinned_memory_may_be_written():
    out = torch.zeros(64, dtype=torch.int32, pin_memory=True)
    _load("fill").launch(*_arguments(out), grid=1, block=64)
    torch.cuda.synchronize()
    assert torch.equal(out, _filled(64, "cpu"))


@pytest.mark.gpus(2)
def test_a_kernel_of_another_device_sets_it_and_puts_it_back():
    assert torch.cuda.current_device() == 0
    out = torch.zeros(64, dtype=torch.int32, device="cuda:1")
    kernel = _load("fill", torch.device("cuda:1"))
    kernel.launch(*_arguments(out), grid=1, block=64)
    assert torch.cuda.current_device() == 0
    assert torch.equal(out, _filled(64, "cuda:1"))
    with pytest.raises(LaunchFailed, match="is a tensor on cuda:1; it must be on cuda:0"):
        _load("fill").launch(*_arguments(out), grid=1, block=64)
