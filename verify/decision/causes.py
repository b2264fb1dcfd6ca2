"""What the pattern of differing executions suggests: the likely cause, silent unless it fits.

Each rule looks at all executions of a claim: only the first call, one process, one rank, one kind
of batch. Pure and torch-free. It refuses to decide anything: hints never change a verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from verify.decision.agreement import kind_of
from verify.decision.ensembles import (
    GENERATOR,
    UNCHANGED,
    VARIED,
    Ensemble,
    by_rank,
    content,
    header,
    later_result,
    listed,
    process_groups,
    ranks_of,
    split,
    unchanged,
)

UNLIKELY = 20  # one in so many: that all differences fall on one rank by chance


def _first_call(e: Ensemble, name: str) -> str | None:
    """The first call is the odd one: all later ones, nothing being changed, agree."""
    wrong = ranks_of(e, name)
    later = {rank: later_result(e, rank, name) for rank in wrong}
    if e.claim == "process" or not wrong or not all(later.values()):
        return None
    own = [o for o in e.restored(e.claim) if o.rank in later]
    if not own or any(content(o, name) != later[o.rank][0] for o in own):
        return None
    calls = min(len(found) for found in later.values())
    said = f"the first call differs from {calls} later ones, which agree with each other"
    if e.claim in VARIED:
        return f"{said} and with this: not a matter of {e.claim}, see repeat"
    cause = f"{said}: warm-up, autotuning or lazy initialisation in the first call"
    fresh = [o for o in e.restored("process") if o.rank in later]
    if fresh and all(content(o, name) == e.first(o.rank, name) for o in fresh):
        cause += "; the first call of every fresh process is like the first one here"
    referred = [o for o in e.executions if o.claim == "reference"]
    measured = [o.measurements[name] for o in referred if name in o.measurements]
    if measured and not any(
        m.get(key, 0) for m in measured for key in ("nonfinite", "over_budget", "forbidden")
    ):
        cause += "; later calls are inside the reference's budget, so it is the first that is wrong"
    return cause


def _per_process(e: Ensemble, name: str) -> str | None:
    """Equal within a process, different between processes."""
    if e.claim != "process" or len(process_groups(e, name)) < 2:
        return None
    wrong, runs = unchanged(e, name)
    if wrong:
        return "it differs within a process as well: see repeat first"
    if not runs or _other_names(e, name):
        return None  # not known, or said better
    return (
        "chosen once per process: an autotuned configuration, an order that follows the hash seed "
        "(each fresh process gets another PYTHONHASHSEED), an environment variable or the order of "
        "imports"
    )


def _other_names(e: Ensemble, name: str) -> str | None:
    """The same tensors under other names."""
    for o in e.ordered:
        first = e.base.get(o.rank)
        if first is None or o.compare != "own" or o.failure is not None:
            continue
        known = first.outputs
        if o.outputs.get(name) == known.get(name):
            continue
        moved = [n for n in known if n in o.outputs and o.outputs[n] != known[n]]
        if name not in moved or len(moved) < 2:
            continue
        if Counter(known[n] for n in moved) == Counter(o.outputs[n] for n in moved):
            source = next(n for n in sorted(moved) if known[n] == o.outputs[name])
            seeds = ", which follows PYTHONHASHSEED (another one in each fresh process)"
            return (
                f"the same {len(moved)} tensors under other names ({name} holds what {source} held "
                "in the base): an order of names decides, such as iteration over a set of strings"
                f"{seeds if e.claim == 'process' else ''}; sort it"
            )
    return None


def _one_rank(e: Ensemble, name: str) -> str | None:
    """One rank of several differs from its own first result, the others never do."""
    wrong = ranks_of(e, name)
    others = [rank for rank in e.base if rank not in wrong]
    if e.claim not in UNCHANGED or len(wrong) != 1 or not others:
        return None
    runs = [o for o in e.restored(e.claim) if o.rank == wrong[0]]
    count = sum(content(o, name) != e.first(wrong[0], name) for o in runs)
    said = f"only rank {wrong[0]} differs, in {count} of {len(runs)} runs"
    if len(e.base) ** (count - 1) < UNLIKELY:
        return f"{said}, which may be chance: more --runs tell"
    names = [*e.base[wrong[0]].inputs, name]
    if all(kind_of(e.plan, n) == "replicated" for n in names):
        return (
            f"{said}; all ranks do the same work on the same inputs: the device or memory of rank "
            f"{wrong[0]} is suspected, not the algorithm"
        )
    return f"{said}: look at what only this rank has (its part of the inputs, its device)"


def _replica(e: Ensemble, name: str) -> str | None:
    """Ranks that disagree, while each of them repeats itself."""
    if not any(f.tensor == name and f.reason == "ranks-differ" for f in e.differing):
        return None
    own = e.restored(*UNCHANGED)
    if not own or any(content(o, name) != e.first(o.rank, name) for o in own):
        return None
    names = sorted({n for one in e.base.values() for n in one.inputs})
    parts = [n for n in names if kind_of(e.plan, n) in ("sharded", "local")]
    source = f"a missing reduction over ranks ({listed(parts)} is not the same on all)"
    calls = min(sum(o.rank == rank for o in own) for rank in e.base)
    return f"every rank repeats its own bits in {calls} runs, so it is no race: " + (
        source if parts else "code that depends on the rank, or ranks in another environment"
    )


def _unwritten(e: Ensemble, name: str) -> str | None:
    """Other bits as soon as new memory holds something else, and only then."""
    if e.claim != "memory":
        return None
    wrong, runs = unchanged(e, name)
    if not runs or wrong:
        return None
    return (
        "it follows what new memory holds, and is stable otherwise: something is read, or handed "
        "out, that nothing wrote; no order of accumulation"
    )


def _batch_kind(e: Ensemble, name: str) -> str | None:
    """Another number of entries, another place, other neighbours: three different causes."""
    if e.claim != "batch" or unchanged(e, name)[0]:
        return None
    wrong, equal = ({v.partition("=")[0] for v in side} for side in split(e, name))
    if "neighbours" in wrong:
        return (
            "an entry depends on the content of its neighbours: a leak (attention mask, packing "
            "border, padding, statistics over the batch), not another algorithm"
        )
    if not wrong or "neighbours" not in equal:
        return None
    if wrong == {"size"}:
        what = "on the number of entries: a tile, split or kernel chosen by size, or a mean over it"
    elif wrong == {"position"}:
        what = "on the place in the batch: a tile border or the tail of a vector"
    else:
        what = "on the number of entries and the place in the batch: tiles or splits"
    return f"an entry depends {what}; not a leak, the content of neighbours has no influence"


def _tie(e: Ensemble, name: str) -> str | None:
    """Only indices differ, the values that they were chosen by do not."""
    differing = {f.tensor for f in e.differing if f.tensor and not f.tensor.startswith(GENERATOR)}
    headers = {n: header(text) for one in e.base.values() for n, text in one.outputs.items()}
    if not all(headers.get(n, ("", ()))[0].startswith(("int", "uint")) for n in differing):
        return None
    mine = headers.get(name)
    scores = sorted(
        n
        for n in e.compared - differing
        if n in headers and headers[n][0].startswith(("float", "bfloat")) and mine
        if headers[n][1] == mine[1]
    )
    if not scores:
        return None
    return (
        f"{listed(scores)} of that shape is equal: if these integers are indices chosen by it, a "
        "tie is broken otherwise; choose by value, then by lowest index (a stable sort)"
    )


def _shifted_generator(e: Ensemble, name: str) -> str | None:
    """A setting that also leaves a global generator in another state."""
    places = {(f.rank, f.process, f.variant, f.run) for f in e.differing if f.tensor == name}
    moved = sorted(
        {
            f.tensor.removeprefix(GENERATOR)
            for f in e.differing
            if f.tensor is not None and f.tensor.startswith(GENERATOR)
            if (f.rank, f.process, f.variant, f.run) in places
        }
    )
    if not moved:
        return None
    return (
        f"the global generator {listed(moved)} is left in another state (more or fewer numbers "
        "drawn, or seeded), so everything drawn later is shifted: isolate what draws "
        "(torch.random.fork_rng) or give it a generator of its own"
    )


def _multiples(e: Ensemble, name: str) -> str | None:
    """Values of a varied number that agree are the multiples of something, the others are not."""
    if e.claim != "vary" or unchanged(e, name)[0]:
        return None
    wrong, equal = split(e, name)
    for argument in sorted({v.partition("=")[0] for v in wrong}):
        values = [[_number(v, argument) for v in side] for side in (wrong, equal)]
        bad, good = ([n for n in side if n is not None] for side in values)
        step = math.gcd(*good) if len(good) > 1 else 1
        if bad and all(n % step for n in bad):
            return f"equal where {argument} is a multiple of {step}, other bits elsewhere"
    return None


def _not_repeatable(e: Ensemble, name: str) -> str | None:
    """A setting under which even the same call differs: a race, not another order."""
    if e.claim not in VARIED:
        return None
    wild = [
        variant
        for variant in split(e, name)[0]
        if any(len(set(found)) > 1 for found in by_rank(e, name, variant).values())
    ]
    wrong, runs = unchanged(e, name)
    if not wild or wrong or not runs:
        return None
    return f"other bits in each run at {listed(wild)}: a race that this setting brings about"


def _number(variant: str, argument: str) -> int | None:
    name, _, value = variant.partition("=")
    return int(value) if name == argument and value.isdecimal() and int(value) else None


Cause = Callable[[Ensemble, str], str | None]
CAUSES: Sequence[Cause] = (
    _first_call,
    _other_names,
    _per_process,
    _one_rank,
    _replica,
    _unwritten,
    _shifted_generator,
    _not_repeatable,
    _batch_kind,
    _tie,
    _multiples,
)
