"""Shapes from the table and the command line, and when a peer's own rate makes a ratio count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok.bench import ceilings, rates
from mok.bench.shapes import FIELDS, PEER_SHAPES, SHAPES, Shape, parse_shape
from mok.errors import InputError


def test_the_table_holds_the_peers_shapes_and_the_published_models():
    assert PEER_SHAPES == (
        "kimi-shard",
        "qwen35-shard",
        "v4pro-shard",
        "glm-shard",
        "qwen3-30b",
        "sonic-120b",
    )
    models = {
        "kimi-k2.7": (384, 7168, 2048, 8),
        "glm-5.2": (256, 6144, 2048, 8),
        "qwen3.5-397b": (512, 4096, 1024, 10),
        "deepseek-v4-pro": (384, 7168, 3072, 6),
        "deepseek-v4-flash": (256, 4096, 2048, 6),
        "deepseek-v3": (256, 7168, 2048, 8),
        "qwen3-30b-a3b": (128, 2048, 768, 8),
        "olmoe": (64, 2048, 1024, 8),
        "gpt-oss-120b": (128, 2880, 2880, 4),
        "gpt-oss-20b": (32, 2880, 2880, 4),
        "mixtral-8x7b": (8, 4096, 14336, 2),
        "mixtral-8x22b": (8, 6144, 16384, 2),
    }
    assert {name: (s.E, s.H, s.I, s.K) for name, s in SHAPES.items() if name in models} == models


def test_useful_operations_of_a_known_shape():
    shape = SHAPES["kimi-shard"]
    assert shape.forward_flops == 6 * 7168 * 8 * 7168 * 2048
    assert shape.flops("backward") == 2 * shape.flops("forward")
    assert shape.weight_bytes == 2 * 3 * 48 * 7168 * 2048


@given(st.permutations(FIELDS), st.integers(1, 9), st.integers(9, 99))
def test_sizes_may_come_in_any_order(order, slots, others):
    sizes = {"T": others, "E": others, "H": others + 1, "I": others + 2, "K": slots}
    text = ",".join(f"{field}={sizes[field]}" for field in order)
    shape = parse_shape(text)
    assert {field: getattr(shape, field) for field in FIELDS} == sizes
    assert parse_shape(shape.name) == shape


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kimi", "one of kimi-shard"),
        ("T=1,E=2,H=3,I=4", "lacks K"),
        ("T=1,E=2,H=3,I=4,K=1,K=2", "once"),
        ("T=1,E=2,H=3,I=4,K=-1", "once"),
        ("T=1,E=2,H=3,I=4,K=0", "1 or more"),
        ("T=1,E=2,H=3,I=4,K=3", "K up to E"),
    ],
)
def test_other_shapes_are_refused_with_what_is_allowed(text, said):
    with pytest.raises(InputError, match=said):
        parse_shape(text)


def test_tokens_can_be_replaced_and_then_no_known_rate_applies():
    shape = parse_shape("kimi-shard", tokens=100)
    assert (shape.T, shape.name) == (100, "kimi-shard@T=100")
    assert parse_shape("kimi-shard", tokens=7168) == SHAPES["kimi-shard"]
    assert rates.known_rates("rotation", shape.name, "torch", "forward") == ()


def test_known_rates_cover_the_six_shapes_of_every_peer_and_only_known_names():
    for protocol, peers in ((rates.ROTATION, rates.PEERS), (rates.ALONE, ("sonicmoe", "torch"))):
        assert set(protocol) == {(shape, peer) for shape in PEER_SHAPES for peer in peers}


def _judge(protocol, tflops, **given):
    settings = {"same_setting": True, "version": rates.PEERS["torch"], **given}
    return rates.comparability(protocol, "kimi-shard", "torch", "forward", tflops, **settings)


def test_a_peer_within_seven_percent_is_comparable():
    for rate in (462, 462 * 0.931, 462 * 1.069):
        assert _judge("rotation", rate).comparable
    assert _judge("rotation", 462).why == "peer at 100 % of its known rate"


def test_a_peer_outside_is_not_and_says_at_what_share_it_ran():
    for rate, share in ((462 * 0.92, "92 %"), (462 * 1.08, "108 %"), (1.0, "0 %")):
        found = _judge("rotation", rate)
        assert not found.comparable
        assert found.why == f"not comparable: peer at {share} of its known rate"


def test_a_pair_may_run_anywhere_between_both_protocols():
    rotation, alone = rates.known_rates("pair", "kimi-shard", "sonicmoe", "forward")[::-1]
    assert (rotation, alone) == (628, 554)

    def judge(rate):
        return rates.comparability(
            *("pair", "kimi-shard", "sonicmoe", "forward", rate),
            version=rates.PEERS["sonicmoe"],
            same_setting=True,
        ).comparable

    assert judge(590)
    assert judge(554 * 0.94)
    assert not judge(554 * 0.92)
    assert not judge(628 * 1.08)


def test_no_known_rate_and_another_setting_never_count():
    other = rates.comparability(
        "alone", "kimi-shard", "liger", "forward", 1, version="0.8.5", same_setting=True
    )
    assert (other.comparable, other.percent) == (False, None)
    assert "no known rate" in other.why
    assert not _judge("rotation", 462, same_setting=False).comparable


def test_a_rotation_of_one_direction_is_told_from_that_of_the_known_rates():
    found = _judge("rotation", 462, one_sided=True)
    assert found.comparable
    assert found.why == "peer at 100 % of its known rate (of a rotation of both directions)"
    assert _judge("alone", 462, one_sided=True) == _judge("alone", 462)


def test_another_version_of_a_peer_is_not_the_peer_that_is_known():
    found = _judge("rotation", 462, version="2.12.0+cu130")
    assert (found.comparable, found.percent) == (False, None)
    assert found.why == "not comparable: known rates are of 2.11.0+cu130, not of 2.12.0+cu130"
    assert _judge("rotation", 462, version="2.11.0+cu130").comparable


def test_a_known_rate_of_another_protocol_says_so_and_allows_no_more():
    assert _judge("alone", 460).why == (
        "peer at 100 % of its known rate (of a loop of 25 to 30 calls)"
    )
    assert not _judge("alone", 460 * 0.92).comparable
    assert _judge("pair", 461).why.endswith("(of other protocols)")


@pytest.mark.parametrize(
    ("kind", "ranks", "devices", "copied"),
    [("cuda", 1, 2, True), ("cuda", 2, 2, False), ("cuda", 1, 1, False), ("cpu", 1, 2, False)],
)
def test_nothing_is_copied_to_a_device_that_is_being_timed(kind, ranks, devices, copied):
    assert ceilings._next_is_idle(kind, ranks, devices) is copied


def test_a_shape_holds_what_it_was_given():
    assert Shape("a", 1, 2, 3, 4, 1).forward_flops == 72
