"""Knobs are checked, and none of them changes a bit."""

import pytest

from mok.config import MoKConfig
from mok.errors import InputError
from mok.exact import same_bits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("minibatch_size", 0),
        ("minibatch_size", 100),
        ("minibatch_size", -128),
        ("macrobatch_size", 200),
        ("macrobatch_size", 128),
        ("fwd_num_comm_sms", -1),
        ("bwd_num_comm_sms", -1),
        ("schedule_capacity_multiplier", 0.0),
        ("all_gather_top_experts_chunk_bytes", 24),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name, value):
    with pytest.raises(InputError, match=f"MoKConfig.{name} = {value}; allowed"):
        MoKConfig(**{name: value})


def test_no_knob_changes_a_bit(run_with, make_inputs, make_uniform):
    inputs = make_inputs(600, 64, 48, 2, 1, shared_width=32)
    d_out = make_uniform("d", (600, 64)).bfloat16()
    base = run_with()(inputs, d_out)
    for config in (
        MoKConfig(minibatch_size=128, macrobatch_size=128),
        MoKConfig(minibatch_size=256, fwd_num_comm_sms=0, bwd_num_comm_sms=3),
        MoKConfig(schedule_capacity_multiplier=1.0, all_gather_top_experts_chunk_bytes=16),
    ):
        other = run_with(config)(inputs, d_out)
        assert [name for name in base if not same_bits(base[name], other[name])] == []
