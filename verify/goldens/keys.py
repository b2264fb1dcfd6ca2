"""What a bit golden depends on besides the code: its key, and the provenance that is kept beside.

The key is what the author of the code does not control: architecture or ISA, compiler and library
versions, numerics flags. Source digest, commit, thread count and device names are provenance: they
explain a difference and never excuse it (the count is set again for the run that is compared, since
no user chose it). Driver and cubin are provenance too: the same cubin with
other bits is a finding about driver or hardware.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NUMERICS = ("float32_matmul_precision", "mkldnn_enabled", "default_dtype", "flush_denormal")
_CUDA_NUMERICS = (
    "cuda_matmul_allow_tf32",
    "cuda_matmul_reduced_bf16",
    "cuda_matmul_reduced_fp16",
    "cudnn_allow_tf32",
)
_VARIABLES = (  # by which libraries choose other kernels
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "OPENBLAS_CORETYPE",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
)
_PROVENANCE = ("torch", "machine", "cpu_model", "cpu_capability", "num_threads")


def key_of(environment: Mapping[str, Any], devices: tuple[str, ...] = ("cpu",)) -> dict[str, str]:
    """The key under an environment record; `devices` are the types on which outputs lie.

    In words, no hash of them: what differs is what a reader has to know.
    """
    cuda = (environment.get("cuda") or {}) if "cuda" in devices else None
    flags, variables = environment.get("flags") or {}, environment.get("variables") or {}
    names = _NUMERICS if cuda is None else (*_NUMERICS, *_CUDA_NUMERICS)
    key = {
        "machine": str(environment.get("machine")),
        "torch": str(environment.get("torch")),
        **{name: str(flags.get(name)) for name in names},
        **{name: str(variables[name]) for name in _VARIABLES if name in variables},
    }
    if cuda is not None:
        capabilities = sorted({str(one["capability"]) for one in cuda.get("devices", ())})
        key |= {"cuda": str(cuda.get("runtime")), "sm": ",".join(capabilities)}
    else:
        key |= {
            "cpu": cpu_vendor() or str(environment.get("cpu_model")),
            "isa": str(environment.get("cpu_capability")),
            "blas": "; ".join(environment.get("math_libraries") or [str(environment.get("blas"))]),
        }
    return key


def cpu_vendor() -> str:
    """The maker of the processor, by which math libraries choose their kernels; "" where the system
    does not name it, as on macOS: there the model stands for it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(\S+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def provenance(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept with an entry, to be named when its bits differ."""
    source = environment.get("source") or {}
    devices = (environment.get("cuda") or {}).get("devices", ())
    made = {name: _plain(environment.get(name)) for name in _PROVENANCE}
    made |= {"commit": source.get("commit"), "dirty": source.get("dirty")}
    if devices:
        made["gpu"] = sorted({str(one["name"]) for one in devices})
        made["driver"] = (environment.get("cuda") or {}).get("driver")
    return made


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """`name theirs -> ours` for everything that is not the same."""
    return [
        f"{name} {theirs.get(name)} -> {ours.get(name)}"
        for name in dict.fromkeys([*theirs, *ours])
        if ours.get(name) != theirs.get(name)
    ]


def nearest(key: Mapping[str, str], known: list[Mapping[str, str]]) -> list[str]:
    """How `key` differs from the known key that is most like it."""
    return min((differing(key, other) for other in known), key=len, default=[])


def _plain(value: Any) -> Any:
    """torch's version is a class of its own; numbers and None stay."""
    return str(value) if isinstance(value, str) else value
