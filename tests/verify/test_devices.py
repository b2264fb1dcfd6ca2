"""Devices: what is refused before anything runs, who gets which GPU, and cases put on one.

The tests at the end need GPUs; all others know what the code asks CUDA for, and answer for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import verify
from verify import devices, randomness, ranks, results
from verify.assembly import pick
from verify.plans import RunOptions, plans_of, with_options
from verify.running import run
from verify.staging import prepare
from verify.targets import Found
from verify.workers import ABANDONED, WorkerSpec


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many CUDA devices there are, and keeps which one was made current."""
    seen: dict[str, Any] = {"current": 0}

    def have(number: int) -> dict[str, Any]:
        monkeypatch.setattr(devices, "count", lambda: number)
        return seen

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.update(current=index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: seen["current"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return have


@pytest.mark.parametrize(
    ("name", "parsed"),
    [("cpu", ("cpu", None)), ("cuda", ("cuda", None)), ("cuda:0", ("cuda", 0))],
)
def test_names_of_devices(name: str, parsed: tuple[str, int | None]) -> None:
    assert devices.parse(name) == parsed


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:01", "CUDA", "cpu:0", " cuda"])
def test_other_names_are_refused_before_anything_runs(name: str) -> None:
    with pytest.raises(verify.CaseError, match="allowed are cpu, cuda and cuda:N"):
        devices.parse(name)
    with pytest.raises(verify.CaseError, match="allowed are cpu, cuda and cuda:N"):
        RunOptions(device=name)


@pytest.mark.parametrize(
    ("present", "device", "told"),
    [
        (0, "cuda", "sees no CUDA device"),
        (0, "cuda:0", "sees no CUDA device"),
        (2, "cuda:2", "cuda:0 to cuda:1"),
        (0, "", None),
        (0, "cpu", None),
        (1, "cuda", None),
        (2, "cuda:1", None),
    ],
)
def test_a_device_that_is_not_here_is_told(
    gpus: Any, present: int, device: str, told: str | None
) -> None:
    gpus(present)
    found = devices.missing_device(device)
    assert found is None if told is None else told in str(found)


@pytest.mark.parametrize(
    ("present", "device", "world", "shared", "told"),
    [
        (2, "cuda:1", 2, False, "--device cuda, where rank r has GPU r"),
        (2, "cuda", 4, False, "use --ranks 2"),
        (0, "", 4, False, None),
        (0, "cpu", 4, False, None),
        (1, "cuda", 1, False, None),
        (2, "cuda", 2, False, None),
        (1, "cuda", 4, True, None),
        (2, "cuda:1", 4, True, None),
    ],
)
def test_more_ranks_than_gpus_are_told_unless_they_may_share(
    gpus: Any, present: int, device: str, world: int, shared: bool, told: str | None
) -> None:
    gpus(present)
    found = devices.too_many_ranks(device, world, shared=shared)
    assert found is None if told is None else told in str(found)


def test_each_rank_has_its_own_gpu_and_one_alone_the_current_one(gpus: Any) -> None:
    seen = gpus(2)
    assert devices.enter("", 1, 2) is None
    assert devices.enter("cpu", 1, 2) == torch.device("cpu")
    assert seen["current"] == 0  # neither of them touches CUDA
    assert [devices.enter("cuda", r, 4) for r in range(4)] == [
        torch.device("cuda", index) for index in (0, 1, 0, 1)
    ]
    assert devices.enter("cuda:1", 0, 4) == torch.device("cuda", 1)
    assert devices.enter("cuda", 0, 1) == torch.device("cuda", 1)  # what was current
    assert seen["current"] == 1


def test_a_device_is_put_back_once_cuda_is_in_use(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = gpus(2)
    seen.update(current=1)
    assert devices.current() is None
    devices.restore(None)
    assert seen["current"] == 1  # CUDA is not in use: nothing is asked of it
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    home = devices.current()
    devices.enter("cuda:0", 0, 1)
    assert (home, seen["current"]) == (1, 0)
    devices.restore(home)
    assert devices.enter("cuda", 0, 1) == torch.device("cuda", 1)
    devices.restore(None)
    assert seen["current"] == 0


def test_a_check_in_this_process_leaves_the_device_as_it_was(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = gpus(2)
    seen.update(current=1)
    monkeypatch.setattr(devices, "current", lambda: seen["current"])
    monkeypatch.setattr(devices, "restore", lambda index: seen.update(current=index))

    def moves(x: Tensor) -> Tensor:
        seen.update(current=0)
        return x * 2

    given = {"inputs": {"x": verify.normal(4)}, "claims": ("repeat",)}
    case = verify.Case(name="c", execute=moves, **given)
    assert verify.check(case).verdict == "VERIFIED"
    assert seen["current"] == 1


def test_ranks_of_several_machines_go_by_their_local_rank(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices.enter("cuda", 3, 4) == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("present", "named", "world", "backend"),
    [
        (0, [], 4, "gloo"),
        (2, ["", "cpu"], 2, "gloo"),
        (2, ["cuda"], 2, "cpu:gloo,cuda:nccl"),
        (2, ["cuda", "", "cpu"], 2, "cpu:gloo,cuda:nccl"),
        (1, ["cuda"], 2, "gloo"),  # NCCL refuses two ranks on one GPU
        (2, ["cuda:1"], 2, "gloo"),
        (2, ["cuda", "cuda:1"], 2, "gloo"),
    ],
)
def test_ranks_talk_over_nccl_where_each_has_a_gpu(
    gpus: Any, present: int, named: list[str], world: int, backend: str
) -> None:
    gpus(present)
    assert devices.backend(named, world) == backend


def test_the_option_goes_before_the_case_and_the_plan_says_where(gpus: Any) -> None:
    gpus(2)
    case = verify.case(name="c", inputs={"x": verify.normal(4)}, device="cuda")(lambda x: x * 2)
    found = Found(case, "f.py::c")
    assert [plan.device for plan in plans_of([found], RunOptions())] == ["cuda"]
    there = with_options(found, RunOptions(device="cpu"))
    assert [plan.device for plan in plans_of([there], RunOptions())] == ["cpu"]
    with pytest.raises(verify.CaseError, match=r"f\.py::c: 3 ranks on cuda need 3 CUDA devices"):
        plans_of([found], RunOptions(ranks=3))
    shared = Found(replace(case, shares_gpu=True), "f.py::c")
    assert plans_of([shared], RunOptions(ranks=3))[0].ranks == 3
    gpus(0)
    with pytest.raises(verify.CaseError, match="sees no CUDA device"):
        plans_of([with_options(found, RunOptions(device="cuda"))], RunOptions(device="cuda"))


def test_a_setup_that_asks_is_told_the_device() -> None:
    given: list[torch.device] = []

    def setup(device: torch.device) -> dict[str, Tensor]:
        given.append(device)
        return {"x": torch.ones(3, device=device)}

    case = verify.case(name="c", setup=setup, claims=("repeat",))(lambda x: x * 2)
    prepare(case)
    prepare(replace(case, device="cpu"))
    assert given == [torch.device("cpu")] * 2


def test_the_command_refuses_and_its_document_names_the_device(tmp_path: Path) -> None:
    path = tmp_path / "cases.py"
    path.write_text(
        "import torch, verify\n"
        "@verify.case(inputs={'x': verify.normal(8)}, claims=('repeat',))\n"
        "def doubled(x):\n    return x * 2\n"
    )
    result = run([str(path)], RunOptions(device="cpu"))
    (case,) = result["cases"]
    assert case["device"] == "cpu"
    assert case["reproduce"].endswith("--device cpu")
    assert results.exit_code(result) == 0
    if not torch.cuda.is_available():
        command = [sys.executable, "-m", "verify", "run", str(path), "--device", "cuda"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "sees no CUDA device" in done.stderr


def test_a_rank_that_left_does_not_leave_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL nobody notices: its peers wait in a kernel, and their hearts beat."""
    monkeypatch.setattr(ranks, "GRACE", 0.2)
    specs = [WorkerSpec([], rank, 2, 0, str(tmp_path), 1, 60.0) for rank in range(2)]
    mark = str(specs[0].stem.with_suffix(".abandoned"))
    code = {
        0: f"import pathlib, sys; pathlib.Path({mark!r}).touch(); sys.exit({ABANDONED})",
        1: "import time; time.sleep(60)",
    }
    monkeypatch.setattr(
        ranks,
        "worker_command",
        lambda spec: [sys.executable, "-c", code[json.loads(spec.read_text())["rank"]]],
    )
    begun = time.monotonic()
    outcome = ranks.run_workers(specs, 50.0, lambda text: None)
    assert time.monotonic() - begun < 30
    assert (outcome.timed_out, outcome.abandoned, outcome.deaths) == (False, True, {})


def test_a_generator_that_began_after_the_snapshot_is_put_back_to_its_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA may be used for the first time inside the first call; later ones must begin alike."""
    seeds: list[int] = []
    before = randomness.snapshot()
    try:
        randomness.seed_all(77)
        state = randomness.snapshot()
        torch.rand(3)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
        randomness.restore(state)
    finally:
        monkeypatch.undo()
        randomness.restore(before)
    assert seeds == [77]


CASES = """
import torch, verify
from verify import replicated, sharded
import torch.distributed as dist

LAYER = dict(inputs={"x": verify.normal(96, 64, requires_grad=True)}, batch={"x": 0, "out": 0})

def setup():
    return {"layer": torch.nn.Linear(64, 32), "table": torch.arange(64.0).flip(0)}

@verify.case(setup=setup, claims=("repeat", "process", "history", "schedule"),
             schedule=({"scale": 2.0},), **LAYER)
def module(x, layer, table, scale=1.0):
    assert x.device == table.device == layer.weight.device, (x.device, table.device)
    assert x.device.type == "cuda"
    return torch.tanh(layer(x + table)) * (scale / scale)

@verify.case(claims=("batch",), **LAYER)
def elementwise(x):
    return torch.tanh(x) * 2

@verify.case(claims=("repeat",), random=True, **LAYER)
def dropout(x):
    return torch.nn.functional.dropout(x.cuda(), 0.5)

@verify.case(claims=("repeat",), **LAYER)
def undeclared(x):
    return torch.nn.functional.dropout(x, 0.5)

@verify.case(claims=("exact",), gradients=False,
             inputs={"x": verify.integers(40, 8, low=0, high=9)},
             exact=lambda inputs, upstream, view: {"out": inputs["x"].cpu() * 2})
def wrong(x):
    out = x * 2
    out[7] += 1
    return out

@verify.case(claims=("repeat",), inputs={"at": verify.integers(64, low=0, high=9)},
             gradients=False)
def outside(at):
    return torch.zeros(4, device=at.device)[at]

SHARDED = {"x": sharded(0), "out": sharded(0), "w": replicated, "grad.w": replicated}
TWO = dict(inputs={"x": verify.normal(64, 32, requires_grad=True)}, placement=SHARDED,
           device="cuda", ranks=2)

@verify.case(claims=("repeat", "process", "rank", "ep"), ep=(1, 2), **TWO)
def gathered(x, group=None):
    if group is not None:
        assert "nccl" in dist.get_backend(group) and x.device.index == dist.get_rank()
        whole = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(whole, x.detach(), group=group)
        total = torch.stack(whole).flatten(0, 1).sum(0)
    else:
        total = x.detach().sum(0)
    return x * 2 + torch.sign(total) * 0

@verify.case(claims=("ep",), ep=(1, 2), **TWO)
def other_at_one(x, group=None):
    return x * (2 if group is not None else 3)

@verify.case(claims=("repeat",), **TWO)
def alone(x, group=None, calls=[]):
    calls.append(1)
    if dist.get_rank() == 1 and len(calls) == 3:
        raise ValueError("only here")
    out = x.detach().clone()
    dist.all_reduce(out, group=group)
    return out
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("devices") / "cases.py"
    path.write_text(CASES)
    return path


def verdict_of(path: Path, name: str, **options: Any) -> dict[str, Any]:
    given = {"device": "cuda", "processes": 1, **options}
    (case,) = run([f"{path}::{name}"], RunOptions(**given))["cases"]
    return case


def test_what_a_case_asks_for_in_vain_is_unsupported_and_others_run(
    gpus: Any, tmp_path: Path
) -> None:
    gpus(1)
    path = tmp_path / "cases.py"
    path.write_text(
        "import verify\n"
        "given = dict(inputs={'x': verify.normal(8)}, claims=('repeat',))\n"
        "@verify.case(**given)\n"
        "def here(x):\n    return x * 2\n"
        "@verify.case(device='cuda', ranks=2, **given)\n"
        "def elsewhere(x):\n    return x * 2\n"
    )
    result = run([str(path)], RunOptions())
    verdicts = {case["case"]: case for case in result["cases"]}
    assert verdicts["here"]["verdict"] == "VERIFIED"
    found = [one for claim in verdicts["elsewhere"]["claims"] for one in claim["findings"]]
    assert {one["reason"] for one in found} == {"unsupported"}
    assert "2 ranks on cuda need 2 CUDA devices, 1 are here" in found[0]["detail"]
    assert results.exit_code(result) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["module", "elementwise", "dropout"])
def test_a_case_is_put_on_the_gpu_and_verified(written: Path, name: str) -> None:
    case = verdict_of(written, name)
    assert case["verdict"] == "VERIFIED", case["claims"]


@pytest.mark.gpu
def test_draws_from_the_gpu_s_generator_are_seen(written: Path) -> None:
    case = verdict_of(written, "undeclared")
    (claim,) = case["claims"]
    assert {one["reason"] for one in claim["findings"]} == {"consumes-global-rng"}
    assert any("cuda:0" in note for note in case["notes"])


@pytest.mark.gpu
def test_what_differs_on_the_gpu_is_explained(written: Path) -> None:
    (claim,) = verdict_of(written, "wrong")["claims"]
    assert claim["verdict"] == "MISMATCH"
    lines = " ".join(claim["findings"][0]["difference"]["lines"])
    assert "not explained" not in lines
    assert "out[7,0]" in lines


@pytest.mark.gpu
def test_a_kernel_that_fails_is_a_finding_and_not_the_end_of_the_tool(written: Path) -> None:
    case = verdict_of(written, "outside")
    assert case["verdict"] != "VERIFIED"
    told = str(case["claims"])
    assert "assert" in told or "CUDA" in told or "index" in told


@pytest.mark.gpu
def test_entries_of_a_tensor_on_the_gpu_are_picked_by_indices_of_the_cpu() -> None:
    whole = torch.arange(24.0, device="cuda").view(6, 4)
    keep = torch.tensor([True, False, True])
    part = pick(whole, None, 0, torch.tensor([5, 1, 0]), keep)
    assert part.tensor.device.type == "cuda"
    assert part.tensor.tolist() == [whole[5].tolist(), [0.0] * 4, whole[0].tolist()]


@pytest.mark.gpu
@pytest.mark.slow
def test_four_ranks_of_the_layer_share_one_gpu() -> None:
    result = run(["moe/exact-unused-slots"], RunOptions(device="cuda"))
    assert result["cases"][0]["verdict"] == "VERIFIED", result["cases"][0]["claims"]


@pytest.mark.gpus(2)
@pytest.mark.slow
def test_two_ranks_on_two_gpus_are_verified(written: Path) -> None:
    case = verdict_of(written, "gathered", device=None)
    assert case["verdict"] == "VERIFIED", case["claims"]


@pytest.mark.gpus(2)
@pytest.mark.slow
def test_a_degree_that_gives_other_bits_is_explained_over_two_gpus(written: Path) -> None:
    case = verdict_of(written, "other_at_one", device=None)
    findings = [one for claim in case["claims"] for one in claim["findings"]]
    assert case["verdict"] == "MISMATCH"
    assert any("64 of 64" in str(one) or "differ" in str(one) for one in findings)


@pytest.mark.gpus(2)
@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_run_soon(written: Path) -> None:
    case = verdict_of(written, "alone", device=None, timeout=120.0)
    assert case["verdict"] != "VERIFIED"
    assert "only here" in str(case["claims"])
