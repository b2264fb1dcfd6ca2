"""Each hint fires on the fault it is for, and keeps silent on its neighbours."""

from typing import Any

import pytest
import torch

from verify.comparison import compare
from verify.explanation import difference, suggest, value_rules
from verify.inputs import generate

ACCUMULATION = "floating-point accumulation"
TAIL = "tail tile"
ZEROS = "exact zeros"
UNINITIALISED = "before it was written"
NAN = "uninitialised memory, or"
RATIO = "accumulated 3 times"
SCALE = "constant ratio"
BIT = "one bit flipped"
ORDER = "in another order"
BIJECTION = "no bijection"
SIGN = "opposite sign"
FROM_ROW = "on differs"
PERIOD = "period 16"
OTHER = "other values altogether"
INDEX = "look at what is special"
ALL = (
    ACCUMULATION,
    TAIL,
    ZEROS,
    UNINITIALISED,
    NAN,
    RATIO,
    SCALE,
    BIT,
    ORDER,
    BIJECTION,
    SIGN,
    FROM_ROW,
    PERIOD,
    OTHER,
    INDEX,
)


def base(*shape: int, dtype: torch.dtype = torch.float32, name: str = "x") -> torch.Tensor:
    return generate(name, shape, dtype)


def hints(a: torch.Tensor, b: torch.Tensor, **context: object) -> str:
    return "\n".join(suggest(compare(a, b, "t"), a, b, context))


def fired(text: str) -> set[str]:
    return {mark for mark in ALL if mark in text}


def nudged(t: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """One to three ulp more at `where`."""
    steps = generate("steps", tuple(t.shape), torch.int32, kind="integers", low=1, high=4)
    return torch.where(where, (t.view(torch.int32) + steps).view(torch.float32), t)


def scattered(*shape: int) -> torch.Tensor:
    return generate("where", shape, torch.int32, kind="integers", low=0, high=3) == 0


def test_equal_or_not_comparable_says_nothing() -> None:
    t = base(8, 8)
    assert suggest(compare(t, t.clone()), t, t) == ()
    assert suggest(compare(t, t.double()), t, t.double()) == ()


def test_scatter_add_in_another_order() -> None:
    y, token = base(4000, 8), torch.arange(4000) % 1000
    orders = [generate(name, (4000,), torch.int64, kind="permutation") for name in "pq"]
    a, b = (torch.zeros(1000, 8).index_add(0, token[p], y[p]) for p in orders)
    text = hints(a, b)
    assert fired(text) == {ACCUMULATION}
    assert "scatter_add" in text
    assert "for another batch" in hints(a, b, condition="batch")


def test_accumulation_is_silent_on_large_confined_or_special_differences() -> None:
    t = base(64, 64)
    large = torch.where(scattered(64, 64), t + 1, t)
    assert ACCUMULATION not in hints(t, large)
    row = torch.zeros(64, 64, dtype=torch.bool)
    row[5] = True
    assert fired(hints(t, nudged(t, row))) == {INDEX}
    assert ACCUMULATION not in hints(t.int(), t.int() + 1)


@pytest.mark.parametrize("columns", [255, 257, 300])
def test_dropped_tail_of_columns(columns: int) -> None:
    a = base(33, columns)
    b = a.clone()
    start = columns // 128 * 128
    b[:, start:] = 0
    text = hints(a, b)
    assert fired(text) == {TAIL, ZEROS}
    assert f"columns {start}..{columns - 1} of {columns}" in text


def test_dropped_tail_of_rows_and_of_a_vector() -> None:
    a = base(3, 67, 5)
    b = a[0].clone()
    b[64:] += 1
    assert "rows 64..66 of 67" in hints(a[0], b)
    vector = base(1000)
    other = vector.clone()
    other[992:] = 7.0
    assert "elements 992..999 of 1000" in hints(vector, other)


def test_tail_is_silent_on_whole_tiles_and_scattered_ends() -> None:
    a = base(64, 256)
    b = a.clone()
    b[:, 128:] += 1
    assert TAIL not in hints(a, b)
    c = base(8, 300)
    d = c.clone()
    d[0, 256] += 1
    d[5, 299] += 1
    assert TAIL not in hints(c, d)


def test_zeros() -> None:
    a = base(16, 16)
    b = torch.where(scattered(16, 16), torch.zeros(()), a)
    assert "the other has exact zeros" in hints(a, b)
    assert "the base has exact zeros" in hints(b, a)
    b[0, 0] = 5.0
    assert ZEROS not in hints(a, b)


def test_fill_patterns() -> None:
    a = base(16, 16)
    poisoned = a.view(torch.int32).clone()
    poisoned[3:5, 2:9] = -1
    assert UNINITIALISED in hints(a, poisoned.view(torch.float32))
    poisoned[3:5, 2:9] = 0x5A5A5A5A
    b = poisoned.view(torch.float32)
    assert UNINITIALISED in hints(a, b, fill_bytes=[0x5A])
    assert UNINITIALISED in hints(a, b, fill_bytes=[0xA5])  # new memory gets the complement
    assert UNINITIALISED not in hints(a, b)
    slots = generate("s", (32,), torch.int64, kind="integers", low=0, high=9)
    unused = slots.clone()
    unused[::3] = -1  # a legal value, not a pattern
    assert UNINITIALISED not in hints(slots, unused)
    zeroed = torch.where(scattered(16, 16), torch.zeros(()), a)
    assert UNINITIALISED not in hints(a, zeroed, fill_bytes=[0xFF])


def test_nan_where_a_number_was() -> None:
    a = base(16, 16)
    b = a.clone()
    b[2, 3:9] = float("nan")
    assert "6 NaN where the base has a number" in hints(a, b)
    assert "6 NaN where the other has a number" in hints(b, a)
    c = b.clone()
    c[5, 5] = 1.0
    assert NAN not in hints(b, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_constant_ratio(dtype: torch.dtype) -> None:
    a = base(32, 32, dtype=dtype)
    text = hints(a, a + a + a)
    assert RATIO in text
    assert "the other is 3x" in text
    assert "the base is 3x" in hints(a + a + a, a)
    assert SCALE in hints(a, a * 0.7071)
    assert not fired(hints(a, a * 3 + generate("n", (32, 32), dtype))) & {RATIO, SCALE}


def test_ratio_is_silent_on_rounding_and_on_constants() -> None:
    a = base(32, 32, dtype=torch.bfloat16)
    assert not fired(hints(a, (a.float() * 1.01).bfloat16())) & {RATIO, SCALE}
    assert not fired(hints(torch.ones(8, 8), torch.full((8, 8), 3.0))) & {RATIO, SCALE}


def test_one_flipped_bit() -> None:
    a = base(64, 64)
    bits = a.view(torch.int32).clone()
    bits.reshape(-1)[torch.tensor([5, 900, 1200, 2222, 4000])] ^= 1 << 12
    text = hints(a, bits.view(torch.float32))
    assert BIT in text
    assert "xor 0x00001000, bit 12" in text
    bits.reshape(-1)[7] ^= 3 << 12
    assert BIT not in hints(a, bits.view(torch.float32))
    last = a.view(torch.int32).clone()
    last[::7] ^= 1  # one ulp: rounding looks like that
    assert BIT not in hints(a, last.view(torch.float32))
    assert BIT not in hints(torch.full((9,), 2.0), torch.full((9,), 4.0))


def test_signs() -> None:
    a = base(32, 32)
    where = scattered(32, 32)
    assert fired(hints(a, torch.where(where, -a, a))) == {SIGN}
    assert fired(hints(a, -a)) == {SIGN}
    whole = torch.arange(1, 10)
    assert fired(hints(whole, -whole)) == {SIGN}
    assert SIGN not in hints(torch.zeros(4), -torch.zeros(4))
    assert SIGN not in hints(a, torch.where(where, 1 - a, a))


def test_permuted_rows() -> None:
    a = base(50, 7)
    order = generate("o", (50,), torch.int64, kind="permutation")
    assert fired(hints(a, a[order])) == {ORDER}
    assert "all moved by 3" in hints(a, a.roll(3, 0))
    heads = base(6, 8, 5)
    flat = heads.reshape(48, 5)[generate("o", (48,), torch.int64, kind="permutation")]
    assert ORDER in hints(heads, flat.reshape(6, 8, 5))
    changed = a[order].clone()
    changed[4, 4] += 1
    assert ORDER not in hints(a, changed)


def test_an_index_that_is_no_bijection() -> None:
    a = base(50, 7)
    b = a.clone()
    b[6] = a[7]
    b[20] = a[21]
    text = hints(a, b)
    assert BIJECTION in text
    assert "row 6 holds row 7" in text
    b[20, 3] += 1
    assert BIJECTION not in hints(a, b)
    zero = a.clone()
    zero[3] = 0
    other = zero.clone()
    other[5:7] = 0
    assert BIJECTION not in hints(zero, other)


def test_from_some_row_on() -> None:
    a = base(200, 200)
    b = a.clone()
    b[164:] = base(36, 200, name="garbage")
    text = hints(a, b)
    assert fired(text) == {FROM_ROW}
    assert "every row from 164 on" in text
    assert "passes 2**15" in text
    c = base(65, 9)
    d = c.clone()
    d[16:] = base(49, 9, name="garbage")
    assert "only the first tile" in hints(c, d)
    b[0, 0] += 1
    assert FROM_ROW not in hints(a, b)
    assert FROM_ROW not in hints(a, nudged(a, scattered(200, 200)))


def test_periodic_columns() -> None:
    a = base(20, 200)
    b = a.clone()
    b[:, 3::16] += 1
    text = hints(a, b)
    assert PERIOD in text
    assert "c mod 16 in {3}" in text
    b[0, 0] += 1
    assert "period" not in hints(a, b)
    c = base(40, 6)
    d = c.clone()
    d[3, 0] += 1
    d[9, 2] += 1
    d[30, 4] += 1  # every other of six columns: chance
    assert "period" not in hints(c, d)
    assert "period" not in hints(a, nudged(a, scattered(20, 200)))


def test_other_values() -> None:
    assert fired(hints(base(30, 30), base(30, 30, name="y"))) == {OTHER}
    ids = [generate(n, (900,), torch.int64, kind="integers", low=0, high=10**6) for n in "ab"]
    assert OTHER in hints(*ids)
    assert OTHER not in hints(base(30, 30), base(30, 30) * 1.001 + 1e-4)
    half = torch.cat([base(15, 30), base(15, 30, name="y")])
    assert OTHER not in hints(torch.cat([base(15, 30), base(15, 30, name="z")]), half)


def test_one_expert() -> None:
    a = base(8, 16, 24)
    b = a.clone()
    b[5, 2:9] += 1
    text = hints(a, b, dim0="expert")
    assert fired(text) == {INDEX}
    assert "lie in expert 5 of 8" in text
    b[6, 0, 0] += 1
    assert INDEX not in hints(a, b)
    pair = base(4, 50)
    twice = pair.clone()
    twice[2, [5, 7]] += 1
    assert INDEX not in hints(pair, twice)  # one in four by chance
    single = a.clone()
    single[3, 3, 3] += 1
    assert INDEX not in hints(a, single)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64, torch.float16, torch.uint64],
)
def test_every_dtype_and_shape_gets_through(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (5,), (2, 3), (2, 2, 3)):
        a = torch.zeros(shape).to(dtype)
        b = torch.ones(shape).to(dtype)
        assert isinstance(suggest(compare(a, b), a, b), tuple)
    wide = torch.zeros(1).to(dtype).expand(4)
    assert isinstance(suggest(compare(wide, b.reshape(-1)[:4]), wide, b.reshape(-1)[:4]), tuple)


def test_the_sides_have_the_names_that_are_given() -> None:
    a = base(16, 16)
    names = ("reference", "output")
    zeros = torch.where(scattered(16, 16), torch.zeros(()), a)
    assert "the output has exact zeros" in hints(a, zeros, names=names)
    assert "the output is 3x" in hints(a, a + a + a, names=names)
    assert "a row of the reference" in hints(a, a[torch.arange(16) // 2 * 2], names=names)
    assert "where the reference has a number" in hints(a, a * float("nan"), names=names)
    assert "has exact zeros" not in hints(zeros, a, names=names, condition="reference")


def test_a_ratio_that_rounding_hides_is_taken_as_given() -> None:
    a = base(32, 32)
    b = a * 0.4 * (1 + 1e-5 * base(32, 32, name="accumulation"))
    assert not fired(hints(a, b)) & {RATIO, SCALE}
    assert "constant ratio 0.4 (other / base, 1 / 2.5)" in hints(a, b, ratio=0.4)
    assert not fired(hints(a, b, ratio=None)) & {RATIO, SCALE}
    assert not fired(hints(a, -a, ratio=-1.0)) & {RATIO, SCALE}


def test_what_is_left_is_not_said_beside_a_known_cause() -> None:
    pair = base(30, 30), base(30, 30, name="y")
    assert OTHER in hints(*pair)
    assert OTHER not in hints(*pair, explained=True)


def test_whole_indices_of_an_outer_dimension_are_no_row_that_went_wrong() -> None:
    a = base(4, 6, 5)
    b = a.clone()
    b[1:] = base(3, 6, 5, name="garbage")
    assert FROM_ROW not in hints(a, b)
    c = a.clone()
    c[0, 5] += 1
    c[1:] = b[1:]
    assert FROM_ROW in hints(a, c)


def test_a_few_small_numbers_are_in_another_order_by_chance() -> None:
    a = torch.tensor([0, 0, 1, 1, 0, 1, 0, 0])
    assert ORDER not in hints(a, a.flip(0))
    ids = torch.arange(8)
    assert ORDER in hints(ids, ids.flip(0))


GARBAGE = 6.9e-310  # a pointer read as float64


def test_garbage_has_no_ratio() -> None:
    """No infinite ratio, nor one whose inverse is; a ratio that is one is named as ever."""
    a = base(8, 8, dtype=torch.float64)
    spread = torch.linspace(1, 2, 64, dtype=torch.float64).reshape(8, 8)
    for garbage in (spread * GARBAGE, spread * 1e-318):
        for pair in ((garbage, a), (a, garbage), (garbage, spread), (spread, garbage)):
            assert SCALE not in hints(*pair)
            assert "is 3x" not in hints(*pair)
    for ratio in (GARBAGE, 0.0, float("nan"), float("inf")):
        assert not fired(hints(a, a + 1, ratio=ratio)) & {RATIO, SCALE}
    assert "the other is 3x" in hints(spread * 1e-290, 3 * (spread * 1e-290))


def test_rows_in_another_order_are_looked_for_in_blocks_and_not_in_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = base(50, 7)
    order = generate("o", (50,), torch.int64, kind="permutation")
    twice = a.clone()
    twice[6], twice[20] = a[7], a[21]
    whole = hints(a, a[order]), hints(a, twice)
    monkeypatch.setattr(value_rules, "_BLOCK", 20)
    assert (hints(a, a[order]), hints(a, twice)) == whole
    sizes: list[int] = []
    keys = value_rules._row_keys

    def counted(rows: Any, chosen: Any) -> Any:
        sizes.append(len(chosen))
        return keys(rows, chosen)

    monkeypatch.setattr(value_rules, "_row_keys", counted)
    assert ORDER in hints(a, a.roll(3, 0))
    assert sizes == [50, 50], "the rows that differ, of both sides"
    sizes.clear()
    for limit in ({"_MANY_ROWS": 49}, {"_MANY_ELEMENTS": 349}):
        with monkeypatch.context() as patched:
            for name, value in limit.items():
                patched.setattr(value_rules, name, value)
            assert not fired(hints(a, a[order])) & {ORDER, BIJECTION}
            assert BIJECTION not in hints(a, twice)
    assert sizes == [], "nor is anything widened for them"


@pytest.mark.parametrize("block", [7, 64, 10_000])
def test_the_sample_is_spread_evenly_over_what_differs(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difference, "_BLOCK", block)
    monkeypatch.setattr(difference, "_SAMPLE", 10)
    mask = torch.arange(1000) % 7 < 3
    indices = mask.nonzero().flatten()
    assert torch.equal(difference._sample(mask, len(indices)), indices[:: len(indices) // 10])
    assert torch.equal(difference._sample(mask, 9), indices)
    assert len(difference._sample(torch.zeros(0, dtype=torch.bool), 0)) == 0


def test_another_formula_is_no_order_of_additions():
    x = torch.rand(64, 32, generator=torch.Generator().manual_seed(3)) + 0.5
    total = x.sum(1, keepdim=True)
    said = said_of(x / total, x / (total + 2e-5))
    assert any("nearly the same share everywhere" in text for text in said), said
    assert not any("accumulation" in text for text in said)
    order = said_of(x.sum(1), x.flip(1).double().cumsum(1)[:, -1].float())
    assert not any("nearly the same share" in text for text in order), order


def test_one_nan_explains_itself_and_nothing_else():
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(64, 32, generator=generator) + 1.0
    shifted = (x.view(torch.int32) + torch.randint(-2, 3, x.shape, generator=generator)).int()
    y = shifted.view(torch.float32).clone()
    y[5, 7] = float("nan")
    said = said_of(x, y)
    assert any("few ulp" in text for text in said), said
    assert said[-1].startswith("1 NaN where the base has a number")
    y[:] = float("nan")
    (only, *more) = said_of(x, y)
    assert "2048 NaN" in only
    assert not any("few ulp" in text for text in more)


def said_of(a, b):
    return suggest(compare(a, b, "out"), a, b)
