"""How often the doctor's first-named cause of a generated pair is right, as a confusion matrix."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from onpolicy_faults import CAUSES
from onpolicy_generator import DRIFT, EQUAL, Mismatch, fresh_seed, generate, kind_of
from onpolicy_odd import ODD
from tabulate import tabulate

from verify.onpolicy.causes.ranking import diagnose
from verify.onpolicy.causes.table import Cause, Evidence
from verify.onpolicy.numbers import measure
from verify.onpolicy.pairing import pair

NOTHING = "(nothing)"


@dataclass(frozen=True)
class Outcome:
    """One pair: its label, the first name, whether that is right, and what took how long.

    strict: the name is the label itself, or for none of the twelve one of the right ones.
    """

    seed: int
    kind: str
    label: str
    named: str | None
    claimed: tuple[str, ...]
    right: bool
    strict: bool
    clean: bool
    seconds: float
    truth: str

    @property
    def claimed_on_clean(self) -> bool:
        """A cause is claimed although there is nothing, or nothing but noise."""
        allowed = {DRIFT} if self.label == DRIFT else set()
        return self.clean and bool(set(self.claimed) - allowed)


def first_named(causes: Sequence[Cause]) -> str | None:
    """The name of the first cause that is claimed, or None where none is."""
    return next((cause.name for cause in causes if cause.claimed), None)


def causes_of(made: Mismatch) -> tuple[Cause, ...]:
    """What the doctor says of a generated pair."""
    pairs = pair(made.trainer, made.rollout)
    evidence = Evidence(
        run_config=made.run_config,
        generation_config=made.generation_config,
        trainer_again=made.trainer_again,
    )
    return diagnose(pairs, measure(pairs), evidence)


def outcome(seed: int, kind: str) -> Outcome:
    """Makes the pair of a seed and asks the doctor."""
    made = generate(seed, kind)
    start = time.perf_counter()
    causes = causes_of(made)
    seconds = time.perf_counter() - start
    named = first_named(causes)
    right = named in made.right
    return Outcome(
        seed,
        kind,
        made.label,
        named,
        tuple(cause.name for cause in causes if cause.claimed),
        right,
        right and (named == made.label or made.label not in CAUSES),
        made.clean,
        seconds,
        f"{dict(made.truth)} carried {dict(made.carried)}",
    )


def seeds_and_kinds(count: int, seed: int | None = None) -> list[tuple[int, str]]:
    """A set of pairs: seeds that nobody chose, or those that follow from one."""
    base = fresh_seed() if seed is None else seed
    return [((base << 12) + index, kind_of(index)) for index in range(count)]


def summary(outcomes: Sequence[Outcome]) -> str:
    """The confusion matrix and the shares below it."""
    rows = [
        name for name in (*CAUSES, EQUAL, DRIFT, *ODD) if any(o.label == name for o in outcomes)
    ]
    counts = Counter((o.label, o.named or NOTHING) for o in outcomes)
    names = {named for _, named in counts}
    columns = [name for name in (*CAUSES, DRIFT) if name in names]
    columns += sorted(names - set(columns) - {NOTHING}) + [NOTHING] * (NOTHING in names)
    table = [
        [
            row,
            *(counts[row, column] or "" for column in columns),
            f"{sum(o.right for o in outcomes if o.label == row)}"
            f"/{sum(o.label == row for o in outcomes)}",
        ]
        for row in rows
    ]
    clean = [o for o in outcomes if o.clean]
    claimed = [o for o in clean if o.claimed_on_clean]
    seconds = sorted(o.seconds for o in outcomes)
    heads = [column.replace("-", "- ", 1).replace("- ", "-\n") for column in columns]
    return "\n".join(
        [
            tabulate(table, headers=["made of \\ named first", *heads, "right"]),
            "",
            f"first name right: {share(outcomes):.1%} of {len(outcomes)} "
            f"({sum(o.strict for o in outcomes) / len(outcomes):.1%} the label itself)",
            f"clean pairs on which something was claimed: {len(claimed)} of {len(clean)}",
            f"seconds per diagnosis: median {seconds[len(seconds) // 2]:.2f}, "
            f"most {seconds[-1]:.2f}",
        ]
    )


def share(outcomes: Sequence[Outcome]) -> float:
    """Of right first names."""
    return sum(o.right for o in outcomes) / len(outcomes)
