"""The two protocols on a device whose clock the test moves: order, counts, medians, failures."""

from itertools import pairwise

import pytest
from bench_instruments import FakeDevice, fake_contender
from hypothesis import given
from hypothesis import strategies as st

from mok.bench import protocols
from mok.bench.layer_inputs import make_inputs
from mok.bench.nvml import Gauge
from mok.bench.ranks import Together
from mok.bench.sampling import Reading
from mok.bench.shapes import Shape


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(Shape("test", 4, 2, 8, 4, 1), "gaussian", "cpu")


def _prepared(device, inputs, **times):
    return {
        name: fake_contender(device, name, *each).prepare(inputs) for name, each in times.items()
    }


def test_a_round_is_every_ceiling_then_every_contender_in_some_order(device, inputs):
    runners = _prepared(device, inputs, a=(1.0, 2.0), b=(3.0, 4.0))
    device.calls.clear()
    ceilings = {"gemm": lambda: device.work("gemm", 0.5)}
    found, timings = protocols.rotation(device.instruments(), Together(), ceilings, runners, 4)
    a, b = ["a forward", "a backward"], ["b forward", "b backward"]
    rounds = [device.calls[place : place + 5] for place in range(0, len(device.calls), 5)]
    assert len(rounds) == 2 + 4
    assert all(one in (["gemm", *a, *b], ["gemm", *b, *a]) for one in rounds)
    assert list(timings) == [(n, d) for n in "ab" for d in protocols.DIRECTIONS]
    expected = {
        ("a", "forward"): 1,
        ("a", "backward"): 2,
        ("b", "forward"): 3,
        ("b", "backward"): 4,
    }
    assert set(timings) == set(expected)
    for key, seconds in expected.items():
        assert timings[key].seconds == pytest.approx((seconds,) * 4)
    assert found["gemm"].seconds == pytest.approx((0.5,) * 4)
    assert found["gemm"].joules is None


def test_the_order_of_a_rotation_has_no_fixed_neighbours_and_is_the_same_again(device, inputs):
    names = "abcd"
    runners = _prepared(device, inputs, **dict.fromkeys(names, (1.0, 1.0)))
    orders = []
    for _ in range(2):
        device.calls.clear()
        protocols.rotation(device.instruments(), Together(), {}, runners, 23)
        orders.append([call[0] for call in device.calls if call.endswith("forward")])
    assert orders[0] == orders[1]
    rounds = [orders[0][place : place + 4] for place in range(0, len(orders[0]), 4)]
    assert all(sorted(one) == list(names) for one in rounds)
    after = {name: set() for name in names}
    for one in rounds:
        for before, later in pairwise(one):
            after[before].add(later)
    assert all(after[name] == set(names) - {name} for name in names)


def test_who_fails_in_a_rotation_is_named_with_its_reason(device, inputs):
    bad = fake_contender(device, "bad", 1, 1, fails={"backward": 3}).prepare(inputs)
    runners = {**_prepared(device, inputs, good=(1, 1)), "bad": bad}
    with pytest.raises(protocols.ContenderFailed, match="bad: RuntimeError: bad cannot") as raised:
        protocols.rotation(device.instruments(), Together(), {}, runners, 4)
    assert raised.value.who == "bad"


def test_a_ceiling_that_fails_is_named_too(device, inputs):
    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(protocols.ContenderFailed) as raised:
        protocols.rotation(device.instruments(), Together(), {"gemm": fail}, {}, 1)
    assert raised.value.who == "gemm"


def test_a_loop_lasts_for_the_seconds_after_a_warm_up(device):
    calls = {"a": lambda: device.work("a", 0.1)}
    timings = protocols.loop(device.instruments(), Together(), calls, 2.0)
    assert timings["a"].seconds == pytest.approx((0.1,) * 20)
    assert len(device.calls) == 3 + 6 + 20  # calibration, 0.3 of the seconds, the seconds


def test_a_pair_strictly_alternates_and_each_keeps_its_own_times(device):
    calls = {"a": lambda: device.work("a", 0.1), "b": lambda: device.work("b", 0.3)}
    timings = protocols.loop(device.instruments(), Together(), calls, 4.0)
    assert device.calls == ["a", "b"] * (len(device.calls) // 2)
    assert timings["a"].seconds == pytest.approx((0.1,) * 10)
    assert timings["b"].seconds == pytest.approx((0.3,) * 10)


def test_slow_calls_are_still_made_a_few_times(device):
    timings = protocols.loop(
        device.instruments(), Together(), {"a": lambda: device.work("a", 50.0)}, 1.0
    )
    assert len(timings["a"].seconds) == 5


def test_calls_count_as_the_slowest_rank_s(device):
    together = Together(0, 2, None, lambda values: [max(value, 0.25) for value in values])
    timings = protocols.loop(
        device.instruments(), together, {"a": lambda: device.work("a", 0.1)}, 1.0
    )
    assert set(timings["a"].seconds) == {0.25}


def test_joules_are_power_times_time_and_say_where_they_come_from(device, monkeypatch):
    class Seen:
        def __enter__(self):
            return self

        def __exit__(self, *unused):
            return None

        def reading(self, start, end):
            return Reading(watts=500.0, uncertainty=0.01, update_ms=50.0, clock_mhz=1400)

    monkeypatch.setattr(protocols, "sampling", lambda gauge: Seen())
    times = iter(float(turn) for turn in range(1000))
    monkeypatch.setattr(protocols.time, "perf_counter", lambda: next(times))
    one = protocols.loop(
        device.instruments(), Together(), {"a": lambda: device.work("a", 0.1)}, 1.0
    )["a"]
    # The host clock moved by 1 s between the ends of the loop of 10 calls.
    assert (one.joules, one.kind) == (pytest.approx(500.0 * 1.0 / 10), "counter")
    calls = {"a": lambda: device.work("a", 0.1), "b": lambda: device.work("b", 0.3)}
    two = protocols.loop(device.instruments(), Together(), calls, 1.0)
    assert (two["b"].joules, two["b"].kind) == (pytest.approx(150.0), "estimate")
    unknown = Together(0, 2, None, lambda values: [*values[:1], *[1.0] * (len(values) - 1)])
    other = protocols.loop(device.instruments(), unknown, {"a": calls["a"]}, 1.0)["a"]
    assert (other.joules, other.kind) == (None, None)


def _shared(*ranks):
    """largest() of rank 0 among ranks that give these values, call by call."""
    rounds = iter(zip(*ranks, strict=True))

    def largest(values):
        others = next(rounds)
        return [max(column) for column in zip(values, *others, strict=True)]

    return largest


@pytest.mark.parametrize(
    ("uncertainty", "kind"), [(0.01, "counter"), (0.03, "counter"), (0.031, "estimate")]
)
def test_a_loop_too_short_for_the_counter_is_an_estimate(uncertainty, kind):
    seen = Reading(500.0, uncertainty, 100.0, 1400.0)
    timing = protocols._timing((0.1,), seen, 5.0, "counter", Together())
    assert (timing.joules, timing.kind, timing.reading) == (5.0, kind, seen)
    assert protocols._timing((0.1,), seen, 5.0, "estimate", Together()).kind == "estimate"


def test_power_and_clock_are_of_the_rank_whose_joules_are_kept():
    here = Reading(500.0, 0.01, 100.0, 1500.0)
    nothing = (-1.0,) * 4
    costly = _shared([(9.0, 0.0), (-1.0,), (690.0, 0.02, 90.0, 1300.0)])
    timing = protocols._timing((0.1,), here, 5.0, "counter", Together(0, 2, None, costly))
    assert (timing.joules, timing.kind) == (9.0, "counter")
    assert timing.reading == Reading(690.0, 0.02, 90.0, 1300.0)
    cheap = _shared([(4.0, 0.0), (-2.0,), nothing])
    timing = protocols._timing((0.1,), here, 5.0, "counter", Together(0, 2, None, cheap))
    assert (timing.joules, timing.reading) == (5.0, here)
    # Of equal ranks the first is taken whole, and what it did not see stays unknown.
    equal = _shared([(5.0, 0.0), (-1.0,), nothing])
    clockless = Reading(500.0, 0.04, 100.0, None)
    timing = protocols._timing((0.1,), clockless, 5.0, "counter", Together(0, 2, None, equal))
    assert (timing.kind, timing.reading) == ("estimate", clockless)
    unknown = _shared([(float("-inf"), 1.0)])
    timing = protocols._timing((0.1,), here, 5.0, "counter", Together(0, 2, None, unknown))
    assert (timing.joules, timing.kind) == (None, None)
    assert timing.reading == Reading(clock_mhz=1500.0)


def test_the_largest_is_known_only_if_every_rank_knows_its_own():
    two = Together(0, 2, None, _shared([(7.0, 0.0), (9.0, 0.0), (float("-inf"), 1.0), (1.0, 0.0)]))
    assert [two.largest_known(value) for value in (3.0, 10.0, 3.0, None)] == [7.0, 10.0, None, None]
    assert Together().largest_known(3) == 3
    assert Together().largest_known(None) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_quantiles_lie_between_the_ends_and_agree_with_numpy(values, share):
    numpy = pytest.importorskip("numpy")
    assert protocols.quantile(values, share) == pytest.approx(
        float(numpy.quantile(values, share)), rel=1e-9, abs=1e-6
    )


def test_nothing_is_known_without_a_gauge(device):
    assert isinstance(device.instruments().gauge, Gauge)
    timing = protocols.loop(
        device.instruments(), Together(), {"a": lambda: device.work("a", 0.1)}, 1.0
    )["a"]
    assert (timing.joules, timing.kind, timing.reading) == (None, None, Reading())
