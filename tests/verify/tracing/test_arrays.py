"""Arrays of numpy, and tensors of odd classes: by value where there is one, told where not."""

from __future__ import annotations

import collections.abc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import verify
from verify.errors import UnsupportedError
from verify.reasons import Verdict
from verify.tracing.arrays import NoDigest
from verify.tracing.divergence import diff
from verify.tracing.files import read_recording
from verify.tracing.tensors import located, tensors_in

TABLE = np.zeros(4, [("a", "i1"), ("b", "<f4"), ("c", ">i2")])


class Takes(nn.Module):
    """Is given anything beside its tensor, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, other: Any) -> tuple[torch.Tensor, Any]:
        return self.linear(x), other


def recorded(folder: Path, value: Any, level: str = "module") -> Path:
    torch.manual_seed(0)
    model = Takes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with verify.record(folder, model, optimizer, level=level):
        model(torch.ones(1, 2), value)[0].sum().backward()
        optimizer.step()
    return folder


def masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, it says
        made: torch.Tensor = torch.masked.masked_tensor(
            torch.ones(2), torch.tensor([True, False]), requires_grad=True
        )
    return made


@pytest.mark.parametrize(
    ("array", "paths", "values"),
    [
        (np.arange(6).reshape(2, 3)[:, ::-1], [""], [[[2, 1, 0], [5, 4, 3]]]),
        (np.arange(3, dtype=">f4")[::-1], [""], [[2.0, 1.0, 0.0]]),
        (np.array([1 + 2j], ">c8"), [""], [[1 + 2j]]),
        (TABLE["b"], [""], [[0.0] * 4]),
        (TABLE[:1], ["a", "b", "c"], [[0], [0.0], [0]]),
        (np.array(["1970-01-03"], ">M8[D]"), ["datetime64[D]"], [[2]]),
        (np.array([7], "m8[s]"), ["timedelta64[s]"], [[7]]),
        (np.array([5, None, torch.ones(1)], object), ["2"], [[1.0]]),
        (np.ma.array([1, 2], mask=[False, True]), ["", "mask"], [[1, 2], [False, True]]),
        (np.frombuffer(bytes(9), np.uint8)[1:].view("<f4"), [""], [[0.0, 0.0]]),
        (np.array(3.5, ">f8"), [""], [3.5]),
        (np.array(["text"]), [], []),
    ],
)
def test_arrays_by_value(array: np.ndarray[Any, Any], paths: list[str], values: list[Any]) -> None:
    found = list(tensors_in(array))
    assert [path for path, _ in found] == paths
    assert [t.tolist() for _, t in found if isinstance(t, torch.Tensor)] == values


def test_a_usual_array_shares_its_memory() -> None:
    array = np.zeros(3, np.float32)
    ((_, t),) = tensors_in(array)
    assert isinstance(t, torch.Tensor)
    assert t.data_ptr() == array.ctypes.data


@pytest.mark.parametrize(
    "array", [np.ones(2, np.longdouble), np.ones(2, np.clongdouble)[::-1], np.zeros(2, "V3")]
)
def test_arrays_without_a_digest(array: np.ndarray[Any, Any]) -> None:
    ((path, found),) = tensors_in({"x": array})
    assert path == "x"
    assert isinstance(found, NoDigest)
    assert f"numpy's {array.dtype.name}" in found.reason
    with pytest.raises(UnsupportedError, match="no digest of an array"):
        located(found)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1.0], ">f4"), np.array([2.0], ">f4")),
        (np.array([(1, 2.0, 3)], TABLE.dtype), np.array([(1, 2.0, 4)], TABLE.dtype)),
        (np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-02"], "M8[D]")),
        (np.arange(4)[::-1], np.arange(1, 5)[::-1]),
    ],
)
def test_other_values_are_a_mismatch(tmp_path: Path, one: Any, other: Any) -> None:
    a, b, same = (
        recorded(tmp_path / name, value)
        for name, value in (("a", one), ("b", other), ("c", one.copy()))
    )
    assert diff(a, b).verdict is Verdict.MISMATCH
    assert diff(a, same).verdict is Verdict.VERIFIED


class Closed(collections.abc.Mapping[str, Any]):
    """Refuses to be read."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("closed")

    def __iter__(self) -> Iterator[str]:
        raise OSError("closed")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.ones(2, np.longdouble), "no digest of an array of numpy's"),
        (nn.UninitializedParameter(), "uninitialised parameter"),
        (masked(), "no digest of a MaskedTensor"),
        (Closed(), "no digest of what is in a Closed: to look into it raises OSError"),
    ],
    ids=["longdouble", "lazy", "masked", "closed"],
)
def test_what_has_no_digest_is_told_and_raises_nothing(
    tmp_path: Path, value: Any, told: str, level: str
) -> None:
    folder = recorded(tmp_path, value, level)
    found = diff(folder, folder)
    assert found.verdict is Verdict.UNVERIFIED
    assert all("has no digest" in one or "have no digest" in one for one in found.reasons)
    skipped = read_recording(folder / "rank-00000.trace").skipped
    assert told in skipped["input of (root) 1"]
    assert told in skipped["output of (root) 1"]


@pytest.mark.parametrize("value", [nn.UninitializedParameter(), masked()], ids=["lazy", "masked"])
def test_a_probe_of_it_raises_nothing_either(tmp_path: Path, value: torch.Tensor) -> None:
    model = Takes()
    with verify.record(tmp_path, model):
        assert verify.probe("odd", value) is value
        model(torch.ones(1, 2), None)[0].sum().backward()
    assert "probe of odd" in read_recording(tmp_path / "rank-00000.trace").skipped
