"""The two protocols on a device whose clock the test moves: order, counts, medians, failures."""

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


def test_a_round_is_every_ceiling_then_every_contender_and_the_starter_rotates(device, inputs):
    runners = _prepared(device, inputs, a=(1.0, 2.0), b=(3.0, 4.0))
    device.calls.clear()
    ceilings = {"gemm": lambda: device.work("gemm", 0.5)}
    found, timings = protocols.rotation(device.instruments(), Together(), ceilings, runners, 4)
    a, b = ["a forward", "a backward"], ["b forward", "b backward"]
    assert device.calls == ["gemm", *a, *b, "gemm", *b, *a] * 3
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
