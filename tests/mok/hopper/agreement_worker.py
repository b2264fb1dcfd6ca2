"""One of two gloo ranks whose CPUs stand for GPUs, started by test_agreement.py: RANK STORE_FILE.

Launches are simulated by the portable backend, whose own collectives are not counted; what counts
is what the layer does beside its launch. Exits with a traceback when a check fails. Refuses to be
imported by pytest: it collects nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backward_fakes import simulated_backward
from hopper_fakes import Fakes, simulated_launch

import mok
from mok import functional, operators
from mok.config import MoKConfig
from mok.endings import end_process
from mok.errors import ExchangeError, InputError, MoKError, RoutingError
from mok.exact import exact_case, same_bits
from mok.hopper import chains, passes, pools, records, support, symmetric, workspace
from mok.hopper.layout import group_saved_rows
from mok.hopper.symmetric import Place
from mok.hopper.timeouts import wanted_timeouts

COLLECTIVES = ("all_gather", "all_gather_object", "all_reduce", "barrier", "all_to_all_single")
HOST_READS = ("item", "tolist", "__bool__", "numpy")
CONFIG = MoKConfig()
CASE = exact_case(150, 64, 64, 4, 2, "unused-slots", shared_width=64, clamped=True)
SPLIT = 61
"""Tokens of rank 0; rank 1 has the other 89."""


SAVED: list[int | None] = []
"""Rows of g and u that each launch was to keep."""
BACKWARDS: list[None] = []
"""One for each backward that the kernels ran."""


class Counts:
    """Collectives and host reads since `taken`, those of simulated launches left out."""

    def __init__(self) -> None:
        self.collectives: list[str] = []
        self.reads: list[str] = []
        self.paused = False
        for name in COLLECTIVES:
            self._wrap(dist, name, self.collectives)
        for name in HOST_READS:
            self._wrap(torch.Tensor, name, self.reads)

    def _wrap(self, place: Any, name: str, seen: list[str]) -> None:
        plain = getattr(place, name)

        def counted(*args: Any, **options: Any) -> Any:
            if not self.paused:
                seen.append(name)
            return plain(*args, **options)

        setattr(place, name, counted)

    @contextlib.contextmanager
    def none(self, reads: bool = False) -> Iterator[None]:
        """AssertionError if anything is counted inside; host reads may be allowed."""
        self.collectives.clear()
        self.reads.clear()
        yield
        assert (self.collectives, [] if reads else self.reads) == ([], [])

    @contextlib.contextmanager
    def some(self) -> Iterator[None]:
        """AssertionError if no collective is counted inside."""
        self.collectives.clear()
        yield
        assert self.collectives != []


def pretend(rank: int, counts: Counts) -> list[Any]:
    """This CPU becomes GPU number `rank`; returns the list of workspaces that are launched on."""
    launched: list[Any] = []

    def launch(used: Any, problem: Any, **options: Any) -> Any:
        launched.append(used)
        SAVED.append(options["saved"])
        counts.paused = True
        try:
            return simulated_launch(used, problem, group=dist.group.WORLD, **options)
        finally:
            counts.paused = False

    def launch_backward(used: Any, memory: Any, problem: Any, given: Any, **options: Any) -> Any:
        BACKWARDS.append(None)
        counts.paused = True
        try:
            return simulated_backward(
                used, memory, problem, given, group=dist.group.WORLD, **options
            )
        finally:
            counts.paused = False

    def open_backward(used: Any, group: Any, segments: Any = None) -> Any:
        symmetric.agree_most(group, used.device, 0)  # the real one is collective
        return Fakes().backward(used, segments=segments)

    for module in (support, mok.workspaces, functional):
        module.device_problem = lambda device: None  # type: ignore[attr-defined]
    passes.launch = launch  # type: ignore[assignment]
    passes.launch_backward = launch_backward  # type: ignore[assignment]
    symmetric.open_symmetric_backward = open_backward  # type: ignore[assignment]
    symmetric.place_of = lambda device: Place("here", f"GPU-{rank}")

    def opened(
        sizes: Any, segments: Any, group: Any, device: Any, timeouts: Any, chain: Any
    ) -> Any:
        made = Fakes().workspace(sizes, segments=segments)
        return dataclasses.replace(made, chain=chain, timeouts=wanted_timeouts(timeouts))

    pools._open = opened  # type: ignore[assignment]
    return launched


def part(rank: int, tokens: int | None = None) -> SimpleNamespace:
    """This rank's tokens, at most so many, and experts."""
    rows = slice(0, SPLIT) if rank == 0 else slice(SPLIT, 150)
    if tokens is not None:
        rows = slice(rows.start, min(rows.stop, rows.start + tokens))
    mine, i = slice(2 * rank, 2 * rank + 2), CASE.inputs
    return SimpleNamespace(
        rows=rows,
        experts=mine,
        x=i.x[rows],
        topk=i.topk_experts[rows],
        router=i.router_weights[rows],
        weights=(i.w_gate[mine], i.w_up[mine], i.w_down[mine]),
    )


def layer(p: SimpleNamespace, **options: Any) -> torch.Tensor:
    options = {"swiglu_limit": CASE.inputs.swiglu_limit, **options}
    return mok.moe(
        *(p.x, p.topk, p.router, *p.weights, CASE.inputs.shared),
        group=dist.group.WORLD,
        **options,
    )


def right(p: SimpleNamespace, out: torch.Tensor) -> None:
    assert same_bits(out, CASE.expected["out"][p.rows])


def raises(kind: type[MoKError], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


def check_calls(rank: int, counts: Counts, launched: list[Any]) -> None:
    with counts.some():
        right(part(rank), layer(part(rank)))
    assert launched[0].sizes.max_tokens == 1024  # 89 and a quarter
    for tokens in (150, 1 + rank, 40, 0 if rank else 7):
        p = part(rank, tokens)
        with counts.none():
            out = layer(p)
        right(p, out)
    assert len({id(one) for one in launched}) == 1
    # Another kind: agreed on once, and it has the same chain.
    with counts.some():
        layer(part(rank), swiglu_limit=3.0)
    with counts.none():
        layer(part(rank), swiglu_limit=3.0)
    with counts.some():
        layer(part(rank), config=MoKConfig(minibatch_size=1024))
    assert len({id(one) for one in launched}) == 2
    assert len({id(one.chain) for one in launched}) == 1
    raises(
        InputError,
        "swiglu_limit (bits) differs between ranks",
        lambda: layer(part(rank), swiglu_limit=5.0 + rank),
    )
    raises(
        InputError,
        "minibatch_size (Hopper) differs between ranks: rank 0 has 2048, rank 1 has 4096",
        lambda: layer(
            part(rank), swiglu_limit=7.0, config=MoKConfig(minibatch_size=2048 * (1 + rank))
        ),
    )
    for _ in range(2):
        with counts.some():
            right(part(rank), layer(part(rank), backend="portable"))


def check_capture(rank: int, counts: Counts) -> None:
    for module in (support, chains, workspace):
        module.capturing = lambda device: True  # type: ignore[attr-defined]
    with counts.none():
        out = layer(part(rank))
    right(part(rank), out)
    with counts.none():
        raises(
            InputError,
            "ranks cannot agree on a call while a CUDA graph is captured",
            lambda: layer(part(rank), swiglu_limit=9.0),
        )
    for module in (support, chains, workspace):
        module.capturing = lambda device: False  # type: ignore[attr-defined]


def check_errors(rank: int, counts: Counts) -> None:
    p = part(rank)
    alone = SimpleNamespace(**{**vars(p), "x": p.x.float()})
    if rank == 1:  # nobody else is asked
        with counts.none():
            raises(InputError, "x has dtype torch.float32", lambda: layer(alone))
    raises(
        InputError,
        "rank 1: x has dtype torch.float32",
        lambda: layer(alone if rank == 1 else p, swiglu_limit=11.0),
    )
    bad = SimpleNamespace(**{**vars(p), "topk": p.topk.clone()})
    bad.topk[3, 0] = 77 if rank == 1 else -1
    with counts.none():
        layer(bad)
    with counts.none():
        if rank == 1:  # once it is launched: rank 0 waits for it
            raises(RoutingError, "1 bad expert id(s) in earlier calls", lambda: layer(p))
        else:
            layer(p)
    with counts.none():
        layer(bad)
    place = functional.get_workspace(
        *(CONFIG, dist.group.WORLD),
        device="cpu",
        num_local_tokens=p.x.shape[0],
        hidden_size=64,
        topk=2,
    )
    raises(RoutingError, "rank 1: 1 bad expert id(s) in earlier calls", place.check)
    place.check()
    os.environ["MOK_CHECK"] = "1"
    raises(RoutingError, "rank 1: 1 bad expert id(s)", lambda: layer(bad))
    raises(
        InputError,
        "rank 1: x has dtype torch.float32",
        lambda: layer(alone if rank == 1 else p),
    )
    with counts.some():
        right(p, layer(p))
    del os.environ["MOK_CHECK"]
    with counts.none():
        out = layer(p)
    right(p, out)


def right_gradients(p: SimpleNamespace) -> None:
    leaves = [t.clone().requires_grad_() for t in (p.x, p.router, *p.weights)]
    call = SimpleNamespace(x=leaves[0], topk=p.topk, router=leaves[1], weights=leaves[2:])
    found = torch.autograd.grad(layer(call), leaves, CASE.d_out[p.rows])
    assert same_bits(found[0], CASE.expected["d_x"][p.rows])
    assert same_bits(found[1], CASE.expected["d_router_weights"][p.rows])
    for gradient, name in zip(found[2:], ("d_w_gate", "d_w_up", "d_w_down"), strict=True):
        assert same_bits(gradient, CASE.expected[name][p.experts].bfloat16()), name


def check_backward(rank: int, counts: Counts) -> None:
    """The backward of the layer: portable, with collectives every time, then by the kernels."""
    p, before = part(rank), len(BACKWARDS)
    os.environ[support.BACKWARD_VARIABLE] = "0"
    for _ in range(2):
        with counts.some():
            right_gradients(p)
    assert len(BACKWARDS) == before
    # The forward kept what a static rule says, which fake tensors know too.
    assert SAVED[-1] == group_saved_rows(p.x.shape[0], 2, 2)
    os.environ[support.BACKWARD_VARIABLE] = "" if rank else "0"  # with a group the same
    with counts.some():
        right_gradients(p)
    os.environ[support.BACKWARD_VARIABLE] = "1"
    with counts.some():
        right_gradients(p)
    with counts.none():
        right_gradients(p)
    # Ranks that do not all say the same.
    os.environ[support.BACKWARD_VARIABLE] = str(rank)
    functional.clear_workspace_cache()
    raises(
        InputError,
        "MOK_HOPPER_BACKWARD differs between ranks: rank 0 has 0, rank 1 has 1",
        lambda: layer(p),
    )
    # What one rank may not say, all are told: at a forward, and at a portable backward.
    refused = "rank 1: MOK_HOPPER_BACKWARD = 'yes'; allowed: 1 for the kernels"
    os.environ[support.BACKWARD_VARIABLE] = "yes" if rank else "0"
    raises(InputError, refused, lambda: layer(p))
    os.environ[support.BACKWARD_VARIABLE] = "0"
    x = p.x.clone().requires_grad_()
    out = layer(SimpleNamespace(**{**vars(p), "x": x}))
    os.environ[support.BACKWARD_VARIABLE] = "yes" if rank else "0"
    raises(InputError, refused, lambda: torch.autograd.grad(out, x, CASE.d_out[p.rows]))
    del os.environ[support.BACKWARD_VARIABLE]
    functional.clear_workspace_cache()
    with counts.some():
        right(p, layer(p))


def check_growth(rank: int, counts: Counts, launched: list[Any]) -> None:
    p = part(rank)
    many = SimpleNamespace(
        **{
            **vars(p),
            "x": p.x[:1].repeat(1025, 1),
            "topk": p.topk[:1].repeat(1025, 1),
            "router": p.router[:1].repeat(1025, 1),
        }
    )
    if rank == 1:
        with counts.none():
            raises(
                InputError,
                "T = 1025; allowed: up to 1024, which the group's memory was made for",
                lambda: layer(many),
            )

    def room(tokens: int) -> Any:
        return functional.get_workspace(
            *(CONFIG, dist.group.WORLD),
            device="cpu",
            num_local_tokens=p.x.shape[0],
            hidden_size=64,
            topk=2,
            max_tokens=tokens,
            timeouts=functional.Timeouts(7.0 + rank, 3.0),
        )

    raises(
        InputError,
        "max_tokens (0: None) differs between ranks: rank 0 has 2000, rank 1 has 2001",
        lambda: room(2000 + rank),
    )
    with counts.some():
        room(1500)
    with counts.none():
        room(1500)
    with counts.some():
        layer(many if rank == 1 else p)
    assert launched[-1].sizes.max_tokens == 1536
    with counts.none():
        out = layer(p)
    right(p, out)
    assert (launched[-1].timeouts.enter, launched[-1].timeouts.inside) == (7.0 + rank, 3.0)
    room(1500)


def check_functional(rank: int, counts: Counts) -> None:
    p = part(rank)
    shared = CASE.inputs.shared
    assert shared is not None
    limit = CASE.inputs.swiglu_limit
    place = functional.create_workspace(
        *(CONFIG, dist.group.WORLD),
        device="cpu",
        num_local_tokens=p.x.shape[0],
        hidden_size=64,
        topk=2,
    )

    def forward() -> Any:
        schedule = functional.build_schedule(place, CONFIG, p.topk, num_local_experts=2)
        head = (CONFIG, place, schedule)
        out, _ = functional.forward(*head, p.x, p.router, *shared, *p.weights, limit)
        context = functional.recompute_forward_context(
            *head, p.x, *shared[:2], *p.weights[:2], limit
        )
        return head, out, context

    with counts.some():
        forward()
    with counts.none():
        _, out, _ = forward()
    right(p, out)

    def gradients() -> None:
        head, _, context = forward()
        grads = functional.backward(
            *(*head, context, CASE.d_out[p.rows], p.x, p.router, *shared, *p.weights, limit)
        )
        assert same_bits(grads[0], CASE.expected["d_x"][p.rows])
        for found, name in zip(grads[2:5], ("d_w_gate", "d_w_up", "d_w_down"), strict=True):
            assert same_bits(found, CASE.expected[name][p.experts]), name

    before = len(BACKWARDS)
    for _ in range(2):  # a group's are portable, with collectives every time
        with counts.some():
            gradients()
    assert len(BACKWARDS) == before
    os.environ[support.BACKWARD_VARIABLE] = "1"
    with counts.some():
        gradients()
    with counts.none():
        gradients()
    assert len(BACKWARDS) == before + 2
    del os.environ[support.BACKWARD_VARIABLE]
    with counts.some():
        functional.build_schedule(place, CONFIG, p.topk, num_local_experts=2, validate=True)


def check_failure(rank: int, counts: Counts, launched: list[Any]) -> None:
    """A wait in vain on rank 1: what it raises needs nobody else."""
    p = part(rank)
    place = functional.get_workspace(
        *(CONFIG, dist.group.WORLD),
        device="cpu",
        num_local_tokens=p.x.shape[0],
        hidden_size=64,
        topk=2,
    )
    layer(p)  # so that the last launch used the memory of `place`
    if rank == 1:
        record = records.Failure(state=1, what=2, index=0, rank=1, seen=4, wanted=5, cta=9)
        ctypes.memmove(launched[-1].failure.data_ptr(), bytes(record), 32)
        for call in (lambda: layer(p), place.check, lambda: layer(p, swiglu_limit=13.0)):
            with counts.none(reads=True):  # who is late is read once
                raises(ExchangeError, "rank 0 to enter the launch (wanted 5, seen 4", call)
    dist.barrier()
    functional.clear_workspace_cache()
    with counts.some():
        right(p, layer(p))
    with counts.none():
        layer(p)


def check_one_gpu(rank: int, launched: list[Any]) -> None:
    """Ranks that find that they share a GPU run the portable backend, in the shapes promised."""
    functional.clear_workspace_cache()
    symmetric.place_of = lambda device: Place("here", "one GPU")
    before, p = len(launched), part(rank)
    right_gradients(p)
    shared, limit = CASE.inputs.shared, CASE.inputs.swiglu_limit
    assert shared is not None
    group = operators.group_name(dist.group.WORLD)
    call = (p.x, p.topk, p.router, *p.weights, *shared, limit, group, 4096, True)
    found = operators.moe_forward(*call)
    right(p, found[0])
    rows = group_saved_rows(p.x.shape[0], 2, 2)
    assert [tuple(t.shape) for t in found[1:]] == [(rows, 64)] * 2 + [(p.x.shape[0], 64)] * 2
    assert len(launched) == before


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    os.environ.pop(support.BACKWARD_VARIABLE, None)  # defaults are checked
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    counts = Counts()
    launched = pretend(rank, counts)
    check_calls(rank, counts, launched)
    check_capture(rank, counts)
    check_errors(rank, counts)
    check_growth(rank, counts, launched)
    check_functional(rank, counts)
    check_backward(rank, counts)
    check_failure(rank, counts, launched)
    check_one_gpu(rank, launched)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} checked everything")


if __name__ == "__main__":
    main()
    end_process()
