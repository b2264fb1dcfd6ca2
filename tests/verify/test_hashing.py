"""The digest scheme: a slow reference, additivity, and inputs that other sums confuse."""

import itertools
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.digests import Digest, StateDigest
from verify.errors import UnsupportedError
from verify.hashing import digest, digest_shard, digest_tensor
from verify.lanes import BLOCK, DEFAULT_SEED, block_keys, key_seeds, splitmix64

M64 = 2**64 - 1
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


def _mix(state: int) -> int:
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
    return z ^ (z >> 31)


def _output(seed: int, n: int) -> int:
    return _mix(seed + (n + 1) * 0x9E3779B97F4A7C15 & M64)


def _key(seed: int, word: int, lane: int) -> int:
    b, j = divmod(word, 4096)
    t = _output(_output(seed, 0), j + lane)
    return (t * (_output(_output(seed, 1), b) | 1) & M64) >> 32


def slow_lanes(data: bytes, offset: int, seed: int = DEFAULT_SEED) -> tuple[int, ...]:
    """The scheme, word by word, in Python integers."""
    words: dict[int, int] = {}
    for at, byte in enumerate(data, start=offset):
        words[at // 4] = words.get(at // 4, 0) | byte << 8 * (at % 4)
    return tuple(sum(_key(seed, i, lane) * m for i, m in words.items()) & M64 for lane in range(4))


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    top = 2 if dtype is torch.bool else 256
    rng = np.random.default_rng(seed)
    raw = torch.from_numpy(rng.integers(0, top, math.prod(shape) * size, dtype=np.uint8))
    if dtype is torch.complex128:
        return torch.view_as_complex(raw.view(torch.float64).reshape(*shape, 2))
    return raw.view(dtype).reshape(shape)


def raw_bytes(t: torch.Tensor) -> bytes:
    flat = torch.view_as_real(t) if t.dtype is torch.complex128 else t
    return bytes(flat.contiguous().reshape(-1).view(torch.uint8).tolist()) if t.numel() else b""


def test_splitmix64_gives_its_published_numbers() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(1234567, 0, 3).tolist() == published
    assert splitmix64(5, 7, 3).tolist() == [_output(5, n) for n in (7, 8, 9)]


@given(
    data=st.binary(max_size=300),
    offset=st.one_of(st.integers(0, 70000), st.integers(2**40, 2**40 + 9)),
    seed=st.integers(0, M64),
)
def test_equals_the_slow_reference(data: bytes, offset: int, seed: int) -> None:
    t = torch.tensor(list(data), dtype=torch.uint8)
    full = (offset + len(data) + 5,)
    found = digest_tensor(t, seed=seed, offset=offset, full_shape=full)
    assert found == Digest("uint8", full, len(data), slow_lanes(data, offset, seed))


@pytest.mark.parametrize("num", [BLOCK * 4 - 1, BLOCK * 4 + 1, BLOCK * 4 * 32 + 4 * 5 + 3])
@pytest.mark.parametrize("offset", [0, 3, BLOCK * 4 - 2])
def test_equals_the_slow_reference_across_blocks_and_chunks(num: int, offset: int) -> None:
    t = random_bits((num,), torch.uint8)
    found = digest_tensor(t, offset=offset, full_shape=(num + offset,))
    words = np.zeros(-(-(num + offset) // 4) * 4, np.uint8)
    words[offset : offset + num] = t.numpy()
    m = words.view("<u4").astype(np.uint64)
    seed_t, seed_b = key_seeds(DEFAULT_SEED)
    blocks = -(-len(m) // BLOCK)
    b = np.repeat(block_keys(DEFAULT_SEED, 0, blocks), BLOCK)[: len(m)]
    assert block_keys(DEFAULT_SEED, 3, 1)[0] == splitmix64(seed_b, 3, 1)[0] | np.uint64(1)
    for lane in range(4):
        t_row = np.tile(splitmix64(seed_t, lane, BLOCK), blocks)[: len(m)]
        assert found.lanes[lane] == int((((t_row * b) >> np.uint64(32)) * m).sum())


def test_blocks_far_out_have_their_own_keys() -> None:
    last = 4096 * 4096 * 4  # first byte of the second stretch of keys
    t = random_bits((40,), torch.uint8)
    found = digest_tensor(t, offset=last - 20, full_shape=(last + 20,))
    assert found.lanes == slow_lanes(raw_bytes(t), last - 20)
    many = random_bits((9 * BLOCK * 4,), torch.uint8)
    start, full = last - 4 * BLOCK * 4, (last + 5 * BLOCK * 4,)
    halves = many[: 4 * BLOCK * 4], many[4 * BLOCK * 4 :]
    before, after = (
        digest_tensor(half, offset=at, full_shape=full)
        for half, at in zip(halves, (start, last), strict=True)
    )
    assert before + after == digest_tensor(many, offset=start, full_shape=full)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_its_bytes(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (0, 4), (1,), (3, 5, 7)):
        t = random_bits(shape, dtype)
        found = digest_tensor(t)
        assert (found.dtype, found.shape) == (str(dtype).removeprefix("torch."), shape)
        assert found.whole
        assert found.lanes == slow_lanes(raw_bytes(t), 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    t = random_bits((6, 10, 14), dtype)
    views = [
        t.transpose(0, 2),
        t[:, ::3, 1::2],
        t[2:5, 1:9],
        t.permute(1, 2, 0)[::2],
        t[3, 4],
        t[1:2, 1:2, 1:2].expand(4, 5, 6),
        t[:1].expand(3, 10, 14),
        t.reshape(-1)[5:],
        t.as_strided((5, 5), (1, 1)),
    ]
    for view in views:
        assert digest_tensor(view) == digest_tensor(
            view.clone(memory_format=torch.contiguous_format)
        )


def test_large_strided_tensors_are_read_in_pieces() -> None:
    t = random_bits((1500, 1100), torch.int16).t()
    assert digest_tensor(t) == digest_tensor(t.contiguous())
    part = digest_shard(t[:, 100:900], 1, 100, (1100, 1500))
    rest = [
        digest_shard(t[:, :100], 1, 0, (1100, 1500)),
        digest_shard(t[:, 900:], 1, 900, (1100, 1500)),
    ]
    assert part + rest[0] + rest[1] == digest_tensor(t)


def test_gradients_parameters_and_lazy_views() -> None:
    t = torch.randn(4, 3, requires_grad=True)
    want = digest_tensor(t.detach())
    assert digest_tensor(t) == digest_tensor(torch.nn.Parameter(t.detach())) == want
    z = torch.randn(3, 4, dtype=torch.complex64)
    assert digest_tensor(z.conj()) == digest_tensor(z.conj().resolve_conj())
    assert digest_tensor(z.conj().imag) == digest_tensor(-(z.imag.clone()))
    assert digest_tensor(z.conj()) != digest_tensor(z)
    with torch.inference_mode():
        assert digest_tensor(torch.zeros(3)).count == 3


@given(
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]),
)
def test_ranges_add_up(cuts: list[int], dtype: torch.dtype) -> None:
    t = random_bits((5000,), dtype)
    edges = [0, *sorted(cuts), 5000]
    total = Digest.zero(str(dtype).removeprefix("torch."), (5000,))
    for start, end in itertools.pairwise(edges):
        total += digest_tensor(t[start:end], offset=start, full_shape=(5000,))
    assert total == digest_tensor(t)


@settings(max_examples=60)
@given(data=st.data())
def test_shards_of_every_dimension_add_up(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4), label="shape"))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    dim = data.draw(st.integers(0, len(shape) - 1), label="dim")
    cuts = data.draw(st.lists(st.integers(0, shape[dim]), max_size=3), label="cuts")
    t = random_bits(shape, dtype)
    if data.draw(st.booleans(), label="strided"):
        t = random_bits(shape[::-1], dtype).permute(*range(len(shape))[::-1])
    total = Digest.zero(str(dtype).removeprefix("torch."), shape)
    for start, end in itertools.pairwise([0, *sorted(cuts), shape[dim]]):
        total += digest_shard(t.narrow(dim, start, end - start), dim, start, shape)
    assert total == digest_tensor(t)


@pytest.mark.parametrize("shape", [(3, 70001, 2), (2, 5, 300001), (40, 9001)])
def test_shards_with_long_runs_or_wide_gaps(shape: tuple[int, ...]) -> None:
    t = random_bits(shape, torch.bfloat16)
    for dim in (1, -1):
        cut = shape[dim] // 3
        parts = [t.narrow(dim, 0, cut), t.narrow(dim, cut, shape[dim] - cut).contiguous()]
        first, second = (
            digest_shard(part, dim, start, shape)
            for part, start in zip(parts, (0, cut), strict=True)
        )
        assert first + second == digest_tensor(t)


def test_what_does_not_fit_is_refused() -> None:
    t = torch.zeros(4, 3)
    for offset, full in ((1, None), (-1, (20,)), (9, (20,)), (0, (11,))):
        with pytest.raises(ValueError, match="not all in a tensor"):
            digest_tensor(t, offset=offset, full_shape=full)
    for dim, start, full in (
        (0, 5, (8, 3)),
        (0, 0, (8, 4)),
        (1, 0, (5, 9)),
        (0, -1, (8, 3)),
        (0, 0, (8,)),
    ):
        with pytest.raises(ValueError, match="does not lie"):
            digest_shard(t, dim, start, full)
    with pytest.raises(ValueError, match="not a dimension"):
        digest_shard(t, 2, 0, (4, 3))


def _unsupported() -> list[tuple[object, str]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    freed = torch.ones(8)[2:]
    freed.untyped_storage().resize_(0)  # as FSDP does with gathered parameters
    return [
        (freed, "memory was freed"),
        (torch._efficientzerotensor((3,)), "clone it"),
        (torch.zeros(3, device="meta"), "real tensors"),
        (fake, "real tensors"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (jagged, "unbind"),
        (torch.nn.parameter.UninitializedParameter(), "call forward"),
        ([1.0], "give a tensor"),
        ({"a": object()}, "leave it out"),
        ({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, "two values"),
    ]


def test_values_without_plain_memory_are_refused_with_advice() -> None:
    for value, advice in _unsupported():
        with pytest.raises(UnsupportedError, match=advice):
            digest(value)
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.vmap(lambda row: digest_tensor(row) and row)(torch.zeros(2, 2))


def test_digest_of_states() -> None:
    layer = torch.nn.BatchNorm1d(3)
    layer.register_buffer("hidden", torch.ones(2), persistent=False)
    tied = torch.nn.ModuleDict({"a": layer, "b": layer})
    found = digest(tied)
    assert isinstance(found, StateDigest)
    assert {"a.weight", "b.weight", "a.hidden", "b.hidden", "b.running_var"} <= set(found.tensors)
    before = str(found)
    layer.hidden[1] = 2.0
    assert str(digest(tied)) != before
    nested = {"step": 3, "lr": 0.1, "state": {0: {"m": torch.ones(2)}}, "betas": (0.9, None, "x")}
    again = digest(nested)
    assert isinstance(again, StateDigest)
    assert set(again.tensors) == {"step", "lr", "state.0.m", "betas.0", "betas.1", "betas.2"}
    assert str(digest({**nested, "step": 4})) != str(again)
    assert str(digest({**nested, "step": 3.0})) != str(again)


def test_threads_do_not_disturb_each_other() -> None:
    tensors = [random_bits((300_000 + n,), torch.uint8, seed=n) for n in range(4)]
    want = [digest_tensor(t) for t in tensors]
    found: list[Digest | None] = [None] * 4

    def work(n: int) -> None:
        for _ in range(5):
            found[n] = digest_tensor(tensors[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == want


def test_a_sum_inside_a_sum_has_its_own_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a signal handler or a finalizer takes a digest."""
    t, inner = random_bits((400_000,), torch.uint8), random_bits((70_000,), torch.uint8, seed=9)
    want, original, inside = digest_tensor(t), np.einsum, []

    def interrupted(*operands: object) -> object:
        if not inside:
            inside.append(True)
            digest_tensor(inner)
            inside.pop()
        return original(*operands)

    monkeypatch.setattr(np, "einsum", interrupted)
    assert digest_tensor(t) == want


def test_seeds_give_other_keys() -> None:
    t = random_bits((100,), torch.uint8)
    assert len({digest_tensor(t, seed=seed).lanes for seed in range(50)}) == 50


def test_the_scheme_does_not_change_unnoticed() -> None:
    lanes = "0182146ff0a8b0e90182263ed485306801822d21f453e07e018224f8cb739164"
    assert str(digest_tensor(torch.arange(10000, dtype=torch.int32))) == f"int32[10000]:{lanes}"
