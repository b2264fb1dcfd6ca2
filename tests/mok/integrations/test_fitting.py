"""What fits `mok` and what does not, told from attributes and values: needs no transformers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mok.errors import UnsupportedError
from mok.integrations.fitting import swiglu_limit
from mok.integrations.marks import NAMES, Marks

Gate = Callable[[nn.Module, Tensor], Tensor]


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def _plain(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return self.act_fn(gate) * up


def _alternating(self: nn.Module, gate_up: Tensor) -> Tensor:
    return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]


def _in_float32(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return (self.act_fn(gate.float()) * up.float()).to(gate.dtype)


def _clamped(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def _half_clamped(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return F.silu(gate.clamp(max=self.limit)) * up


def _exchanged(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return self.act_fn(up) * gate


def _sloped(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
    return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


def _bounded(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return F.silu(gate.clamp(max=200.0)) * up


def _scaled(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return F.silu(gate) * up * self.scale


def experts(gate: Gate = _plain, **attributes: object) -> nn.Module:
    """An experts module as transformers marks it; a class of its own."""
    marks = {
        "has_gate": True,
        "has_bias": False,
        "is_transposed": False,
        "is_concatenated": True,
        "has_post_expert_norm": False,
        "act_fn": nn.SiLU(),
        **attributes,
    }
    made = type("Experts", (nn.Module,), {"_apply_gate": gate})()
    for name, value in marks.items():
        if value is not None:
            setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("gate", "attributes", "limit"),
    [
        (_plain, {}, None),
        (_in_float32, {}, None),
        (_plain, {"limit": 7.0}, None),  # an attribute of that name, which the gate does not read
        (_plain, {"limit": 100.0}, None),  # beyond the fixed part of the grid
        (_clamped, {"limit": 7.0, "act_fn": None}, 7.0),
        (_clamped, {"limit": 0.5}, 0.5),
        (_clamped, {"limit": 100}, 100.0),
        (_plain, {"act_fn": F.silu}, None),  # as some models of the library have it
    ],
)
def test_what_fits(gate: Gate, attributes: dict[str, object], limit: float | None) -> None:
    assert swiglu_limit(experts(gate, **attributes)) == limit


@pytest.mark.parametrize(
    ("gate", "attributes", "told"),
    [
        (_plain, {"is_transposed": True}, "stored transposed"),
        (_plain, {"is_concatenated": False}, "gate and up alternate"),
        (
            _alternating,
            {"is_concatenated": False},
            r"\(1\) columns of gate and up alternate.*proj\. ",
        ),
        (_alternating, {}, r"\(1\) columns of gate and up alternate in gate_up_proj\. mok"),
        (_plain, {"has_bias": True}, "biases"),
        (_plain, {"has_gate": False}, "it has no gate"),
        (_plain, {"has_post_expert_norm": True}, "normalises"),
        (_plain, {"has_bias": None}, "does not say has_bias"),
        (_plain, {"act_fn": nn.ReLU6()}, "ReLU6 has settings"),
        (_plain, {"act_fn": nn.Tanh()}, r"not silu\(gate\) \* up\. mok takes"),
        (_plain, {"act_fn": None}, "not callable"),
        (_plain, {"act_fn": F.gelu}, r"not silu\(gate\) \* up\. mok takes"),
        (_plain, {"act_fn": functools.partial(F.gelu, approximate="tanh")}, "partial has settings"),
        (_plain, {"_apply_gate": _halves}, "one of its own"),
        (_bounded, {}, r"not silu\(gate\) \* up\. mok takes"),  # a bound that is no attribute
        (_exchanged, {}, r"not silu\(gate\) \* up\. mok takes"),
        (_half_clamped, {"limit": 7.0}, r"not silu\(gate\) \* up\. mok takes"),
        (_sloped, {"limit": 7.0, "alpha": 1.5}, r"sigmoid\(1\.5 gate\) \* \(up \+ 1\), clamped"),
        (_scaled, {"scale": 1.0}, "no attribute 'scale'"),  # 1.0 here may be another elsewhere
    ],
)
def test_what_does_not_fit(gate: Gate, attributes: dict[str, object], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told) as caught:
        swiglu_limit(experts(gate, **attributes))
    assert str(caught.value).startswith("mok cannot run Experts: (1) ")
    assert "set_experts_implementation" in str(caught.value)


def test_all_that_does_not_fit_is_told_at_once() -> None:
    with pytest.raises(UnsupportedError, match=r"\(1\).*transposed.*\(2\).*biases.*\(3\).*silu"):
        swiglu_limit(experts(_exchanged, is_transposed=True, has_bias=True))


def test_what_was_found_of_one_module_is_not_taken_for_another() -> None:
    """The limit is an instance's; the same class with another one is asked again."""
    first = experts(_clamped, limit=7.0)
    second = type(first)()
    for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"):
        setattr(second, name, getattr(first, name))
    second.has_post_expert_norm, second.limit = False, 2.0
    assert (swiglu_limit(first), swiglu_limit(second)) == (7.0, 2.0)


def test_a_class_whose_gate_is_replaced_is_asked_again() -> None:
    module = experts()
    assert swiglu_limit(module) is None
    type(module)._apply_gate = _exchanged
    with pytest.raises(UnsupportedError, match="not silu"):
        swiglu_limit(module)


OLDER = Marks(said=tuple(name for name in NAMES if name != "has_post_expert_norm"))


def test_a_mark_that_the_library_cannot_set_means_not_so() -> None:
    silent = experts(has_post_expert_norm=None)
    assert swiglu_limit(silent, OLDER) is None
    with pytest.raises(UnsupportedError, match="does not say has_post_expert_norm"):
        swiglu_limit(silent)
    with pytest.raises(UnsupportedError, match="does not say has_gate"):
        swiglu_limit(experts(has_post_expert_norm=None, has_gate=None), OLDER)


@pytest.mark.parametrize(
    "attributes",
    [
        {"has_post_expert_norm": True},  # said all the same
        {"has_post_expert_norm": None, "post_expert_norm": nn.LayerNorm(4)},
    ],
)
def test_a_norm_that_the_library_cannot_mark_is_seen(attributes: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=r"\(1\) it normalises the result of each expert\. "):
        swiglu_limit(experts(**attributes), OLDER)


def test_a_mark_that_mok_does_not_know_is_refused_where_it_is_set() -> None:
    newer = Marks(others=(("has_scale", False), ("kernel", None)))
    assert swiglu_limit(experts(), newer) is None
    assert swiglu_limit(experts(has_scale=False), newer) is None
    with pytest.raises(UnsupportedError, match=r"\(1\) it says has_scale, which mok does not know"):
        swiglu_limit(experts(has_scale=True), newer)


def test_without_transformers_the_import_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "mok.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"install mok-verify\[transformers\]"):
        __import__("mok.integrations.transformers")
