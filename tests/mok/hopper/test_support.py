"""Which backend runs: the same answer for calls, fake tensors and `mok env`, with its reason."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import mok
from mok import environment
from mok.cli import main
from mok.config import MoKConfig
from mok.errors import InputError, UnsupportedError
from mok.exact import exact_case, same_bits
from mok.hopper import support
from mok.hopper.symmetric import Place, places_problem, without_multicast

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
GOOD = {"hidden": 128, "width": 64, "shared_width": 0, "slots": 2, "experts": 4, "tokens": 100}


@pytest.fixture
def hopper_device(monkeypatch):
    """As if a device of capability 9.0 and its packages were here."""
    monkeypatch.setattr(support, "device_problem", lambda device: None)


def test_a_cpu_is_told_what_is_missing():
    assert "capability 9.0, not cpu" in str(support.why_not(CPU, **GOOD))
    assert support.choose("auto", "no") is False
    with pytest.raises(UnsupportedError, match=r"no such thing. Pass backend='auto' or 'portable'"):
        support.choose("hopper", "no such thing")


def test_good_sizes_run_and_only_portable_keeps_them_away(hopper_device):
    assert support.why_not(CUDA, **GOOD) is None
    assert [support.choose(name, None) for name in support.BACKENDS] == [True, True, False]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden": 96}, "H = 96"),
        ({"width": 32}, "I = 32"),
        ({"shared_width": 32}, "shared expert's I = 32"),
        ({"slots": 17}, "K = 17"),
        ({"experts": 2000}, "E = 2000"),
        ({"tokens": 2**24}, "T K = 33554432"),
    ],
)
def test_sizes_that_do_not_fit_are_named(hopper_device, change, told):
    assert told in str(support.why_not(CUDA, **{**GOOD, **change}))


def test_tokens_of_one_of_several_ranks_decide_nothing_alone(hopper_device):
    assert support.why_not(CUDA, **{**GOOD, "tokens": 2**24}, ranks=2) is None


def test_an_older_or_newer_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    support._cuda_problem.cache_clear()
    try:
        told = support.device_problem(CUDA)
    finally:
        support._cuda_problem.cache_clear()
    assert told == "it needs compute capability 9.0, and NVIDIA A100 has 8.0"


def test_a_missing_compiler_is_named(monkeypatch):
    def missing(name: str) -> object:
        raise support.toolchain.CompilerMissing("no cuda-core. Do: install it")

    assert support.compiler_problem() is None
    monkeypatch.setattr(support.toolchain, "cuda_module", missing)
    assert support.compiler_problem() == "no cuda-core. Do: install it"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_env_says_that_there_is_no_device():
    facts = environment.describe()
    assert (facts["backend"], facts["reason"]) == ("portable", "torch sees no CUDA device")


@pytest.mark.parametrize(
    ("given", "alone", "together", "words"),
    [
        (None, True, False, "the kernels; with a group the portable backend"),
        ("", True, False, "the kernels; with a group the portable backend"),
        ("1", True, True, "the kernels"),
        ("0", False, False, "the portable backend, for MOK_HOPPER_BACKWARD=0"),
    ],
)
def test_who_computes_backwards(monkeypatch, given, alone, together, words):
    monkeypatch.delenv(support.BACKWARD_VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(support.BACKWARD_VARIABLE, given)
    assert support.backward_wanted() is alone
    assert [support.backward_wanted(ranks) for ranks in (2, 64)] == [together] * 2
    assert environment.describe()["hopper_backward"] == words


@pytest.mark.parametrize("given", ["2", "on", " 1", "true"])
def test_another_value_is_refused_and_env_says_so(monkeypatch, given):
    monkeypatch.setenv(support.BACKWARD_VARIABLE, given)
    with pytest.raises(
        InputError, match=f"MOK_HOPPER_BACKWARD = '{given}'; allowed: 1 for the kernels"
    ):
        support.backward_wanted()
    result = CliRunner().invoke(main, ["env", "--json"])
    assert (result.exit_code, result.exception) == (0, None)
    told = json.loads(result.output)["hopper_backward"]
    assert told.startswith(
        f"not usable, every call is refused: MOK_HOPPER_BACKWARD = '{given}'; al"
    )


def test_on_a_gpu_the_reason_says_who_computes_backwards(hopper_device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    told = {}
    for given in ("", "0", "2"):
        monkeypatch.setenv(support.BACKWARD_VARIABLE, given)
        backend, told[given] = support.backend_here()
        assert backend == "hopper"
    assert told[""].startswith("NVIDIA H200; where shapes allow (")
    assert told[""].endswith("; backward: the kernels; with a group the portable backend")
    assert told["0"].endswith("; backward: the portable backend, for MOK_HOPPER_BACKWARD=0")
    assert "; backward: not usable, every call is refused: MOK_HOPPER_BACKWARD = '2'" in told["2"]


def test_an_unknown_backend_is_refused_everywhere():
    inputs = exact_case(8, 16, 8, 4, 2).inputs
    weights = (inputs.w_gate, inputs.w_up, inputs.w_down)
    call = (inputs.x, inputs.topk_experts, inputs.router_weights, *weights)
    with pytest.raises(InputError, match="backend = 'cuda'; allowed: 'auto', 'hopper'"):
        mok.moe(*call, backend="cuda")
    with pytest.raises(InputError, match="backend = 'fast'"):
        mok.MoE(4, 16, 8, backend="fast")
    with pytest.raises(InputError, match="backend = ''"):
        mok.functional.get_workspace(
            MoKConfig(),
            None,
            device="cpu",
            num_local_tokens=8,
            hidden_size=16,
            topk=2,
            backend="",
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_on_a_cpu_auto_is_portable_bit_for_bit_and_hopper_is_refused():
    case = exact_case(8, 16, 8, 4, 2)
    i = case.inputs
    call = (i.x, i.topk_experts, i.router_weights, i.w_gate, i.w_up, i.w_down)
    for backend in ("auto", "portable"):
        assert same_bits(mok.moe(*call, backend=backend), case.expected["out"])
    with pytest.raises(UnsupportedError, match="backend='hopper' cannot run this call: it needs a"):
        mok.moe(*call, backend="hopper")


def test_memory_for_fewer_tokens_than_the_call_has_is_refused():
    with pytest.raises(InputError, match="max_tokens = 7; allowed: at least num_local_tokens"):
        mok.functional.create_workspace(
            MoKConfig(),
            None,
            device="cpu",
            num_local_tokens=8,
            hidden_size=16,
            topk=2,
            max_tokens=7,
        )


def test_ranks_on_one_gpu_or_on_several_hosts_are_told_by_name():
    one, two, far = Place("a", "GPU-1"), Place("a", "GPU-2"), Place("b", "GPU-1")
    assert places_problem([one, two]) is None
    assert places_problem([two, one, two]) == (
        "ranks 0 and 2 share one GPU (GPU-2); it takes a GPU for each rank"
    )
    assert "2 hosts (a, b)" in str(places_problem([one, far]))


def test_multicast_is_off_only_while_memory_is_made(monkeypatch):
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.delenv(name, raising=False)
    import os

    with without_multicast():
        assert os.environ[name] == "1"
    assert name not in os.environ
    monkeypatch.setenv(name, "0")
    with pytest.raises(RuntimeError), without_multicast():
        raise RuntimeError
    assert os.environ[name] == "0"
