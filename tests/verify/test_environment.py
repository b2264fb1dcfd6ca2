"""The environment record: complete enough, and free of secrets."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from mok import jit
from verify import cuda_facts
from verify import environment as module
from verify.environment import environment, source_state, variables


def _git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def test_record_is_json_and_names_what_bits_depend_on():
    record = environment()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["torch"] == torch.__version__
    assert record["num_threads"] == torch.get_num_threads()
    assert record["python"].startswith("CPython 3.")
    for name in ("cpu_capability", "machine", "numpy", "safetensors", "parallel_backend"):
        assert record[name], name
    assert record["flags"]["deterministic_algorithms"] is False
    assert record["flags"]["float32_matmul_precision"] == "highest"


def test_record_follows_flags_and_threads():
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    try:
        record = environment()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert record["flags"]["deterministic_algorithms"] is True
    assert record["flags"]["deterministic_warn_only"] is True
    assert record["num_threads"] == 1


def test_record_changes_nothing():
    before = torch.get_rng_state().clone()
    environment()
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.cuda.is_initialized()


def test_only_known_variables_and_no_secrets():
    given = {
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": "AVX2",
        "PYTHONHASHSEED": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCH_LOGS": "x" * 1000,
        "HOME": "/root",
        "AWS_REGION": "x",
        "TORCH_HUB_TOKEN": "abc",
        "CUDA_API_KEY": "abc",
        "NCCL_password": "abc",
        "MOK_THING": "https://me:word@host/",
        "MOK_OTHER": "token=abc",
    }
    kept = variables(given)
    assert set(kept) == {
        "OMP_NUM_THREADS",
        "MKL_CBWR",
        "PYTHONHASHSEED",
        "CUBLAS_WORKSPACE_CONFIG",
        "TORCH_LOGS",
    }
    assert len(kept["TORCH_LOGS"]) < 400


def test_source_of_a_clean_a_dirty_and_an_empty_checkout(tmp_path):
    _git(tmp_path, "init", "-q")
    assert source_state(tmp_path) == {"commit": None, "dirty": False}
    (tmp_path / "a").write_text("1")
    assert source_state(tmp_path) == {"commit": None, "dirty": True}
    _git(tmp_path, "add", "a")
    _git(tmp_path, "commit", "-q", "-m", "a")
    clean = source_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "b").write_text("untracked: the commit does not say what it holds")
    assert source_state(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_source_outside_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source_state(tmp_path) == {"commit": None, "dirty": None}
    assert source_state(tmp_path / "none") == {"commit": None, "dirty": None}


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 1\n"])
def test_source_without_a_working_git(tmp_path, monkeypatch, script):
    if script:
        (tmp_path / "git").write_text(script)
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_state(tmp_path) == {"commit": None, "dirty": None}


def test_cuda_devices_come_from_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 580.1'\necho 'NVIDIA H200, 9.0, 580.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    record = environment(tmp_path)["cuda"]
    assert record["driver"] == "580.1"
    assert record["devices"] == [{"name": "NVIDIA H200", "capability": "9.0"}] * 2
    assert record["kernel_flags"]["use_fast_math"] is False
    assert json.loads(json.dumps(record, allow_nan=False)) == record


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tNODE\tPIX\t0-31\t0
GPU2\tSYS\tNODE\t X \tPIX\t0-31\t0
NIC0\tPIX\tPIX\tPIX\t X

Legend:

  X    = Self
"""


def test_how_devices_are_joined_comes_from_the_matrix_of_nvidia_smi():
    assert cuda_facts.links(TOPOLOGY) == {
        "GPU0-GPU1": "NV18",
        "GPU0-GPU2": "SYS",
        "GPU1-GPU2": "NODE",
    }
    assert cuda_facts.links("") == {}
    assert cuda_facts.links("Failed to initialize NVML") == {}


def test_without_a_device_there_is_no_cuda_record(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_facts.cuda_facts(lambda command: None) is None


@pytest.mark.parametrize(
    ("capability", "compiles", "backend"),
    [
        ("9.0", True, "cuda-kernel"),
        ("9.0", False, "host"),
        ("7.5", True, "host"),
        ("", True, "host"),
    ],
)
def test_how_digests_of_a_gpu_are_taken_is_known_without_using_it(
    monkeypatch, capability, compiles, backend
):
    asked = []

    def compile_source(source, *, arch, macros):
        asked.append(arch)
        if not compiles:
            raise jit.CompilerMissing("no compiler")

    monkeypatch.setattr(jit, "compile_source", compile_source)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    found, why = cuda_facts._digest_backend(capability)
    assert found == backend
    assert bool(why) == (backend == "host")
    assert asked == (["sm_90a"] if capability == "9.0" else [])
