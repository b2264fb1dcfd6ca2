"""Gradients of one execution, of everything that its outputs reach.

Inputs and parameters of module arguments are known by name. Others, such as the parameters of a
module in a closure, are found by walking the autograd graph; their gradients are compared too, as
`grad.reached.0`, `grad.reached.1`, ..., although their values cannot be restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def reached_leaves(heads: Sequence[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    """Leaves of the graph of `heads` that are not among `known`, in a fixed order."""
    ids = {id(tensor) for tensor in known}
    found: list[Tensor] = []
    stack = [head.grad_fn for head in reversed(heads) if head.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in ids:
            ids.add(id(variable))
            found.append(variable)
        for after, _ in reversed(node.next_functions):
            if after is not None and after not in seen:
                seen.add(after)
                stack.append(after)
    return found


def differentiate(
    heads: Mapping[str, Tensor], upstream: Mapping[str, Tensor], reached: Sequence[Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Backward of all heads. Returns the reached leaves' gradients, and heads left out.

    A head is left out when the function has already used its graph in a backward of its own; what
    that left in `.grad` is compared instead. The reached leaves' own `.grad` is put back.
    """
    before = [leaf.grad for leaf in reached]
    for leaf in reached:
        leaf.grad = None
    left_out: list[str] = []
    consumed = False
    try:
        torch.autograd.backward(list(heads.values()), [upstream[name] for name in heads])
    except RuntimeError as error:
        if not _graph_is_used(error):
            raise
        consumed = True
        for leaf, grad in zip(reached, before, strict=True):
            leaf.grad = grad
        for name, head in heads.items():
            try:
                torch.autograd.backward([head], [upstream[name]])
            except RuntimeError as single:
                if not _graph_is_used(single):
                    raise
                left_out.append(name)
    found = {f"reached.{i}": t.grad for i, t in enumerate(reached) if t.grad is not None}
    for leaf, grad in zip(reached, before, strict=True):
        # after a backward of the function's own nobody knows what was there before the call
        leaf.grad = None if consumed else grad
    return found, left_out


def _graph_is_used(error: RuntimeError) -> bool:
    return "second time" in str(error) or "already been freed" in str(error)
