"""What happens inside the layer, told to whom it may concern: tensors of a pass, stage by stage.

A recorder listens, so that a fault inside the fused layer is located to its stage. Without one,
nothing is computed or kept for it. Telling changes no bit: tensors are handed over as they are, and
whoever listens may neither change nor keep them.

Stages of a forward, in this order (R rows of this rank's experts in canonical order, S routes that
this rank sent, T tokens, K slots, H hidden size, I width):
    route_table     int64 [T, K] cleaned expert ids, int64 [E] rows of each local expert
    router_weights  fp32 [T, K]
    dispatched      bf16 [R, H], the experts' inputs
    gate, up        bf16 [R, I], rounded as they are saved
    hidden          bf16 [R, I], silu(g) u
    route_output    bf16 [S, H], before the router's weights
    shared_gate, shared_up, shared_hidden   bf16 [T, I_shared]
    shared_output   bf16 [T, H]
    combined        bf16 [T, H], the layer's output
and of a backward, as gradients of these:
    combined        bf16 [T, H], given from above
    route_output    bf16 [R, H], the same at the experts
    gate, up        bf16 [R, I]
    weighted_hidden bf16 [R, I], w h' as the gradient of w_down reads it (no gradient, but a stage)
    dispatched      bf16 [R, H], of each route
    router_weights  fp32 [T, K]
    w_gate, w_up, w_down, shared_w_gate, ... fp32, where needed
    x               bf16 [T, H], the layer's input
    shared_gate, shared_up, shared_weighted_hidden   bf16 [T, I_shared], between weighted_hidden and
                    dispatched
Several ranks compute gate and up again in their backward: again_gate, again_up. The Hopper backend
tells what it keeps: route_table's ids, router_weights, gate and up where a backward follows,
combined; and of its backward combined, router_weights, the weights and x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Told:
    """One tensor of a stage.

    stage: a name of the list above. part: which of several tensors, or "". backward: whether it is
    the gradient of that stage. So that both directions of a call can be told to belong together,
    both have owner, the address of the layer's input, and node, the number of the autograd node
    that the call was made in: of a forward, the node made last in this thread, which without
    autograd is somebody else's; of a backward, -1 outside of autograd. One node has several calls
    where torch.compile made it, one input where layers share it.
    """

    stage: str
    part: str
    tensor: torch.Tensor
    backward: bool
    owner: int
    node: int


Listener = Callable[[Told], None]
Tell = Callable[..., None]
"""tell(stage, tensor, part="")"""

_listeners: list[tuple[Listener, Callable[[], bool]]] = []


def _always() -> bool:
    return True


@contextmanager
def listened(listener: Listener, wants: Callable[[], bool] = _always) -> Iterator[None]:
    """Calls `listener` for every tensor of every stage of every layer in this process, in order.

    On the thread that runs the pass, which for a backward is autograd's. wants: whether it listens
    now, asked when a pass begins (if nobody does, nothing is computed for it), and at each tensor.
    """
    one = (listener, wants)
    _listeners.append(one)
    try:
        yield
    finally:
        _listeners.remove(one)


def heard() -> bool:
    """Whether anybody listens; what is told must then hold no memory that was never written."""
    return any(wants() for _, wants in _listeners)


def teller(x: torch.Tensor, *, backward: bool = False, prefix: str = "") -> Tell | None:
    """How the pass of the layer with this input tells its stages; None when nobody listens.

    prefix: comes before the stage's name.
    """
    if not heard():
        return None
    owner, node = x.data_ptr(), _node(backward)

    def tell(stage: str, tensor: torch.Tensor | None, part: str = "") -> None:
        if tensor is not None:
            told = Told(prefix + stage, part, tensor, backward, owner, node)
            for listener, wants in tuple(_listeners):
                if wants():
                    listener(told)

    return tell


def _node(backward: bool) -> int:
    if not backward:
        return int(torch._C._autograd._get_sequence_nr()) - 1
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())
