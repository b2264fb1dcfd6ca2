"""A generator that nothing drew from explains nothing; one that was drawn from may explain all."""

from __future__ import annotations

from trace_toy import header, write_step

from verify.reasons import Verdict
from verify.tracing.causes import Cause
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter


def record(folder, states, outputs=("x", "y", "z")):
    """A start and three steps of one module, with a generator's states at the four borders."""
    writer = TraceWriter(folder, header())
    for number, state in enumerate(states, -1):
        entries = [("python", "rng", "", state)]
        if number >= 0:
            out = outputs[number]
            entries = [("m", "input", "0", "x"), ("m", "output", "", out), *entries]
        write_step(writer, number, entries)
    writer.close()
    return folder


def test_one_that_is_never_drawn_from_is_left_out(tmp_path):
    a, b = record(tmp_path / "a", "0000"), record(tmp_path / "b", "1111")
    found = diff(a, b)
    assert (found.verdict, found.differing, found.compared) == (Verdict.VERIFIED, 0, 6)
    (left,) = found.left
    assert (left.open, left.events, left.examples) == (False, 4, ("generator python",))
    assert "no step of either run drew from them" in left.reason
    assert diff(a, a).left == ()


def test_it_does_not_hide_a_culprit(tmp_path):
    a = record(tmp_path / "a", "0000")
    b = record(tmp_path / "b", "1111", outputs="x!z")
    assert diff(a, b).culprit.names == ("m",)


def test_one_that_is_drawn_from_counts_from_the_start(tmp_path):
    for sides in (("0012", "3345"), ("0000", "1112")):
        a, b = (
            record(tmp_path / f"a{sides[0]}", sides[0]),
            record(tmp_path / f"b{sides[1]}", sides[1]),
        )
        found = diff(a, b)
        assert (found.culprit.cause, found.culprit.place.step) == (Cause.START, -1)
        assert (found.verdict, found.left) == (Verdict.MISMATCH, ())


def test_a_step_that_did_not_draw_has_no_excuse(tmp_path):
    a = record(tmp_path / "a", "0012", outputs="xyz")
    same_step = diff(a, record(tmp_path / "b", "3345", outputs="!yz"))
    (other,) = same_step.others  # step 0 drew nothing, so the generator cannot have caused it
    assert (other.cause, other.place.step) == (Cause.FORWARD, 0)
    later = diff(a, record(tmp_path / "c", "3345", outputs="x!z"))
    assert later.others_count == 0  # step 1 drew, and the states before it differ


def test_one_state_alone_is_not_known_to_be_unused(tmp_path):
    for side in "ab":
        writer = TraceWriter(tmp_path / side, header())
        write_step(writer, 0, [("m", "output", "", "x"), ("python", "rng", "", side)])
        writer.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, found.culprit.cause) == (Verdict.MISMATCH, Cause.RNG)


def cut(folder, state, out, *, end=True):
    """A start, and then a step that an exception or a kill ended: no state behind it."""
    writer = TraceWriter(folder, header())
    write_step(writer, -1, [("torch", "rng", "", state)])
    if end:
        write_step(writer, 0, [("m", "input", "0", "x"), ("m", "output", "", out)], failed=True)
        writer.close("RuntimeError: lost")
    else:
        writer.leave()
    return folder


def test_a_run_that_was_cut_at_once_does_not_tell_whether_it_drew(tmp_path):
    a, b = cut(tmp_path / "a", "0", "x"), cut(tmp_path / "b", "1", "x")
    found = diff(a, b)
    assert (found.verdict, found.differing, found.compared) == (Verdict.UNVERIFIED, 0, 2)
    assert found.left[0].reason.endswith("drew from them, as far as was recorded")
    killed = [cut(tmp_path / f"k{state}", state, "x", end=False) for state in "01"]
    assert diff(*killed).verdict is Verdict.UNVERIFIED
    other = diff(a, cut(tmp_path / "c", "1", "y"))  # it may have drawn: no module is blamed
    assert (other.verdict, other.differing, other.culprit) == (Verdict.MISMATCH, 1, None)
    alike = diff(a, cut(tmp_path / "d", "0", "y"))
    assert (alike.culprit.cause, alike.culprit.names) == (Cause.FORWARD, ("m",))
