"""A schedule that the device builds: what the functional API hands out before the Hopper forward.

It exists because that forward builds its schedule itself, on the device, while the portable passes
need one on the host, which costs a wait. So ids are kept as they came, and the host's schedule is
made when a portable pass asks for it first. Refuses nothing: bad ids become unused slots in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mok.checks import ErrorRecord, routing_message
from mok.dispatch import Schedule, clean_topk, make_schedule


@dataclass(frozen=True, eq=False)
class DeferredSchedule:
    """topk_TK: int64 [T, K], raw ids, a copy. num_experts: over all ranks of the group."""

    topk_TK: torch.Tensor
    num_local_experts: int
    group: dist.ProcessGroup | None
    _made: list[Schedule] = field(default_factory=list, repr=False)

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        return self.num_local_experts * ranks

    def on_host(self, errors: ErrorRecord | None = None) -> Schedule:
        """The portable schedule of the same ids. Collective and a wait at the first call.

        errors: where bad ids are recorded; None if a Hopper forward has counted them.
        """
        if not self._made:
            cleaned, bad = clean_topk(self.topk_TK, self.num_experts)
            if errors is not None and bool(bad.any()):
                errors.set(routing_message(bad, self.topk_TK, self.num_experts))
            self._made.append(make_schedule(cleaned, self.num_local_experts, self.group))
        return self._made[0]


def on_host(schedule: Schedule | DeferredSchedule, errors: ErrorRecord | None = None) -> Schedule:
    """The portable schedule, made now if it was deferred. Collective then."""
    return schedule.on_host(errors) if isinstance(schedule, DeferredSchedule) else schedule
