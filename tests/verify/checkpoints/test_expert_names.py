"""What of experts a parameter holds, by its name and shape, and the boxes that it is cut into."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.checkpoints.boxes import digest_box, digest_placed
from verify.checkpoints.expert_names import cuts, holding
from verify.checkpoints.parameters import Place, box_numel, tiling_problem


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("a.experts.3.gate_proj.weight", (6, 8), [("a.", "weight", "gate", 3)]),
        ("experts.3.w3.bias", (6,), [("", "bias", "up", 3)]),
        ("a.experts.0.gate_up_proj", (4, 8), [("a.", "weight", r, 0) for r in ("gate", "up")]),
        ("a.experts.down_proj", (1, 8, 6), [("a.", "weight", "down", 0)]),
        ("a.experts.w2_weight_scale_inv", (1, 8, 6), [("a.", "scale_inv", "down", 0)]),
        ("a.experts.gate_up_proj_bias", (1, 8), [("a.", "bias", r, 0) for r in ("gate", "up")]),
        ("a.w_gate", (1, 8, 6), [("a.", "weight", "gate", 0)]),
        ("w_down", (1, 8, 6), [("", "weight", "down", 0)]),
        ("a.experts.router.weight", (1, 3, 2), [("a.", "weight", "router", 0)]),
        ("a.experts.gate_up_proj", (1, 7, 6), None),
        ("a.experts.down_proj", (8, 6), None),
        ("a.experts.down_proj", (), None),
        ("a.experts.gate_up_proj", (1 << 20, 2, 2), None),  # as a broken header may say
        ("a.shared_experts.gate_proj.weight", (6, 8), None),
        ("a.mlp.gate_up_proj.weight", (8, 8), None),
        ("optim.a.experts.0.gate_proj.weight.exp_avg", (6, 8), None),
    ],
)  # fmt: skip
def test_what_names_and_shapes_hold(name: str, shape: tuple[int, ...], found) -> None:
    held = holding(name, shape)
    if found is None:
        assert held is None
        return
    assert held is not None
    assert [(p.stem, p.kind, p.role, p.expert) for p, _ in held.pieces] == found
    assert tiling_problem(shape, [box for _, box in held.pieces], cover=True) == ""


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4).map(lambda n: 2 * n), st.integers(1, 4)),
    name=st.sampled_from(["experts.gate_up_proj", "experts.down_proj", "w_up", "other"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int8]),
    data=st.data(),
)
def test_cut_boxes_add_up(shape, name, dtype, data) -> None:
    box = tuple(
        tuple(sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))))
        for size in shape
    )
    tensor = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    parts = cuts(name, box, shape)
    assert sum(map(box_numel, parts)) == box_numel(box)
    total = digest_box(tensor, parts[0])
    for part in parts[1:]:
        total += digest_box(tensor, part)
    assert total == digest_box(tensor, box)
    for part in parts:
        inside = tensor[tuple(slice(*edge) for edge in box)].reshape(-1)
        assert digest_placed(inside, Place(box, shape), part) == digest_box(tensor, part)
