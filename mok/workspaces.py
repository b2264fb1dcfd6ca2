"""The workspace: where a layer runs, and the record of routing errors that it left.

It exists because users of Mixture-of-Kittens pass one to every call, and because bad routing values
must be reported at a later call than the one that met them. The caches below are process-wide, and
clear_workspace_cache() empties them; only the order of launches on a device stays, since launches
may still be under way. The portable backend keeps no buffers between calls; the Hopper backend's
lie in a pool, made at first use, and never alias a result.

What ranks have to agree on (sizes, options, that every rank's arguments are right) costs a
collective and a wait on the host. The portable backend has it at every call. The Hopper backend has
it once for every kind of call, when memory has to be made anyway: later calls of that kind are
checked by each rank alone, launch, and can be recorded in a CUDA graph. A rank that refuses such a
call does not launch; its peers wait for it in theirs, until they have waited for as long as
Timeouts.enter says, and name it in an ExchangeError. MOK_CHECK=1 has the collective at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mok import checks
from mok.config import MoKConfig
from mok.engine import canonical_device
from mok.errors import InputError
from mok.hopper.chains import Chain
from mok.hopper.pools import WorkspacePool
from mok.hopper.support import (
    BACKENDS,
    check_backend,
    choose,
    device_problem,
    refuse_capture,
    why_not,
)
from mok.hopper.timeouts import Timeouts, wanted_timeouts


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
        """Wait for earlier calls, then raise_pending. Collective over the group.

        An ExchangeError is raised without the collective, since a peer may be dead.
        """

        def check() -> None:
            self.errors.raise_pending()
            self.pool.check()

        checks.checked("check", check, self.group, self.device)

    def close(self) -> None:
        """Give the Hopper backend's memory back; a later call makes it anew.

        Waits for what was launched. With a group call it on all ranks.
        """
        self.pool.close()

    def meet(self) -> None:
        """Find out, once, whether the group's ranks can share memory. Collective over the group."""
        if self.group is None or self.backend == "portable":
            return
        # Ranks with a GPU ask all, whatever their own could do: all have to be there.
        if self.device.type == "cuda" or device_problem(self.device) is None:
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

    def could_run(self, experts: int) -> bool:
        """Whether some width of so many experts a rank would take the Hopper backend."""
        problem = why_not(
            self.device,
            hidden=self.hidden_size,
            width=64,
            shared_width=0,
            slots=self.topk,
            experts=experts,
            tokens=self.num_local_tokens,
            ranks=self.num_ranks,
        )
        return problem is None

    def check_room(self, experts: int, width: int, shared_width: int, minibatch: int) -> None:
        """Raises InputError when a group's memory is too small for this rank's tokens."""
        if self.group is None:
            return
        from mok.hopper.layout import Sizes
        from mok.hopper.passes import Knobs

        sizes = Sizes(
            max_tokens=self.num_local_tokens,
            slots=self.topk,
            experts=experts,
            hidden=self.hidden_size,
            width=width,
            shared_width=shared_width,
            ranks=self.num_ranks,
        )
        self.pool.check_room(sizes, Knobs(minibatch).segments(width))

    @property
    def may_be_alone(self) -> bool:
        """Whether ranks may check calls by themselves: they meet on the device, in a launch."""
        return (
            self.group is not None
            and self.backend != "portable"
            and device_problem(self.device) is None
            and self.pool.knows_group(self.group)
            and self.pool.group_problem(self.group, self.device) is None
        )

    def agree(
        self,
        call: str,
        kind: tuple[object, ...],
        check: Callable[[], Mapping[str, int] | None],
        settled: Callable[[], bool] | None = None,
    ) -> None:
        """Run a check as checks.checked does, until all ranks agreed on a call of this kind.

        After that on this rank alone. kind: all that has to be equal on the ranks, as far as it can
        be read from arguments that are not checked yet; a call of a known kind that fails fails
        here alone. settled: asked after the check, whether it is the Hopper backend's call (None:
        it is wherever ranks may be alone). MOK_CHECK=1: with all ranks, every time.
        """
        known = (call, self.backend, self.hidden_size, self.topk, *kind)
        if self.may_be_alone and known in self.pool.agreed and not checks.validation_wanted(False):
            checks.checked(call, check, None, self.device)
            return
        if self.group is not None:
            refuse_capture(self.device, "ranks cannot agree on a call")
        checks.checked(call, check, self.group, self.device)
        self.meet()
        if self.may_be_alone and (settled is None or settled()):
            self.pool.agreed.add(known)


_WORKSPACES: dict[tuple[object, ...], Workspace] = {}
_RECORDS: dict[tuple[object, ...], checks.ErrorRecord] = {}
_POOLS: dict[tuple[object, ...], WorkspacePool] = {}
_CHAINS: dict[torch.device, Chain] = {}


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
    timeouts: Timeouts | None = None,
) -> Workspace:
    """A new workspace, not cached. Ranks may differ in num_local_tokens and timeouts only.

    num_local_tokens: 0 is allowed. backend: "auto" takes the Hopper kernels where they can run,
    "hopper" insists, "portable" never does. max_tokens: what the Hopper backend's memory is made
    for at first use. None: num_local_tokens; with a group the largest of any rank at that
    first use, to the next multiple of 1024, and a quarter more if they differ. One rank's memory
    grows by itself, except in a CUDA graph's capture. A group's does not: a later call with more
    tokens is an InputError on its rank, and a larger max_tokens on all ranks lets it grow.
    timeouts: how long its launches wait for peers; None takes MOK_TIMEOUT_ENTER and
    MOK_TIMEOUT_INSIDE (seconds), else 600 s until a peer begins the same launch and 30 s inside.
    Collective. Raises InputError, on all ranks, for a negative or zero size or another backend.
    """
    del config
    where = canonical_device(device)
    pool = WorkspacePool(max_tokens or 0, timeouts, None if group is None else _chain(where))
    made = Workspace(group, where, num_local_tokens, hidden_size, topk, backend=backend, pool=pool)
    checks.checked("workspace", lambda: _facts(made, max_tokens, timeouts), group, where)
    made.meet()
    return made


def _facts(made: Workspace, max_tokens: int | None, timeouts: Timeouts | None) -> Mapping[str, int]:
    """What ranks must agree on; raises InputError for what is not allowed."""
    sizes = {
        "num_local_tokens": made.num_local_tokens,
        "hidden_size": made.hidden_size,
        "topk": made.topk,
    }
    for name, size in sizes.items():
        least = 0 if name == "num_local_tokens" else 1
        if size < least:
            raise InputError(f"{name} = {size}; allowed: {least} or more.")
    check_backend(made.backend)
    if max_tokens is not None and max_tokens < made.num_local_tokens:
        raise InputError(
            f"max_tokens = {max_tokens}; allowed: at least num_local_tokens "
            f"({made.num_local_tokens}), or None."
        )
    wanted_timeouts(timeouts)
    return {
        "hidden_size": made.hidden_size,
        "topk": made.topk,
        "backend": BACKENDS.index(made.backend),
        "max_tokens (0: None)": max_tokens or 0,
    }


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
    timeouts: Timeouts | None = None,
) -> Workspace:
    """The cached workspace of this group, device, shape and backend; made at the first call.

    As create_workspace; where the Hopper backend can run, a call that differs from an earlier one
    in num_local_tokens or timeouts only is no collective. Cached workspaces of one group and device
    share their error record, the Hopper backend's memory, its max_tokens (the largest that was
    given) and its time-outs (the last that were given), whatever their numbers of tokens.
    """
    del config
    where = canonical_device(device)
    place = (group, where)
    record, pool = _RECORDS.get(place), _POOLS.get(place)
    if record is None or pool is None:
        record = checks.ErrorRecord()
        pool = WorkspacePool(chain=None if group is None else _chain(where))
    made = Workspace(group, where, num_local_tokens, hidden_size, topk, record, backend, pool)
    made.agree("workspace", (max_tokens,), lambda: _facts(made, max_tokens, timeouts))
    _RECORDS[place], _POOLS[place] = record, pool
    if max_tokens is not None:
        pool.least_tokens = max(pool.least_tokens, max_tokens)
    if timeouts is not None and timeouts != pool.timeouts:
        pool.set_timeouts(timeouts)
    return _WORKSPACES.setdefault((*place, num_local_tokens, hidden_size, topk, backend), made)


def _chain(device: torch.device) -> Chain:
    """Of all launches of groups on a device, in whichever group and whatever workspace."""
    return _CHAINS.setdefault(device, Chain())


def clear_workspace_cache() -> None:
    """Forget all cached workspaces, their error records, and the Hopper backend's memory.

    Waits for what was launched. With a group on the Hopper backend call it on all ranks that are
    still there: the next call makes the memory anew, together.
    """
    for pool in _POOLS.values():
        pool.close()
    _WORKSPACES.clear()
    _RECORDS.clear()
    _POOLS.clear()
