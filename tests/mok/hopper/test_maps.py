"""Tensor maps: what is described, what is refused, and a cache that stays small."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mok.errors import InputError
from mok.hopper import maps
from mok.hopper.maps import MapCache, MapSpec, rows_spec, weight_spec


class Encoder:
    """Stands for the driver: gives every spec other bytes, and counts."""

    def __init__(self) -> None:
        self.calls: list[MapSpec] = []

    def __call__(self, spec: MapSpec) -> bytes:
        self.calls.append(spec)
        return len(self.calls).to_bytes(8, "little") * 16


def test_rows_are_described_innermost_first_with_byte_strides():
    spec = rows_spec(0x1000, 300, 192, 16)
    assert spec == MapSpec(0x1000, (192, 300), (384,), (64, 16))


def test_weights_are_described_per_expert_and_may_be_strided():
    whole = torch.zeros(3, 4, 128, 64, dtype=torch.bfloat16)
    weight = whole[:, 1]
    spec = weight_spec(weight, 128)
    assert spec.pointer == weight.data_ptr()
    assert (spec.sizes, spec.strides) == ((64, 128, 3), (128, 4 * 128 * 128))
    assert spec.box == (64, 128, 1)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ((8, (64, 2), (128,), (64, 64)), "begins at address 0x8"),
        ((0, (64, 2), (128,), (64, 64)), "begins at address 0x0"),
        ((16, (64, 2), (136,), (64, 64)), r"strides of \(136,\) bytes"),
        ((16, (64, 2), (0,), (64, 64)), "strides of"),
        ((16, (64, 0), (128,), (64, 64)), "not empty"),
        ((16, (64, 2**33), (128,), (64, 64)), "1 to 2"),
        ((16, (64, 2), (128,), (128, 64)), "128 elements along the innermost"),
        ((16, (64, 2), (128,), (64, 257)), "1 to 256"),
        ((16, (64,), (), (64,)), "two or three sizes"),
        ((16, (64, 2, 2), (128,), (64, 64, 1)), "two or three sizes"),
    ],
)
def test_what_the_hardware_cannot_address_is_refused(spec, told):
    encoder = Encoder()
    cache = MapCache(encoder=encoder)
    for _ in range(2):  # a refusal leaves nothing behind
        with pytest.raises(InputError, match=told):
            cache.get(MapSpec(*spec))
    assert encoder.calls == []
    assert len(cache) == 0


def test_a_weight_of_another_form_is_refused():
    weight = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    for wrong in (weight[0], weight.float(), weight.transpose(1, 2)):
        with pytest.raises(InputError, match=r"bfloat16 \[E, out, in\]"):
            weight_spec(wrong, 128)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 4))
def test_a_cache_gives_each_spec_its_own_map_and_keeps_the_latest(order, most):
    encoder = Encoder()
    cache = MapCache(most, encoder)
    latest: list[int] = []
    for number in order:
        spec = rows_spec(0x1000 * (1 + number), 64, 64, 64)
        before = len(encoder.calls)
        made = cache.get(spec)
        assert (len(encoder.calls) == before) == (number in latest)
        serial = max(n for n, call in enumerate(encoder.calls, 1) if call == spec)
        assert list(made.opaque) == [serial] * 16
        latest = [*[n for n in latest if n != number], number][-most:]
        assert len(cache) == len(latest)
    cache.clear()
    assert len(cache) == 0


def test_a_cache_has_room_for_the_maps_of_a_large_models_steps():
    encoder = Encoder()
    cache = MapCache(encoder=encoder)
    layers = [
        [rows_spec(0x1000 * (1 + 35 * n + i), 64, 64, 64) for i in range(35)] for n in range(61)
    ]
    for _ in range(2):
        for specs in (*layers, *reversed(layers)):
            for spec in specs:
                cache.get(spec)
    assert len(encoder.calls) == 35 * 61


class Meeting(OrderedDict):
    """While one thread has found a map, another one asks for a map that pushes that out."""

    def __init__(self) -> None:
        super().__init__()
        self.other: threading.Thread | None = None

    def move_to_end(self, key: object, last: bool = True) -> None:
        if self.other is not None:
            self.other.start()
            self.other.join(0.2)  # a cache that lets it wait goes on before it
        super().move_to_end(key, last)


def test_a_map_that_another_thread_pushes_out_is_given_all_the_same():
    meeting = Meeting()
    cache = MapCache(1, Encoder(), meeting)
    first, second = (rows_spec(0x1000 * n, 64, 64, 64) for n in (1, 2))
    made = cache.get(first)
    meeting.other = threading.Thread(target=cache.get, args=(second,))
    assert cache.get(first) is made
    meeting.other.join()
    assert list(meeting) == [second]


def test_encoding_is_what_the_driver_is_asked_for(monkeypatch):
    asked: list[tuple[object, ...]] = []
    driver = maps.cuda_module("cuda.bindings.driver")

    class Fake:
        def __getattr__(self, name: str) -> object:
            return getattr(driver, name)

        def cuTensorMapEncodeTiled(self, *arguments: object) -> tuple[int, object]:
            asked.append(arguments)
            return 0, driver.CUtensorMap()

    monkeypatch.setattr(maps, "cuda_module", lambda name: Fake())
    encoded = maps.encode(MapSpec(0x4000, (64, 256, 3), (128, 32768), (64, 128, 1)))
    assert len(encoded) == 128
    dtype, rank, address, sizes, strides, box, steps, *kinds = asked[0]
    assert (rank, address) == (3, 0x4000)
    assert [[int(value) for value in part] for part in (sizes, strides, box, steps)] == [
        [64, 256, 3],
        [128, 32768],
        [64, 128, 1],
        [1, 1, 1],
    ]
    assert [str(getattr(kind, "name", kind)).rsplit("_", 1)[-1] for kind in (dtype, *kinds)] == [
        "BFLOAT16",
        "NONE",
        "128B",
        "256B",
        "NONE",
    ]


@pytest.mark.gpu
def test_the_driver_takes_maps_of_every_kind_and_refuses_none():
    weight = torch.zeros(3, 128, 64, dtype=torch.bfloat16, device="cuda")
    cache = MapCache()
    specs = [weight_spec(weight, 256), rows_spec(weight.data_ptr(), 384, 64, 16)]
    assert len({bytes(cache.get(spec)) for spec in specs}) == 2


def test_one_expert_may_have_any_stride_of_its_own_dimension() -> None:
    weight = torch.empty(128, 64, 1, dtype=torch.bfloat16).permute(2, 0, 1)
    assert weight.stride(0) == 1
    assert maps.weight_spec(weight, 128).strides == (64 * 2, 128 * 64 * 2)
