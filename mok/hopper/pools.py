"""The workspaces that a mok.Workspace uses: one for each shape of layer, made at first use.

It exists because a caller makes one workspace before any weight is known, and because a number of
tokens that grows from step to step must not fail. With a group, memory is made by all ranks
together, at the first call of a shape, for the largest number of tokens of any rank then; after
that a call with more is an error of that rank, since growing would have to ask all others at every
call, and grows again only where all say so: get_workspace with a larger max_tokens. Memory that a
CUDA graph recorded is kept until the pool is closed. On a CPU a pool stays empty. Refuses to grow
inside a capture.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mok import checks
from mok.errors import InputError
from mok.hopper.chains import Chain
from mok.hopper.support import refuse_capture
from mok.hopper.timeouts import Timeouts

if TYPE_CHECKING:
    from mok.hopper.backward_memory import BackwardMemory
    from mok.hopper.layout import Segments, Sizes
    from mok.hopper.tuned import Choice
    from mok.hopper.workspace import HopperWorkspace

_UNIT = 128  # tokens; smaller steps would make new memory for nothing
_UNIT_OF_GROUPS = 1024  # larger, since running out of room is an error there


@dataclass(eq=False)
class WorkspacePool:
    """Hopper workspaces of one group and device.

    least_tokens: what they are made for at least; with a group the same on all ranks. timeouts:
    None takes the environment's. chain: of launches with peers; None gives each workspace its own.
    agreed: kinds of calls that all ranks of the group have agreed on, for mok.workspaces.
    """

    least_tokens: int = 0
    timeouts: Timeouts | None = None
    chain: Chain | None = None
    agreed: set[tuple[object, ...]] = field(default_factory=set)
    _made: dict[tuple[Sizes, Segments], HopperWorkspace] = field(default_factory=dict)
    _kept: list[HopperWorkspace] = field(default_factory=list)
    _group_problem: dict[str, str | None] = field(default_factory=dict)
    _tuned: dict[Sizes, Choice | None] = field(default_factory=dict)

    def tuned(self, sizes: Sizes, device: torch.device) -> Choice | None:
        """Knobs that a table has for these sizes; None if it says nothing.

        The first call's tokens decide for all later ones, or max_tokens if that is more: other
        segments for other tokens would need a second workspace, which a capture cannot make.
        """
        key = dataclasses.replace(sizes, max_tokens=0)
        if key not in self._tuned:
            from mok.hopper.tuned import knobs_for

            tokens = max(sizes.max_tokens, self.least_tokens)
            gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            self._tuned[key] = knobs_for(gpu, dataclasses.replace(key, max_tokens=tokens))
        return self._tuned[key]

    def get(
        self,
        sizes: Sizes,
        segments: Segments,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> HopperWorkspace:
        """The workspace of these sizes, made anew when it has room for fewer tokens.

        sizes.max_tokens: of this rank's call. With a group, collective when it has to be made: at
        the first call of these sizes, and after max_tokens grew. Raises what check_room does.
        """
        key = (dataclasses.replace(sizes, max_tokens=0), segments)
        found = self._made.get(key)
        if group is not None:
            self.check_room(sizes, segments)
        wanted = sizes.max_tokens if group is None else self.least_tokens
        if found is not None and found.sizes.max_tokens >= wanted:
            return found
        refuse_capture(device)
        if found is not None:  # what it has to say would go with it
            checks.checked("check", found.check, group, device)
        if group is None:
            least = max(sizes.max_tokens, self.least_tokens)
            if found is not None:
                least = max(least, found.sizes.max_tokens * 5 // 4)
            tokens = _rounded(sizes, least, _UNIT)
        else:
            from mok.hopper.symmetric import agree_range

            tokens = room_of_group(
                sizes, *agree_range(group, device, sizes.max_tokens), self.least_tokens
            )
        made = _open(
            dataclasses.replace(sizes, max_tokens=tokens),
            segments,
            group,
            device,
            self.timeouts,
            self.chain,
        )
        if found is not None:
            if found.captured:
                self._kept.append(found)
            else:
                found.close()
        self._made[key] = made
        return made

    def check_room(self, sizes: Sizes, segments: Segments) -> None:
        """Raises InputError when a group's memory has no room for sizes.max_tokens tokens.

        Memory that is yet to be made, or to be made larger, at this call has.
        """
        found = self._made.get((dataclasses.replace(sizes, max_tokens=0), segments))
        if found is None or found.sizes.max_tokens < self.least_tokens:
            return
        if sizes.max_tokens > found.sizes.max_tokens:
            raise InputError(
                f"T = {sizes.max_tokens}; allowed: up to {found.sizes.max_tokens}, which the "
                "group's memory was made for: its ranks share it, so one alone cannot make it "
                "larger. Call mok.functional.get_workspace(..., max_tokens=N) on all ranks, with "
                "one N that is enough for all, before the first call that needs it."
            )

    def set_timeouts(self, timeouts: Timeouts) -> None:
        """For all launches from now on; a graph keeps those that it recorded."""
        self.timeouts = timeouts
        for key, made in self._made.items():
            self._made[key] = dataclasses.replace(made, timeouts=timeouts)

    def knows_group(self, group: dist.ProcessGroup) -> bool:
        """Whether group_problem was asked before, so that asking again is no collective."""
        return str(group.group_name) in self._group_problem

    def group_problem(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        """Why the group's ranks cannot share memory; collective at the first call, then known."""
        name = str(group.group_name)
        if name not in self._group_problem:
            from mok.hopper.symmetric import group_problem

            refuse_capture(device)
            self._group_problem[name] = group_problem(group, device)
        return self._group_problem[name]

    @property
    def nbytes(self) -> int:
        """Device bytes of all workspaces."""
        return sum(made.nbytes for made in (*self._made.values(), *self._kept))

    def raise_pending(self) -> None:
        """Raises what earlier launches left; see HopperWorkspace.raise_pending.

        Bad ids of a group's launches are raised by the next launch, once it is under way: a rank
        that raised before would keep its peers waiting.
        """
        for made in (*self._made.values(), *self._kept):
            if made.sizes.ranks == 1:
                made.raise_pending()
            else:
                made.raise_failed()

    def check(self) -> None:
        """As raise_pending, after all launches ended."""
        for made in (*self._made.values(), *self._kept):
            made.check()

    def close(self) -> None:
        """Gives all memory back; the next call makes it anew. Graphs that recorded it are void."""
        for made in (*self._made.values(), *self._kept):
            made.close()
        self._made.clear()
        self._kept.clear()
        self.agreed.clear()
        self._tuned.clear()


def room_of_group(sizes: Sizes, fewest: int, most: int, said: int) -> int:
    """Tokens to make a group's memory for. fewest, most: of the ranks' calls. said: max_tokens.

    Who said enough gets that. Otherwise it is a multiple of 1024, and a quarter more where the
    ranks' numbers differ: they follow the data then, and the next step's may be larger. Where they
    are equal they are a setting of the training, and a quarter of y and x would be for nothing.
    """
    if said >= most and said > 0:
        return _rounded(sizes, said, _UNIT)
    wanted = most if fewest == most else most * 5 // 4
    tokens = _rounded(sizes, max(1, wanted), _UNIT_OF_GROUPS)
    return tokens if _fits(sizes, tokens) else _rounded(sizes, max(1, most), _UNIT)


def _rounded(sizes: Sizes, least: int, unit: int) -> int:
    """At least `least`, and a multiple of the unit where the kernels' words hold that."""
    tokens = -(-least // unit) * unit
    while tokens > least and not _fits(sizes, tokens):
        tokens = max(least, tokens - _UNIT)
    return tokens


def _fits(sizes: Sizes, tokens: int) -> bool:
    from mok.hopper.layout import size_problem

    return size_problem(**{**dataclasses.asdict(sizes), "max_tokens": tokens}) is None


def _open(
    sizes: Sizes,
    segments: Segments,
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeouts: Timeouts | None,
    chain: Chain | None,
) -> HopperWorkspace:
    if group is None or sizes.ranks == 1:
        from mok.hopper.workspace import open_workspace

        return open_workspace(sizes, device, segments=segments, timeouts=timeouts)
    from mok.hopper.symmetric import open_symmetric

    return open_symmetric(sizes, group, device, segments=segments, timeouts=timeouts, chain=chain)


def ensure_backward(
    workspace: HopperWorkspace,
    group: dist.ProcessGroup | None = None,
    *,
    segments: Segments | None = None,
) -> BackwardMemory:
    """The workspace's memory for backwards, made if it has none yet.

    group: of its ranks, None for one rank alone; with a group the first call is collective.
    segments: of the first call, None for the default. Raises what making a workspace does, and
    InputError inside a capture unless the memory is there.
    """
    found = workspace.backward
    if found is not None:
        return found
    from mok.hopper import backward_memory

    workspace.raise_failed()
    refuse_capture(workspace.device, backward_memory.REFUSED)
    if workspace.sizes.ranks > 1:
        if group is None:
            raise InputError(
                f"a workspace of {workspace.sizes.ranks} ranks without a group; allowed: the group "
                "it was made with. Pass it."
            )
        from mok.hopper.symmetric import open_symmetric_backward

        return open_symmetric_backward(workspace, group, segments=segments)
    made = backward_memory.open_backward(workspace, segments)
    workspace.keep_backward(made)
    return made
