"""Power from a counter that moves in steps, and NVML through a library that is not there."""

import ctypes
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok.bench import nvml
from mok.bench.protocols import COUNTER_UNCERTAINTY
from mok.bench.sampling import MINIMUM_STEPS, Sample, reading, sampling


def _samples(watts, step, seconds, poll=0.01, offset=0.0):
    """A counter in mJ that shows the energy of the last multiple of `step`, polled."""
    count = int(seconds / poll)
    return [
        Sample(
            offset + turn * poll, round(1e3 * watts * (turn * poll // step) * step), 1500 + turn % 2
        )
        for turn in range(count)
    ]


@given(
    st.floats(50, 1000), st.sampled_from([0.02, 0.05, 0.1]), st.floats(1.0, 4.0), st.floats(0, 9)
)
def test_power_is_right_within_the_stated_uncertainty(watts, step, seconds, offset):
    found = reading(_samples(watts, step, seconds, offset=offset), offset, offset + seconds)
    assert found.watts is not None
    assert abs(found.watts / watts - 1) <= found.uncertainty + 1e-3
    assert found.uncertainty < 0.03
    assert found.update_ms == pytest.approx(1e3 * step, rel=0.2)
    assert found.clock_mhz == pytest.approx(1500.5, abs=1)


@pytest.mark.parametrize("poll", [0.01, 0.015, 0.02])
def test_a_loop_of_two_seconds_counts_on_a_coarse_counter_and_two_intervals_do_not(poll):
    long = reading(_samples(700, 0.1, 2.0, poll), 0, 2.0)
    assert long.uncertainty <= COUNTER_UNCERTAINTY
    short = reading(_samples(700, 0.1, 0.35, poll), 0, 0.35)
    assert short.watts is not None
    assert short.uncertainty > COUNTER_UNCERTAINTY


def test_too_few_steps_give_no_number_but_a_clock():
    found = reading(_samples(700, 0.1, 0.25), 0, 0.25)
    assert MINIMUM_STEPS > 2
    assert (found.watts, found.uncertainty, found.update_ms) == (None, None, None)
    assert found.clock_mhz is not None
    assert reading([], 0, 1) == type(found)()


def test_a_window_is_not_told_about_what_lies_outside():
    busy, idle = _samples(700, 0.05, 2), _samples(70, 0.05, 2, offset=2)
    idle = [Sample(s.at, s.energy + busy[-1].energy, s.clock) for s in idle]
    assert reading([*busy, *idle], 0, 1.99).watts == pytest.approx(700, rel=0.02)
    assert reading([*busy, *idle], 2.1, 4).watts == pytest.approx(70, rel=0.02)


def test_the_thread_reads_until_the_block_ends_and_none_runs_without_a_counter():
    gauge = nvml.Gauge(lambda: int(time.perf_counter() * 7e5), lambda: 1400, lambda: None, {})
    begin = time.perf_counter()
    with sampling(gauge) as sampler:
        time.sleep(0.2)
    end = time.perf_counter()
    count = len(sampler.samples)
    assert sampler.reading(begin, end).watts == pytest.approx(700, rel=0.2)
    time.sleep(0.03)
    assert len(sampler.samples) == count
    with sampling(nvml.no_gauge("a test")) as silent:
        time.sleep(0.02)
    assert silent.samples == []


class _Library:
    """Answers NVML's calls as its header describes them; `missing` calls give "not supported"."""

    def __init__(self, missing=()):
        self.missing = missing

    def __getattr__(self, name):
        values = {
            "nvmlDeviceGetTotalEnergyConsumption": 123456789012,
            "nvmlDeviceGetClockInfo": 1410,
            "nvmlDeviceGetPowerUsage": 691500,
            "nvmlDeviceGetEnforcedPowerLimit": 700000,
        }

        def call(*arguments):
            if name in self.missing:
                return 3
            if name == "nvmlSystemGetDriverVersion":
                arguments[0].value = b"580.1"
            else:
                arguments[-1]._obj.value = values[name]
            return 0

        return call


def test_nvml_is_read_in_its_units():
    gauge = nvml._gauge(_Library(), ctypes.c_void_p())
    assert (gauge.energy(), gauge.clock(), gauge.power()) == (123456789012, 1410, 691.5)
    assert gauge.facts["driver"] == "580.1"
    assert gauge.facts["power_limit_w"] == 700
    assert gauge.facts["energy_counter"] == "nvmlDeviceGetTotalEnergyConsumption"


def test_what_nvml_does_not_answer_is_not_known():
    gauge = nvml._gauge(_Library({"nvmlDeviceGetTotalEnergyConsumption"}), ctypes.c_void_p())
    assert gauge.energy() is None
    assert gauge.clock() == 1410
    assert "no energy counter" in gauge.facts["energy_counter"]
    assert "none: the reason" in nvml.no_gauge("the reason").facts["energy_counter"]
