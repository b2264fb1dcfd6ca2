"""Says what a pattern of differing elements suggests: the likely cause, with the evidence for it.

Each rule, in `value_rules` and `place_rules`, looks at one property of the elements that differ
(their bits, their values, or where they are) and stays silent unless it holds for practically all
of them, since a wrong hint costs more than none. Rules on values come first, rules on places
second; unordered accumulation and "other values" are what is left when nothing about the values is
special. It refuses to decide anything: hints never change a verdict.
"""

from collections.abc import Mapping
from typing import Any

import torch

from verify.comparison import Comparison
from verify.explanation.difference import pattern_of
from verify.explanation.place_rules import PLACE_RULES
from verify.explanation.value_rules import ASIDE_RULES, REST_RULES, VALUE_RULES


def suggest(
    comparison: Comparison,
    a: torch.Tensor,
    b: torch.Tensor,
    context: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """What the difference between base `a` and other `b` suggests; () when equal or not comparable.

    context (all optional): `condition`, what was varied (`batch`, `threads`, `schedule` ...);
    `fill_bytes`, the bytes that memory was poisoned with; `dim0`, what the first dimension counts
    ("expert", "row"); `names`, what `a` and `b` are called; `ratio`, b / a where rounding hides it
    from the values themselves (None: not constant); `explained`, whether a likelier cause is known
    than what is left when no rule fires.
    """
    if comparison.problem or comparison.num_differing == 0:
        return ()
    pattern = pattern_of(comparison, a, b, context or {})
    by_value = [text for rule in VALUE_RULES if (text := rule(pattern))]
    by_place = [text for rule in PLACE_RULES if (text := rule(pattern))]
    rest = (
        []
        if by_value or pattern.context.get("explained")
        else [text for rule in REST_RULES if (text := rule(pattern))]
    )
    aside = [text for rule in ASIDE_RULES if (text := rule(pattern))]
    return (*by_value, *by_place, *rest, *aside)
