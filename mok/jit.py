"""Kernels at first use: a CUDA source is compiled by NVRTC, kept on disk, loaded and launched.

    kernel = load("digest/digest.cu", "digest_words", macros={"WIDTH": 4})
    kernel.launch(words, out, ctypes.c_uint64(words.numel()), grid=132, block=256)

There is no build step and no nvcc. This module is the way in; the parts are `mok.compilation`
(source to cubin, needs no GPU), `mok.compile_cache`, `mok.loading`, `mok.launching` and
`mok.toolchain` (packages, flags, errors). The kernels themselves are listed in `mok.kernels`.
"""

from __future__ import annotations

from mok.compilation import Compiled, compile_source
from mok.compile_cache import cache_folder
from mok.kernel_sources import source_root
from mok.launching import Kernel, PreparedLaunch
from mok.loading import architecture, load
from mok.ptxas_log import Resources
from mok.toolchain import (
    NUMERICS,
    ArchitectureUnsupported,
    CompilationFailed,
    CompilerMissing,
    DeviceMissing,
    JitError,
    LaunchFailed,
    LoadFailed,
    SourceMissing,
    record,
)

__all__ = [
    "NUMERICS",
    "ArchitectureUnsupported",
    "CompilationFailed",
    "Compiled",
    "CompilerMissing",
    "DeviceMissing",
    "JitError",
    "Kernel",
    "LaunchFailed",
    "LoadFailed",
    "PreparedLaunch",
    "Resources",
    "SourceMissing",
    "architecture",
    "cache_folder",
    "compile_source",
    "load",
    "record",
    "source_root",
]
