"""Sampling one token at a time with a cache, by a generator of our own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from live_models import VOCABULARY, Model
from torch import Tensor, nn

from verify.errors import UnsupportedError
from verify.onpolicy.live import layouts, sampling
from verify.onpolicy.live.calling import Pass, call, convention
from verify.onpolicy.live.layouts import Setting
from verify.onpolicy.live.models import Live, described
from verify.onpolicy.live.scoring import score


class Fixed(nn.Module):
    """Always the same logits; a cache that counts."""

    def __init__(self, logits: Tensor, **config: Any) -> None:
        super().__init__()
        self.logits = logits
        self.config = SimpleNamespace(vocab_size=len(logits), **config)

    def forward(self, input_ids: Tensor, cache: int = 0, use_cache: bool = False) -> Any:
        logits = self.logits.expand(*input_ids.shape, -1)
        return SimpleNamespace(logits=logits, cache=cache + 1 if use_cache else None)


def sampled(live: Live, tokens: int = 4, seed: int = 0, count: int = 2) -> Any:
    prompts = sampling.prompts(live, count, seed)
    return sampling.sample(live, convention(live.model), prompts, tokens, seed)


def test_the_sampler_has_the_bits_of_decoding_again():
    live = described("fused", Model(fused=True))
    samples, found = sampled(live)
    how = convention(live.model)
    again = score(live.model, how, layouts.decode(samples, how, Setting(1, 0)), samples)
    for one, other in zip(found.values, again.values, strict=True):
        assert one.dtype == np.float32
        assert np.array_equal(one, other)


def test_tokens_follow_the_seed_and_leave_torchs_generator_alone():
    live = described("small", Model())
    before = torch.get_rng_state()
    one, _ = sampled(live, seed=5)
    torch.manual_seed(99)
    two, _ = sampled(live, seed=5)
    torch.set_rng_state(before)
    assert one == two
    assert sampled(live, seed=6)[0] != one


def test_tokens_are_drawn_by_their_probability():
    logits = torch.log(torch.tensor([0.5, 0.0, 0.375, 0.125]))
    live = described("fixed", Fixed(logits))
    samples, found = sampled(live, tokens=400, count=1)
    counts = np.bincount(samples[0].response, minlength=4)
    assert counts[1] == 0
    assert np.abs(counts / 400 - [0.5, 0.0, 0.375, 0.125]).max() < 0.1
    wanted = np.log([0.5, 1.0, 0.375, 0.125])[list(samples[0].response)]
    assert np.allclose(found.values[0], wanted, atol=1e-6)


def test_an_end_token_ends_a_response():
    logits = torch.tensor([0.0, 50.0, 0.0])
    samples, _ = sampled(described("ends", Fixed(logits, eos_token_id=1)))
    assert [one.response for one in samples] == [(1,), (1,)]
    assert all(one.stopped for one in samples)
    goes_on, _ = sampled(described("on", Fixed(logits, eos_token_id=[0, 2])))
    assert [len(one.response) for one in goes_on] == [4, 4]


def test_drawn_prompts_differ_in_length_and_hold_no_special_token():
    live = described("special", Fixed(torch.zeros(6), eos_token_id=2, pad_token_id=5))
    prompts = sampling.prompts(live, 3, 0)
    assert [len(one) for one in prompts] == [5, 8, 11]
    assert not {2, 5} & {token for one in prompts for token in one}


def test_prompts_that_came_with_the_model_are_used_in_turn():
    live = described("given", Model(), ((1, 2), (3,)))
    assert sampling.prompts(live, 3, 0) == [(1, 2), (3,), (1, 2)]


def test_what_cannot_be_sampled_is_refused():
    nan = described("nan", Fixed(torch.full((4,), float("nan"))))
    with pytest.raises(UnsupportedError, match="not finite"):
        sampled(nan)
    with pytest.raises(UnsupportedError, match="the model takes 6"):
        sampled(described("short", Fixed(torch.zeros(4), max_position_embeddings=6)))

    class Uncached(nn.Module):
        config = SimpleNamespace(vocab_size=4)

        def forward(self, input_ids: Tensor) -> Tensor:
            return torch.zeros(*input_ids.shape, 4)

    with pytest.raises(UnsupportedError, match="takes no cache"):
        sampled(described("uncached", Uncached()))


def test_a_cache_that_is_not_returned_is_said():
    class Forgets(Fixed):
        def forward(self, input_ids: Tensor, cache: Any = None, use_cache: bool = False) -> Any:
            return {"logits": self.logits.expand(*input_ids.shape, -1)}

    with pytest.raises(UnsupportedError, match="returned no cache"):
        sampled(described("forgets", Forgets(torch.zeros(4))))


@pytest.mark.parametrize(
    ("out", "why"),
    [
        (torch.zeros(1, 4), r"logits \[1, 4\]"),
        (None, "logits NoneType"),
        (ValueError("no such token"), "raised ValueError when called with input_ids .1, 1.*token"),
    ],
)
def test_calls_that_go_wrong_say_what_was_given(out, why):
    class Odd(nn.Module):
        config = SimpleNamespace(vocab_size=VOCABULARY)

        def forward(self, input_ids: Tensor) -> Any:
            if isinstance(out, Exception):
                raise out
            return (out,)

    model = Odd()
    one = Pass(torch.tensor([[1]]), torch.tensor([[0]]))
    with pytest.raises(UnsupportedError, match=why):
        call(model, convention(model), one)


def test_models_with_another_convention_are_refused():
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(UnsupportedError, match="takes x; needed is input_ids"):
        convention(Other())
    encoder = Fixed(torch.zeros(4), is_encoder_decoder=True)
    with pytest.raises(UnsupportedError, match="encoder"):
        convention(encoder)
    with pytest.raises(UnsupportedError, match=r"config\.vocab_size"):
        described("unknown", Other())
