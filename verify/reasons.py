"""The closed list of verdicts and reasons, each with what it means and what to do next.

A verdict is never invented elsewhere: `decision` picks from this list, renderers print from it, and
every reason has a control that must provoke it. Additions are a minor version; a reason never
changes its verdict. What keeps a whole gate from passing is a list of its own, GATE_REASONS.
"""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What the evidence supports. Missing evidence is never a pass."""

    VERIFIED = "VERIFIED"
    MISMATCH = "MISMATCH"
    UNVERIFIED = "UNVERIFIED"


EXIT_CODES = {Verdict.VERIFIED: 0, Verdict.MISMATCH: 1, Verdict.UNVERIFIED: 3}
EXIT_USAGE = 2


@dataclass(frozen=True)
class Reason:
    """One entry of the list: `name` is stable, kebab-case and appears in JSON."""

    name: str
    verdict: Verdict
    meaning: str
    remedy: str


_M, _U = Verdict.MISMATCH, Verdict.UNVERIFIED

REASONS: dict[str, Reason] = {
    reason.name: reason
    for reason in (
        Reason(
            "bits-differ",
            _M,
            "an output has other bits than in the base execution",
            "read the first difference and what its pattern suggests",
        ),
        Reason(
            "outputs-differ",
            _M,
            "an execution returned other tensors: names, dtypes or shapes differ",
            "make the function return the same set of tensors every time",
        ),
        Reason(
            "ranks-differ",
            _M,
            "a tensor declared as replicated has other bits on another rank",
            "look for a missing collective, or declare the tensor as sharded or local",
        ),
        Reason(
            "input-mutated",
            _M,
            "an input has other bits after the execution than before",
            "do not write to inputs, or declare it: mutates=('name',)",
        ),
        Reason(
            "aliased-output",
            _M,
            "a result that the caller still held was overwritten by a later call",
            "return memory of its own, not a shared workspace",
        ),
        Reason(
            "consumes-global-rng",
            _M,
            "results differ when the global random generators are left free",
            "use a generator of your own, or declare it: random=True",
        ),
        Reason(
            "raises-sometimes",
            _M,
            "some executions raised and others did not",
            "read the error of the execution that raised",
        ),
        Reason(
            "golden-differs",
            _M,
            "an output has other bits than its golden",
            "if that is meant, look at it and say why: verify golden update --reason TEXT",
        ),
        Reason(
            "over-budget",
            _M,
            "the error against float64 exceeds the budget of the arithmetic",
            "look at the worst row: a term is lost, doubled or wrong",
        ),
        Reason(
            "wrong-rounding",
            _M,
            "elements differ from the rounding reference away from a rounding border",
            "a value is rounded at another place, or truncated",
        ),
        Reason(
            "non-finite",
            _M,
            "NaN or infinity where the reference is finite",
            "look at the first such element",
        ),
        Reason(
            "missing-rank",
            _U,
            "a rank died, stopped or never reported",
            "read its log; nothing is claimed without it",
        ),
        Reason(
            "crashed",
            _U,
            "the process that ran the case died",
            "read its log; run the case alone under a debugger",
        ),
        Reason(
            "timed-out",
            _U,
            "an execution did not end within the limit",
            "raise --timeout, or look for a deadlock",
        ),
        Reason(
            "no-placement",
            _U,
            "nobody said whether a tensor is replicated, sharded or local",
            "declare it: placement={'name': verify.sharded(0)}",
        ),
        Reason(
            "no-batch-dim",
            _U,
            "no output has a declared batch dimension",
            "declare it: batch={'x': 0, 'out': 0}",
        ),
        Reason(
            "no-reference",
            _U,
            "the case has no float64 reference or exact expectation",
            "give the case reference=... or exact=...",
        ),
        Reason(
            "weak-reference",
            _U,
            "the reference is not computed in float64, so nothing is judged by it",
            "widen every input before computing, x.double(); switch off TF32 and its kin",
        ),
        Reason(
            "input-mismatch",
            _U,
            "inputs differed, so equal or unequal outputs prove nothing",
            "build inputs with verify.inputs; they have the same bits everywhere",
        ),
        Reason(
            "nothing-compared",
            _U,
            "the case returned no tensors, or none that this claim can compare",
            "return the tensors that matter; for those left out, see why",
        ),
        Reason(
            "vacuous",
            _U,
            "outputs are empty or constant, or a budget permits everything: nothing is proven",
            "use inputs for which the output varies, and a budget that could be exceeded",
        ),
        Reason(
            "cached-output",
            _U,
            "an output stayed the same although every input changed",
            "return what is computed from the inputs, or declare it: constants=('name',)",
        ),
        Reason(
            "case-error",
            _U,
            "the case, its setup or its reference raised, so nothing was compared",
            "read the error",
        ),
        Reason(
            "too-few-runs",
            _U,
            "fewer executions than the claim needs",
            "raise --runs or --timeout",
        ),
        Reason(
            "unsupported",
            _U,
            "the condition cannot be made on this machine or for this case",
            "run it where it can be made",
        ),
        Reason(
            "no-effect",
            _U,
            "the condition was requested but was not in effect",
            "read requested and effective in the evidence",
        ),
        Reason(
            "no-overlap",
            _U,
            "no load ran while the case ran",
            "make the case longer, or free a core for the load",
        ),
        Reason(
            "no-golden",
            _U,
            "no golden is stored for an output, or for the whole case",
            "look at the output and store it: verify golden update",
        ),
        Reason(
            "env-unknown",
            _U,
            "bits are stored for other environments only",
            "run it where it was made, or store this environment's: verify golden update",
        ),
        Reason(
            "not-run",
            _U,
            "the claim was promised but never executed",
            "see the other findings of this case",
        ),
    )
}


GATE_REASONS: dict[str, Reason] = {
    reason.name: reason
    for reason in (
        Reason(
            "not-covered",
            _U,
            "a source file changed and no case of the gate covers it",
            "add a case for it, name it in a case's sources=, or exempt it in [sources] exempt",
        ),
        Reason(
            "control-failed",
            _U,
            "a planted fault was missed or a clean twin was not clean: the verifier is in doubt",
            "read it: verify controls --only NAME",
        ),
        Reason(
            "dirty-source",
            _U,
            "the gate wants a clean tree, and files differ from the commit",
            "commit them, remove them, or ignore them in .gitignore",
        ),
        Reason(
            "budget-spent",
            _U,
            "the budget of the gate was used up before all cases that had to run did",
            "raise [budget] in the file of the gate, or make its cases smaller",
        ),
        Reason(
            "golden-unclaimed",
            _U,
            "a stored golden is claimed by no case of the gate",
            "declare it again, or remove it: verify golden prune",
        ),
    )
}


def worst(verdicts: list[Verdict]) -> Verdict:
    """MISMATCH beats UNVERIFIED beats VERIFIED; an empty list is UNVERIFIED: nothing ran."""
    for verdict in (Verdict.MISMATCH, Verdict.UNVERIFIED):
        if verdict in verdicts:
            return verdict
    return Verdict.VERIFIED if verdicts else Verdict.UNVERIFIED
