"""A mixture-of-experts layer that gives the same bits every time.

`mok.MoE` is the module, `mok.moe` the function, `mok.functional` the pieces, `mok.MoKConfig` the
knobs. Names are loaded at first use, so that `import mok` does not import torch. No submodule is
called like one of them, since importing it would hide the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mok import functional as functional
    from mok.config import MoKConfig as MoKConfig
    from mok.layer import MoE as MoE
    from mok.layer import moe as moe

_HOMES = {"MoE": "mok.layer", "moe": "mok.layer", "MoKConfig": "mok.config"}
__all__ = ["MoE", "MoKConfig", "functional", "moe"]


def __getattr__(name: str) -> object:
    if name == "functional":
        return importlib.import_module("mok.functional")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mok' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
