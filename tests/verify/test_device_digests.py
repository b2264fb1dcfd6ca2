"""Digests on a device equal those of the host; and what is refused where there is no device."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sync_debug import synchronising_raises

from mok import jit
from verify import device_kernel, device_parts
from verify.device_digests import DigestPlan, digest_tensors
from verify.device_kernel import HOST, KERNEL, Tuning, digest_backend
from verify.device_parts import ITEM_BYTES, Range, Shard
from verify.digests import Digest
from verify.errors import UnsupportedError
from verify.hashing import digest, digest_on_host, digest_shard, digest_tensor

# complex32 is among the dtypes; torch says once per process that it is experimental
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
DTYPES = [*ITEM_BYTES, *COMPLEX]


def random_pair(rng: random.Random, largest: int = 50_000) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of random dtype, shape, strides and offset on the host, and the same on a device."""
    dtype = rng.choice(DTYPES)
    item = torch.empty((), dtype=dtype).element_size()
    shape, count = [], 1
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4, 10])):
        most = max(1, min(largest // count, 2 if len(shape) > 5 else 300))
        shape.append(rng.randint(1, largest if not shape and rng.random() < 0.2 else most))
        count *= shape[-1]
    order = list(range(len(shape)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = 0 if rng.random() < 0.05 else step
        step = step * shape[dim] * rng.choice([1, 1, 1, 2]) + rng.choice([0, 0, 0, 3])
    offset = rng.choice([0, 0, 1, 2, 3, 8])
    top = 2 if dtype is torch.bool else 256
    raw = np.random.default_rng(rng.randrange(2**32)).integers(
        0, top, (offset + step + 1) * item, np.uint8
    )
    conjugated, part = rng.random() < 0.5, rng.random() < 0.5
    views = []
    for device in ("cpu", "cuda"):
        t = torch.from_numpy(raw).to(device).view(dtype).as_strided(shape, strides, offset)
        if dtype.is_complex and conjugated:
            t = t.conj()
            t = t.imag if part else t
        views.append(t)
    return views[0], views[1]


@pytest.mark.gpu
def test_random_tensors_in_one_launch() -> None:
    assert digest_backend() == (KERNEL, "")
    rng = random.Random(1)
    pairs = [random_pair(rng) for _ in range(150)]
    found = digest_tensors([there for _, there in pairs])
    for at, (here, _) in enumerate(pairs):
        assert found[str(at)] == digest_on_host(here), (here.dtype, here.shape, here.stride())


@pytest.mark.gpu
def test_shards_and_ranges_on_a_device() -> None:
    rng = random.Random(2)
    for _ in range(40):
        here, there = random_pair(rng, 5000)
        place = Range(rng.randint(0, 9), (here.numel() + 9,))
        assert digest_tensors([there], layouts={"0": place})["0"] == digest_on_host(here, place)
        if here.dim():
            dim, start = rng.randrange(here.dim()), rng.randint(0, 3)
            full = [*here.shape]
            full[dim] += start + rng.randint(0, 3)
            shard = (dim, start, tuple(full))
            assert digest_shard(there, *shard) == digest_shard(here, *shard)


@pytest.mark.gpu
@pytest.mark.parametrize("lead", [0, 1, 3, 4, 8, 15])
def test_sizes_around_borders_at_any_alignment(lead: int) -> None:
    for size in (0, 1, 15, 16, 63, 65, 2048, 2049, 16383, 16384, 16385, 49153, 300_001):
        t = torch.randint(0, 256, (size + lead,), dtype=torch.uint8, device="cuda")[lead:]
        assert digest_tensor(t) == digest_on_host(t), size


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tuning",
    [Tuning(), Tuning(stages=2, prefetch=256), Tuning(striped=True)],
    ids=str,
)
def test_every_variant_gives_the_same_lanes(tuning: Tuning) -> None:
    words = torch.randint(-(2**62), 2**62, (20_000_003,), device="cuda")
    turned = words[:900_000].view(900, 1000).t()
    for some in ([words, turned], [words], [words.view(torch.bfloat16)[3:]], [words[:7], words]):
        plan = DigestPlan(some, tuning=tuning)
        plan.launch()
        assert list(plan.digests().values()) == [digest_on_host(t) for t in some]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, *COMPLEX[1:]])
def test_large_strided_tensors(dtype: torch.dtype) -> None:
    """Long enough for the table of keys, in memory's own order and in rows, at odd borders."""
    item = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (300_001 * item,), dtype=torch.uint8, device="cuda").view(dtype)
    for first in (0, 1):
        for shape in ((300, 1000), (1000, 300), (7, 42_857), (60, 50, 100)):
            t = raw[first : first + math.prod(shape)].view(shape)
            some = [t.transpose(0, -1), t.transpose(0, 1)[1:, 3:], t[:, 1:-2], t[..., ::2]]
            some += [t.transpose(0, 1).conj()] if dtype.is_complex else []
            for at, found in enumerate(digest_tensors(some).values()):
                assert found == digest_on_host(some[at]), (shape, first, at)
            shard = (1, 3, (some[0].shape[0], some[0].shape[1] + 5, *some[0].shape[2:]))
            assert digest_shard(some[0], *shard) == digest_shard(some[0].cpu(), *shard)


@pytest.mark.gpu
def test_shards_add_up_beyond_4_gib() -> None:
    half = 2**32 + 4096 + 6  # bytes
    t = torch.empty(2, half, dtype=torch.uint8, device="cuda")
    t.view(-1)[: half // 8 * 16].view(torch.int64).random_()
    whole, cut = digest_tensor(t), half // 3
    parts = [digest_shard(t[:, :cut], 1, 0, (2, half)), digest_shard(t[:, cut:], 1, cut, (2, half))]
    assert parts[0] + parts[1] == whole
    tail = digest_tensor(t[1, -100_000:], offset=2 * half - 100_000, full_shape=(2 * half,))
    place = Range(2 * half - 100_000, (2 * half,))
    assert tail == digest_on_host(t[1, -100_000:], place)


@pytest.mark.gpu
def test_replays_see_what_is_there_now_and_nothing_waits() -> None:
    x = torch.randn(500, 300, device="cuda")
    y = torch.randn(77, device="cuda", dtype=torch.complex128).conj()
    empty = torch.empty(0, 3, device="cuda")
    DigestPlan([x]).launch()  # compiled and loaded
    with synchronising_raises():
        plan = DigestPlan({"x": x, "y": y, "empty": empty})
        plan.launch()
        plan.capture()
        plan.replay()
    for _ in range(3):
        x.add_(1)
        y.mul_(1.5)
        plan.replay()
        assert plan.digests() == {
            n: digest_on_host(t) for n, t in zip("xy", (x, y), strict=True)
        } | {"empty": Digest("float32", (0, 3), 0, (0, 0, 0, 0))}


@pytest.mark.gpu
def test_work_is_done_on_the_current_stream() -> None:
    x = torch.zeros(1000, device="cuda")
    plan = DigestPlan({"x": x})
    plan.launch()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(1)
        plan.launch()
    assert plan.digests()["x"] == digest_on_host(torch.ones(1000))
    torch.cuda.current_stream().wait_stream(side)
    x.fill_(2)
    side.wait_stream(torch.cuda.current_stream())
    plan.launch(side)
    assert plan.digests()["x"] == digest_on_host(torch.full((1000,), 2.0))


@pytest.mark.gpu
def test_a_plan_made_on_a_stream_is_waited_for_by_others() -> None:
    x = torch.randn(1000, device="cuda")
    DigestPlan([x]).launch()  # compiled and loaded
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        plan = DigestPlan({"x": x, "turned": x.view(20, 50).t()})
    plan.launch()
    assert plan.digests() == {"x": digest_on_host(x), "turned": digest_on_host(x.view(20, 50).t())}


@pytest.mark.gpu
def test_a_launch_may_be_captured_by_its_caller() -> None:
    x = torch.randn(4000, device="cuda")
    plan = DigestPlan({"x": x})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        plan.launch()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert plan.digests()["x"] == digest_on_host(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        with pytest.raises(UnsupportedError, match="before the capture"):
            DigestPlan({"x": x})


@pytest.mark.gpu
def test_a_captured_launch_that_has_not_run_has_no_digests() -> None:
    x = torch.randn(4000, device="cuda")
    for some in ([x], [x[:0], x.view(40, 100).t()]):
        plan = DigestPlan(some)
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            plan.launch()
        with pytest.raises(UnsupportedError, match="has not run: replay the graph first"):
            plan.digests()
        graph.replay()
        assert list(plan.digests().values()) == [digest_on_host(t) for t in some]


@pytest.mark.gpu
def test_shapes_that_change_in_place_are_noticed_where_memory_is_strided() -> None:
    for change in (torch.Tensor.t_, lambda t: t.resize_(3, 5)):
        x = torch.randn(30, 50, device="cuda")
        plan = DigestPlan({"x": x, "y": x.t()})
        plan.launch()
        assert plan.digests()["y"] == digest_on_host(x.t())
        change(x)
        plan.launch()
        with pytest.raises(UnsupportedError, match="changed in place since"):
            plan.digests()


@pytest.mark.gpu
def test_plans_made_in_inference_mode_are_launched_outside_of_it() -> None:
    with torch.inference_mode():
        x = torch.randn(1000, device="cuda")
        plan = DigestPlan([x])
        plan.launch()
    plan.launch()
    assert plan.digests()["0"] == digest_on_host(x)


@pytest.mark.gpu
def test_a_layout_of_too_many_parts_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_parts, "MAX_PARTS", 15)
    x = torch.randn([2] * 12, device="cuda")
    some = {"turned": x.permute(*range(11, -1, -1)), "plain": x}
    assert digest_tensors(some) == {name: digest_on_host(t) for name, t in some.items()}
    with pytest.raises(device_parts.TooManyParts, match="would need 16 parts"):
        DigestPlan(some)


@pytest.mark.gpu
def test_layouts_of_whole_tensors_are_none() -> None:
    x = torch.randn(40, 30, device="cuda")
    plan = DigestPlan({"x": x}, layouts={"x": None})
    plan.launch()
    x.unsqueeze_(0)
    assert plan.digests() == {"x": digest_on_host(x)}, "of dense memory, whose bytes count"


@pytest.mark.gpu
def test_moved_memory_is_noticed() -> None:
    x = torch.randn(10, device="cuda")
    plan = DigestPlan({"x": x})
    with pytest.raises(UnsupportedError, match="not before"):
        plan.digests()
    plan.launch()
    x.unsqueeze_(0)
    assert plan.digests() == {"x": digest_on_host(x)}, "the same bytes, and the shape of now"
    x.resize_(3)
    with pytest.raises(UnsupportedError, match="changed in place since"):
        plan.digests()
    x.data = torch.randn(10, device="cuda")
    with pytest.raises(UnsupportedError, match="make a new DigestPlan"):
        plan.launch()


@pytest.mark.gpu
def test_devices_are_told_apart() -> None:
    here, there = torch.randn(100), torch.randn(100, device="cuda")
    found = digest_tensors({"a": here, "b": there, "c": here})
    assert list(found) == ["a", "b", "c"]
    assert found["b"] == digest_on_host(there)
    with pytest.raises(UnsupportedError, match=r"on one device, cuda:0, and tensor 1 is on cpu"):
        DigestPlan([there, here])
    state = digest({"w": there, "inner": {"b": here, "n": 3}})
    assert state == digest({"w": there.cpu(), "inner": {"b": here, "n": 3}})


@pytest.mark.gpu
def test_without_the_compiler_digests_are_taken_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise jit.CompilerMissing("no compiler in this test")

    device_kernel.loaded.cache_clear()
    monkeypatch.setattr(jit, "load", missing)
    try:
        x = torch.randn(1000, device="cuda")
        assert digest_backend() == (HOST, "no compiler in this test")
        assert digest_tensor(x) == digest_on_host(x.cpu())
        with pytest.raises(UnsupportedError, match="no compiler in this test"):
            DigestPlan([x])
    finally:
        device_kernel.loaded.cache_clear()


def test_tensors_on_the_host_go_the_host_way() -> None:
    t = torch.arange(24.0).reshape(4, 6)
    found = digest_tensors({"whole": t, "part": t[1:]}, layouts={"part": Shard(0, 1, (4, 6))})
    assert found == {"whole": digest_tensor(t), "part": digest_shard(t[1:], 0, 1, (4, 6))}
    assert digest_tensors([t], seed=5)["0"] == digest_tensor(t, seed=5)
    assert digest_tensors([]) == {}


def test_a_plan_refuses_what_is_on_no_device() -> None:
    with pytest.raises(UnsupportedError, match="not on cpu; digest_tensors takes any"):
        DigestPlan([torch.zeros(2)])
    with pytest.raises(UnsupportedError, match="at least one"):
        DigestPlan([])
    with pytest.raises(UnsupportedError, match="by name or in a list"):
        digest_tensors(torch.zeros(2))  # type: ignore[arg-type]


def test_a_stream_of_another_device_is_refused() -> None:
    plan = DigestPlan.__new__(DigestPlan)  # the stream is looked at first
    plan._index = 0
    elsewhere = SimpleNamespace(device_index=1, cuda_stream=0)
    with pytest.raises(UnsupportedError, match="stream of that device, not on one of cuda:1"):
        plan.launch(elsewhere)  # type: ignore[arg-type]


def test_the_host_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    assert digest_backend(torch.device("cpu"))[0] == HOST
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    device_kernel.loaded.cache_clear()
    assert digest_backend() == (HOST, "cuda:0 has capability (7, 5), (8, 0) is needed")
    device_kernel.loaded.cache_clear()


def test_a_kernel_that_should_run_and_does_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise jit.LoadFailed("the driver refused it")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(jit, "load", broken)
    device_kernel.loaded.cache_clear()
    with pytest.warns(RuntimeWarning, match="taken on the host: the driver refused it"):
        found = device_kernel.loaded(0)
    assert (found.kernel, found.reason) == (None, "the driver refused it")
    device_kernel.loaded.cache_clear()


def test_a_kernel_without_an_occupancy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Crowded:
        def resident_blocks(self, block: int, shared: int = 0) -> int:
            raise jit.LaunchFailed("no occupancy")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(jit, "load", lambda *args, **kwargs: Crowded())
    device_kernel.loaded.cache_clear()
    with pytest.warns(RuntimeWarning, match="taken on the host: no occupancy"):
        found = device_kernel.loaded(0)
    assert (found.kernel, found.reason) == (None, "no occupancy")
    device_kernel.loaded.cache_clear()


def test_macros_name_what_differs_from_the_source() -> None:
    assert Tuning().macros == {}
    assert Tuning(words=32, prefetch=256).macros == {"WORDS": 32, "PREFETCH": 256}
    assert Tuning(stages=2, striped=True).macros == {"STAGES": 2}
    source = (jit.source_root() / "digest/parts.cuh").read_text()
    for name in ("words", "stages", "prefetch"):
        value = getattr(Tuning(), name)
        assert f"#define {name.upper()} {value}" in source, "the defaults are the source's"
    assert Tuning().shared_bytes == 8 * 4 * 4 * (512 + 16)
    assert Tuning(stages=2).shared_bytes == 8 * 2 * 4 * (512 + 16)
    assert Tuning(words=32, stages=2).shared_bytes == 4 * 2 * 8 * (512 + 16)
    least = min(Tuning(words=words, stages=2).shared_bytes for words in (16, 32))
    assert least >= 8 * 4100, "room for the table"


@pytest.mark.parametrize("stages", [-2, 0, 1, 3])
def test_stages_that_the_ring_cannot_have_are_refused(stages: int) -> None:
    with pytest.raises(ValueError, match=rf"stages is {stages}; give a power of 2 from 2 on"):
        Tuning(stages=stages)
