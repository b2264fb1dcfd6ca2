"""How long peers' Triton autotuners search: short candidate lists by default, full ones on request.

Full lists take minutes for every shape, since each candidate is compiled for each H and I. The
short ones hold the candidates that win on an H200, and the known rates of `mok.bench.rates` were
measured with them. MOK_PEERS_TUNING=full keeps the peers' own lists and timing windows; which one
was in force is part of `choices`. It changes objects of the peers in this process and no file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mok.errors import InputError

VARIABLE = "MOK_PEERS_TUNING"
SHORT, FULL = "short", "full"
WARMUP_MS, TIMED_MS = 4, 20


def mode() -> str:
    """ "short" or "full". Raises InputError for any other value of the variable."""
    value = os.environ.get(VARIABLE, SHORT) or SHORT
    if value not in (SHORT, FULL):
        raise InputError(
            f"{VARIABLE}={value!r}; allowed: {SHORT} (the default) or {FULL}. Correct or unset it."
        )
    return value


def shorten(kernel: Any, configs: Sequence[Any]) -> None:
    """Gives a triton.autotune kernel these candidates and a short timing window.

    Raises InputError when none is left: the peer's own list has changed.
    """
    if not configs:
        raise InputError(
            f"the short tuning list of {name_of(kernel)} is empty: this version of the peer has "
            f"other candidates. Set {VARIABLE}={FULL}, or install the version that is documented."
        )
    kernel.configs = list(configs)
    kernel.__dict__["do_bench"] = _bench  # a cached property, so an entry of this name replaces it


def _bench(call: Callable[[], Any], quantiles: Any = None) -> Any:
    import triton.testing

    return triton.testing.do_bench(call, warmup=WARMUP_MS, rep=TIMED_MS, quantiles=quantiles)


def name_of(kernel: Any) -> str:
    """The name of the function below an autotuner and a jit function."""
    inner = getattr(kernel, "base_fn", None) or getattr(kernel, "fn", kernel)
    return str(getattr(inner, "__name__", inner))


def picked(kernels: Iterable[Any]) -> dict[str, str]:
    """By kernel, the distinct candidates that its autotuner has chosen, and the mode."""
    found = {
        name_of(kernel): "; ".join(dict.fromkeys(str(c) for c in kernel.cache.values()))
        for kernel in kernels
    }
    return {"tuning": mode(), **{name: value for name, value in found.items() if value}}
