"""The workspace: where a layer runs, and the record of routing errors that it left.

It exists because users of Mixture-of-Kittens pass one to every call, and because bad routing values
must be reported at a later call than the one that met them. The cache below is the package's only
process-wide table; clear_workspace_cache() empties it. Refuses to hold tensors: the portable
backend keeps no buffers between calls, so nothing can alias a result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mok import checks
from mok.config import MoKConfig
from mok.engine import canonical_device
from mok.errors import InputError


@dataclass(frozen=True)
class Workspace:
    """Where a layer runs: group, device, shapes, and the record of routing errors.

    The portable backend keeps no buffers between calls, so nothing can alias a result.
    """

    group: dist.ProcessGroup | None
    device: torch.device
    num_local_tokens: int
    hidden_size: int
    topk: int
    errors: checks.ErrorRecord = field(default_factory=checks.ErrorRecord, repr=False)

    @property
    def num_ranks(self) -> int:
        """Size of the expert-parallel group."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def check(self) -> None:
        """Raise RoutingError if an earlier call met bad expert ids. Collective over the group."""
        checks.checked("check", self.errors.raise_pending, self.group, self.device)


_WORKSPACES: dict[tuple[object, ...], Workspace] = {}
_RECORDS: dict[tuple[object, ...], checks.ErrorRecord] = {}


def create_workspace(
    config: MoKConfig,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
) -> Workspace:
    """A new workspace, not cached. Ranks may differ in num_local_tokens only; 0 is allowed.

    Raises InputError, on all ranks, for a negative or zero size.
    """
    del config
    where = canonical_device(device)
    sizes = {"num_local_tokens": num_local_tokens, "hidden_size": hidden_size, "topk": topk}

    def check() -> dict[str, int]:
        for name, size in sizes.items():
            least = 0 if name == "num_local_tokens" else 1
            if size < least:
                raise InputError(f"{name} = {size}; allowed: {least} or more.")
        return {"hidden_size": hidden_size, "topk": topk}

    checks.checked("workspace", check, group, where)
    return Workspace(group, where, num_local_tokens, hidden_size, topk)


def get_workspace(
    config: MoKConfig,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
) -> Workspace:
    """The cached workspace of this group, device and shape; made at the first call.

    Checked like create_workspace at every call, so that ranks never wait for each other when one
    has it cached. Cached workspaces of one group and device share their error record.
    """
    made = create_workspace(
        config,
        group,
        device=device,
        num_local_tokens=num_local_tokens,
        hidden_size=hidden_size,
        topk=topk,
    )
    place = (group, made.device)
    record = _RECORDS.setdefault(place, made.errors)
    shared = Workspace(group, made.device, num_local_tokens, hidden_size, topk, record)
    return _WORKSPACES.setdefault((*place, num_local_tokens, hidden_size, topk), shared)


def clear_workspace_cache() -> None:
    """Forget all cached workspaces and their error records."""
    _WORKSPACES.clear()
    _RECORDS.clear()
