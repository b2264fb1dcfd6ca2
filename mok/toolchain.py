"""What compiles and loads the kernels: packages, versions and the flags that decide their bits.

The CUDA packages are an extra. Nothing here imports them before a function is called, so `mok` and
`verify` work without them; a function that needs one says which package is missing and how to get
it. The flags stand in one constant because a result may depend on each of them: they go into the
environment record of every result. Refuses fast math: no kernel may ask for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mok.errors import MoKError

INSTALL = 'pip install "mok-verify[cuda]"'
PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")

# fma: a*b+c rounds once wherever the compiler contracts it, the same in every build of one NVRTC.
# ftz off keeps denormals, prec_div and prec_sqrt are IEEE division and root.
NUMERICS: Mapping[str, bool] = MappingProxyType(
    {"fma": True, "ftz": False, "prec_div": True, "prec_sqrt": True, "use_fast_math": False}
)
STANDARD = "c++17"
_FIRST_WITH: Mapping[str, int] = MappingProxyType({"": 0, "a": 90, "f": 100})


class JitError(MoKError, RuntimeError):
    """A kernel could not be compiled, loaded or launched; the message says what to do."""


class CompilerMissing(JitError):
    """A CUDA package or a library of NVRTC is not installed, or cannot be loaded."""


class DeviceMissing(JitError):
    """There is no CUDA device or driver here, or not the one that was asked for."""


class ArchitectureUnsupported(JitError):
    """The compiler does not know this architecture, or the kernel does not run on it."""


class SourceMissing(JitError):
    """There is no such kernel source, or no such entry in it."""


class CompilationFailed(JitError):
    """NVRTC rejected a source. `log` is all that it said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions cross processes by pickle, which would call this class with one argument."""
        return (type(self), (str(self), self.log))


class LoadFailed(JitError):
    """The driver refused a compiled kernel."""


class LaunchFailed(JitError):
    """The driver refused a launch, or its arguments do not fit the kernel."""


def cuda_module(name: str) -> Any:
    """`cuda.core`, `cuda.core.utils`, `cuda.bindings.driver` or `cuda.bindings.nvrtc`.

    Raises CompilerMissing if the package is not installed or cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = "cuda-bindings" if name.startswith("cuda.bindings") else "cuda-core"
        raise CompilerMissing(
            f"kernels are compiled and launched through {package}, and {name} cannot be imported "
            f"({error}). Do: {INSTALL}"
        ) from error


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC library that is loaded here.

    Raises CompilerMissing if there is none.
    """
    nvrtc = cuda_module("cuda.bindings.nvrtc")
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        # cuda-pathfinder's DynamicLibNotFoundError is one; so is a symbol that is too new.
        first = str(error).strip().splitlines()[:1]
        raise CompilerMissing(
            f"the compiler library NVRTC cannot be loaded ({''.join(first)}). Do: {INSTALL}"
        ) from error
    if int(status) != 0:
        raise CompilerMissing(f"NVRTC does not say its version: {status}. Do: {INSTALL}")
    return int(major), int(minor)


@functools.cache
def known_architectures() -> tuple[int, ...]:
    """Numbers such as 90 that this NVRTC can compile for, ascending."""
    nvrtc_version()
    status, numbers = cuda_module("cuda.bindings.nvrtc").nvrtcGetSupportedArchs()
    if int(status) != 0:
        raise CompilerMissing(f"NVRTC does not list its architectures: {status}. Do: {INSTALL}")
    return tuple(sorted(int(number) for number in numbers))


def check_architecture(arch: str) -> None:
    """Raises ArchitectureUnsupported unless `arch` is like "sm_90a" and known to this NVRTC."""
    shape = re.fullmatch(r"sm_([0-9]{2,3})([af]?)", arch)
    known = known_architectures()
    if (
        shape is None
        or int(shape.group(1)) not in known
        or int(shape.group(1)) < _FIRST_WITH[shape.group(2)]
    ):
        listed = ", ".join(f"sm_{number}" for number in known)
        version = ".".join(map(str, nvrtc_version()))
        raise ArchitectureUnsupported(
            f"NVRTC {version} cannot compile for {arch!r}; it knows {listed}, each from sm_90 on "
            "also with the suffix a (features of exactly that architecture), as in sm_90a, and "
            "from sm_100 on with f (features of its family)"
        )


def record() -> dict[str, object]:
    """JSON-ready facts for an environment record: package versions and flags. Loads no library."""
    return {
        **{name.replace("-", "_"): package_version(name) for name in PACKAGES},
        "standard": STANDARD,
        "numerics": dict(NUMERICS),
    }


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
