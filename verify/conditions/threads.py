"""threads: another number of intra-op threads (torch.set_num_threads)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from verify.sessions import Session, perform

COUNTS = (1, 2, 3)


def run(session: Session, runs: int) -> None:
    """At least `runs` executions, over thread counts that include some other than the base's."""
    before = torch.get_num_threads()
    counts = [count for count in (*COUNTS, before + 1) if count != before]
    try:
        for index in range(max(runs, len(counts))):
            wanted = counts[index % len(counts)]
            torch.set_num_threads(wanted)
            perform(
                session,
                "threads",
                f"threads={wanted}",
                run=index,
                requested={"num_threads": wanted, "base": before},
                effective=partial(_in_effect, wanted),
            )
    finally:
        torch.set_num_threads(before)


def _in_effect(wanted: int) -> tuple[dict[str, Any], bool]:
    """Looked at after the execution: a case that sets its own count undoes the condition."""
    got = torch.get_num_threads()
    return {"num_threads": got}, got == wanted
