"""Other versions of transformers, emulated by what they lack: what runs on, and what is refused."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
import transformers_models as tiny  # skips this file where transformers is missing
from torch import Tensor, nn
from transformers.integrations import moe as library

import mok.integrations.transformers as integration
from mok.errors import RoutingError, UnsupportedError
from mok.exact import same_bits
from mok.integrations import marks


def older(
    experts_class: type[nn.Module] | None = None,
    *,
    experts_interface: object = None,
    is_concatenated: bool = True,
    is_transposed: bool = False,
    has_bias: bool = False,
    has_gate: bool = True,
) -> None:
    """The parameters of use_experts_implementation from 5.7 to 5.19."""


def oldest(
    experts_class: type[nn.Module] | None = None,
    *,
    is_transposed: bool = False,
    has_bias: bool = False,
) -> None:
    """As in 5.0."""


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=tiny.tokens()).logits
    return found


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model as from 5.7 to 5.17, where modules have neither of the later marks."""
    model = tiny.qwen3()
    for module in tiny.experts_of(model):
        for name in ("has_post_expert_norm", "_is_expert_parallel"):
            module.__dict__.pop(name, None)  # a library that old never had them
    monkeypatch.setattr(integration, "_KNOWN", marks.marks_of(older, "5.17.0"))
    return model


def test_a_library_that_cannot_mark_a_norm_runs_with_the_same_bits(aged: nn.Module) -> None:
    assert integration.check(aged) == 2
    assert same_bits(logits(aged), logits(tiny.qwen3()))


def test_a_norm_that_it_cannot_mark_is_refused(aged: nn.Module) -> None:
    tiny.experts_of(aged)[1].post_expert_norm = nn.Identity()
    for call in (logits, integration.check):
        with pytest.raises(UnsupportedError, match="normalises the result"):
            call(aged)


def test_a_mark_that_the_library_can_set_is_missed(aged: nn.Module) -> None:
    del tiny.experts_of(aged)[0].has_bias
    with pytest.raises(UnsupportedError, match="does not say has_bias"):
        logits(aged)


@pytest.mark.parametrize(("marked", "away"), [(False, 0), (None, 1), (True, 1)])
def test_ids_that_mean_no_other_rank_are_an_error(
    monkeypatch: pytest.MonkeyPatch, marked: bool | None, away: int
) -> None:
    """E means another rank's expert where experts may be split; no other id does."""
    monkeypatch.setenv("MOK_CHECK", "1")
    module = tiny.experts_of(tiny.qwen3())[0]
    if marked is None:
        module.__dict__.pop("_is_expert_parallel", None)
    else:
        module._is_expert_parallel = marked
    ids = torch.tensor([[0, tiny.EXPERTS + away]])
    x, weights = torch.ones(1, tiny.HIDDEN).bfloat16(), torch.tensor([[0.5, 0.0]])
    with pytest.raises(RoutingError, match="out of range"):
        module(x, ids, weights)


def test_what_the_installed_library_can_mark_is_what_mok_knows() -> None:
    """A new mark of theirs is to be read here before somebody's model has it."""
    assert set(marks.NAMES) - set(integration._KNOWN.said) <= {"has_post_expert_norm"}
    assert integration._KNOWN.others == ()


def imported_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, integration.__name__)
    importlib.import_module(integration.__name__)


def test_a_library_that_lets_nobody_else_run_experts_is_refused_by_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.0.9")
    monkeypatch.setattr(library, "use_experts_implementation", oldest)
    told = r"transformers 5\.0\.9 \(.*not take is_concatenated, has_gate\); allowed: 5\.7 or newer"
    with pytest.raises(UnsupportedError, match=told):
        imported_anew(monkeypatch)


def test_a_library_without_a_table_of_experts_is_refused_by_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    monkeypatch.setitem(sys.modules, library.__name__, None)
    with pytest.raises(UnsupportedError, match=r"transformers 4\.57\.1 .*allowed: 5\.7 or newer"):
        imported_anew(monkeypatch)
