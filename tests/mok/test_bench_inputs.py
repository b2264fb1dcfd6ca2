"""Random inputs: values, three kinds of routing, and files that are refused with their reason."""

import os

import pytest
import torch
from safetensors.torch import save_file

from mok.bench.layer_inputs import load_spread, make_inputs, read_routing, skewed_share
from mok.bench.shapes import SHAPES, Shape
from mok.errors import InputError, RoutingError

SHAPE = Shape("test", 200, 8, 32, 16, 2)


@pytest.mark.parametrize("routing", ["gaussian", "skewed"])
def test_inputs_have_the_documented_form(routing):
    inputs = make_inputs(SHAPE, routing, "cpu")
    assert inputs.x.shape == inputs.d_out.shape == (200, 32)
    assert inputs.w_gate_up.shape == (8, 32, 32)
    assert inputs.w_down.shape == (8, 32, 16)
    tensors = (inputs.x, inputs.w_gate_up, inputs.w_down, inputs.d_out)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(tensor.is_contiguous() and (tensor != 0).float().mean() > 0.98 for tensor in tensors)
    assert inputs.topk_experts.dtype == torch.int64
    assert inputs.router_weights.dtype == torch.float32
    rounded = inputs.router_weights.bfloat16().float()
    assert torch.equal(inputs.router_weights, rounded)
    assert ((inputs.router_weights.sum(1) - 1).abs() < 0.01).all()
    ids = inputs.topk_experts.sort(1).values
    assert (ids[:, 1:] != ids[:, :-1]).all()
    assert inputs.w_gate_up.float().std() == pytest.approx(32**-0.5, rel=0.05)


def test_the_same_seed_gives_the_same_problem_and_ranks_differ():
    one, again = (make_inputs(SHAPE, "gaussian", "cpu") for _ in range(2))
    assert torch.equal(one.x, again.x)
    assert torch.equal(one.topk_experts, again.topk_experts)
    first, second = (make_inputs(SHAPE, "gaussian", "cpu", rank=r, ranks=2) for r in range(2))
    assert first.w_down.shape[0] == 4
    assert not torch.equal(first.x, second.x)
    assert not torch.equal(first.w_down, second.w_down)
    assert int(first.topk_experts.max()) == 7


def test_skewed_routing_gives_one_expert_its_share_and_gaussian_does_not():
    shape = Shape("wide", 400, 64, 16, 8, 4)
    assert skewed_share(shape) == 0.25
    assert skewed_share(SHAPES["mixtral-8x7b"]) == 0.75
    for routing, tokens in (("skewed", 100), ("gaussian", None)):
        inputs = make_inputs(shape, routing, "cpu")
        here = int((inputs.topk_experts == 0).any(1).sum())
        assert (here == tokens) if tokens else (here < 60)
    assert load_spread(make_inputs(shape, "skewed", "cpu"), 64) == pytest.approx(4.0)


def _file(tmp_path, **change):
    gaussian = make_inputs(SHAPE, "gaussian", "cpu")
    tensors = {
        "topk_experts": gaussian.topk_experts,
        "router_weights": gaussian.router_weights + 0.001,
        **change,
    }
    path = tmp_path / "routing.safetensors"
    save_file({name: t for name, t in tensors.items() if t is not None}, path)
    return str(path)


def test_routing_from_a_file_is_used_and_its_weights_are_rounded(tmp_path):
    gaussian = make_inputs(SHAPE, "gaussian", "cpu")
    inputs = make_inputs(SHAPE, _file(tmp_path), "cpu")
    assert torch.equal(inputs.topk_experts, gaussian.topk_experts)
    expected = (gaussian.router_weights + 0.001).bfloat16().float()
    assert torch.equal(inputs.router_weights, expected)


def test_ranks_take_their_rows_of_a_file(tmp_path):
    half = Shape("half", 100, 8, 32, 16, 2)
    path = _file(tmp_path)
    whole = make_inputs(SHAPE, path, "cpu").topk_experts
    for rank in range(2):
        part = make_inputs(half, path, "cpu", rank=rank, ranks=2).topk_experts
        assert torch.equal(part, whole[100 * rank : 100 * (rank + 1)])


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"topk_experts": None}, InputError, "Save topk_experts under that name"),
        ({"topk_experts": torch.zeros(200, 2)}, InputError, "topk_experts is torch.float32"),
        ({"router_weights": torch.zeros(200, 3)}, InputError, r"\(200, 3\); allowed"),
        ({"router_weights": torch.full((200, 2), float("nan"))}, RoutingError, "finite"),
        ({"topk_experts": torch.full((200, 2), 8)}, RoutingError, r"= 8; allowed: 0 \.\. 7"),
        ({"topk_experts": torch.full((200, 2), -1)}, RoutingError, "Unused slots"),
        ({"topk_experts": torch.full((200, 2), 3)}, RoutingError, r"token 0 has experts \[3, 3\]"),
    ],
)
def test_bad_routing_files_say_what_is_wrong(tmp_path, change, error, said):
    with pytest.raises(error, match=said):
        make_inputs(SHAPE, _file(tmp_path, **change), "cpu")


def test_a_missing_and_a_foreign_file_are_refused(tmp_path):
    with pytest.raises(InputError, match="Check the path"):
        make_inputs(SHAPE, str(tmp_path / "none.safetensors"), "cpu")
    other = tmp_path / "text.safetensors"
    other.write_text("not one")
    with pytest.raises(InputError, match="a safetensors file with"):
        make_inputs(SHAPE, str(other), "cpu")


def test_experts_must_be_shared_out_evenly():
    with pytest.raises(InputError, match="E = 8 experts on 3 ranks"):
        make_inputs(SHAPE, "gaussian", "cpu", ranks=3)


def test_a_pipe_in_place_of_a_routing_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        read_routing(tmp_path / "pipe", SHAPES["small"])
