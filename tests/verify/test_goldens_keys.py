"""What a bit golden depends on besides the code, and what only explains a difference."""

from __future__ import annotations

from typing import Any

import pytest

from verify.environment import environment
from verify.goldens import keys

RECORD: dict[str, Any] = {
    "machine": "x86_64",
    "torch": "2.13.0",
    "cpu_model": "AMD EPYC 7",
    "cpu_capability": "AVX2",
    "num_threads": 2,
    "math_libraries": ["MKL 1"],
    "blas": "mkl",
    "flags": {"float32_matmul_precision": "highest", "cuda_matmul_allow_tf32": False},
    "variables": {"OMP_NUM_THREADS": "2"},
    "cuda": None,
    "source": {"commit": "a" * 40, "dirty": False},
}
GPU = {
    "runtime": "13.0",
    "driver": "580",
    "devices": [{"name": "NVIDIA H200", "capability": "9.0"}],
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**RECORD, **fields}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (changed(machine="aarch64"), ["machine x86_64 -> aarch64"]),
        (changed(torch="2.14.0"), ["torch 2.13.0 -> 2.14.0"]),
        (changed(cpu_capability="AVX512"), ["isa AVX2 -> AVX512"]),
        (changed(math_libraries=["MKL 2"]), ["blas MKL 1 -> MKL 2"]),
        (
            changed(flags={"float32_matmul_precision": "high"}),
            ["float32_matmul_precision highest -> high"],
        ),
        (changed(variables={"MKL_CBWR": "COMPATIBLE"}), ["MKL_CBWR None -> COMPATIBLE"]),
    ],
)
def test_what_the_author_does_not_control_is_the_key_and_named(
    record: dict[str, Any], said: list[str]
) -> None:
    assert keys.differing(keys.key_of(record), keys.key_of(RECORD)) == said


@pytest.mark.parametrize(
    "record",
    [
        changed(num_threads=64),
        changed(cpu_model="AMD EPYC 9"),
        changed(source={"commit": "b" * 40, "dirty": True}),
        changed(variables={"OMP_NUM_THREADS": "64"}),
        changed(cuda=GPU),
        changed(flags={**RECORD["flags"], "cuda_matmul_allow_tf32": True}),
    ],
)
def test_what_explains_a_difference_does_not_excuse_it(record: dict[str, Any]) -> None:
    assert keys.key_of(record) == keys.key_of(RECORD)


def test_outputs_on_a_gpu_have_its_key() -> None:
    base = keys.key_of(changed(cuda=GPU), ("cuda",))
    assert base["sm"] == "9.0"
    assert base["cuda"] == "13.0"
    assert "isa" not in base
    other = {**GPU, "devices": [{"name": "B200", "capability": "10.0"}], "driver": "590"}
    assert keys.differing(keys.key_of(changed(cuda=other), ("cuda",)), base) == ["sm 9.0 -> 10.0"]
    assert keys.provenance(changed(cuda=GPU))["gpu"] == ["NVIDIA H200"]
    tf32 = changed(cuda=GPU, flags={**RECORD["flags"], "cuda_matmul_allow_tf32": True})
    assert keys.differing(keys.key_of(tf32, ("cuda",)), base) == [
        "cuda_matmul_allow_tf32 False -> True"
    ]


def test_the_nearest_of_several_keys() -> None:
    ours = {"torch": "2", "isa": "A", "cpu": "x"}
    far = {"torch": "1", "isa": "B", "cpu": "x"}
    near = {"torch": "2", "isa": "B", "cpu": "x"}
    assert keys.nearest(ours, [far, near]) == ["isa B -> A"]
    assert keys.nearest(ours, [ours, far]) == []
    assert keys.nearest(ours, []) == []
    assert keys.differing({"a": "1"}, {"b": "2"}) == ["b 2 -> None", "a None -> 1"]


def test_this_machine_has_a_key_and_a_provenance_of_plain_text() -> None:
    record = environment()
    key, made = keys.key_of(record), keys.provenance(record)
    assert key == keys.key_of(environment())
    assert all(type(name) is str and type(text) is str and text for name, text in key.items())
    assert {type(value) for value in made.values()} <= {str, int, bool, type(None)}
    assert made["num_threads"] == record["num_threads"]


def test_where_the_system_names_no_vendor_the_model_stands_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apple, other = changed(cpu_model="Apple M1"), changed(cpu_model="Apple M4")
    assert keys.key_of(apple) == keys.key_of(other), "of one vendor"
    monkeypatch.setattr(keys, "cpu_vendor", lambda: "")
    said = keys.differing(keys.key_of(other), keys.key_of(apple))
    assert said == ["cpu Apple M1 -> Apple M4"]
    assert keys.key_of(apple) == keys.key_of(changed(cpu_model="Apple M1"))


def test_a_system_without_proc_names_no_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr(keys.Path, "read_text", refuse)
    assert keys.cpu_vendor() == ""
