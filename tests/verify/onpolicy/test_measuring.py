"""The call inside a training loop: tensors of any layout give the same figures as dumps do."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from onpolicy_records import both, sample

from verify.onpolicy import measure_logprobs
from verify.onpolicy.numbers import measure

RNG = np.random.default_rng(9)
R = (-3 * RNG.random((3, 4))).astype(np.float32)
T = R.copy()
T[0, 2] -= 0.5
T[2, 1] += 1.5
MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]])
IDS = np.arange(12).reshape(3, 4) + 100


def by_dump():
    return measure(
        both(
            *(
                sample(
                    str(row), IDS[row].tolist(), trainer=T[row].tolist(), rollout=R[row].tolist(),
                    mask=MASK[row].tolist(),
                )
                for row in range(3)
            )
        )
    )  # fmt: skip


def figures(numbers):
    return {
        name: value
        for name, value in numbers.to_json().items()
        if name not in ("misalignments", "differing_beyond_storage")
    }


@pytest.mark.parametrize("kind", ["numpy", "torch", "packed", "torch-packed", "bool", "int32"])
def test_the_same_figures_as_of_a_dump(kind):
    given = [T, R, MASK, None, IDS]
    if "packed" in kind:
        starts = np.array([0, 4, 8, 12], np.int32)
        given = [T.ravel(), R.ravel(), MASK.ravel(), starts, IDS.ravel()]
    if kind == "bool":
        given[2] = MASK.astype(bool)
    if "torch" in kind:
        given = [None if one is None else torch.from_numpy(one) for one in given]
        given[0].requires_grad_()
    if kind == "int32":
        given[4] = IDS.astype(np.int32)
    found = measure_logprobs(*given)
    assert figures(found) == figures(by_dump())
    assert found.first.key == "0"
    assert (found.first.position, found.first.token) == (2, 102)
    assert (found.largest.key, found.largest.position, found.largest.token) == ("2", 1, 109)
    assert found.largest_sum == "2"
    assert found.sums.tolist() == measure_logprobs(T, R, MASK).sums.tolist()


def test_bfloat16_and_float16_and_float64():
    exact = torch.tensor([-0.25, -1.5, -2.0])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        numbers = measure_logprobs(exact.to(dtype), exact)
        assert numbers.differing_tokens == 0
        assert numbers.compared_tokens == 3
    rounded = torch.tensor([-0.3]).to(torch.bfloat16)
    assert measure_logprobs(rounded, torch.tensor([-0.3])).differing_tokens == 1


def test_strided_and_transposed_arrays():
    wide = np.stack([T, R])
    assert measure_logprobs(wide[0, :, ::2], wide[1, :, ::2]).tokens == 6
    assert measure_logprobs(T.T, R.T).abs_max == measure_logprobs(T, R).abs_max
    assert measure_logprobs(torch.from_numpy(T).T, torch.from_numpy(R).T).tokens == 12


def test_nothing_given_is_altered():
    t, r = T.astype(np.float64), R.astype(np.float64)
    before = t.copy(), r.copy()
    measure_logprobs(t, r, MASK)
    np.testing.assert_array_equal(t, before[0])
    np.testing.assert_array_equal(r, before[1])


def test_empty_and_masked_altogether():
    assert measure_logprobs(np.zeros(0), np.zeros(0)).mean is None
    assert measure_logprobs(np.zeros((0, 5)), np.zeros((0, 5))).samples == 0
    assert measure_logprobs(np.zeros((3, 0)), np.zeros((3, 0))).samples == 3
    masked = measure_logprobs(T, R, np.zeros((3, 4)))
    assert (masked.compared_tokens, masked.masked_tokens, masked.abs_max) == (0, 12, None)
    empties = measure_logprobs(T.ravel(), R.ravel(), cu_seqlens=[0, 0, 12, 12])
    assert empties.sums.tolist()[::2] == [0.0, 0.0]
    assert empties.largest_sum == "1"
    assert empties.first.key == "1"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rollout": R[:2]}, "rollout has shape [2, 4], trainer [3, 4]"),
        ({"mask": MASK[0]}, "mask has shape [4]"),
        ({"tokens": IDS.ravel()}, "tokens has shape [12]"),
        ({"tokens": IDS.astype(float)}, "token ids are integers"),
        ({"trainer": T[None], "rollout": R[None]}, "allowed are [N] and [B, T]"),
        ({"trainer": IDS}, "log-probabilities are floating point"),
        ({"cu_seqlens": [0, 12]}, "cu_seqlens is for packed arrays"),
        ({"rollout": [["a"] * 4] * 3}, "numbers are needed"),
    ],
)
def test_what_does_not_fit_is_said(given, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        measure_logprobs(**{"trainer": T, "rollout": R, **given})


@pytest.mark.parametrize("starts", [[1, 12], [0, 11], [0, 8, 4, 12], [], [[0, 12]], [0.0, 12.0]])
def test_starts_must_cover_the_tokens(starts):
    with pytest.raises(ValueError, match="cu_seqlens"):
        measure_logprobs(T.ravel(), R.ravel(), cu_seqlens=starts)


def test_neither_torch_nor_the_command_line_is_loaded():
    script = (
        "import sys, numpy as np; import verify.onpolicy as o;"
        "print(o.measure_logprobs(np.zeros(3), np.zeros(3)).differing_tokens,"
        " sorted({'torch', 'click', 'pyarrow'} & set(sys.modules)), 'measure' in dir(o))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["0", "[]", "True"]


def test_names_are_those_that_are_there():
    import verify.onpolicy as package

    for name in package.__all__:
        if name not in ("diagnose", "Evidence", "read_dump"):  # they load the readers
            assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_equal_values_are_0_apart_and_not_minus_0():
    assert str(measure_logprobs(np.array([-1.0]), np.array([-1.0])).abs_max) == "0.0"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mask": np.array([1.0, np.nan, 0.0])}, "mask holds NaN"),
        ({"cu_seqlens": [0, 2, 1, 3]}, "falls from 2 to 1 at 2"),
        ({"cu_seqlens": [0, 2]}, "from 0 to 3"),
        ({"rollout": [[-1.0], [-1.0, -2.0]]}, "rollout is no dense array of numbers"),
    ],
)
def test_what_is_wrong_is_named_with_the_argument(given, says):
    values = np.array([-1.0, -2.0, -3.0])
    with pytest.raises(ValueError, match=says):
        measure_logprobs(**{"trainer": values, "rollout": values, **given})


def test_a_tensor_that_numpy_cannot_view_is_named():
    dense = torch.tensor([-1.0, -2.0])
    with pytest.raises(ValueError, match="rollout is no dense array"):
        measure_logprobs(dense, dense.to_sparse())
    assert measure_logprobs(torch._neg_view(-dense), dense).differing_tokens == 0


def test_numbers_can_be_copied_and_gathered():
    numbers = measure_logprobs(np.array([-1.0, -2.0]), np.array([-1.0, -2.5]))
    for one in (copy.deepcopy(numbers), pickle.loads(pickle.dumps(numbers))):
        assert one.to_json() == numbers.to_json()
        assert one.sums.tolist() == numbers.sums.tolist()
