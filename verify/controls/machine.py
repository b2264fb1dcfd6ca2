"""What this machine lacks for a control, in words: never a silent skip.

A control that cannot run here is reported by name as not run. The rest is judged without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec

from verify.controls.planting import Control


def _lacks_cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA device"
    try:
        found = find_spec("cuda.core")
    except ModuleNotFoundError:
        found = None
    return "" if found else "needs cuda-core: pip install 'mok-verify[cuda]'"


NEEDS: Mapping[str, Callable[[], str]] = {"": lambda: "", "cuda": _lacks_cuda}
"""What a control may need -> what this machine lacks for it; an empty text is nothing."""


def lacking(control: Control) -> str:
    """What this machine lacks for a control, such as `needs a CUDA device`; empty if nothing."""
    return NEEDS[control.needs]()


def parted(controls: Iterable[Control]) -> tuple[list[Control], dict[str, str]]:
    """The controls that can run here, and by name what is lacking for the others."""
    here: list[Control] = []
    left_out: dict[str, str] = {}
    for control in controls:
        why = lacking(control)
        if why:
            left_out[control.name] = why
        else:
            here.append(control)
    return here, left_out
