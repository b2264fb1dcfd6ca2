"""prime-rl's `rollouts/step_N/.../traces.jsonl`: episodes of verifiers, or traces, one a line.

A trace is a graph of messages: nodes with parent, token_ids (what the message adds), mask (True for
tokens that the model sampled) and logprobs (of these only). Each path from a root to a leaf is one
sample, with its tokens joined in order. Routing is kept off disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.formats import values
from verify.onpolicy.formats.values import Spot
from verify.onpolicy.samples import ROLLOUT, Sample, Series

MOST_TOKENS = 2**26  # of all paths of a trace together; they share their beginnings
MOST_NODES = 100_000  # of a trace


def holds(record: Mapping[str, Any]) -> bool:
    """Whether an object is an episode or a trace."""
    return any(isinstance(record.get(name), list) for name in ("traces", "nodes"))


def samples_of(
    record: Mapping[str, Any], spot: Spot, fallback: str, step: int | None
) -> Iterator[Sample]:
    """The samples of an episode or of a trace."""
    traces = record.get("traces", [record])
    if not values.is_list(traces):
        spot.bad("traces", f"is {values.described(traces)}; it is a list")
        return
    for at, trace in enumerate(traces):
        field = f"traces[{at}]." if "traces" in record else ""
        if not isinstance(trace, Mapping) or not values.is_list(trace.get("nodes")):
            spot.bad(f"{field}nodes", "is no list of messages")
            continue
        name = values.key(trace.get("id"), spot, f"{field}id") or f"{fallback}.{at}"
        yield from _branches(trace, spot, f"{field}nodes", name, step)


def _branches(
    trace: Mapping[str, Any], spot: Spot, field: str, name: str, step: int | None
) -> Iterator[Sample]:
    nodes: list[tuple[int | None, _Node]] = []
    if len(trace["nodes"]) > MOST_NODES:
        spot.bad(field, f"has {len(trace['nodes'])} messages, at most {MOST_NODES} are read")
        return
    for at, given in enumerate(trace["nodes"]):
        node = _node(given, spot, f"{field}[{at}]")
        parent = given.get("parent") if isinstance(given, Mapping) else None
        linked = parent is None or (type(parent) is int and 0 <= parent < at)
        if node is None or not linked:
            if not linked:
                told = values.described(parent)
                spot.bad(f"{field}[{at}].parent", f"is {told}; it is an earlier node, or null")
            spot.bad(field, "the trace is left out: its paths cannot be followed")
            return
        nodes.append((parent, node))
    inner = {parent for parent, _ in nodes}
    leaves = [at for at in range(len(nodes)) if at not in inner]
    lengths: list[int] = []  # of the paths, a message without tokens counted as one
    for parent, node in nodes:
        lengths.append(1 + len(node[0]) + (0 if parent is None else lengths[parent]))
    if sum(lengths[leaf] for leaf in leaves) > MOST_TOKENS:
        spot.bad(field, f"its paths have more than {MOST_TOKENS} tokens together: left out")
        return
    meta = values.meta({"finish_reason": trace.get("stop_condition"), "step": step}, spot, field)
    for branch, leaf in enumerate(leaves):
        path: list[_Node] = []
        upward: int | None = leaf
        while upward is not None:
            upward, node = nodes[upward]
            path.append(node)
        key = name if len(leaves) == 1 else f"{name}:{branch}"
        yield _joined(path[::-1], spot, key, meta)


_Node = tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float64], NDArray[np.bool_]]


def _node(given: Any, spot: Spot, field: str) -> _Node | None:
    """Ids, mask, values and absent of one message, all as long as its ids."""
    if not isinstance(given, Mapping):
        spot.bad(field, f"is {values.described(given)}; it is an object")
        return None
    tokens = values.ids(given.get("token_ids", []), spot, f"{field}.token_ids")
    mask = values.mask(given.get("mask", []), spot, f"{field}.mask")
    series = values.series(given.get("logprobs", []), spot, f"{field}.logprobs")
    if tokens is None or mask is None or len(mask) != len(tokens):
        spot.bad(f"{field}.mask", "the ids and the mask of a message have one length")
        return None
    numbers = np.full(len(tokens), np.nan)
    absent = np.ones(len(tokens), dtype=np.bool_)
    if series is not None and len(series.values):
        if len(series.values) == int(mask.sum()):
            numbers[mask], absent[mask] = series.values, series.absent
        else:
            given_, sampled = len(series.values), int(mask.sum())
            what = f"has {given_} entries for {sampled} sampled tokens; none of them is used"
            spot.bad(f"{field}.logprobs", what)
    return tokens, mask, numbers, absent


def _joined(path: list[_Node], spot: Spot, key: str, meta: Mapping[str, Any]) -> Sample:
    tokens, mask, numbers, absent = (np.concatenate(parts) for parts in zip(*path, strict=True))
    begin = int(np.flatnonzero(mask)[0]) if mask.any() else len(tokens)
    return Sample(
        key=key,
        place=spot.place,
        prompt=tokens[:begin],
        tokens=tokens[begin:],
        mask=mask[begin:],
        series={ROLLOUT: Series(numbers[begin:], absent[begin:])},
        meta=meta,
    )
