"""`mok.moe` and `mok.MoE`: the layer as a function and as a torch.nn.Module.

Why not `mok/moe.py`: importing a submodule of that name would hide the function `mok.moe`. The
router stays outside: both take its choice (topk_experts, router_weights). Under torch.compile the
layer is one operator without a graph break; under activation checkpointing the recomputed pass has
the saved one's bits. Refuses other weight dtypes than bf16, except where autocast casts them.

Legend: T local tokens, K slots, E local experts, H hidden size, I width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mok.config import MoKConfig
from mok.errors import InputError
from mok.hopper.support import check_backend
from mok.operators import group_name, moe_forward

SharedWeights = tuple[Tensor, Tensor, Tensor]


def moe(
    x: Tensor,
    topk_experts: Tensor,
    router_weights: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    shared: SharedWeights | None = None,
    swiglu_limit: float | None = None,
    group: dist.ProcessGroup | None = None,
    config: MoKConfig | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """out = shared(x) + sum over k of router_weights[:, k] * expert[topk_experts[:, k]](x).

    x: bf16 [T, H]. topk_experts: int64 [T, K], global ids, -1 for an unused slot. router_weights:
    fp32 [T, K]. w_gate, w_up: bf16 [E, I, H]; w_down: bf16 [E, H, I], this rank's experts, each
    contiguous: halves of a fused [E, 2 I, H] need no copy. shared:
    (gate [I_shared, H], up, down [H, I_shared]). Returns bf16 [T, H].

    Differentiable in x, router_weights and the weights; weight gradients are accumulated in fp32
    and rounded to bf16 once. In a torch.autocast region of dtype bf16, x and the weights may have
    other floating-point dtypes than float64: they are cast to bf16, router weights to fp32, and
    gradients arrive in the given dtypes.

    backend: "auto" runs both directions on the Hopper kernels where device and shapes allow (a
    group's backward if MOK_HOPPER_BACKWARD=1),
    "hopper" insists on them (UnsupportedError says why it cannot be), "portable" never takes them.

    With a group the call and its backward are collective, T may differ and be 0, and the shared
    expert's gradients are this rank's partial sums. Raises InputError for a wrong shape, dtype,
    device or layout: on all ranks, or, by the Hopper backend after the first call of a kind, on the
    rank that meets it.
    """
    knobs = config or MoKConfig()
    shared_gate, shared_up, shared_down = shared if shared is not None else (None, None, None)
    given = (x, router_weights, w_gate, w_up, w_down, shared_gate, shared_up, shared_down)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    return moe_forward(
        x,
        topk_experts,
        router_weights,
        w_gate,
        w_up,
        w_down,
        shared_gate,
        shared_up,
        shared_down,
        swiglu_limit,
        group_name(group),
        knobs.minibatch_size,
        save,
        knobs.num_sms,
        backend,
    )[0]


@dataclass(frozen=True)
class _Group:
    """A process group, which torch can neither copy nor pickle: a copy of the layer shares it."""

    value: dist.ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, object]) -> _Group:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if self.value is None:
            return _Group, (None,)
        raise InputError(
            "a mok.MoE with a process group cannot be pickled; allowed: group = None. Save its "
            "state_dict() and load that into a layer made with the group."
        )


class MoE(nn.Module):
    """The layer with its weights; the router is outside.

    Parameters (bf16): w_gate, w_up [E / ranks, I, H], w_down [E / ranks, H, I], and with
    shared_size the shared expert's w_shared_gate, w_shared_up [I_shared, H], w_shared_down
    [H, I_shared]. reset_parameters() draws them from a normal distribution of variance 1 / fan-in;
    load a checkpoint or seed each rank to get the same model at every expert-parallel degree.
    state_dict() holds these parameters and nothing else. A rank holds its own experts, in rank
    order, so rank r of R loads rows r E / R .. (r + 1) E / R - 1 of a whole w_gate, w_up and
    w_down, and the ranks' parts concatenated along dimension 0 are the whole.

    backend: as of mok.moe. Raises InputError when the number of experts is not a multiple of the
    group's size, or for an unknown backend.
    """

    w_shared_gate: Tensor | None
    w_shared_up: Tensor | None
    w_shared_down: Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        shared_size: int | None = None,
        swiglu_limit: float | None = None,
        group: dist.ProcessGroup | None = None,
        config: MoKConfig | None = None,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_backend(backend)
        ranks = 1 if group is None else dist.get_world_size(group)
        if num_experts < 1 or num_experts % ranks:
            raise InputError(
                f"num_experts = {num_experts} on {ranks} rank(s); allowed: a positive multiple of "
                "the group's size. Use a smaller group or pad the experts."
            )
        self.num_experts = num_experts
        self.swiglu_limit = swiglu_limit
        self._group = _Group(group)
        self.config = config or MoKConfig()
        self.backend = backend

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))

        local = num_experts // ranks
        self.w_gate = weight(local, intermediate_size, hidden_size)
        self.w_up = weight(local, intermediate_size, hidden_size)
        self.w_down = weight(local, hidden_size, intermediate_size)
        if shared_size is None:
            for name in ("w_shared_gate", "w_shared_up", "w_shared_down"):
                self.register_parameter(name, None)
        else:
            self.w_shared_gate = weight(shared_size, hidden_size)
            self.w_shared_up = weight(shared_size, hidden_size)
            self.w_shared_down = weight(hidden_size, shared_size)
        self.reset_parameters()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The expert-parallel group; None for one rank. A deep copy shares it."""
        return self._group.value

    def reset_parameters(self) -> None:
        """Normal values of variance 1 / fan-in."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def forward(self, x: Tensor, topk_experts: Tensor, router_weights: Tensor) -> Tensor:
        """out [T, H] bf16; see mok.moe for the arguments."""
        shared: SharedWeights | None = None
        if (
            self.w_shared_gate is not None
            and self.w_shared_up is not None
            and self.w_shared_down is not None
        ):
            shared = (self.w_shared_gate, self.w_shared_up, self.w_shared_down)
        return moe(
            x,
            topk_experts,
            router_weights,
            self.w_gate,
            self.w_up,
            self.w_down,
            shared,
            self.swiglu_limit,
            self.group,
            self.config,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """Sizes, as printed by repr."""
        _, width, hidden = self.w_gate.shape
        return f"num_experts={self.num_experts}, hidden_size={hidden}, intermediate_size={width}"
