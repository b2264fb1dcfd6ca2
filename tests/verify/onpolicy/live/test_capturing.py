"""Which tensors have a row for each token, and which only look so."""

from __future__ import annotations

import pytest
import torch
from live_parts import PLACES, Outer, Scaled, Sometimes, X, seen
from torch import Tensor, nn

from verify.errors import UnsupportedError
from verify.onpolicy.live.capturing import Capture, Seen, by_token, mend_padding
from verify.onpolicy.live.sequences import NOWHERE, places


@pytest.mark.parametrize(
    ("shape", "width"),
    [((2, 3, 4), 4), ((2, 3, 4, 5), 20), ((6, 4), 4), ((1, 3, 4), 4), ((2, 3), 1), ((6,), 1)],
)
def test_a_tensor_with_a_row_for_each_token_is_taken(shape, width):
    found = by_token(torch.zeros(shape), 2, 3)
    assert found is not None
    assert found.shape == (6, width)


@pytest.mark.parametrize("shape", [(), (2,), (2, 1, 3, 3), (5, 4), (0, 4), (2, 4, 3)])
def test_other_tensors_are_not(shape):
    assert by_token(torch.zeros(shape), 2, 3) is None


@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4), (2, 3)])
def test_nan_of_padding_is_mended_and_of_tokens_is_kept(shape):
    t = torch.full(shape, float("nan"))
    mend_padding(t, torch.tensor([[NOWHERE, 0, 1], [2, 3, 4]]))
    kept = t.isnan().reshape(6, -1)
    assert (t.reshape(6, -1)[0] == 0).all()
    assert kept[1:].all()
    other = torch.full((4, 3), float("inf"))
    mend_padding(other, torch.tensor([[NOWHERE, 0, 1], [2, 3, 4]]))
    assert other.isinf().all()


def test_one_row_for_all_sequences_is_each_ones():
    found = by_token(torch.arange(3.0).reshape(1, 3, 1), 2, 3)
    assert found is not None
    assert found.flatten().tolist() == [0, 1, 2, 0, 1, 2]


def modules(found: Seen) -> set[str]:
    return {event.module for event in found.rows}


def test_what_is_called_a_number_of_times_that_depends_on_the_data_is_left_out():
    capture = Capture(model := Sometimes())
    with capture.listening():
        for number, x in enumerate((X, X[:, :2])):  # odd are 1, 3, 5 and 1, 3
            capture.begin(places(number, 0, x.shape[1])[None])
            model(x)
    assert modules(capture.taken()) == {"(root)", "after"}


class Choosing(nn.Module):
    """Gives a module integers beside numbers: [T, K] each."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, Chosen())
        self.name = name

    def forward(self, x: Tensor, slots: int = 2) -> Tensor:
        chosen = torch.zeros(x.shape[1], slots, dtype=torch.int64)
        return self.get_submodule(self.name)(x[0], chosen, chosen.float())


class Chosen(nn.Module):
    """Its part sees rows in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Scaled(1.0)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.act(x.flip(0)).flip(0)


@pytest.mark.parametrize("name", ["experts", "block_of_any_name"])
def test_nothing_inside_an_experts_module_is_taken(name):
    assert modules(seen(Choosing(name), X)) == {"(root)", name}


@pytest.mark.parametrize(
    ("name", "taken"), [("experts.3", False), ("mlp.shared_experts", True), ("mlp.expert", True)]
)
def test_a_list_of_experts_is_known_by_its_name(name, taken):
    top = model = nn.Sequential()
    for part in name.split("."):
        inner = nn.Sequential()
        model.add_module(part, inner)
        model = inner
    model.add_module("last", Scaled(1.0))
    assert (f"{name}.last" in modules(seen(top, X))) is taken


def test_a_position_and_a_mask_of_one_token_are_no_choice():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Outer()

        def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
            return self.inner.first(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))

    found = seen(Whole(), X[:, :1], PLACES[:, :1])
    assert "layer.inner.first" in modules(found)


def test_a_tensor_that_has_another_shape_once_is_left_out_and_its_memory_is_free():
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Scaled(1.0)

        def forward(self, x: Tensor) -> Tensor:
            self.part(x[0, x[0, :, 0] > 0])
            return x

    capture = Capture(model := Grouped(), largest=8 * 2 * 4 * 3)  # nearly all that is given
    with capture.listening():
        for number, x in enumerate((X, X - 2, X)):  # -1 is not above 0
            capture.begin(places(number, 0, 3)[None])
            model(x)
    assert modules(capture.taken()) == {"(root)"}


def test_rows_beyond_memory_are_refused_with_what_to_do():
    with pytest.raises(UnsupportedError, match="--samples 2 --tokens 8"):
        seen(Outer(), X, largest=40)


def test_hooks_are_gone_afterwards_even_when_the_model_raises():
    model = Outer()
    with pytest.raises(TypeError), Capture(model).listening():
        model("not a tensor")
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
