"""A CUDA source becomes a cubin: through NVRTC in this process, without nvcc, without a GPU.

Kernels are `extern "C"` and specialised by macros, so that a name is a name. The flags of
`mok.toolchain.NUMERICS` hold for all of them. What was compiled before comes from the cache on
disk, with the log that it had. Refuses to return a cubin without knowing its registers and spills.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mok import compile_cache, kernel_sources, kernels, ptxas_log
from mok.ptxas_log import Resources
from mok.toolchain import (
    INSTALL,
    NUMERICS,
    STANDARD,
    ArchitectureUnsupported,
    CompilationFailed,
    CompilerMissing,
    JitError,
    check_architecture,
    cuda_module,
    nvrtc_version,
)

_ERROR = re.compile(r"\berror\b\s*(?:#\S+\s*)?:|^ptxas (?:fatal|error)")
_SHOWN_ERRORS = 3
_SHOWN_WIDTH = 160


@dataclass(frozen=True)
class Compiled:
    """One compiled source. seconds: what NVRTC took, also if it was an earlier process.

    macros: name and value pairs, sorted. cached: whether the cubin came from disk.
    """

    source: str
    arch: str
    macros: tuple[tuple[str, str], ...]
    cubin: bytes
    log: str
    seconds: float
    cached: bool
    resources: tuple[Resources, ...]


def compile_source(
    source: str,
    *,
    arch: str,
    macros: Mapping[str, int | str] | None = None,
    cache: bool = True,
) -> Compiled:
    """Compiles `source`, a path relative to `source_root()`, for `arch` such as "sm_90a".

    Includes in quotes are relative to the same folder. Needs no GPU. `cache=False` neither reads
    nor writes the cache. Raises CompilerMissing, ArchitectureUnsupported, SourceMissing, JitError
    (a macro that cannot be one, a source that cannot be read) or CompilationFailed, which carries
    the log.
    """
    defined = _checked_macros(macros or {})
    text = kernel_sources.read_source(source)
    check_architecture(arch)
    needs = kernels.needed_architectures(source, macros or {})
    if needs and arch not in needs:
        raise ArchitectureUnsupported(
            f"{source} uses instructions of {' and '.join(needs)} and does not exist for {arch}; "
            f"compile it for {' or '.join(needs)}"
        )
    options = _options(source, arch, defined)
    key = _cache_key(source, text, options) if cache else None
    entry = compile_cache.fetch(key) if key is not None else None
    cached = entry is not None
    if entry is None:
        entry = _compile(source, text, options)
        if key is not None:
            compile_cache.keep(key, entry)
    try:
        resources = ptxas_log.parse_resources(entry.log)
    except ValueError as error:
        raise CompilationFailed(
            f'{source} compiled for {arch}, but {error}. Does it hold an extern "C" kernel?',
            entry.log,
        ) from error
    return Compiled(
        source=source,
        arch=arch,
        macros=defined,
        cubin=entry.cubin,
        log=entry.log,
        seconds=entry.seconds,
        cached=cached,
        resources=resources,
    )


def _checked_macros(macros: Mapping[str, int | str]) -> tuple[tuple[str, str], ...]:
    """Sorted pairs of strings; an int is written in decimal, True and False as 1 and 0."""
    for name, value in macros.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise JitError(f"{name!r} cannot be a macro; it must be an identifier of C")
        if not isinstance(value, int | str):
            raise JitError(
                f"macro {name} is {value!r}; it must be an int or a str. "
                "A float goes in as text, so that its digits are chosen: '1.5f'"
            )
    return tuple(
        (name, str(int(value) if isinstance(value, int) else value))
        for name, value in sorted(macros.items())
    )


def _options(source: str, arch: str, macros: tuple[tuple[str, str], ...]) -> Any:
    return cuda_module("cuda.core").ProgramOptions(
        name=source,
        arch=arch,
        std=STANDARD,
        define_macro=list(macros) or None,
        include_path=[str(kernel_sources.source_root())],
        # A quoted include never means a file beside the working directory.
        no_source_include=True,
        # Line numbers for profilers and the sanitizer; the machine code is the same without.
        lineinfo=True,
        ptxas_options=["-v"],
        # On a machine with a driver NVRTC keeps machine code of its own, and a hit has no log: no
        # registers, no spills. What is worth keeping is in `mok.compile_cache`, with its log.
        no_cache=True,
        **NUMERICS,
    )


def _cache_key(source: str, text: str, options: Any) -> bytes:
    """cuda-core's key (code, options, NVRTC version) over the content of all included files."""
    nvrtc_version()  # a missing library is named here, before cuda-core meets it
    key = cuda_module("cuda.core.utils").make_program_cache_key(
        code=text,
        code_type="c++",
        options=options,
        target_type="cubin",
        extra_digest=kernel_sources.source_digest(source),
    )
    return bytes(key)


def _compile(source: str, text: str, options: Any) -> compile_cache.Entry:
    nvrtc_version()
    log = io.StringIO()
    start = time.perf_counter()
    try:
        code = cuda_module("cuda.core").Program(text, "c++", options).compile("cubin", logs=log)
    except Exception as error:  # NVRTCError derives from Exception alone and has no public name
        said = _clean(str(error))
        if "compilation log" not in said:
            raise CompilerMissing(
                f"NVRTC does not work here: {said.splitlines()[0]}. Do: {INSTALL}"
            ) from error
        raise CompilationFailed(_failure(source, options.arch, said), said) from None
    seconds = time.perf_counter() - start
    return compile_cache.Entry(bytes(code.code), _clean(log.getvalue()), seconds)


def _clean(log: str) -> str:
    """NVRTC's logs hold NUL bytes."""
    return log.replace("\0", "").strip() + "\n"


def _failure(source: str, arch: str, log: str) -> str:
    """The first errors, each with the line of the source that the compiler shows below it."""
    lines = log.splitlines()
    shown = []
    for number, line in enumerate(lines):
        if _ERROR.search(line):
            shown.append(line.strip()[:_SHOWN_WIDTH])
            follows = lines[number + 1].strip() if number + 1 < len(lines) else ""
            if follows and not follows.startswith("^"):
                shown.append(f"  {follows[:_SHOWN_WIDTH]}")
        if sum(1 for text in shown if not text.startswith("  ")) == _SHOWN_ERRORS:
            break
    told = shown or [line for line in lines if line.strip()][:_SHOWN_ERRORS]
    return "\n".join([f"{source} does not compile for {arch}; the whole log is in .log", *told])
