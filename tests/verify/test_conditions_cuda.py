"""Conditions on a GPU: in effect on clean cases, and each finds a fault that is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import verify
from verify import allocations
from verify.cases import Case
from verify.conditions import CONDITIONS, cuda_contention
from verify.conditions.cuda_loads import busy_stream, held_multiprocessors
from verify.conditions.cuda_probes import COLD, cache_of, reached_multiprocessors
from verify.controls import gpu_kernels
from verify.decision import decide
from verify.evidence import Execution, Plan, Record
from verify.sessions import Session, first
from verify.staging import prepare
from verify.verdicts import ClaimVerdict

pytestmark = pytest.mark.gpu

INPUTS = {
    "x": verify.normal(256, 512, requires_grad=True),
    "w": verify.normal(512, 384, requires_grad=True),
}
CLAIMS = ("contention", "memory", "stream", "sms", "graph")


def run(
    claim: str, function: Callable[..., Any], runs: int = 3, **options: Any
) -> tuple[ClaimVerdict, list[Execution]]:
    options = {"inputs": INPUTS, "device": "cuda", "claims": (claim,), **options}
    case = Case(name="c", execute=function, **options)
    records: list[Record] = []
    plan = Plan("c", "c", [claim], 1, {claim: runs}, random=case.random)
    allocations.give_back()  # as before every case of a run
    session = Session(prepare(case), plan, records.append)
    first(session)
    CONDITIONS[claim](session, runs)
    own = [r for r in records if isinstance(r, Execution) and r.claim == claim]
    return decide(plan, records).claims[0], own


def reasons(claim: ClaimVerdict) -> set[str]:
    return {finding.reason for finding in claim.findings}


def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ w)


def without_blas(x: Tensor, w: Tensor) -> Tensor:
    """Nothing here asks how many multiprocessors a stream reaches, as cuBLAS may."""
    return torch.nn.functional.gelu(x).sum(1) + w.sum()


def drawing(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x @ w, 0.3)


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_clean_case_is_verified_under_every_setting(claim: str) -> None:
    verdict, own = run(claim, without_blas if claim == "sms" else layer)
    assert not verdict.findings
    assert verdict.compared == ["grad.w", "grad.x", "out"]
    for variant in {e.variant for e in own}:
        assert any(e.in_effect for e in own if e.variant == variant)


def network() -> dict[str, Any]:
    layers = [torch.nn.Linear(512, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 32)]
    return {"module": torch.nn.Sequential(*layers)}


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim != "sms"])
def test_so_is_a_module_with_state(claim: str) -> None:
    def through(x: Tensor, module: torch.nn.Module) -> Tensor:
        out: Tensor = module(x)
        return out

    verdict, _ = run(claim, through, inputs={"x": INPUTS["x"]}, setup=network)
    assert not verdict.findings
    assert {"grad.module.0.weight", "state.module.1.running_mean"} <= set(verdict.compared)


def test_results_on_both_devices_are_tried_on_both() -> None:
    def both(x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"cpu": torch.arange(5.0) * 2, "cuda": x @ w}

    variants = {e.variant for e in run("memory", both)[1]}
    assert {"fill=0xfe", "recycled-nan", "cuda fill=0xfe", "cuda shifted"} <= variants
    assert any(v.startswith("load=") for v in {e.variant for e in run("contention", both)[1]})


def test_held_multiprocessors_are_out_of_reach() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    everything = reached_multiprocessors(device)
    count = len(everything) // 2
    with held_multiprocessors(count) as load:
        load.begin()
        left = reached_multiprocessors(device)
        overlap = load.overlap()
    assert overlap.complete
    assert overlap.multiprocessors == count
    assert len(left) == len(everything) - count
    assert reached_multiprocessors(device) == everything


@pytest.mark.parametrize("work", ["memory", "fma", "tensor"])
def test_a_busy_stream_runs_beside_other_work(work: str) -> None:
    a = torch.randn(1024, 1024, device="cuda")
    (a @ a).sum()  # loading a kernel at its first use would wait for the load to end
    with busy_stream(work=work) as load:
        load.begin()
        (a @ a).sum()
        overlap = load.overlap()
    assert overlap.complete
    assert overlap.steps > 0


def test_a_load_ends_by_itself() -> None:
    with held_multiprocessors(1, timeout=0.2) as load:
        torch.cuda.synchronize()  # waits for the load, too: it must not last
        load.begin()
        overlap = load.overlap()
    assert (overlap.covering, overlap.timed_out) == (0, 1)


def test_a_cold_cache_is_slower() -> None:
    warm, cold = cache_of(torch.device("cuda", torch.cuda.current_device())).chill()
    assert cold >= COLD * warm


def unwritten(x: Tensor, w: Tensor) -> Tensor:
    held = torch.empty(256, 1024, device=x.device)
    held[:, :512] = x
    return held.clone()


def on_default_stream(x: Tensor, w: Tensor) -> Tensor:
    with torch.cuda.stream(torch.cuda.default_stream()):
        return x * 2


def known_while_recording(x: Tensor, w: Tensor) -> Tensor:
    return x * (1.5 if torch.cuda.is_current_stream_capturing() else 1.0)


def counting(x: Tensor, w: Tensor) -> Tensor:
    return x + len(reached_multiprocessors(x.device, torch.cuda.current_stream()))


@pytest.mark.parametrize(
    ("claim", "function"),
    [
        ("memory", unwritten),
        ("stream", on_default_stream),
        ("graph", known_while_recording),
        ("sms", counting),
        ("contention", counting),
    ],
)
def test_every_condition_finds_a_fault(claim: str, function: Callable[..., Tensor]) -> None:
    assert reasons(run(claim, function)[0]) == {"bits-differ"}


@pytest.mark.parametrize("fault", [True, False])
def test_a_backward_on_another_stream_is_found_by_late_gradients(fault: bool) -> None:
    def learned(x: Tensor) -> Tensor:
        return gpu_kernels.doubled(x, fault=fault)

    inputs = {"x": verify.normal(1 << 16, requires_grad=True)}
    verdict, own = run("stream", learned, inputs=inputs)
    late = [e for e in own if e.variant == "late side stream"]
    assert late
    assert all(e.in_effect and e.effective["late_gradients"] == 1 for e in late)
    assert reasons(verdict) == ({"bits-differ"} if fault else set())
    assert not fault or {f.tensor for f in verdict.findings if f.variant == late[0].variant}


def there_and_back(x: Tensor, w: Tensor) -> Tensor:
    return (x.cuda() @ w.cuda()).cpu()


def test_a_case_that_only_visits_the_gpu_is_tried_there() -> None:
    verdict, own = run("memory", there_and_back, device="cpu")
    assert "bits-differ" not in reasons(verdict)
    told = {e.variant: e.in_effect for e in own}
    assert all(told[f"cuda {kind}"] for kind in ("fill=0xfe", "recycled-nan", "shifted"))
    verdict, own = run("contention", there_and_back, device="cpu")
    assert "bits-differ" not in reasons(verdict)
    assert any(e.variant.startswith("hold=") and e.in_effect for e in own)
    # neither its inputs nor its gradients can be made late
    assert reasons(run("stream", there_and_back, device="cpu")[0]) == {"no-effect"}


@pytest.mark.parametrize("claim", ["memory", "sms"])
def test_a_stream_of_the_case_s_own_is_out_of_reach(claim: str) -> None:
    def aside(x: Tensor, w: Tensor) -> Tensor:
        stream, here = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            out = x * 2
        here.wait_stream(stream)
        return out

    verdict, own = run(claim, aside, gradients=False)
    assert reasons(verdict) == {"no-effect"}
    assert all(e.effective["own_streams"] == 1 for e in own)


def test_a_stream_that_the_setup_warmed_up_is_noticed() -> None:
    streams: list[torch.cuda.Stream] = []
    alive: list[Tensor] = []

    def setup() -> dict[str, Tensor]:
        streams.append(torch.cuda.Stream())
        with torch.cuda.stream(streams[0]):
            torch.zeros(256, 512, device="cuda").mul_(2)
            alive.append(torch.ones(1, device="cuda"))  # its segment has room for more
        torch.cuda.synchronize()
        return {"scale": torch.ones(4, 1)}

    def aside(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        streams[0].wait_stream(here)
        with torch.cuda.stream(streams[0]):
            out = x[:4] * scale
        here.wait_stream(streams[0])
        return out

    verdict, own = run("memory", aside, gradients=False, setup=setup)
    assert reasons(verdict) == {"no-effect"}
    assert all(e.effective["own_streams"] == 1 for e in own)


def test_streams_of_conditions_are_not_the_next_case_s() -> None:
    run("stream", layer)
    run("sms", layer)
    _, own = run("memory", layer)
    assert not any("own_streams" in e.effective for e in own)


def test_a_case_that_waits_for_the_device_has_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(x: Tensor, w: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return x @ w

    monkeypatch.setattr(cuda_contention, "TIMEOUTS", (0.2, 0.5))
    verdict, own = run("contention", waits)
    assert reasons(verdict) == {"no-overlap"}
    assert any(e.effective.get("timed_out") for e in own)


def test_torch_works_on_after_a_recording_that_failed() -> None:
    def asks(x: Tensor, w: Tensor) -> Tensor:
        return torch.rand_like(x) * float(x.sum().item())

    verdict, _ = run("graph", asks, random=True)
    assert reasons(verdict) == {"unsupported"}
    assert "captur" in verdict.findings[0].detail
    torch.cuda.empty_cache()
    torch.cuda.manual_seed(5)
    assert float(torch.rand(4, device="cuda").sum()) > 0
    assert not run("repeat", drawing, random=True)[0].findings
    assert not run("graph", drawing, random=True)[0].findings


def test_one_hardware_queue_does_not_make_contention_vanish() -> None:
    code = (
        "import torch\n"
        "from verify.conditions.cuda_loads import busy_stream, held_multiprocessors\n"
        "a = torch.randn(512, 512, device='cuda')\n"
        "(a @ a).sum().item()\n"
        "for make in (lambda: busy_stream(), lambda: held_multiprocessors(8)):\n"
        "    with make() as load:\n"
        "        load.begin()\n"
        "        (a @ a).sum()\n"
        "        assert load.overlap().complete, load.overlap()\n"
    )
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
