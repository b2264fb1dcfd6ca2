"""Reports of wrong routing as small cases: empty experts, unused slots, padding, top-k weights.

One file, however long, since all its cases are executed by one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import verify

Inputs = Mapping[str, Tensor]
REFERENCE, EXACT = ("reference",), ("exact",)


# BUG-17: weight gradients of experts without tokens

RECYCLED = torch.empty(4 * 6 * 5)


def weight_gradients(x: Tensor, g: Tensor, counts: Sequence[int], buffer: Tensor) -> Tensor:
    """x_e^T g_e for every expert e with tokens; tokens are sorted by expert."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            buffer[expert] = x[rows].t() @ g[rows]
        start += count
    return buffer


def recycled(x: Tensor, g: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
    """Takes memory that an earlier step gave back, and skips experts without tokens."""
    RECYCLED[:40] = x[:, :5].flatten()  # what the forward had there
    RECYCLED[40:] = 0.25
    dw = weight_gradients(x, g, counts, RECYCLED.view(4, 6, 5))
    return {"dw": dw.clone(), "dw_shared": x.t() @ g}


def cleared(x: Tensor, g: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
    """Takes cleared memory."""
    dw = weight_gradients(x, g, counts, torch.zeros(4, 6, 5))
    return {"dw": dw, "dw_shared": x.t() @ g}


def weight_gradient_case(
    name: str, function: Callable[..., Any], counts: Sequence[int]
) -> verify.Case:
    def reference(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
        x, g = inputs["x"].double(), inputs["g"].double()
        value = weight_gradients(x, g, counts, torch.zeros(4, 6, 5).double())
        size = weight_gradients(x.abs(), g.abs(), counts, torch.zeros(4, 6, 5).double())
        return {
            "dw": verify.reduction(value, size, 8, torch.float32),
            "dw_shared": verify.reduction(x.t() @ g, x.abs().t() @ g.abs(), 8, torch.float32),
        }

    def execute(x: Tensor, g: Tensor) -> dict[str, Tensor]:
        return function(x, g, counts)

    inputs = {"x": verify.normal(8, 6), "g": verify.normal(8, 5)}
    return verify.case(name=name, inputs=inputs, claims=REFERENCE, reference=reference)(execute)


bug_17 = weight_gradient_case("bug_17", recycled, [5, 0, 3, 0])
bug_17_twin = weight_gradient_case("bug_17_twin", cleared, [5, 0, 3, 0])
bug_17_none = weight_gradient_case("bug_17_none", recycled, [0, 0, 0, 0])
bug_17_none_twin = weight_gradient_case("bug_17_none_twin", cleared, [0, 0, 0, 0])
bug_17_one = weight_gradient_case("bug_17_one", recycled, [8, 0, 0, 0])
bug_17_one_twin = weight_gradient_case("bug_17_one_twin", cleared, [8, 0, 0, 0])


# BUG-19: slots that belong to nobody


def slots_of_rank() -> dict[str, Tensor]:
    """Twelve tokens with two slots each; this rank has experts 2 and 3, -1 is nobody's slot."""
    ids = verify.inputs.generate("ids", (12, 2), torch.int64, kind="integers", low=0, high=4)
    ids[1], ids[4], ids[8] = torch.tensor([2, -1]), torch.tensor([-1, -1]), torch.tensor([-1, 0])
    return {"topk_ids": ids, "expert_map": torch.tensor([-1, -1, 0, 1])}


def local_experts(x: Tensor, local: Tensor, w: Tensor) -> Tensor:
    """The sum over slots of x w_local, where local is an index of this rank's experts or -1."""
    out = torch.zeros(len(x), w.shape[2], dtype=x.dtype)
    for slot in range(local.shape[1]):
        for expert in range(len(w)):
            rows = (local[:, slot] == expert).nonzero().flatten()
            out[rows] += x[rows] @ w[expert]
    return out


def slots_reference(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    ids, mapped = inputs["topk_ids"], inputs["expert_map"]
    if int(ids.max()) >= len(mapped):
        raise ValueError(f"expert {int(ids.max())} of {len(mapped)}")
    local = torch.where(ids < 0, -1, mapped[ids.clamp(min=0)])
    x, w = inputs["x"].double(), inputs["w"].double()
    value, size = local_experts(x, local, w), local_experts(x.abs(), local, w.abs())
    return {"out": verify.reduction(value, size, 2 * x.shape[1], torch.float32)}


SLOTS: dict[str, Any] = {
    "inputs": {"x": verify.normal(12, 6), "w": verify.normal(2, 6, 5)},
    "setup": slots_of_rank,
    "claims": REFERENCE,
    "reference": slots_reference,
}


@verify.case(**SLOTS)
def bug_19(x: Tensor, w: Tensor, topk_ids: Tensor, expert_map: Tensor) -> Tensor:
    """Uses -1 as an index: the last expert."""
    return local_experts(x, expert_map[topk_ids], w)


@verify.case(**SLOTS)
def bug_19_unwritten(x: Tensor, w: Tensor, topk_ids: Tensor, expert_map: Tensor) -> Tensor:
    """Leaves slots of nobody unwritten, and adds them."""
    buffer = torch.full((12, 2, 5), float("nan"))
    for slot in range(2):
        ids = topk_ids[:, slot]
        local = torch.where(ids < 0, -1, expert_map[ids.clamp(min=0)])
        rows = (ids >= 0).nonzero().flatten()
        buffer[rows, slot] = local_experts(x[rows], local[rows, None], w)
    return buffer.sum(1)


@verify.case(**SLOTS)
def bug_19_twin(x: Tensor, w: Tensor, topk_ids: Tensor, expert_map: Tensor) -> Tensor:
    """Skips slots of nobody."""
    local = torch.where(topk_ids < 0, -1, expert_map[topk_ids.clamp(min=0)])
    return local_experts(x, local, w)


# BUG-20: gating of NaN


def scores_with_nan() -> dict[str, Tensor]:
    scores = verify.inputs.generate("scores", (32, 8))
    scores[3] = float("nan")
    return {"scores": scores}


def distinct_ids(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
    """NaN counts as the lowest score; among equals the lower index wins."""
    keys = inputs["scores"].nan_to_num(nan=-float("inf"))
    return {"ids": torch.argsort(keys, dim=1, descending=True, stable=True)[:, :3]}


GATING: dict[str, Any] = {"setup": scores_with_nan, "claims": EXACT, "exact": distinct_ids}


@verify.case(**GATING)
def bug_20(scores: Tensor) -> dict[str, Tensor]:
    """A loop of arg-max that marks what it took by the lowest score."""
    keys, taken = scores.nan_to_num(nan=-float("inf")).clone(), []
    for _ in range(3):
        taken.append(keys.argmax(dim=1))
        keys.scatter_(1, taken[-1][:, None], -float("inf"))
    return {"ids": torch.stack(taken, dim=1)}


@verify.case(**GATING)
def bug_20_twin(scores: Tensor) -> dict[str, Tensor]:
    """The same loop with a mask of what it took."""
    keys, free = scores.nan_to_num(nan=-3e38), torch.ones_like(scores, dtype=torch.bool)
    taken = []
    for _ in range(3):
        taken.append(torch.where(free, keys, -float("inf")).argmax(dim=1))
        free.scatter_(1, taken[-1][:, None], False)
    return {"ids": torch.stack(taken, dim=1)}


def same_expert_twice() -> dict[str, Tensor]:
    return {
        "ids": torch.tensor([[1, 1], [2, 3]]),
        "weights": torch.tensor([[0.625, 0.375], [0.5, 0.5]]),
    }


def both_weights(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
    """The rule here: an expert that is named twice counts with both weights."""
    return {"share": torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])}


TWICE: dict[str, Any] = {"setup": same_expert_twice, "claims": EXACT, "exact": both_weights}


@verify.case(**TWICE)
def bug_20_twice(ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The second weight overwrites the first."""
    return {"share": torch.zeros(2, 4).scatter(1, ids, weights)}


@verify.case(**TWICE)
def bug_20_twice_twin(ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Both are added."""
    return {"share": torch.zeros(2, 4).scatter_add(1, ids, weights)}


# BUG-21 and BUG-22: the weights of the router

ROUTER = {"scores": verify.uniform(24, 6, low=0, high=1), "y": verify.normal(24, 6, 10)}


def mixed(weights: Tensor, ids: Tensor, y: Tensor) -> Tensor:
    """sum_k weights[:, k] y[:, ids[:, k]]"""
    picked = y.gather(1, ids[:, :, None].expand(-1, -1, y.shape[2]))
    return (weights[:, :, None] * picked).sum(1)


def router_case(
    name: str, function: Callable[..., Any], right: Callable[..., Any], *args: Any
) -> verify.Case:
    """A case of a router: `function` and `right` return weights and ids for the scores."""

    def reference(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
        y = inputs["y"].double()
        weights, ids = right(inputs["scores"].double(), *args)
        size, steps = mixed(weights.abs(), ids, y.abs()), 2 * y.shape[1] + 16
        return {
            "weights": verify.reduction(weights, weights.abs(), 16, torch.float32),
            "out": verify.reduction(mixed(weights, ids, y), size, steps, torch.float32),
        }

    def execute(scores: Tensor, y: Tensor) -> dict[str, Tensor]:
        weights, ids = function(scores, *args)
        return {"weights": weights, "out": mixed(weights, ids, y)}

    return verify.case(name=name, inputs=ROUTER, claims=REFERENCE, reference=reference)(execute)


def normalised(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, ids = scores.topk(k, dim=1)
    return weights / weights.abs().sum(dim=1, keepdim=True), ids


def normalised_last(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """One expert is a special case, without the dimension of slots."""
    weights, ids = scores.max(dim=-1) if k == 1 else scores.topk(k, dim=-1)
    weights = weights / weights.abs().sum(dim=-1, keepdim=True)
    return weights.reshape(-1, k), ids.reshape(-1, k)


bug_21 = router_case("bug_21", normalised_last, normalised, 1)
bug_21_twin = router_case("bug_21_twin", normalised, normalised, 1)
bug_21_two = router_case("bug_21_two", normalised_last, normalised, 2)
bug_21_all = router_case("bug_21_all", normalised_last, normalised, 6)


def scaled(
    scores: Tensor, renormalise: bool, scale: float, activation: str
) -> tuple[Tensor, Tensor]:
    probabilities = torch.softmax(scores, 1) if activation == "softmax" else torch.sigmoid(scores)
    weights, ids = probabilities.topk(3, dim=1)
    if renormalise:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights * scale, ids


def scaled_if_normalised(
    scores: Tensor, renormalise: bool, scale: float, activation: str
) -> tuple[Tensor, Tensor]:
    """The scale sits in the branch of the normalisation."""
    return scaled(scores, renormalise, scale if renormalise else 1.0, activation)


def raw_scores(
    scores: Tensor, renormalise: bool, scale: float, activation: str
) -> tuple[Tensor, Tensor]:
    """Without normalisation the scores themselves are the weights."""
    ids = scores.topk(3, dim=1).indices
    return scaled(scores, True, scale, activation) if renormalise else (scores.gather(1, ids), ids)


SETTINGS = {
    f"{'renormalised' if renormalise else 'plain'}_{scale:g}_{activation}".replace(".", "_"): (
        renormalise,
        scale,
        activation,
    )
    for renormalise in (True, False)
    for scale in (1.0, 2.5)
    for activation in ("softmax", "sigmoid")
}
for setting, values in SETTINGS.items():
    name = f"bug_22_{setting}"
    globals()[name] = router_case(name, scaled_if_normalised, scaled, *values)
    globals()[f"{name}_twin"] = router_case(f"{name}_twin", scaled, scaled, *values)


def centred(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda scores, *args: function(4 * scores - 3, *args)


bug_22_raw = router_case("bug_22_raw", centred(raw_scores), centred(scaled), False, 1.0, "softmax")


# BUG-24: padding and capacity


def padding_first() -> dict[str, Tensor]:
    return {"padding": torch.arange(12) < 4}


def with_capacity(x: Tensor, w: Tensor, counted: Tensor, capacity: int) -> dict[str, Tensor]:
    """Everybody wants expert 0; it takes the first `capacity` of those that count."""
    position = torch.cumsum(counted, 0) - 1
    kept = counted & (position < capacity)
    return {"out": torch.where(kept[:, None], x @ w, torch.zeros((), dtype=x.dtype)), "kept": kept}


def capacity_reference(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    x, w, counted = inputs["x"].double(), inputs["w"].double(), ~inputs["padding"]
    value = with_capacity(x, w, counted, 4)["out"]
    size = with_capacity(x.abs(), w.abs(), counted, 4)["out"]
    return {"out": verify.reduction(value, size, 6, torch.float32)}


def kept_tokens(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
    counted = ~inputs["padding"]
    return {"kept": counted & (torch.cumsum(counted, 0) <= 4)}


CAPACITY: dict[str, Any] = {
    "inputs": {"x": verify.normal(12, 6), "w": verify.normal(6, 5)},
    "setup": padding_first,
    "constants": ("kept",),
    "claims": ("reference", "exact"),
    "reference": capacity_reference,
    "exact": kept_tokens,
}


@verify.case(**CAPACITY)
def bug_24(x: Tensor, w: Tensor, padding: Tensor) -> dict[str, Tensor]:
    """Padding is routed like any token, and takes the places."""
    return with_capacity(x, w, torch.ones_like(padding), 4)


@verify.case(**CAPACITY)
def bug_24_twin(x: Tensor, w: Tensor, padding: Tensor) -> dict[str, Tensor]:
    """Padding takes no place."""
    return with_capacity(x, w, ~padding, 4)


def largest(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
    return {"ids": torch.argsort(inputs["scores"], dim=0, descending=True, stable=True)}


CHOICE: dict[str, Any] = {
    "inputs": {"scores": verify.normal(12, 2)},
    "claims": EXACT,
    "exact": largest,
}


@verify.case(**CHOICE)
def bug_24_capacity(scores: Tensor, capacity: int = 20) -> dict[str, Tensor]:
    """An expert chooses more tokens than there are."""
    return {"ids": torch.topk(scores, capacity, dim=0).indices}


@verify.case(**CHOICE)
def bug_24_capacity_twin(scores: Tensor, capacity: int = 20) -> dict[str, Tensor]:
    """It chooses all."""
    return {"ids": torch.topk(scores, min(capacity, len(scores)), dim=0).indices}


# More reports: a slot lost beside a mask, and loads counted twice


def slot_mask() -> dict[str, Tensor]:
    ids = torch.stack([torch.arange(24) % 6, (torch.arange(24) + 1) % 6], dim=1)
    return {"ids": ids, "mask": torch.arange(24) % 5 != 0}


def masked_reference(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, verify.Reference]:
    weights, y = inputs["weights"].double(), inputs["y"].double()
    keep = inputs["mask"][:, None]
    value = mixed(weights, inputs["ids"], y) * keep
    size = mixed(weights.abs(), inputs["ids"], y.abs()) * keep
    return {"out": verify.reduction(value, size, 4, torch.float32)}


MASKED: dict[str, Any] = {
    "inputs": {"weights": verify.uniform(24, 2, low=0), "y": verify.normal(24, 6, 10)},
    "setup": slot_mask,
    "claims": REFERENCE,
    "reference": masked_reference,
}


@verify.case(**MASKED)
def aiter_5595(weights: Tensor, y: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Takes the last slot for the mask's own, since there is a mask, and strips it."""
    return mixed(weights[:, :-1], ids[:, :-1], y) * mask[:, None]


@verify.case(**MASKED)
def aiter_5595_twin(weights: Tensor, y: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Every slot counts."""
    return mixed(weights, ids, y) * mask[:, None]


def loads(inputs: Inputs, upstream: Inputs, view: Any) -> dict[str, Tensor]:
    return {"load": torch.bincount(inputs["ids"].flatten(), minlength=8)}


LOADS: dict[str, Any] = {
    "inputs": {"ids": verify.integers(100, 2, low=0, high=8)},
    "claims": EXACT,
    "exact": loads,
}


@verify.case(**LOADS)
def automodel_3247(ids: Tensor) -> dict[str, Tensor]:
    """The forward and its recomputation both count."""
    load = torch.zeros(8, dtype=torch.int64)
    for _ in ("forward", "recomputation"):
        load += torch.bincount(ids.flatten(), minlength=8)
    return {"load": load}


@verify.case(**LOADS)
def automodel_3247_twin(ids: Tensor) -> dict[str, Tensor]:
    """The forward alone counts."""
    load = torch.zeros(8, dtype=torch.int64)
    return {"load": load + torch.bincount(ids.flatten(), minlength=8)}
