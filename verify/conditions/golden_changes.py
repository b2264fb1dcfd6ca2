"""What is said beside an output that differs from its golden: what has changed since, and which of
the two is nearer to float64.

Thread counts are nobody's choice, so that of a golden is set here again, for the execution that is
compared or for one more. It refuses counts that this machine can hardly have, and changes no
verdict: what cannot be found out is left out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from verify import plans
from verify.budgets import Reference
from verify.conditions import references
from verify.environment import environment
from verify.execution import Capture, execute
from verify.goldens import keys, likely
from verify.goldens.store import Entry
from verify.hashing import digest_tensor
from verify.sessions import Session

_ANYWHERE = 8  # threads that every machine can have, however few cores it has


@dataclass(frozen=True)
class Since:
    """What is known of a golden and of today's run, found out once for all outputs.

    threads: set for the execution that is compared; None where it had today's count. again: one
    more execution with the golden's count, None where that is today's or cannot be had alone.
    references: of today's case, empty without one. changed: lines on what is known to be another
    than when the golden was made.
    """

    session: Session
    entry: Entry
    threads: int | None
    again: Callable[[], Capture | None]
    references: Callable[[], Mapping[str, Reference]]
    changed: Callable[[], tuple[str, ...]]


def since_of(session: Session, entry: Entry, threads: int | None) -> Since:
    """Executes nothing before an output asks for it."""
    return Since(
        session,
        entry,
        threads,
        functools.cache(lambda: _again(session, entry)),
        functools.cache(lambda: _references(session)),
        functools.cache(lambda: _changed(session, entry, threads)),
    )


def most_threads() -> int:
    """The largest count that is set because a file says so: more may end the process."""
    return max(_ANYWHERE, 2 * (os.cpu_count() or 1))


def threads_of(entry: Entry) -> int | None:
    """The count that the golden was made with, or None where it is unknown or cannot be had."""
    count = entry.made.get("num_threads")
    if type(count) is not int or not 0 < count <= most_threads():
        return None
    with threads_set(count):
        return count if torch.get_num_threads() == count else None


@contextmanager
def threads_set(count: int | None) -> Iterator[None]:
    """Another number of intra-op threads for a while; None leaves the count alone."""
    before = torch.get_num_threads()
    try:
        if count is not None and count != before:
            torch.set_num_threads(count)
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def told(since: Since, name: str, golden: Tensor, actual: Tensor) -> list[str]:
    """Lines about one output that differs; golden and actual are this rank's parts."""
    again, lines = since.again(), [*since.changed()]
    found = again.outputs.get(name) if again is not None else None
    today = since.threads in (None, torch.get_num_threads())
    first = since.session.base.kept.get(name) if since.session.base and today else found
    if today or again is not None:  # with other threads only one more execution tells stability
        stable = first is not None and _same(first, actual)
        reference = since.references().get(name)
        exact = reference.exact if reference is not None else None
        lines += likely.told(golden, actual, exact, stable=stable)
    if again is None or since.threads is not None:
        return lines
    what = "gives the golden's bits: the result depends on the thread count"
    said = what if found is not None and _same(found, golden) else "differs too"
    count = since.entry.made["num_threads"]
    return [*lines, f"executed again with {count} threads, as then: {said}"]


def _changed(session: Session, entry: Entry, threads: int | None) -> tuple[str, ...]:
    skipped = ["commit", "dirty", *(["num_threads"] if threads is not None else [])]
    differing = keys.differing(keys.provenance(environment()), entry.made)
    texts = [text for text in differing if text.partition(" ")[0] not in skipped]
    same = plans.source_digest(session.stage.case) == entry.source_digest
    said = (
        "the files that the case names are those that the golden was made with; what else it"
        " imports, and variables of the environment, are not known"
        if same
        else "the code has changed since the golden was made"
    )
    return (said, f"changed since: {', '.join(texts)}") if texts else (said,)


def _same(one: Tensor, other: Tensor) -> bool:
    return str(digest_tensor(one)) == str(digest_tensor(other))


def _references(session: Session) -> Mapping[str, Reference]:
    """The case's float64 references, called once; a reference that raises has a claim to say so."""
    if session.stage.case.reference is None:
        return {}
    try:
        return references.expected_of(session, session.stage.case.reference)
    except Exception:
        return {}


def _again(session: Session, entry: Entry) -> Capture | None:
    """One more execution with the golden's thread count; never on several ranks, where the others
    would not take part."""
    count = threads_of(entry)
    if count in (None, torch.get_num_threads()) or session.stage.world > 1:
        return None
    assert session.base is not None
    try:
        with threads_set(count):
            return execute(session.stage, session.base.given, group=session.group)
    except Exception:
        return None
