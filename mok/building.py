"""Compiles every kernel of the catalogue, without a GPU, and says what is wrong with the result.

A kernel that spills registers, or whose wgmma instructions were serialised, is right and slow;
nobody would notice. So a spill, a warning of ptxas or a loss of speed that it announces is a
finding, and so is a source that does not compile or does not hold the kernels that the catalogue
names. NVRTC compiles one program at a time in a process, so each core gets a process. Refuses to
call it clean when nothing was compiled.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any

from mok import compile_cache, kernels, ptxas_log
from mok.compilation import Compiled, compile_source
from mok.kernels import Variant
from mok.ptxas_log import Resources
from mok.toolchain import (
    CompilationFailed,
    JitError,
    check_architecture,
    nvrtc_version,
    record,
)


@dataclass(frozen=True)
class Built:
    """What came of one variant for one architecture.

    findings: why it is not clean, in sentences. notes: what the front end warned of, which is no
    finding. allowed: why findings are expected (a planted fault), else "". seconds: of NVRTC.
    """

    variant: Variant
    arch: str
    resources: tuple[Resources, ...] = ()
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    cached: bool = False

    @property
    def allowed(self) -> str:
        """Why findings are expected here, or ""."""
        return self.variant.planted

    @property
    def clean(self) -> bool:
        """Whether nothing was found, or what was found is planted."""
        return not self.findings or bool(self.allowed)


@dataclass(frozen=True)
class Build:
    """All that was compiled; skipped are the variants that do not exist for an architecture."""

    built: tuple[Built, ...]
    skipped: tuple[tuple[Variant, str], ...]

    @property
    def clean(self) -> bool:
        """Whether something was compiled and all of it is clean."""
        return bool(self.built) and all(one.clean for one in self.built)


def build(
    architectures: Sequence[str],
    *,
    cache: bool = True,
    jobs: int | None = None,
    catalogue: Sequence[Variant] | None = None,
    progress: Callable[[Built], None] | None = None,
) -> Build:
    """Compiles each variant of a catalogue for each of `architectures`, such as ("sm_90a",).

    catalogue: None is all kernels that exist. jobs: processes, None is one per core; 1 compiles in
    this process. progress: called after each, in the order of the catalogue. Raises
    CompilerMissing, ArchitectureUnsupported, SourceMissing, or JitError if the compiler dies.
    """
    catalogue = kernels.CATALOGUE if catalogue is None else catalogue
    for arch in architectures:
        check_architecture(arch)
    asked = [(variant, arch) for arch in dict.fromkeys(architectures) for variant in catalogue]
    skipped = tuple(pair for pair in asked if _skips(*pair))
    work = [(*pair, cache) for pair in asked if not _skips(*pair)]
    if cache:
        compile_cache.open_cache()  # says here what each process would say again
    built = []
    for one in _results(work, jobs if jobs is not None else _cores()):
        built.append(one)
        if progress is not None:
            progress(one)
    return Build(tuple(built), skipped)


def describe_build(result: Build) -> dict[str, object]:
    """JSON-ready: the compiler, one row per kernel, what was skipped, and whether all is clean."""
    return {
        "clean": result.clean,
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "toolchain": record(),
        "kernels": list_rows(result),
        "findings": [
            {"variant": one.variant.name, "arch": one.arch, "finding": finding}
            | ({"allowed": one.allowed} if one.allowed else {})
            for one in result.built
            for finding in one.findings
        ],
        "notes": [
            {"variant": one.variant.name, "arch": one.arch, "note": note}
            for one in result.built
            for note in one.notes
        ],
        "skipped": [
            {"variant": variant.name, "arch": arch, "needs": list(variant.needs)}
            for variant, arch in result.skipped
        ],
    }


def list_rows(result: Build) -> list[dict[str, Any]]:
    """One row per kernel; sizes in bytes, seconds of the compilation that all its kernels share."""
    return [
        {
            "source": one.variant.source,
            "kernel": found.entry,
            "macros": " ".join(f"{name}={value}" for name, value in one.variant.macros),
            "arch": one.arch,
            **{key: value for key, value in asdict(found).items() if key != "entry"},
            "dynamic_shared": one.variant.dynamic_shared,
            "seconds": round(one.seconds, 3),
            "cached": one.cached,
        }
        for one in result.built
        for found in one.resources
    ]


def judge(variant: Variant, compiled: Compiled) -> tuple[str, ...]:
    """Findings about one compilation, in sentences; empty when it is clean."""
    findings = [
        f"{one.entry} spills: {one.spill_stores} bytes stored, {one.spill_loads} loaded"
        for one in compiled.resources
        if one.spills
    ]
    findings += ptxas_log.find_advisories(compiled.log)
    present = {one.entry for one in compiled.resources}
    findings += [
        f"the catalogue names the kernel {entry}, which the source does not have"
        for entry in variant.entries
        if entry not in present
    ]
    findings += [
        f"the source has the kernel {entry}, which the catalogue does not name"
        for entry in sorted(present - set(variant.entries))
    ]
    return tuple(findings)


def _skips(variant: Variant, arch: str) -> bool:
    return bool(variant.needs) and arch not in variant.needs


def _results(work: list[tuple[Variant, str, bool]], jobs: int) -> Iterator[Built]:
    if jobs <= 1 or len(work) <= 1:
        yield from map(_build_one, work)
        return
    # A fresh interpreter, since a fork would copy locks of libraries that are loaded here.
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(
            min(jobs, len(work)), mp_context=spawn, initializer=_keep_quiet
        ) as pool:
            yield from pool.map(_build_one, work)
    except BrokenProcessPool as error:
        raise JitError(
            "a process that compiled kernels died, for want of memory or by a fault of the "
            "compiler; find the kernel with `mok build --jobs 1`"
        ) from error


def _keep_quiet() -> None:
    logging.getLogger("mok").setLevel(logging.ERROR)


def _build_one(work: tuple[Variant, str, bool]) -> Built:
    variant, arch, cache = work
    try:
        compiled = compile_source(
            variant.source, arch=arch, macros=dict(variant.macros), cache=cache
        )
    except CompilationFailed as error:
        return Built(variant, arch, findings=(str(error),))
    return Built(
        variant=variant,
        arch=arch,
        resources=compiled.resources,
        findings=judge(variant, compiled),
        notes=ptxas_log.find_warnings(compiled.log),
        seconds=compiled.seconds,
        cached=compiled.cached,
    )


def _cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
