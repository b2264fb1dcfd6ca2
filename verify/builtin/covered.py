"""The files of `mok` that the built-in cases execute, so that a change in one of them affects them.

They are found where `mok` is imported from, which need not be the current folder. A test compares
the names with the modules that a case really loads on a CPU. ON_GPU is what the Hopper backend is
made of, for the cases that run it on a GPU: a result from there has to have another source digest
when its kernels are others. Most built-in cases are not among them, since the kernel takes
multiples of 64 and their widths are odd ones on purpose. A gate that runs on a CPU shows nothing of
those files, so ci/gate.toml exempts them and says who runs them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_LAYER = (
    "__init__",
    "activations",
    "agreement",
    "autocast",
    "checks",
    "config",
    "dispatch",
    "engine",
    "errors",
    "hopper/__init__",
    "hopper/chains",
    "hopper/layout",
    "hopper/pools",
    "hopper/records",
    "hopper/support",
    "hopper/timeouts",
    "layer",
    "operator_shapes",
    "operators",
    "portable",
    "stages",
    "tiles",
    "workspaces",
)
_REFERENCE = ("deviations", "reference")
_EXACT = ("exact",)
_ON_GPU = (
    "hopper/backward",
    "hopper/backward_layout",
    "hopper/backward_memory",
    "hopper/backward_packing",
    "hopper/backward_problem",
    "hopper/forward",
    "hopper/gradient_records",
    "hopper/maps",
    "hopper/packing",
    "hopper/passes",
    "hopper/saved",
    "hopper/symmetric",
    "hopper/tuned",
    "hopper/workspace",
    "main_gradients",
)
_KERNELS = ("moe/*.cu", "moe/*.cuh", "moe/backward/*.cuh", "ptx.cuh")
"""In the folder of CUDA sources: that of a checkout, or the one inside the installed package."""


def _packages() -> tuple[Path, ...]:
    spec = find_spec("mok")
    return tuple(Path(place) for place in (spec.submodule_search_locations if spec else None) or ())


def _files(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(place / f"{name}.py") for place in _packages() for name in names)


def _kernels() -> tuple[str, ...]:
    folders = [
        folder for place in _packages() for folder in (place / "csrc", place.parent / "csrc")
    ]
    root = next((folder for folder in folders if folder.is_dir()), None)
    found = [path for pattern in _KERNELS if root is not None for path in root.glob(pattern)]
    return tuple(sorted(map(str, found)))


ON_GPU = (*_files(_ON_GPU), *_kernels())
LAYER = _files(_LAYER)
WITH_REFERENCE = (*LAYER, *_files(_REFERENCE))
WITH_EXACT_CASES = (*WITH_REFERENCE, *_files(_EXACT))
