"""Reports of goldens: each fault and its twin, compared with what was stored before.

The code as it was then is in `cases_goldens_then.py`: mostly the twin under the fault's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import verify

ROWS: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(16, 8)},
    "claims": ("repeat", "golden"),
    "golden": "exact",
}


def bits(value: int, like: Tensor) -> Tensor:
    """One element with these bits."""
    word = {2: torch.int16, 4: torch.int32}[like.element_size()]
    size = 8 * like.element_size()
    return torch.tensor(value - (1 << size) * (value >> (size - 1)), dtype=word).view(like.dtype)


def with_bits(x: Tensor, value: int, where: int = 5) -> Tensor:
    """A copy of x in which one element holds these bits."""
    out = x.clone()
    out.view(-1)[where] = bits(value, x)
    return out


@verify.case(**ROWS)
def bug_53_zero(x: Tensor) -> Tensor:
    """-0.0 where the golden has 0.0."""
    return with_bits(x, 0x80000000)


@verify.case(**ROWS)
def bug_53_zero_twin(x: Tensor) -> Tensor:
    """0.0 in both."""
    return with_bits(x, 0)


@verify.case(**ROWS)
def bug_53_payload(x: Tensor) -> Tensor:
    """NaN in both, with other bits."""
    return with_bits(x, 0xFFC00001)


@verify.case(**ROWS)
def bug_53_payload_twin(x: Tensor) -> Tensor:
    """NaN in both, with the same bits at the same place."""
    return with_bits(x, 0x7FC00000)


@verify.case(**ROWS)
def bug_53_signalling(x: Tensor) -> Tensor:
    """A quiet NaN in bfloat16 where the golden has a signalling one."""
    return with_bits(x.to(torch.bfloat16), 0x7FC0)


@verify.case(**ROWS)
def bug_53_signalling_twin(x: Tensor) -> Tensor:
    """A signalling NaN in both."""
    return with_bits(x.to(torch.bfloat16), 0x7F81)


@verify.case(**ROWS)
def bug_54_dtype(x: Tensor) -> Tensor:
    """float32 that was rounded from bfloat16; the golden is bfloat16."""
    return x.to(torch.bfloat16).float()


@verify.case(**ROWS)
def bug_54_dtype_twin(x: Tensor) -> Tensor:
    """bfloat16 in both."""
    return x.to(torch.bfloat16)


@verify.case(**ROWS)
def bug_54_shape(x: Tensor) -> Tensor:
    """(16, 1) where the golden is (16,): both broadcast to the same."""
    return x[:, :1] * 2


@verify.case(**ROWS)
def bug_54_shape_twin(x: Tensor) -> Tensor:
    """(16,) in both."""
    return x[:, 0] * 2


@verify.case(**ROWS)
def bug_54_empty(x: Tensor) -> Tensor:
    """No element at all, in both: nothing is compared."""
    return x[:0, :4]


@verify.case(**ROWS)
def bug_54_empty_twin(x: Tensor) -> Tensor:
    """Some elements."""
    return x[:2, :4].clone()


@verify.case(**ROWS)
def bug_54_missing(x: Tensor) -> dict[str, Tensor]:
    """The golden has b as well."""
    return {"a": x + 1}


@verify.case(**ROWS)
def bug_54_missing_twin(x: Tensor) -> dict[str, Tensor]:
    """Both are there."""
    return {"a": x + 1, "b": x * 2}


@verify.case(**ROWS)
def bug_54_extra(x: Tensor) -> dict[str, Tensor]:
    """The golden has no c."""
    return {"a": x + 1, "b": x * 2, "c": x - 1}


@verify.case(**ROWS)
def bug_54_extra_twin(x: Tensor) -> dict[str, Tensor]:
    """As in the golden."""
    return {"a": x + 1, "b": x * 2}


@verify.case(**ROWS)
def bug_54_odd(x: Tensor) -> dict[str, Tensor]:
    """Kinds of tensors that comparators trip over; one element of each differs."""
    return odd(x, 1)


@verify.case(**ROWS)
def bug_54_odd_twin(x: Tensor) -> dict[str, Tensor]:
    """The same tensors as in the golden."""
    return odd(x, 0)


def odd(x: Tensor, change: int) -> dict[str, Tensor]:
    """0-dim, expanded, strided, fp8, bool, complex and conjugated: not one plain tensor."""
    y = x.clone()
    y[3, 3] += change
    return {
        "zero_dim": y[3, 3],
        "expanded": y[3, 3:4].expand(4),
        "strided": y.t()[1::2, 1::2],
        "fp8": y.to(torch.float8_e4m3fn),
        "bool": (y > x) | (x > 0),
        "complex": torch.complex(y, x),
        "conjugated": torch.complex(x, y).conj(),
    }


def in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def float64(
    inputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], view: Any
) -> dict[str, verify.Reference]:
    x = inputs["x"].double()
    return {"out": verify.reduction(x.sum(1), x.abs().sum(1), x.shape[1], torch.float32)}


SUMS: Mapping[str, Any] = {
    "inputs": {"x": verify.normal(64, 120)},
    "claims": ("repeat", "reference", "golden"),
    "reference": float64,
    "golden": "exact",
}


@verify.case(**SUMS)
def bug_55_order(x: Tensor) -> Tensor:
    """Sums from the last column to the first; the golden was made from the first to the last."""
    return in_order(x.flip(1).unbind(1))


@verify.case(**SUMS)
def bug_55_order_twin(x: Tensor) -> Tensor:
    """The order of the golden."""
    return in_order(x.unbind(1))


@verify.case(**{**SUMS, "claims": ("repeat", "golden")})
def bug_55_regression(x: Tensor) -> Tensor:
    """The accumulator is bfloat16 now."""
    return in_order(x.to(torch.bfloat16).unbind(1)).float()


@verify.case(**{**SUMS, "claims": ("repeat", "golden")})
def bug_55_regression_twin(x: Tensor) -> Tensor:
    """float32, as in the golden."""
    return in_order(x.unbind(1))


@verify.case(**{**SUMS, "claims": ("repeat", "golden"), "reference": None})
def bug_55_threads(x: Tensor) -> Tensor:
    """Every thread adds its columns; the golden was made with another number of threads."""
    parts = [in_order(part.unbind(1)) for part in x.chunk(torch.get_num_threads(), dim=1)]
    return in_order(parts)


@verify.case(**{**SUMS, "claims": ("repeat", "golden"), "reference": None})
def bug_55_threads_twin(x: Tensor) -> Tensor:
    """Threads share out a fixed grouping."""
    return in_order([in_order(part.unbind(1)) for part in x.chunk(4, dim=1)])


@verify.case(**{**SUMS, "claims": ("repeat", "golden"), "reference": None})
def bug_55_unstable(x: Tensor) -> Tensor:
    """Differs from itself: no matter of goldens."""
    order = torch.frombuffer(bytearray(os.urandom(8 * 120)), dtype=torch.int64).argsort()
    return in_order(x[:, order].unbind(1))


@verify.case(**{**SUMS, "claims": ("repeat", "golden"), "reference": None})
def bug_55_unstable_twin(x: Tensor) -> Tensor:
    """Stable."""
    return in_order(x.unbind(1))


@verify.case(**ROWS)
def bug_55_infinite(x: Tensor) -> Tensor:
    """The golden holds an infinity, from a step that overflowed."""
    return x * 2


@verify.case(**ROWS)
def bug_55_infinite_twin(x: Tensor) -> Tensor:
    """The golden is finite."""
    return x * 2


@verify.case(**{**ROWS, "golden": "bits"})
def bug_55_environment(x: Tensor) -> Tensor:
    """Bits stored by another version of torch: nothing is known about this one."""
    return x.exp()


@verify.case(**{**ROWS, "golden": "bits"})
def bug_55_environment_twin(x: Tensor) -> Tensor:
    """Bits of this environment."""
    return x.exp()


class Router(torch.nn.Module):
    """Experts' weights, tied to a second name, and their bias: a buffer, no parameter."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        weight = (torch.arange(100_000, dtype=torch.float32) - 5e4).view(100, 1000) / 7
        if change == "weight":  # one bit, far from where anybody samples
            weight.view(torch.int32)[50, 500] ^= 1 << 20
        self.weight = torch.nn.Parameter(weight)
        self.tied = self.weight
        self.register_buffer("expert_bias", torch.linspace(-1, 1, 100))
        self.register_buffer("scale", torch.ones(3), persistent=False)
        if change == "bias":
            self.expert_bias[7] = 0.5
        if change == "scale":
            self.scale[1] = 2

    def tensors(self) -> dict[str, Tensor]:
        """Everything by which a layer computes, whatever it is called or saved."""
        named = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in named.items()}


STATE: Mapping[str, Any] = {**ROWS, "gradients": False, "constants": ("*",)}


def state(change: str) -> dict[str, Tensor]:
    """A copy of a layer's tensors as another process would receive them."""
    return Router(change).tensors()


@verify.case(**STATE)
def bug_57_weight(x: Tensor) -> dict[str, Tensor]:
    """One bit in the middle of a large tensor, which two names share."""
    return {**state("weight"), "probe": x * 2}


@verify.case(**STATE)
def bug_57_weight_twin(x: Tensor) -> dict[str, Tensor]:
    """All bits as stored."""
    return {**state(""), "probe": x * 2}


@verify.case(**STATE)
def bug_57_bias(x: Tensor) -> dict[str, Tensor]:
    """A buffer has changed, no parameter."""
    return {**state("bias"), "probe": x * 2}


@verify.case(**STATE)
def bug_57_bias_twin(x: Tensor) -> dict[str, Tensor]:
    """Buffers as stored."""
    return {**state(""), "probe": x * 2}


@verify.case(**STATE)
def bug_57_scale(x: Tensor) -> dict[str, Tensor]:
    """A buffer that no state_dict holds has changed."""
    return {**state("scale"), "probe": x * 2}


@verify.case(**STATE)
def bug_57_scale_twin(x: Tensor) -> dict[str, Tensor]:
    """As stored."""
    return {**state(""), "probe": x * 2}


@verify.case(**ROWS)
def bug_58_shared(x: Tensor) -> dict[str, Tensor]:
    """What raw memory must not be written of, and one element has changed since."""
    return {**bug_58_shared_twin.execute(x), "t": (x + (x == x[3, 2])).t()}


@verify.case(**ROWS)
def bug_58_shared_twin(x: Tensor) -> dict[str, Tensor]:
    """Transposed, expanded, and two views of one storage: each stored by its logical elements."""
    y = x * 2
    return {"t": x.t(), "expanded": x[:1].expand(4, 8), "a": y, "b": y[1:3]}
