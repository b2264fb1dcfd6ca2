"""What the layer tells of its stages: all, in order, the values it used; and it costs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from moe_block import SHARED, Block, batch, different, step

from mok import stages
from mok.activations import swiglu
from mok.exact import same_bits
from mok.stages import Told, listened, teller

EXPERTS = ("gate", "up", "hidden")
FORWARD = (
    *("route_table experts", "route_table rows", "router_weights", "dispatched", *EXPERTS),
    *("route_output", *(f"shared_{name}" for name in EXPERTS), "shared_output", "combined"),
)
BACK = ("gate", "up", "weighted_hidden")
WEIGHTS = ("w_gate", "w_up", "w_down")
BACKWARD = (
    *("combined", "route_output", *BACK, *(f"shared_{name}" for name in BACK), "dispatched"),
    *("router_weights", *WEIGHTS, *(f"shared_{name}" for name in WEIGHTS), "x"),
)


def told_of(model: Block, x: torch.Tensor, backward: bool = True) -> list[Told]:
    """A pass, and what was told of it; tensors are copied, since they are lent."""
    told: list[Told] = []

    def listen(one: Told) -> None:
        told.append(dataclasses.replace(one, tensor=one.tensor.clone()))

    with listened(listen):
        out = model(x)
        if backward:
            out.backward(torch.ones_like(out))
    return told


def names(told: Sequence[Told], backward: bool) -> list[str]:
    return [f"{one.stage} {one.part}".rstrip() for one in told if one.backward == backward]


def one(told: Sequence[Told], name: str, backward: bool = False) -> torch.Tensor:
    (found,) = [t for t in told if t.stage == name and t.backward == backward]
    return found.tensor


def test_every_stage_is_told_in_order_with_one_owner_and_node() -> None:
    told = told_of(Block(), batch(24).requires_grad_())
    assert names(told, False) == list(FORWARD)
    assert names(told, True) == list(BACKWARD)
    assert len({(one.owner, one.node) for one in told}) == 1


def test_calls_on_one_input_have_nodes_of_their_own() -> None:
    model, x = Block(), batch(8).requires_grad_()
    told: list[Told] = []
    with listened(told.append):
        sum(model(x) for _ in range(3)).sum().backward()
    for backward in (False, True):
        assert len({one.node for one in told if one.backward == backward}) == 3
    assert len({one.node for one in told}) == 3


def test_two_layers_have_two_owners() -> None:
    inputs = batch(8), batch(8, seed=2)  # both kept, or the second may lie where the first lay
    told = [one for x in inputs for one in told_of(Block(), x)]
    assert len({one.owner for one in told if not one.backward}) == 2


def test_without_a_shared_expert_nothing_is_told_of_one() -> None:
    told = told_of(Block(shared=None), batch(8))
    assert not [one.stage for one in told if one.stage.startswith("shared_")]


@torch.no_grad()
def test_what_is_told_is_what_the_pass_used() -> None:
    model, x = Block(), batch(24)
    told = told_of(model, x, backward=False)
    own = model.moe
    gate = (x.float() @ own.w_shared_gate.float().t()).to(torch.bfloat16)
    assert same_bits(one(told, "shared_gate"), gate)
    up = (x.float() @ own.w_shared_up.float().t()).to(torch.bfloat16)
    assert same_bits(one(told, "shared_up"), up)
    exact = x.float() @ own.w_shared_gate.float().t(), x.float() @ own.w_shared_up.float().t()
    assert same_bits(one(told, "shared_hidden"), swiglu(*exact, None))
    experts, weights = model.route(x)
    table = {part.part: part.tensor for part in told if part.stage == "route_table"}
    assert torch.equal(table["experts"], experts)
    assert table["rows"].tolist() == torch.bincount(experts.flatten(), minlength=4).tolist()
    assert same_bits(one(told, "router_weights"), weights.float())
    order = sorted((int(e), t, k) for t, row in enumerate(experts) for k, e in enumerate(row))
    assert same_bits(one(told, "dispatched"), x[[t for _, t, _ in order]])
    assert same_bits(one(told, "combined"), model.moe(x, experts, weights))
    assert one(told, "shared_output").shape == x.shape
    assert one(told, "shared_hidden").shape == (24, SHARED)


def test_gradients_that_are_told_are_those_that_arrive() -> None:
    model, x = Block(), batch(24).requires_grad_()
    told = told_of(model, x)
    for name in ("w_gate", "w_up", "w_down"):
        arrived = getattr(model.moe, name).grad
        assert same_bits(one(told, name, backward=True).to(torch.bfloat16), arrived)


def test_listening_changes_no_bit_and_ends() -> None:
    x, d_out = batch(40), batch(40, seed=3)
    model = Block()
    alone = step(model, model, x, d_out)
    told: list[str] = []
    with listened(lambda one: told.append(one.stage)):
        heard = step(model, model, x, d_out)
    assert not different(alone, heard)
    count = len(told)
    assert count
    step(model, model, x, d_out)
    assert len(told) == count
    assert not stages.heard()
    assert teller(x) is None


def test_what_fails_while_it_listens_stops_listening() -> None:
    def fail(told: Told) -> None:
        raise RuntimeError(told.stage)

    with pytest.raises(RuntimeError, match="route_table"), listened(fail):
        Block()(batch(8))
    assert not stages.heard()


def test_rows_that_a_kernel_never_writes_are_zero_for_a_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mok.hopper.packing import Problem, make_results

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, shape: t.new_full(shape, 7.0))
    weight, x = torch.zeros(2, 64, 64, dtype=torch.bfloat16), batch(4)
    problem = Problem(x, torch.zeros(4, 1), torch.zeros(4, 1), weight, weight, weight, None, None)
    assert make_results(problem, 256).gate.unique().tolist() == [7.0]
    with listened(lambda told: None):
        assert make_results(problem, 256).gate.unique().tolist() == [0.0]
