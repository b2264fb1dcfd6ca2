"""The Hopper passes for a mok.Workspace: which workspace of kernels, how many rows, which knobs.

It exists so that the operators and the functional API run the same code, as mok.engine does for the
portable backend. A backward is that of the kernels unless support.backward_wanted() says that it
is the portable one; what that needs of this forward, bit for bit, is saved or computed again here.
Its callers have checked the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mok import engine
from mok.config import MoKConfig
from mok.dispatch import Schedule, dispatch, rows_to_send
from mok.hopper.backward import launch_backward
from mok.hopper.backward_layout import choose_backward_segments
from mok.hopper.backward_problem import BackwardProblem
from mok.hopper.forward import launch
from mok.hopper.gradient_records import WANT_ROUTED, WANT_SHARED
from mok.hopper.layout import BLOCK, Segments, Sizes, choose_segments, saved_rows
from mok.hopper.packing import Problem, Results
from mok.hopper.pools import ensure_backward
from mok.hopper.saved import padded_count, without_padding
from mok.hopper.symmetric import agree_most
from mok.hopper.workspace import HopperWorkspace
from mok.main_gradients import MainGradients
from mok.portable import SavedRows
from mok.stages import teller

if TYPE_CHECKING:
    from mok.hopper.pools import WorkspacePool

_DEFAULT_MINIBATCH = MoKConfig().minibatch_size


@dataclass(frozen=True)
class Knobs:
    """minibatch: rows, num_sms: CTAs or 0 for all. Neither changes a bit."""

    minibatch: int = _DEFAULT_MINIBATCH
    num_sms: int = 0

    @property
    def _blocks(self) -> int | None:
        return None if self.minibatch == _DEFAULT_MINIBATCH else self.minibatch // BLOCK

    def segments(self, width: int) -> Segments:
        """Blocks of a segment: minibatch is the most, if it is not the default."""
        return choose_segments(width, self._blocks)

    def backward_segments(self, width: int) -> Segments:
        """The same for a backward."""
        return choose_backward_segments(width, self._blocks)


def run_forward(
    pool: WorkspacePool,
    group: dist.ProcessGroup | None,
    problem: Problem,
    knobs: Knobs,
    *,
    save: bool,
    rows: int | None = None,
) -> Results:
    """out and, with `save`, g and u of so many padded rows, None for the default capacity.

    A launch with peers, but no collective, unless the group's memory has to be made for this shape.
    """
    workspace, num_sms = _workspace(pool, group, problem, knobs)
    kept = saved_rows(problem.x.shape[0], workspace.sizes) if rows is None else rows
    found = launch(workspace, problem, saved=kept if save else None, num_sms=num_sms)
    tell = teller(problem.x)
    if tell is not None:
        tell("route_table", problem.topk, "experts")
        tell("router_weights", problem.router)
        tell("gate", found.gate)
        tell("up", found.up)
        tell("combined", found.out)
    return found


def recompute(
    pool: WorkspacePool,
    group: dist.ProcessGroup | None,
    problem: Problem,
    rows: int | None,
    knobs: Knobs,
) -> Results:
    """g and u again, bit for bit; `out` is not to be used. A launch with peers, as run_forward.

    rows: how many padded rows to keep, None for the default capacity. Only gate and up weights of
    `problem` count: the down weights may be anything of their shape (stand_in_down).
    """
    workspace, num_sms = _workspace(pool, group, problem, knobs)
    kept = saved_rows(problem.x.shape[0], workspace.sizes) if rows is None else rows
    return launch(workspace, problem, saved=kept, num_sms=num_sms, count_bad=False)


def run_backward(
    pool: WorkspacePool,
    group: dist.ProcessGroup | None,
    problem: Problem,
    d_out: torch.Tensor,
    kept: Results,
    knobs: Knobs,
    *,
    needs: tuple[bool, bool] = (True, True),
    dtype: torch.dtype = torch.float32,
    main: MainGradients | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """All gradients, by the kernels, in the order of the functional API.

    kept: what the forward saved; rows that are missing are computed again inside. needs: whether
    gradients of routed, of shared weights are wanted. dtype: theirs; those in `main` are added to
    it, and None is returned for them. A launch with peers, but no collective, unless the memory of
    backwards has to be made.
    """
    workspace, num_sms = _workspace(pool, group, problem, knobs)
    segments = knobs.backward_segments(problem.gate.shape[1])
    memory = ensure_backward(workspace, group, segments=segments)
    wants = WANT_ROUTED * needs[0] | WANT_SHARED * (needs[1] and problem.shared is not None)
    backward = BackwardProblem(d_out, kept, wants, main or MainGradients(), dtype)
    made = launch_backward(workspace, memory, problem, backward, num_sms=num_sms)
    routed = (made.d_gate, made.d_up, made.d_down)
    shared = (made.d_shared_gate, made.d_shared_up, made.d_shared_down)
    tell = teller(problem.x, backward=True)
    if tell is not None:
        tell("combined", d_out)
        engine.tell_gradients(tell, made.d_x, made.d_router, routed, shared)
    return made.d_x, made.d_router, *routed, *shared


def _workspace(
    pool: WorkspacePool, group: dist.ProcessGroup | None, problem: Problem, knobs: Knobs
) -> tuple[HopperWorkspace, int]:
    """The workspace and num_sms: as the caller said, or as a table says where nobody did."""
    device = problem.x.device
    tokens, hidden = problem.x.shape
    experts, width = problem.gate.shape[:2]
    sizes = Sizes(
        max_tokens=tokens,
        slots=problem.topk.shape[1],
        experts=experts,
        hidden=hidden,
        width=width,
        shared_width=0 if problem.shared is None else problem.shared[0].shape[0],
        ranks=1 if group is None else dist.get_world_size(group),
    )
    chosen = pool.tuned(sizes, device) if knobs == Knobs() else None
    if chosen is not None:
        return pool.get(sizes, chosen.segments, group, device), chosen.num_sms
    return pool.get(sizes, knobs.segments(width), group, device), knobs.num_sms


def stand_in_down(gate: torch.Tensor) -> torch.Tensor:
    """A tensor of down's shape, for a recompute that has no down weights; gate's memory again."""
    return gate.reshape(*gate.shape[:-2], gate.shape[-1], gate.shape[-2])


def saved_for_backward(
    pool: WorkspacePool,
    group: dist.ProcessGroup | None,
    schedule: Schedule,
    problem: Problem,
    kept: Results | None,
    knobs: Knobs,
) -> engine.Saved:
    """What the portable backward reads. Collective over the group.

    kept: g and u that the forward saved, None for nothing. Rows that are missing on some rank are
    computed again by all, with the forward's bits.
    """
    rows = padded_count(schedule.rows_E)
    missing = kept is None or kept.gate is None or kept.gate.shape[0] < rows
    if group is not None:
        missing = bool(agree_most(group, problem.x.device, int(missing)))
    found = recompute(pool, group, problem, rows, knobs) if missing or kept is None else kept
    assert found.gate is not None
    assert found.up is not None
    shared = None
    if found.shared_gate is not None and found.shared_up is not None:
        shared = SavedRows(found.shared_gate, found.shared_up)
    x_rows = dispatch(rows_to_send(problem.x, schedule), schedule, group)
    return engine.Saved(x_rows, without_padding(found.gate, found.up, schedule.rows_E), shared)
