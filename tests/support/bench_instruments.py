"""A device that does not exist, for tests of the benchmark: only work moves its clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mok.bench.contenders import DIRECTIONS, Contender, Inputs, Prepared
from mok.bench.instruments import Instruments
from mok.bench.nvml import no_gauge


@dataclass
class FakeDevice:
    """seconds: the device's clock. calls: what ran, in order. broken: synchronize raises."""

    seconds: float = 0.0
    calls: list[str] = field(default_factory=list)
    broken: bool = False
    memory: int = 0
    peak: int = 0
    tick: float = 1e-9  # so that nothing takes no time at all

    def work(self, name: str, seconds: float) -> None:
        self.calls.append(name)
        self.seconds += seconds

    def instruments(self) -> Instruments:
        def synchronize() -> None:
            if self.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def record() -> float:
            self.seconds += self.tick
            return self.seconds

        def reset() -> None:
            self.peak = self.memory

        return Instruments(
            device=torch.device("cpu"),
            record=record,
            wait=lambda mark: None,
            seconds=lambda start, end: end - start,
            synchronize=synchronize,
            reset_peak=reset,
            allocated=lambda: self.memory,
            peak=lambda: self.peak,
            release=lambda: None,
            gauge=no_gauge("a test"),
            facts={"device": "NVIDIA H200 of a test"},
        )


def fake_contender(
    device: FakeDevice,
    name: str,
    forward: float,
    backward: float,
    *,
    fails: Mapping[str, int] | None = None,
    failure: Callable[[], None] | None = None,
    parallel: bool = False,
    directions: tuple[str, ...] = DIRECTIONS,
) -> Contender:
    """Takes the given seconds. fails: by "prepare", "forward", "backward", the call that raises."""
    count: dict[str, int] = {}

    def step(what: str, seconds: float) -> None:
        count[what] = count.get(what, 0) + 1
        if (fails or {}).get(what) == count[what]:
            if failure is not None:
                failure()
            raise RuntimeError(f"{name} cannot {what}\nsecond line")
        device.work(f"{name} {what}", seconds)

    def prepare(inputs: Inputs) -> Prepared:
        step("prepare", 0.0)

        def run_forward() -> torch.Tensor:
            step("forward", forward)
            device.peak = max(device.peak, device.memory + 3 * 2**20)
            return torch.zeros_like(inputs.x)

        def run_backward(out: torch.Tensor, keep: bool) -> dict[str, torch.Tensor]:
            step("backward", backward)
            return {
                "d_x": torch.zeros_like(inputs.x),
                "d_gate_up": torch.zeros_like(inputs.w_gate_up),
                "d_down": torch.zeros_like(inputs.w_down),
                "d_router": torch.zeros_like(inputs.router_weights),
            }

        return Prepared(run_forward, run_backward)

    return Contender(
        name,
        "1.0",
        prepare,
        parallel=parallel,
        devices=("cpu", "cuda"),
        directions=directions,
    )
