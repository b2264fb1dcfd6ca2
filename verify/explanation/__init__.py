"""What a difference suggests: likely causes, with the evidence for them. Hints, never verdicts.

`telling` makes the record that a finding carries and never raises; `suggesting` applies
`value_rules` and `place_rules` to two tensors (`difference`); for a result
that leaves its reference `reference_errors` measures where and by how much, `hypotheses` tries
`changed_inputs`, and `self_checks` asks whether the reference itself can judge (`narrow` watches
it).
"""

from verify.explanation.suggesting import suggest

__all__ = ["suggest"]
