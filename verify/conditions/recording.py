"""One execution of a case recorded in a CUDA graph, forward and gradients, and replayed.

Recording executes nothing: whatever the case returns afterwards comes from replays. Before each one
every result that lies in the graph's own memory is overwritten, and the inputs, module state and
generators are put back, so that a replay which leaves something out, or uses what the host knew
only while recording, gives other bits.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from verify.captures import as_integers, flatten, same_bits
from verify.conditions.availability import refused_anywhere
from verify.conditions.watching import instead
from verify.gradients import differentiate, reached_leaves
from verify.sessions import Effect, Session

POISON = 0xFF  # in every byte: NaN, or -1
LONGEST_TEXT = 500


class CaptureRefused(RuntimeError):
    """What the case does cannot be recorded in a CUDA graph."""


@dataclass
class Replays:
    """What was seen of the replays of one recording. refused: why there are none.

    poisoned: results overwritten before each. rewritten: the least of these that a replay wrote.
    changed: inputs that it wrote to, looked at only where nothing could be overwritten.
    """

    wanted: int
    done: int = 0
    poisoned: int = 0
    rewritten: int = 0
    changed: int = 0
    elsewhere: list[str] = field(default_factory=list)
    refused: str = ""

    def effect(self) -> Effect:
        """In effect where the graph was replayed and was seen to write."""
        told = {"replays": self.done, "poisoned": self.poisoned, "rewritten": self.rewritten}
        if self.elsewhere:
            told |= {"not_poisoned": len(self.elsewhere)}
        return told, self.done > 0 and self.rewritten + self.changed > 0


def recorded(session: Session, device: torch.device, replays: Replays) -> Session:
    """The same session, whose case is recorded and then replayed `replays.wanted` times.

    It returns the first replay that differs from the first one, else the last. Raises
    CaptureRefused, with `replays.refused` set, when recording fails on any rank: a peer alone would
    wait in the replay of a collective. torch works on as before.
    """
    inner = session.stage.case.execute

    @functools.wraps(inner)
    def execute(**arguments: Any) -> Any:
        leaves = [v for v in pytree.tree_leaves(arguments) if isinstance(v, Tensor)]
        generators = [
            (value, session.stage.own_generators[name])
            for name, value in session.stage.others.items()
            if isinstance(value, torch.Generator) and value.device.type == "cuda"
        ]
        state = torch.cuda.get_rng_state(device)
        states = session.stage.module_state.values()
        kept = [
            (one.live.detach(), one.content)
            for owned in states
            for one in owned.values()
            if one.live.is_cuda
        ]
        kept += [(leaf.detach(), leaf.detach().clone()) for leaf in leaves if leaf.is_cuda]

        def put_back() -> None:
            torch.cuda.set_rng_state(state, device)
            for generator, content in generators:
                generator.set_state(content)
            for live, content in kept:
                as_integers(live).copy_(as_integers(content))

        try:
            graph, pool, outputs = _record(
                device,
                functools.partial(_run, session, inner, arguments, leaves),
                [generator for generator, _ in generators],
            )
        except CaptureRefused as error:
            replays.refused = refused_anywhere(session, str(error))
            raise
        replays.refused = refused_anywhere(session, "")
        if replays.refused:
            graph.reset()
            raise CaptureRefused(replays.refused)
        try:
            static = {**outputs, **_gradients(session, leaves)}
            found = _replay(graph, pool, static, put_back, replays)
            if not replays.poisoned:
                replays.changed = sum(not same_bits(live, content) for live, content in kept)
        finally:
            graph.reset()
        for owner, name in _owners(session, leaves):
            owner.grad = found[name]
        return {name: found[name] for name in outputs}

    return instead(session, execute, gradients=False)


def _run(
    session: Session, inner: Callable[..., Any], arguments: dict[str, Any], leaves: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Forward and gradients, as `execution.execute` takes them; reached gradients are outputs."""
    base, case = session.base, session.stage.case
    assert base is not None
    outputs, _ = flatten(inner(**arguments))
    heads = {n: t for n, t in outputs.items() if t.requires_grad and n in base.upstream}
    if heads and case.gradients:
        parameters = (p for m in session.stage.modules.values() for p in m.parameters())
        reached = reached_leaves(list(heads.values()), [*leaves, *parameters])
        gradients, _ = differentiate(heads, base.upstream, reached)
        outputs |= {f"grad.{name}": tensor for name, tensor in gradients.items()}
    return {name: tensor.detach() for name, tensor in outputs.items()}


def _record(
    device: torch.device, body: Callable[[], dict[str, Tensor]], generators: Sequence[Any]
) -> tuple[torch.cuda.CUDAGraph, Any, dict[str, Tensor]]:
    """The graph, the id of its memory, and what `body` returned while it was recorded.

    Raises CaptureRefused for whatever fails, since the peers wait to hear of it.
    """
    try:
        return _captured(device, body, generators)
    except CaptureRefused:
        raise
    except RuntimeError as error:
        raise CaptureRefused(_text(error)) from error


def _captured(
    device: torch.device, body: Callable[[], dict[str, Tensor]], generators: Sequence[Any]
) -> tuple[torch.cuda.CUDAGraph, Any, dict[str, Tensor]]:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    for generator in generators:
        graph.register_generator_state(generator)
    gc.collect()  # what is collected while recording could wait for the device, which is forbidden
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = body()
        except (Exception, SystemExit) as error:
            with suppress(RuntimeError):
                graph.capture_end()
            _recover(device, pool)
            raise CaptureRefused(_text(error)) from error
        try:
            graph.capture_end()
        except RuntimeError as error:
            _recover(device, pool)
            raise CaptureRefused(_text(error)) from error
    torch.cuda.synchronize(device)
    return graph, pool, outputs


def _recover(device: torch.device, pool: Any) -> None:
    """After a recording that failed torch may go on as if it still recorded.

    Its allocator then refuses to give memory back, and its generator refuses to be used outside.
    The first is told that it is over; a recording that succeeds clears the second. Where that fails
    as well nothing can be done, and why the first one failed is what counts.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):  # where it is over already
            end(index, pool)
    with suppress(RuntimeError):
        cell = torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            graph.capture_begin(capture_error_mode="thread_local")
            cell.add_(1)
            graph.capture_end()
        torch.cuda.synchronize(device)
        graph.reset()


def _replay(
    graph: torch.cuda.CUDAGraph,
    pool: Any,
    static: Mapping[str, Tensor],
    put_back: Callable[[], None],
    replays: Replays,
) -> dict[str, Tensor]:
    """Copies of what the chosen replay gave, by name."""
    own = own_tensors(torch.cuda.memory_snapshot(), tuple(pool), static)
    replays.elsewhere = sorted(set(static) - set(own))
    replays.poisoned, replays.rewritten = len(own), len(own)
    first: dict[str, Tensor] = {}
    other: dict[str, Tensor] | None = None
    # all of them, whatever they give: peers that share a collective replay as often
    for _ in range(replays.wanted):
        for tensor in own.values():
            _bytes_of(tensor).fill_(POISON)
        put_back()  # after that, since a result may be an input
        graph.replay()
        written = sum(bool((_bytes_of(one) != POISON).any()) for one in own.values())
        replays.done, replays.rewritten = replays.done + 1, min(replays.rewritten, written)
        now = {name: tensor.clone() for name, tensor in static.items()}
        first = first or now
        if other is None and any(not same_bits(now[name], first[name]) for name in static):
            other = now
    return now if other is None else other


def own_tensors(
    snapshot: Sequence[Any], pool: tuple[int, int], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Those tensors that lie in the memory of a pool, by torch.cuda.memory_snapshot(): what the
    graph made itself. Overwriting others could destroy what it only reads."""
    ranges = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in snapshot
        if tuple(segment.get("segment_pool_id", ())) == pool
    ]
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.numel()
        and any(low <= tensor.untyped_storage().data_ptr() < high for low, high in ranges)
    }


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the memory that a tensor is in, as one row."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


def _owners(session: Session, leaves: Sequence[Tensor]) -> list[tuple[Tensor, str]]:
    """Inputs and parameters with a gradient, each with a name for it."""
    parameters = [p for m in session.stage.modules.values() for p in m.parameters()]
    distinct = {id(one): one for one in [*leaves, *parameters] if one.grad is not None}
    return [(owner, f"gradient {index}") for index, owner in enumerate(distinct.values())]


def _gradients(session: Session, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name: one.grad for one, name in _owners(session, leaves) if one.grad is not None}


def _text(error: BaseException) -> str:
    """The first lines of what CUDA says; the rest is advice on debugging it."""
    said = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(said[:2])}"[:LONGEST_TEXT]
