"""Which stored golden a case is compared with: of its name and kind, for this environment and these
inputs; or why there is none.

It says which inputs a golden speaks of, too: on several ranks only of those that are whole on every
one. It compares nothing and refuses to take a golden of something else for one of this case.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from verify.conditions.golden_changes import most_threads, threads_of
from verify.environment import environment
from verify.evidence import Trouble
from verify.goldens import keys, packing, store
from verify.hashing import digest_tensor
from verify.placements import placement_of
from verify.sessions import Session
from verify.staging import Stage

_PARTS = ("local", "sharded")
Found = tuple[store.Entry, Mapping[str, Tensor]]


def look_up(session: Session) -> Found | None:
    """The entry to compare with and its tensors, or None after saying why there is none."""
    case, folder = session.stage.case, session.golden
    if folder is None:
        trouble(session, "no-golden", "no folder of goldens was given: --golden DIR")
        return None
    with store.reading(folder):
        entries = store.read(folder).of(case.name, case.golden)
        if not entries:
            where = os.path.relpath(folder)
            detail = f"{where} holds no golden of kind {case.golden} for {case.name!r}"
            trouble(session, "no-golden", detail)
            return None
        entry = _of_this_environment(session, entries) if case.golden == "bits" else entries[0]
        if entry is None:
            return None
        stored = packing.load(folder, entry)
    ours, theirs = inputs_digest(session.stage), entry.inputs
    if session.stage.world > 1:
        ours, theirs = ours.partition("+")[0], theirs.partition("+")[0]
    if ours != theirs:
        detail = "the golden was made from other inputs (seed, shapes, weights): make it again"
        trouble(session, "input-mismatch", detail + _undeclared(session.stage))
        return None
    return entry, stored


def inputs_digest(stage: Stage) -> str:
    """One digest of everything that the whole problem is given: tensors, modules, seed.

    Where inputs are declared as a rank's own, `+` and one of these, which holds on one rank only.
    """
    given = {name: str(digest_tensor(tensor)) for name, tensor in stage.tensors.items()}
    for module, state in stage.module_state.items():
        given |= {f"{module}.{name}": str(digest_tensor(k.content)) for name, k in state.items()}
    own = [(name, given.pop(name)) for name in rank_local(stage)]
    whole = _hash([stage.case.seed, sorted(given.items())])
    return f"{whole}+{_hash(own)}" if own else whole


def rank_local(stage: Stage) -> list[str]:
    """Names of what setup gives and what each rank has its own of, by its declared placement.

    Modules are never cut, so a sharded parameter is one that each rank holds its own part of.
    """
    tensors, parameters = _of_setup(stage)
    kinds = {**dict.fromkeys(tensors, ("local",)), **dict.fromkeys(parameters, _PARTS)}
    placements = {name: placement_of(stage.case.placement, name) for name in kinds}
    return sorted(n for n, where in placements.items() if where and where.kind in kinds[n])


def trouble(session: Session, reason: str, detail: str) -> None:
    """What kept this rank from comparing with a golden."""
    session.emit(
        Trouble(session.plan.case, reason, detail, claim="golden", rank=session.stage.rank)
    )


def _of_this_environment(session: Session, entries: list[store.Entry]) -> store.Entry | None:
    """The entry whose bits hold here, or None after saying what is another."""
    assert session.base is not None
    devices = tuple(sorted({t.device.type for t in session.base.kept.values()}))
    key = keys.key_of(environment(), devices)
    entry = next((one for one in entries if dict(one.key or {}) == key), None)
    if entry is None:
        near = ", ".join(keys.nearest(key, [one.key or {} for one in entries]))
        detail = f"no golden for this environment; nearest: {near}"
        trouble(session, "env-unknown", detail)
    elif threads_of(entry) is None:
        count, most = entry.made.get("num_threads"), most_threads()
        detail = f"made with {count!r} threads, which cannot be set here (at most {most})"
        trouble(session, "env-unknown", detail)
        return None
    return entry


def _undeclared(stage: Stage) -> str:
    """What setup gives on several ranks and nobody said where it lies: it may be a rank's own."""
    tensors, parameters = _of_setup(stage)
    names = [*tensors, *parameters]
    names = sorted(n for n in names if placement_of(stage.case.placement, n) is None)
    if stage.world == 1 or not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"; or, if these are rank-local inputs, declare them verify.local:"
        f" {', '.join(names[:3])}{more}"
    )


def _of_setup(stage: Stage) -> tuple[list[str], list[str]]:
    """Names of its tensors, and of the parameters and buffers of its modules."""
    state = stage.module_state.items()
    return (
        [name for name in stage.tensors if name not in stage.case.inputs],
        [f"{module}.{name}" for module, kept in state for name in kept],
    )


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
