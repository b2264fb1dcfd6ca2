"""Where a case's tensors lie, and how ranks on GPUs talk to each other.

A device is written `cpu`, `cuda` or `cuda:N`; an empty name leaves every tensor where the case puts
it. On `cuda` rank r has GPU r of its machine. What the tool says to itself travels over gloo and
the store, from the CPU; tensors of the case travel over NCCL, unless ranks share a GPU, which NCCL
refuses: then gloo moves them too, for cases that say that this works for them.

Nothing here makes a CUDA context except `enter`, which runs in the process that executes. What it
changes, the current device, is put back by its callers (`current`, `restore`): the next case, and
what the caller does afterwards, must not depend on which cases ran before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from verify.errors import CaseError

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"cpu|cuda(?::(0|[1-9][0-9]?))?")


def parse(name: str) -> tuple[str, int | None]:
    """`cuda:1` as ("cuda", 1). Raises CaseError for anything but cpu, cuda and cuda:N."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise CaseError(f"device {name!r}; allowed are cpu, cuda and cuda:N, such as cuda:1")
    return name.partition(":")[0], None if found.group(1) is None else int(found.group(1))


def count() -> int:
    """CUDA devices that this process may use; 0 where torch sees none."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def missing_device(device: str) -> str | None:
    """Why nothing can run on `device` here, or None."""
    import torch

    if not device or parse(device)[0] == "cpu":
        return None
    present, (_, index) = count(), parse(device)
    if present == 0:
        built = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        return (
            f"device {device} is asked for, but torch sees no CUDA device here{built}; "
            "run it on a machine with one, or use --device cpu"
        )
    if index is not None and index >= present:
        return (
            f"device {device} is asked for, but there are {present} CUDA devices here; "
            f"allowed are cuda and cuda:0 to cuda:{present - 1}"
        )
    return None


def too_many_ranks(device: str, ranks: int, *, shared: bool = False) -> str | None:
    """Why that many ranks of this machine cannot run on `device`, which is here; or None.

    shared: the case allows several ranks on one GPU.
    """
    if not device or ranks == 1 or shared:
        return None
    kind, index = parse(device)
    if kind == "cpu":
        return None
    if index is not None:
        return (
            f"{ranks} ranks cannot all be on {device}, since NCCL wants a GPU for each; "
            "use --device cuda, where rank r has GPU r, or --ranks 1"
        )
    present = count()
    if ranks > present:
        return (
            f"{ranks} ranks on cuda need {ranks} CUDA devices, {present} are here; use --ranks "
            f"{present}, or shares_gpu=True in a case whose collectives work over gloo"
        )
    return None


def enter(device: str, rank: int, world: int) -> torch.device | None:
    """The device of this rank, made the current one of this process; None for an empty name.

    One rank alone has the current CUDA device. Ranks of several machines go by LOCAL_RANK. Raises
    CaseError when the device is not here.
    """
    import torch

    if not device:
        return None
    kind, index = parse(device)
    if kind == "cpu":
        return torch.device("cpu")
    if (lacking := missing_device(device)) is not None:
        raise CaseError(lacking)
    if index is None:
        local = int(os.environ.get("LOCAL_RANK", rank))
        index = local % max(count(), 1) if world > 1 else torch.cuda.current_device()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def current() -> int | None:
    """torch's current CUDA device; None before CUDA is in use, when the first one will be."""
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def restore(index: int | None) -> None:
    """Makes the device current again that `current` gave."""
    import torch

    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # after a CUDA error nothing runs on any device any more
            torch.cuda.set_device(index or 0)


def backend(devices: Iterable[str], local_ranks: int) -> str:
    """What torch.distributed.init_process_group takes, for ranks that run cases on `devices`.

    With both backends in one group, objects and CPU tensors travel over gloo, CUDA tensors over
    NCCL, whose communicator is made when the first of them does.
    """
    named = [parse(device) for device in devices if device]
    indices = {index for kind, index in named if kind == "cuda"}
    own = indices == {None} and local_ranks <= count()
    return "cpu:gloo,cuda:nccl" if own else "gloo"
