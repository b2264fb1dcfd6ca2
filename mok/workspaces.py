"""The workspace: where a layer runs, and the record of routing errors that it left.

It exists because users of Mixture-of-Kittens pass one to every call, and because bad routing values
must be reported at a later call than the one that met them. The cache below is the package's only
process-wide table; clear_workspace_cache() empties it. The portable backend keeps no buffers
between calls; the Hopper backend's lie in a pool, made at first use, and never alias a result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mok import checks
from mok.config import MoKConfig
from mok.engine import canonical_device
from mok.errors import InputError
from mok.hopper.pools import WorkspacePool
from mok.hopper.support import BACKENDS, check_backend, choose, device_problem, why_not


@dataclass(frozen=True)
class Workspace:
    """Where a layer runs: group, device, shapes, backend, and the record of routing errors.

    pool: memory of the Hopper backend, shared by all cached workspaces of one group and device; a
    tensor that a call returns never lies in it.
    """

    group: dist.ProcessGroup | None
    device: torch.device
    num_local_tokens: int
    hidden_size: int
    topk: int
    errors: checks.ErrorRecord = field(default_factory=checks.ErrorRecord, repr=False)
    backend: str = "auto"
    pool: WorkspacePool = field(default_factory=WorkspacePool, repr=False, compare=False)

    @property
    def num_ranks(self) -> int:
        """Size of the expert-parallel group."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def nbytes(self) -> int:
        """Device bytes that the Hopper backend holds for this workspace's group and device."""
        return self.pool.nbytes

    def raise_pending(self) -> None:
        """Raise what earlier calls left, without waiting for the device; on this rank alone.

        RoutingError for bad expert ids, ExchangeError after a kernel waited in vain.
        """
        self.errors.raise_pending()
        self.pool.raise_pending()

    def check(self) -> None:
        """Wait for earlier calls, then raise_pending. Collective over the group."""

        def check() -> None:
            self.errors.raise_pending()
            self.pool.check()

        checks.checked("check", check, self.group, self.device)

    def close(self) -> None:
        """Give the Hopper backend's memory back; a later call makes it anew."""
        self.pool.close()

    def meet(self) -> None:
        """Find out, once, whether the group's ranks can share memory. Collective over the group."""
        wanted = self.backend != "portable" and device_problem(self.device) is None
        if self.group is not None and wanted:
            self.pool.group_problem(self.group, self.device)

    def runs_hopper(self, experts: int, width: int, shared_width: int) -> bool:
        """Whether a call with such weights takes the Hopper backend; `meet` comes before.

        Raises UnsupportedError where backend="hopper" cannot be had.
        """
        if self.backend == "portable":
            return False
        problem = why_not(
            self.device,
            hidden=self.hidden_size,
            width=width,
            shared_width=shared_width,
            slots=self.topk,
            experts=experts,
            tokens=self.num_local_tokens,
            ranks=self.num_ranks,
        )
        if problem is None and self.group is not None:
            problem = self.pool.group_problem(self.group, self.device)
        return choose(self.backend, problem)


_WORKSPACES: dict[tuple[object, ...], Workspace] = {}
_RECORDS: dict[tuple[object, ...], checks.ErrorRecord] = {}
_POOLS: dict[tuple[object, ...], WorkspacePool] = {}


def create_workspace(
    config: MoKConfig,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
    backend: str = "auto",
    max_tokens: int | None = None,
) -> Workspace:
    """A new workspace, not cached. Ranks may differ in num_local_tokens only; 0 is allowed.

    backend: "auto" takes the Hopper kernel for the forward where it can run, "hopper" insists,
    "portable" never does. max_tokens: what the Hopper backend's memory is made for at first use,
    so that it need not grow later (a CUDA graph's capture forbids that); None is num_local_tokens.
    Raises InputError, on all ranks, for a negative or zero size or another backend.
    """
    del config
    where = canonical_device(device)
    sizes = {"num_local_tokens": num_local_tokens, "hidden_size": hidden_size, "topk": topk}

    def check() -> dict[str, int]:
        for name, size in sizes.items():
            least = 0 if name == "num_local_tokens" else 1
            if size < least:
                raise InputError(f"{name} = {size}; allowed: {least} or more.")
        check_backend(backend)
        if max_tokens is not None and max_tokens < num_local_tokens:
            raise InputError(
                f"max_tokens = {max_tokens}; allowed: at least num_local_tokens "
                f"({num_local_tokens}), or None."
            )
        return {"hidden_size": hidden_size, "topk": topk, "backend": BACKENDS.index(backend)}

    checks.checked("workspace", check, group, where)
    pool = WorkspacePool(max_tokens or num_local_tokens)
    return Workspace(group, where, num_local_tokens, hidden_size, topk, backend=backend, pool=pool)


def get_workspace(
    config: MoKConfig,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
    backend: str = "auto",
    max_tokens: int | None = None,
) -> Workspace:
    """The cached workspace of this group, device, shape and backend; made at the first call.

    Checked like create_workspace at every call, so that ranks never wait for each other when one
    has it cached. Cached workspaces of one group and device share their error record and the Hopper
    backend's memory, whatever their numbers of tokens.
    """
    made = create_workspace(
        config,
        group,
        device=device,
        num_local_tokens=num_local_tokens,
        hidden_size=hidden_size,
        topk=topk,
        backend=backend,
        max_tokens=max_tokens,
    )
    place = (group, made.device)
    record = _RECORDS.setdefault(place, made.errors)
    pool = _POOLS.setdefault(place, made.pool)
    pool.least_tokens = max(pool.least_tokens, made.pool.least_tokens if max_tokens else 0)
    shared = Workspace(
        group, made.device, num_local_tokens, hidden_size, topk, record, backend, pool
    )
    return _WORKSPACES.setdefault((*place, num_local_tokens, hidden_size, topk, backend), shared)


def clear_workspace_cache() -> None:
    """Forget all cached workspaces, their error records, and the Hopper backend's memory.

    With a group on the Hopper backend call it on all ranks: the next call makes the memory anew,
    together.
    """
    for pool in _POOLS.values():
        pool.close()
    _WORKSPACES.clear()
    _RECORDS.clear()
    _POOLS.clear()
