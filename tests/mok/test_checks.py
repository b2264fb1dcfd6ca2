"""Every refused argument is named, with what was given and what is allowed."""

import pytest
import torch

from mok import checks, functional
from mok.config import MoKConfig
from mok.errors import InputError
from mok.exact import exact_case

CONFIG = MoKConfig()
NAMES = (
    "x",
    "router_weights",
    "w_shared_gate",
    "w_shared_up",
    "w_shared_down",
    "w_routed_gate",
    "w_routed_up",
    "w_routed_down",
    "swiglu_limit",
)


@pytest.fixture
def call():
    case = exact_case(12, 32, 16, 4, 2, shared_width=8)
    i = case.inputs
    good = dict(
        zip(
            NAMES,
            (i.x, i.router_weights, *i.shared, i.w_gate, i.w_up, i.w_down, None),
            strict=True,
        )
    )
    workspace = functional.create_workspace(
        CONFIG, None, device="cpu", num_local_tokens=12, hidden_size=32, topk=2
    )
    schedule = functional.build_schedule(workspace, CONFIG, i.topk_experts, num_local_experts=4)

    def forward(name, change):
        value = change(good[name])
        return functional.forward(CONFIG, workspace, schedule, **{**good, name: value})

    return forward


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda x: x.float(), r"x has dtype torch.float32; allowed: torch.bfloat16"),
        ("x", lambda x: x[:5], r"x has shape \[5, 32\]; allowed: \[12, 32\], \[T, H\]"),
        ("x", lambda x: x.t().contiguous().t(), r"x has strides \[1, 12\]; allowed: contiguous"),
        ("x", lambda x: x.to("meta"), r"x is on meta; allowed: cpu"),
        ("x", lambda x: None, r"x is NoneType; allowed"),
        ("router_weights", lambda w: w.double(), r"router_weights has dtype torch.float64"),
        ("router_weights", lambda w: w[:, :1], r"router_weights has shape \[12, 1\]"),
        ("w_routed_gate", lambda w: w[:2].contiguous(), r"w_routed_up has shape \[4, 16, 32\]"),
        ("w_routed_up", lambda w: w[:, :8].contiguous(), r"w_routed_up has shape \[4, 8, 32\]"),
        ("w_routed_down", lambda w: w.mT, r"w_routed_down has shape \[4, 16, 32\]"),
        ("w_routed_down", lambda w: None, r"w_routed_down is None"),
        ("w_routed_up", lambda w: w[:1].expand(4, -1, -1), r"w_routed_up has strides \[0, 32, 1\]"),
        ("w_routed_up", lambda w: w.mT.contiguous().mT, r"w_routed_up has strides \[512, 1, 16\]"),
        ("w_shared_up", lambda w: None, r"given = \[True, False, True\]; allowed: all of them"),
        ("w_shared_down", lambda w: w[:, :4].contiguous(), r"w_shared_down has shape \[32, 4\]"),
        ("swiglu_limit", lambda _: -1.0, r"swiglu_limit = -1.0; allowed: None or a positive"),
        ("swiglu_limit", lambda _: float("nan"), r"swiglu_limit = nan; allowed"),
        ("swiglu_limit", lambda _: "4", r"an argument could not be read: TypeError"),
    ],
)
def test_a_wrong_argument_is_named(call, name, change, message):
    with pytest.raises(InputError, match=message):
        call(name, change)


def test_weights_of_experts_may_lie_apart(call):
    """Halves of a fused tensor, as views, give the bits of the copies."""
    whole = call("swiglu_limit", lambda _: None)[0]

    def half(weight):
        return torch.cat([weight, weight + 1], dim=1)[:, : weight.shape[1]]

    for name in ("w_routed_gate", "w_routed_up", "w_routed_down"):
        assert torch.equal(whole, call(name, half)[0])


def test_the_number_of_experts_must_be_the_schedules(call):
    def two(weight):
        return weight[:2].contiguous()

    case = exact_case(12, 32, 16, 2, 2)
    workspace = functional.create_workspace(
        CONFIG, None, device="cpu", num_local_tokens=12, hidden_size=32, topk=2
    )
    i = case.inputs
    schedule = functional.build_schedule(workspace, CONFIG, i.topk_experts, num_local_experts=4)
    with pytest.raises(InputError, match=r"2 experts on each of 1 rank.*built for 4"):
        functional.forward(
            CONFIG,
            workspace,
            schedule,
            i.x,
            i.router_weights,
            None,
            None,
            None,
            two(i.w_gate),
            two(i.w_up),
            two(i.w_down),
        )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 32, 2), "num_local_tokens = -1; allowed: 0 or more"),
        ((4, 0, 2), "hidden_size = 0; allowed: 1 or more"),
        ((4, 32, 0), "topk = 0; allowed: 1 or more"),
    ],
)
def test_a_workspace_needs_sizes(sizes, message):
    tokens, hidden, topk = sizes
    with pytest.raises(InputError, match=message):
        functional.create_workspace(
            CONFIG, None, device="cpu", num_local_tokens=tokens, hidden_size=hidden, topk=topk
        )


@pytest.mark.parametrize(
    ("topk", "experts", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int32), 4, "topk_experts has dtype torch.int32"),
        (torch.zeros(3, 2, dtype=torch.int64), 4, r"topk_experts has shape \[3, 2\]"),
        (torch.zeros(2, 2, dtype=torch.int64), 0, "num_local_experts = 0; allowed: 1 or more"),
    ],
)
def test_a_schedule_needs_ids(topk, experts, message):
    workspace = functional.create_workspace(
        CONFIG, None, device="cpu", num_local_tokens=2, hidden_size=8, topk=2
    )
    with pytest.raises(InputError, match=message):
        functional.build_schedule(workspace, CONFIG, topk, num_local_experts=experts)


def test_a_record_keeps_the_first_error_and_raises_it_once():
    record = checks.ErrorRecord()
    record.raise_pending()
    record.set("first")
    record.set("second")
    with pytest.raises(checks.RoutingError, match="first"):
        record.raise_pending()
    record.raise_pending()


def test_limit_bits_tell_limits_apart():
    values = [None, 1.0, 1.0 + 2.0**-52, 64.0]
    assert len({checks.limit_bits(value) for value in values}) == 4
