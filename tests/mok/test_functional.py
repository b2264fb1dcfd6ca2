"""The functional API on one rank: shapes, contexts, edge cases, and the workspace cache."""

from dataclasses import replace

import pytest
import torch

from mok import functional
from mok.config import MoKConfig
from mok.errors import ContextError, RoutingError, UnsupportedError
from mok.exact import exact_case, same_bits

CONFIG = MoKConfig()


def _workspace(tokens, hidden=32, topk=2, make=functional.create_workspace):
    return make(CONFIG, None, device="cpu", num_local_tokens=tokens, hidden_size=hidden, topk=topk)


def _arguments(case):
    i = case.inputs
    shared = i.shared or (None, None, None)
    return (i.x, i.router_weights, *shared, i.w_gate, i.w_up, i.w_down, i.swiglu_limit)


def _forward(case, experts=4):
    workspace = _workspace(case.inputs.x.shape[0])
    schedule = functional.build_schedule(
        workspace, CONFIG, case.inputs.topk_experts, num_local_experts=experts
    )
    head = (CONFIG, workspace, schedule)
    return head, functional.forward(*head, *_arguments(case))


def test_shapes_dtypes_and_order_of_results():
    case = exact_case(20, 32, 16, 4, 2, shared_width=8)
    head, (out, context) = _forward(case)
    gradients = functional.backward(*head, context, case.d_out, *_arguments(case))
    assert (out.dtype, out.shape) == (torch.bfloat16, (20, 32))
    shapes = [(20, 32), (20, 2), (4, 16, 32), (4, 16, 32), (4, 32, 16), (8, 32), (8, 32), (32, 8)]
    assert [tuple(grad.shape) for grad in gradients] == shapes
    assert [grad.dtype for grad in gradients] == [torch.bfloat16] + [torch.float32] * 7


def test_without_a_shared_expert_its_gradients_are_none():
    case = exact_case(20, 32, 16, 4, 2)
    head, (_, context) = _forward(case)
    gradients = functional.backward(*head, context, case.d_out, *_arguments(case))
    assert gradients[5:] == (None, None, None)


def test_one_backward_per_forward_context():
    case = exact_case(20, 32, 16, 4, 2)
    head, (_, context) = _forward(case)
    functional.backward(*head, context, case.d_out, *_arguments(case))
    with pytest.raises(ContextError, match="one backward per forward context"):
        functional.backward(*head, context, case.d_out, *_arguments(case))
    arguments = _arguments(case)
    again = functional.recompute_forward_context(
        *head, arguments[0], None, None, arguments[5], arguments[6], arguments[8]
    )
    functional.backward(*head, again, case.d_out, *_arguments(case))


def test_a_context_belongs_to_its_schedule_and_weights():
    case = exact_case(20, 32, 16, 4, 2, shared_width=8)
    head, (_, context) = _forward(case)
    other, _ = _forward(case)
    with pytest.raises(ContextError, match="another schedule"):
        functional.backward(*other, context, case.d_out, *_arguments(case))
    alone = replace(case, inputs=replace(case.inputs, shared=None))
    with pytest.raises(ContextError, match="shared expert"):
        functional.backward(*head, context, case.d_out, *_arguments(alone))


def test_results_do_not_alias_each_other_or_the_next_call():
    case = exact_case(20, 32, 16, 4, 2)
    head, (first, _) = _forward(case)
    kept = first.clone()
    functional.forward(
        *head, *_arguments(replace(case, inputs=replace(case.inputs, x=-case.inputs.x)))
    )
    assert same_bits(first, kept)


def test_mxfp8_tuples_are_refused_by_name():
    case = exact_case(20, 32, 16, 4, 2)
    arguments = list(_arguments(case))
    arguments[5] = (arguments[5], arguments[5])
    head, _ = _forward(case)
    with pytest.raises(UnsupportedError, match=r"w_routed_gate is a tuple.*MXFP8.*Dequantise"):
        functional.forward(*head, *arguments)


@pytest.mark.parametrize("kind", ["no tokens", "no routes"])
def test_nothing_to_do_gives_zeros(kind, run):
    case = exact_case(0 if kind == "no tokens" else 12, 32, 16, 4, 2)
    inputs = case.inputs
    if kind == "no routes":
        inputs = replace(inputs, topk_experts=torch.full_like(inputs.topk_experts, -1))
    got = run(inputs, case.d_out)
    for name, value in got.items():
        assert same_bits(value, torch.zeros_like(value)), name


def test_bad_ids_run_as_unused_slots_and_are_raised_at_the_next_call():
    case = exact_case(20, 32, 16, 4, 2)
    topk = case.inputs.topk_experts.clone()
    topk[3, 1], topk[5, 1] = 4, topk[5, 0]
    unused = topk.clone()
    unused[3, 1] = unused[5, 1] = -1
    workspace = _workspace(20)
    schedule = functional.build_schedule(workspace, CONFIG, topk, num_local_experts=4)
    assert torch.equal(schedule.topk_TK, unused)
    message = r"2 bad expert id.*topk_experts\[3, 1\] = 4, is out of range; allowed: -1.*0 .. 3"
    with pytest.raises(RoutingError, match=message):
        functional.forward(CONFIG, workspace, schedule, *_arguments(case))
    out, _ = functional.forward(CONFIG, workspace, schedule, *_arguments(case))
    clean = replace(case, inputs=replace(case.inputs, topk_experts=unused))
    assert same_bits(out, _forward(clean)[1][0])
    workspace.check()


def test_workspace_check_raises_a_pending_error_once():
    workspace = _workspace(2)
    functional.build_schedule(
        workspace, CONFIG, torch.tensor([[0, 0], [1, 2]]), num_local_experts=4
    )
    with pytest.raises(RoutingError, match=r"\[0, 1\] = 0, is repeated inside the token"):
        workspace.check()
    workspace.check()


def test_values_are_checked_at_once_on_request(monkeypatch):
    bad = torch.tensor([[0, 9], [1, 2]])
    with pytest.raises(RoutingError, match="= 9"):
        functional.build_schedule(_workspace(2), CONFIG, bad, num_local_experts=4, validate=True)
    monkeypatch.setenv("MOK_CHECK", "1")
    workspace = _workspace(2)
    with pytest.raises(RoutingError, match="= 9"):
        functional.build_schedule(workspace, CONFIG, bad, num_local_experts=4)
    workspace.check()


def test_workspaces_are_cached_by_shape_and_share_their_error_record():
    get = functional.get_workspace
    first = _workspace(2, make=get)
    assert _workspace(2, make=get) is first
    other = _workspace(3, make=get)
    assert other is not first
    assert _workspace(2) is not first
    functional.build_schedule(first, CONFIG, torch.tensor([[9, 0], [1, 2]]), num_local_experts=4)
    with pytest.raises(RoutingError, match="= 9"):
        other.check()
    functional.clear_workspace_cache()
    assert _workspace(2, make=get) is not first
