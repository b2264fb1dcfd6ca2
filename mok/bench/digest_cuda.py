"""Speed of verify's digest on a CUDA device, beside torch.hash_tensor and a plain read.

Protocol: one buffer of random words, viewed as each dtype; the contenders take turns, the starting
one rotating, each turn a few launches between two events; medians. The plain read is the sum of the
buffer as int64. A digest's launch includes zeroing its output. Host times are medians over calls in
a warm process, each on an idle device so that none waits for a full queue, with Python's collector
off, for a plan of 64 tensors of 1 KB to 64 MB. Three are also measured alone, each in a
loop of 2 s without gaps, where the power limit sets the clock: rate, joules of a launch (NVML) and
clock. Refuses to measure where the kernel does not run: a copy to the host is not a digest on the
device.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mok.bench.digest import works
from mok.bench.nvml import open_gauge
from mok.bench.sampling import sampling

DTYPES = {
    "int64": torch.int64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "fp64": torch.float64,
}
LAUNCHES = 4  # between two events; the first one's start-up hides behind the others
ALONE_SECONDS = 2.0
QUEUED = 8  # turns
WARM_UP_SECONDS = 0.3  # the idle clock is a fifth of the busy one
HOST_WARM_UP_SECONDS = 0.1
PLAN_TENSORS = 64
READ = "plain read"


def measure(megabytes: int = 2048, rounds: int = 15) -> dict[str, object]:
    """TB/s by dtype and contender (None where unsupported), ratios, host times; JSON-ready.

    megabytes: size of the buffer, in units of 10^6 bytes. Raises ImportError when there is no CUDA
    device or the kernel does not run on it, with the reason.
    """
    from verify.device_kernel import HOST, digest_backend, loaded

    backend, reason = digest_backend()
    if backend == HOST:
        raise ImportError(f"digests are taken on the host: {reason}")
    count = megabytes * 10**6 // 8
    words = torch.randint(-(2**63), 2**63 - 1, (count,), device="cuda")
    rows = [_row(name, words, dtype, rounds) for name, dtype in DTYPES.items()]
    alone = _alone(words)
    del words
    kernel = loaded(torch.cuda.current_device()).kernel
    return {
        "measured": len(rows),
        "unit": "TB/s",
        "protocol": f"{megabytes} MB, contenders in rotation, {LAUNCHES} launches a turn, median "
        f"of {rounds} turns",
        "rows": rows,
        **alone,
        **_host_times(),
        "registers": kernel.registers if kernel is not None else None,
        "machine": {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }


def _row(name: str, words: Tensor, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    from verify.device_digests import DigestPlan

    view = words.view(dtype)
    calls: dict[str, Callable[[], object]] = {
        "verify digest": DigestPlan([view]).launch,
        READ: lambda: torch.sum(words),
    }
    if works(lambda: torch.hash_tensor(view[:1024])):
        calls["torch.hash_tensor"] = lambda: torch.hash_tensor(view)
    times = rotate(calls, rounds)
    size = words.numel() * 8
    rate = {key: size / seconds / 1e12 for key, seconds in times.items()}
    own, hashed = rate["verify digest"], rate.get("torch.hash_tensor")
    return {
        "dtype": name,
        "verify digest": own,
        "torch.hash_tensor": hashed,
        READ: rate[READ],
        "of the read": own / rate[READ],
        "of hash_tensor": own / hashed if hashed else None,
    }


def rotate(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of one launch by name, taking turns on the current stream."""
    names = list(calls)
    until = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < until:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(LAUNCHES):
                calls[name]()
            end.record()
            spans[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(a.elapsed_time(b) for a, b in some) / LAUNCHES / 1e3
        for name, some in spans.items()
    }


def _alone(words: Tensor) -> dict[str, object]:
    """Each contender in a loop of its own on the int64 words; joules and clock None if unknown."""
    from verify.device_digests import DigestPlan

    contenders: dict[str, Callable[[], object]] = {
        "verify digest": DigestPlan([words]).launch,
        READ: lambda: torch.sum(words),
    }
    if works(lambda: torch.hash_tensor(words[:1024])):
        contenders["torch.hash_tensor"] = lambda: torch.hash_tensor(words)
    size = words.numel() * 8
    found: dict[str, object] = {}
    with sampling(open_gauge(words.device)) as sampler:
        for name, call in contenders.items():
            seconds, start, end = _loop(call)
            seen = sampler.reading(start, end)
            found[f"alone {name}"] = {
                "tb_per_s": round(size / seconds / 1e12, 3),
                "joules": None if seen.watts is None else round(seen.watts * seconds, 4),
                "clock_mhz": None if seen.clock_mhz is None else round(seen.clock_mhz),
            }
    return found


def _loop(call: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds of one launch, and when the loop began and ended (time.perf_counter)."""
    launches, marks = 0, [torch.cuda.Event(enable_timing=True)]
    start = time.perf_counter()
    marks[0].record()
    while time.perf_counter() < start + ALONE_SECONDS:
        for _ in range(LAUNCHES):
            call()
        launches += LAUNCHES
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        marks[max(0, len(marks) - 1 - QUEUED)].synchronize()  # never idle, and never far ahead
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[-1]) / launches / 1e3, start, time.perf_counter()


def _host_times() -> dict[str, object]:
    """Microseconds of the host for a plan of many tensors, and TB/s of the device on it.

    `digests` waits for a copy of 2 KB; `digest_tensors` builds, launches, waits and reads. `anew`
    is the first plan of its sizes; the others have had one, as results of the same case have.
    """
    from verify.device_dense import forget_sizes
    from verify.device_digests import DigestPlan, digest_tensors

    def build_anew() -> None:
        forget_sizes()
        DigestPlan(tensors)

    tensors = {
        str(at): torch.randn(2 ** (8 + at * 16 // (PLAN_TENSORS - 1)), device="cuda")
        for at in range(PLAN_TENSORS)
    }
    plan = DigestPlan(tensors)
    plan.capture()
    seconds = rotate({"replay": plan.replay}, rounds=9)["replay"]
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return {
        "plan_tensors": PLAN_TENSORS,
        "plan_build_us": host_microseconds(lambda: DigestPlan(tensors)),
        "plan_build_anew_us": host_microseconds(build_anew),
        "plan_launch_us": host_microseconds(plan.launch),
        "plan_replay_us": host_microseconds(plan.replay),
        "plan_digests_us": host_microseconds(plan.digests),
        "digest_tensors_us": host_microseconds(lambda: digest_tensors(tensors)),
        "plan_megabytes": size / 1e6,
        "plan_tb_per_s": size / seconds / 1e12,
    }


def host_microseconds(call: Callable[[], object], calls: int = 300) -> float:
    """Median microseconds that a call keeps the host, by the protocol above."""
    taken: list[float] = []
    until = time.perf_counter() + HOST_WARM_UP_SECONDS
    collecting = gc.isenabled()
    gc.disable()
    try:
        while len(taken) < calls:
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            end = time.perf_counter()
            if end > until:
                taken.append(end - start)
    finally:
        if collecting:
            gc.enable()
    torch.cuda.synchronize()
    return 1e6 * statistics.median(taken)
