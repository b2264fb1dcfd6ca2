"""The workspaces that a mok.Workspace uses: one for each shape of layer, made at first use.

It exists because a caller makes one workspace before any weight is known, and because a number of
tokens that grows from step to step must not fail. Memory that a CUDA graph recorded is kept until
the pool is closed. On a CPU a pool stays empty. Refuses to grow inside a capture.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mok.hopper.layout import Segments, Sizes
    from mok.hopper.workspace import HopperWorkspace

_UNIT = 128  # tokens; smaller steps would make new memory for nothing


@dataclass(eq=False)
class WorkspacePool:
    """Hopper workspaces of one group and device. least_tokens: what new ones are made for."""

    least_tokens: int = 0
    _made: dict[tuple[Sizes, Segments], HopperWorkspace] = field(default_factory=dict)
    _kept: list[HopperWorkspace] = field(default_factory=list)
    _group_problem: dict[str, str | None] = field(default_factory=dict)

    def get(
        self,
        sizes: Sizes,
        segments: Segments,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> HopperWorkspace:
        """The workspace of these sizes, made anew when it has room for fewer tokens.

        sizes.max_tokens: of this call, agreed on by all ranks. Collective when it has to be made.
        """
        key = (dataclasses.replace(sizes, max_tokens=0), segments)
        found = self._made.get(key)
        if found is not None and found.sizes.max_tokens >= sizes.max_tokens:
            return found
        least = max(sizes.max_tokens, self.least_tokens)
        if found is not None:
            if group is None:
                found.check()  # what it has to say would go with it
            least = max(least, found.sizes.max_tokens * 5 // 4)
        tokens = -(-least // _UNIT) * _UNIT
        while tokens > least and not _fits(sizes, tokens):
            tokens = max(least, tokens - _UNIT)
        made = _open(dataclasses.replace(sizes, max_tokens=tokens), segments, group, device)
        if found is not None:
            if found.captured:
                self._kept.append(found)
            else:
                found.close()
        self._made[key] = made
        return made

    def group_problem(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        """Why the group's ranks cannot share memory; collective at the first call, then known."""
        name = str(group.group_name)
        if name not in self._group_problem:
            from mok.hopper.symmetric import group_problem

            self._group_problem[name] = group_problem(group, device)
        return self._group_problem[name]

    @property
    def nbytes(self) -> int:
        """Device bytes of all workspaces."""
        return sum(made.nbytes for made in (*self._made.values(), *self._kept))

    def raise_pending(self) -> None:
        """Raises what earlier launches left; see HopperWorkspace.raise_pending."""
        for made in self._made.values():
            made.raise_pending()

    def check(self) -> None:
        """As raise_pending, after all launches ended."""
        for made in self._made.values():
            made.check()

    def close(self) -> None:
        """Gives all memory back; the next call makes it anew. Graphs that recorded it are void."""
        for made in (*self._made.values(), *self._kept):
            made.close()
        self._made.clear()
        self._kept.clear()


def _fits(sizes: Sizes, tokens: int) -> bool:
    from mok.hopper.layout import size_problem

    return size_problem(**{**dataclasses.asdict(sizes), "max_tokens": tokens}) is None


def _open(
    sizes: Sizes, segments: Segments, group: dist.ProcessGroup | None, device: torch.device
) -> HopperWorkspace:
    if group is None or sizes.ranks == 1:
        from mok.hopper.workspace import open_workspace

        return open_workspace(sizes, device, segments=segments)
    from mok.hopper.symmetric import open_symmetric

    return open_symmetric(sizes, group, device, segments=segments)
