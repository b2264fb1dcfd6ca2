"""The environment record: what a bit may depend on besides the code under test.

Two runs with other bits are explained by this record more often than by the code, so it is made for
every result, and `verify diff` lists what differs in it. It refuses to dump the process
environment: only variables with a known prefix are recorded, never one whose name or value looks
like a credential. It starts no CUDA context.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic as _deterministic

from verify.cuda_facts import cuda_facts

PREFIXES = (
    "ATEN_",
    "CUBLAS_",
    "CUBLASLT_",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "GLOO_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "MOK_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHONHASHSEED",
    "PYTORCH_",
    "TORCH",
    "VERIFY_",
)
_PRIVATE = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|SESSION", re.IGNORECASE)
_URL_WITH_USER = re.compile(r"://[^/\s]*@")
_LONGEST_VALUE = 300
_GIT_TIMEOUT = 10.0


def environment(source: Path | None = None) -> dict[str, Any]:
    """The record of this process; `source` is the directory whose checkout is named (default: cwd).

    Values are JSON-ready; what this machine or this torch does not have is None or absent.
    """
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_affinity": _affinity(),
        "cpu_capability": _value(lambda: torch.backends.cpu.get_cpu_capability()),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "numpy": _version("numpy"),
        "safetensors": _version("safetensors"),
        **_math_libraries(),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "flags": _flags(),
        "variables": variables(os.environ),
        "cuda": cuda_facts(lambda command: _output(command, timeout=5.0)),
        "source": source_state(source or Path.cwd()),
    }


def cpu_model() -> str | None:
    """The processor's name as the system gives it, or None."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    if platform.system() == "Darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"], timeout=2.0)
    return platform.processor() or None


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """The variables of `given` that may change bits, by an allow-list of prefixes."""
    kept = {}
    for name in sorted(given):
        value = given[name]
        if not name.startswith(PREFIXES) or _PRIVATE.search(name):
            continue
        if _PRIVATE.search(value) or _URL_WITH_USER.search(value):
            continue
        long = len(value) > _LONGEST_VALUE
        kept[name] = value[:_LONGEST_VALUE] + "..." if long else value
    return kept


def source_state(directory: Path) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that holds `directory`; both None outside of one.

    Untracked files count as dirty: the commit does not say what they hold. A checkout without a
    commit has commit None and dirty True or False.
    """
    command = ["git", "-C", str(directory), "status", "--porcelain=v2", "--branch"]
    text = _output(command, timeout=_GIT_TIMEOUT)
    if text is None:
        return {"commit": None, "dirty": None}
    commit: str | None = None
    dirty = False
    for line in text.splitlines():
        if line.startswith("# branch.oid "):
            oid = line.removeprefix("# branch.oid ").strip()
            commit = oid if re.fullmatch(r"[0-9a-f]{40,64}", oid) else None
        elif line and not line.startswith("#"):
            dirty = True
    return {"commit": commit, "dirty": dirty}


def _math_libraries() -> dict[str, Any]:
    """BLAS and the parallel backend, from what torch prints about its own build."""
    build = torch.__config__.show()
    parallel = torch.__config__.parallel_info()
    blas = re.search(r"BLAS_INFO=(\w+)", build)
    backend = re.search(r"ATen parallel backend: (.+)", parallel)
    names = []
    for line in parallel.splitlines():
        if re.match(r"(Intel\(R\) .*(Library|MKL)|OpenMP \d)", line.strip()):
            names.append(line.strip())
    return {
        "blas": blas.group(1) if blas else None,
        "math_libraries": names,
        "parallel_backend": backend.group(1).strip() if backend else None,
    }


def _flags() -> dict[str, Any]:
    """The switches of torch that change which algorithm runs or how it rounds."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    readers: dict[str, Callable[[], Any]] = {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "fill_uninitialized_memory": lambda: _deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cuda_matmul_allow_tf32": lambda: cuda.allow_tf32,
        "cuda_matmul_reduced_bf16": lambda: cuda.allow_bf16_reduced_precision_reduction,
        "cuda_matmul_reduced_fp16": lambda: cuda.allow_fp16_reduced_precision_reduction,
        "cudnn_allow_tf32": lambda: cudnn.allow_tf32,
        "cudnn_deterministic": lambda: cudnn.deterministic,
        "cudnn_benchmark": lambda: cudnn.benchmark,
        "mkldnn_enabled": lambda: torch.backends.mkldnn.enabled,
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "flush_denormal": _flushes_denormals,
    }
    return {name: _value(reader) for name, reader in readers.items()}


def _flushes_denormals() -> bool:
    """Torch can set this mode but not read it, so it is measured on one value."""
    return bool((torch.tensor([1e-39], dtype=torch.float32) * 1.0 == 0.0).item())


def _affinity() -> int | None:
    """How many processors this process may use, where the system can tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _value(reader: Callable[[], Any]) -> Any:
    """What a reader says, or None: some of these raise or warn in some versions of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return reader()
        except (RuntimeError, AttributeError):
            return None


def _output(command: list[str], timeout: float) -> str | None:
    """Standard output of a command that succeeded, else None. Takes no lock in a checkout."""
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
