"""Decides whether two checkpoints hold the same weights, parameter by parameter.

Tensors on both sides are compared bit by bit, otherwise digests are. One tensor of a side is in
memory at a time, of experts that it stores fused those of one layer. It refuses to apply a
tolerance, to call a comparison of nothing VERIFIED, and to leave out silently what only one side
has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from verify.checkpoints.fusing import fused
from verify.checkpoints.matching import Patterns, Renames, natural, renamed
from verify.checkpoints.parameters import Checkpoint, Parameter, Part, equal_digests, told
from verify.errors import InputFileError, UnsupportedError, VerifyError
from verify.reasons import Verdict

KINDS = ("bits", "dtype", "shape", "only in A", "only in B")
EXPLAINED = 20  # findings that are explained; the others are counted
_NO_TENSORS = "whether a cast of A gives B cannot be told from digests: give the tensors"


@dataclass(frozen=True)
class Finding:
    """One parameter that differs. name: B's name for it; old: A's where that is another.

    kind: one of KINDS. a, b: dtype and shape on each side, "" where there is none.
    """

    name: str
    kind: str
    a: str
    b: str
    detail: str = ""
    lines: tuple[str, ...] = ()
    old: str = ""


@dataclass(frozen=True)
class WeightsDiff:
    """What was found. parameters: all names of both sides that were not ignored; compared: those
    on both; elements: of the compared ones. unsettled: what keeps equal weights from VERIFIED."""

    a: Checkpoint
    b: Checkpoint
    parameters: int
    compared: int
    elements: int
    findings: tuple[Finding, ...]
    unsettled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        if any(one.kind not in KINDS[3:] for one in self.findings):
            return Verdict.MISMATCH
        if not self.elements:
            return Verdict.UNVERIFIED
        if self.findings:
            return Verdict.MISMATCH
        return Verdict.UNVERIFIED if self.unsettled else Verdict.VERIFIED


@dataclass(frozen=True)
class Pairing:
    """Parameters of both sides by B's names, without the ignored ones. notes: of names."""

    left: Mapping[str, Parameter]
    right: Mapping[str, Parameter]
    notes: tuple[str, ...]


def compare_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    renames: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fuse: bool = True,
    progress: Callable[[str], None] = lambda message: None,
) -> WeightsDiff:
    """Compares all parameters. renames: OLD=NEW, of A's names to B's. ignore: patterns of names.

    fuse: whether experts that one side stores fused are compared by expert and part.

    VerifyError for renames that do not make sense, InputFileError for tensors that cannot be read.
    """
    named = _paired(a, b, Renames(renames), Patterns(ignore))
    left_out = Patterns(ignore)
    pairing = fused(named.left, named.right, take=fuse, ignored=left_out.match)
    findings: list[Finding] = []
    unsettled = [*a.unsettled, *b.unsettled, *pairing.unsettled]
    compared = elements = 0
    names = sorted({*pairing.left, *pairing.right}, key=natural)
    for number, name in enumerate(names):
        progress(f"{number} of {len(names)} parameters, {len(findings)} differ: {name}")
        left, right = pairing.left.get(name), pairing.right.get(name)
        if left is None or right is None:
            findings.append(_alone(name, left, right))
            continue
        compared += 1
        elements += max(left.numel, right.numel)
        try:
            found, gap = _pair(name, left, right, explain=len(findings) < EXPLAINED)
        except UnsupportedError as error:
            raise InputFileError(
                f"{a.path}, {b.path}: {name!r}: {error}; or leave it out with --ignore"
            ) from error
        findings += [found] if found else []
        unsettled += [gap] if gap else []
    from verify.checkpoints.hints import hints

    return WeightsDiff(
        a,
        b,
        len(names),
        compared,
        elements,
        tuple(findings),
        tuple(unsettled),
        (*a.notes, *b.notes, *named.notes, *pairing.notes),
        hints(pairing, findings, progress),
    )


def _paired(a: Checkpoint, b: Checkpoint, renames: Renames, ignored: Patterns) -> Pairing:
    left: dict[str, Parameter] = {}
    notes: list[str] = []
    out: list[str] = []
    for new, olds in renamed(a.parameters, renames).items():
        kept = []
        for old in olds:
            if ignored.match(old) or ignored.match(new):
                out.append(old)
            else:
                kept.append(old)
        if kept:
            left[new] = _one_of(new, [a.parameters[old] for old in kept])
        if len(kept) > 1:
            notes.append(f"A: {' and '.join(kept)} have the same bits and are {new} in B")
    right = {}
    for name, parameter in b.parameters.items():
        if ignored.match(name):
            out.append(name)
        else:
            right[name] = parameter
    if out:
        names = set(out)
        what = "parameter" if len(names) == 1 else "parameters, such as"
        notes.append(f"ignored: {len(names)} {what} {min(names, key=natural)}")
    notes += [f"rename {rule!r} matches no parameter of A" for rule in renames.unused]
    notes += [f"ignore {rule!r} matches no parameter" for rule in ignored.unused]
    for side, checkpoint in (("A", a), ("B", b)):
        others = [name for name in checkpoint.others if not ignored.match(name)]
        if others:
            named = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
            count = f"{len(others)} values are" if len(others) > 1 else "1 value is"
            tensors = "tensors" if len(others) > 1 else "tensor"
            notes.append(f"{side}: {count} no {tensors} and not compared: {named}")
    return Pairing(left, right, tuple(notes))


def _one_of(new: str, some: Sequence[Parameter]) -> Parameter:
    """The one parameter that several names of A stand for: tied weights, and nothing else."""
    if len(some) == 1:
        return some[0]
    known = {(one.form(), one.digest().lanes, one.covered, one.boxes) for one in some}
    if len(known) > 1 or any(one.problem for one in some):
        named = ", ".join(f"{one.name} {one.form()}" for one in some[:4])
        raise VerifyError(
            f"renames give {len(some)} parameters of A with different bits the name {new!r} "
            f"({named}): fused parameters are not compared; save them fused or apart on both sides,"
            " or leave them out with --ignore"
        )
    return some[0]


def _alone(name: str, left: Parameter | None, right: Parameter | None) -> Finding:
    if left is not None:
        old = left.name if left.name != name else ""
        return Finding(name, "only in A", left.form(), "", old=old)
    assert right is not None
    return Finding(name, "only in B", "", right.form())


def _pair(name: str, a: Parameter, b: Parameter, *, explain: bool) -> tuple[Finding | None, str]:
    """The finding of one parameter or None, and what remains unsettled of it or ""."""
    kind, detail, gap = "", "", ""
    lines: tuple[str, ...] = ()
    if a.shape != b.shape:
        kind = "shape"
        detail = _other_shape(a, b) if explain else ""
    elif a.dtype != b.dtype:
        kind = "dtype"
        detail, lines = _other_dtype(name, a, b) if explain else ("", ())
    elif a.problem or b.problem:
        kind = "bits"
        detail = "; ".join(f"{s}: {p.problem}" for s, p in (("A", a), ("B", b)) if p.problem)
    elif a.load is not None and b.load is not None:
        from verify.checkpoints import tensor_pairs

        x, y = a.load(), b.load()
        if not tensor_pairs.equal_bits(x, y):
            kind = "bits"
            detail, lines = tensor_pairs.difference(name, x, y) if explain else ("", ())
    elif a.covered == a.numel and b.covered == b.numel:
        if not equal_digests(a, b):
            kind, detail = "bits", "digests differ" + _where(*_by_parts(a, b))
    else:
        differing, common = _by_parts(a, b)
        if differing:
            kind, detail = "bits", "digests differ" + _where(differing, common)
        gap = "; ".join(
            f"{name}: {side} has digests of {one.covered} of {one.numel} elements only"
            for side, one in (("A", a), ("B", b))
            if one.covered < one.numel
        )
        gap += "" if common else ", and none of them can be compared"
    if not kind:
        return None, gap
    old = a.name if a.name != name else ""
    return Finding(name, kind, a.form(), b.form(), detail, lines, old), gap


def _other_shape(a: Parameter, b: Parameter) -> str:
    if a.load is not None and b.load is not None:
        from verify.checkpoints import tensor_pairs

        return tensor_pairs.other_shape(a.load(), b.load())
    if a.dtype != b.dtype or a.numel != b.numel or not a.numel:
        return ""
    whole = a.covered == a.numel and b.covered == b.numel and not (a.place or b.place)
    same = whole and not (a.problem or b.problem) and a.digest().lanes == b.digest().lanes
    return "the same elements in the same order: reshaped" if same else ""


def _other_dtype(name: str, a: Parameter, b: Parameter) -> tuple[str, tuple[str, ...]]:
    if a.load is None or b.load is None:
        return _NO_TENSORS, ()
    from verify.checkpoints import tensor_pairs

    return tensor_pairs.other_dtype(name, a.load(), b.load())


def _by_parts(a: Parameter, b: Parameter) -> tuple[list[Part], int]:
    """Which parts differ, of those that can be compared, and how many these are."""
    shards = b if b.load is None else a
    other = a if shards is b else b
    if other.load is not None:
        from verify.checkpoints.boxes import digest_placed

        tensor, place = other.load(), shards.place
        mine = [part for part in shards.parts if part.digest.count]
        found = [part for part in mine if digest_placed(tensor, place, part.box) != part.digest]
        return found, len(mine)
    theirs = {part.box: part for part in other.parts}
    mine = [part for part in shards.parts if part.digest.count and part.box in theirs]
    return [part for part in mine if theirs[part.box].digest != part.digest], len(mine)


def _where(differing: Sequence[Part], common: int) -> str:
    """Which ranks' parts differ, where that is known."""
    if not differing or (common == 1 and differing[0].digest.whole):
        return ""
    named = ", ".join(f"{told(part.box)} of {part.origin}" for part in differing[:3])
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return f" in {len(differing)} of {common} parts: {named}{more}"
