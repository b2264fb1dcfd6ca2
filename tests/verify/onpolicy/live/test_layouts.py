"""Layouts hold each token once, where it belongs, and refuse what a model cannot be given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verify.errors import UnsupportedError
from verify.onpolicy.live import layouts
from verify.onpolicy.live.calling import Convention
from verify.onpolicy.live.layouts import LAYOUTS, Layout, Setting
from verify.onpolicy.live.sequences import NOWHERE, Sampled, lengths, placed

ALL = Convention("cache", mask=True, positions=True, use_cache=True)
BARE = Convention("", mask=False, positions=False, use_cache=False)
SETTING = Setting(chunk=3, pad=0)
TWO = [Sampled((4, 5), (6, 7, 8)), Sampled((9,), (10, 11))]


def made(name: str, samples: list[Sampled], how: Convention = ALL) -> Layout:
    makers = {"alone": layouts.alone, "decode": layouts.decode, **LAYOUTS}
    return makers[name](samples, how, SETTING)


sampled = st.builds(
    Sampled,
    st.lists(st.integers(1, 20), min_size=1, max_size=6).map(tuple),
    st.lists(st.integers(1, 20), min_size=1, max_size=6).map(tuple),
)


@settings(max_examples=15, deadline=None)
@given(samples=st.lists(sampled, min_size=2, max_size=4))
@pytest.mark.parametrize("name", ["alone", "decode", *LAYOUTS])
def test_every_token_is_given_once_with_its_own_id(name, samples):
    seen = {}
    for run in made(name, samples).runs:
        for one in run:
            for row, column in (one.places != NOWHERE).nonzero().tolist():
                place = placed(int(one.places[row, column]))
                assert place not in seen
                seen[place] = int(one.ids[row, column])
    wanted = {
        (number, position): token
        for number, one in enumerate(samples)
        for position, token in enumerate(one.given)
    }
    assert seen == wanted
    assert lengths(samples) == [len(one.given) for one in samples]


@settings(max_examples=15, deadline=None)
@given(samples=st.lists(sampled, min_size=2, max_size=4))
def test_positions_of_real_tokens_are_those_of_the_sequence_alone(samples):
    for name in ("padded-left", "packed"):
        for one in made(name, samples).runs[0]:
            assert one.positions is not None
            for row, column in (one.places != NOWHERE).nonzero().tolist():
                _, position = placed(int(one.places[row, column]))
                assert int(one.positions[row, column]) == position


def test_padding_is_on_its_side_and_masked():
    left, right = made("padded-left", TWO), made("padded-right", TWO)
    assert left.padding == (0, 2)
    assert left.runs[0][0].mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert right.runs[0][0].mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert left.runs[0][0].ids[1].tolist() == [0, 0, 9, 10]


def test_equally_long_sequences_are_padded_all_the_same():
    twins = [TWO[0], TWO[0]]
    for name in ("padded-left", "padded-right"):
        mask = made(name, twins).runs[0][0].mask
        assert mask.shape == (2, 8)
        assert mask.sum(dim=1).tolist() == [4, 4]


def test_left_padding_gives_no_position_ids_to_a_model_without():
    how = Convention("cache", mask=True, positions=False, use_cache=True)
    assert made("padded-left", TWO, how).runs[0][0].positions is None


def test_a_batch_has_no_mask_and_real_tokens_everywhere():
    (one,) = made("batch", TWO).runs[0]
    assert one.mask is None
    assert bool((one.ids > 0).all())


def test_chunks_are_never_the_whole_sequence():
    long = [Sampled(tuple(range(1, 9)), (9,)), Sampled((1,), (2, 3))]
    runs = made("chunked", long).runs
    assert [one.ids.shape[1] for one in runs[0]] == [3, 3, 2]
    assert [one.ids.shape[1] for one in runs[1]] == [1, 1]


def test_decoding_is_the_prompt_and_then_single_tokens():
    runs = made("decode", TWO).runs
    assert [one.ids.shape[1] for one in runs[0]] == [2, 1, 1]
    assert [one.ids.shape[1] for one in runs[1]] == [1, 1]


@pytest.mark.parametrize(
    ("name", "samples", "how", "why"),
    [
        ("packed", TWO, BARE, "position_ids"),
        ("padded-left", TWO, BARE, "attention_mask"),
        ("padded-right", TWO, BARE, "attention_mask"),
        ("chunked", TWO, BARE, "cache"),
        ("decode", TWO, BARE, "cache"),
        ("batch", TWO[:1], ALL, "--samples 2"),
        ("packed", TWO[:1], ALL, "--samples 2"),
    ],
)
def test_what_a_model_cannot_be_given_is_refused(name, samples, how, why):
    with pytest.raises(UnsupportedError, match=why):
        made(name, samples, how)


def test_padding_is_the_pad_token():
    ids = layouts.padded_right(TWO, ALL, Setting(3, 77)).runs[0][0].ids
    assert torch.equal(ids[1], torch.tensor([9, 10, 77, 77]))
