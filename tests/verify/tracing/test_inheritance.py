"""What must not be blamed: an event that differs because of another one, by its recorded causes."""

from __future__ import annotations

from trace_toy import header, write_step

from verify.reasons import Verdict
from verify.tracing.causes import Cause
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter
from verify.tracing.sentences import sentence


def compare(tmp_path, *steps, first=0):
    """Steps of `name kind [path]` events; one that ends in "!" has another value in the second run,
    and `-` is the empty name."""
    for side in "ab":
        writer = TraceWriter(tmp_path / side, header())
        for number, events in enumerate(steps, first):
            entries = []
            for place, text in enumerate(events):
                name, kind, *path = text.rstrip("!").split()
                value = f"{number} {place}" + ("!" if side == "b" and text.endswith("!") else "")
                entries.append((name.strip("-"), kind, path[0] if path else "", value))
            write_step(writer, number, entries)
        writer.close()
    return diff(tmp_path / "a", tmp_path / "b")


def blamed(found):
    return [(one.cause, one.place.name, one.place.kind) for one in (found.culprit, *found.others)]


def test_a_gradient_of_a_module_whose_forward_differs(tmp_path):
    found = compare(
        tmp_path,
        ["m input 0!", "m output!", "m grad_output", "m grad_input 0!"],
    )
    assert blamed(found) == [(Cause.DATA, "m", "input")]
    assert found.inherits_count == 2


def test_a_parameter_that_differed_before(tmp_path):
    found = compare(tmp_path, ["w parameter!"], ["w grad", "w parameter!"], first=-1)
    assert blamed(found) == [(Cause.START, "w", "parameter")]
    state = compare(
        tmp_path / "state",
        ["w parameter", "w optimizer exp_avg!"],
        ["w grad", "w parameter!", "w optimizer exp_avg!"],
        first=-1,
    )
    assert blamed(state) == [(Cause.START, "w", "optimizer")]


def test_a_gradient_after_another_parameter_differed(tmp_path):
    found = compare(tmp_path, ["w parameter!", "v parameter"], ["v grad!"], first=-1)
    assert blamed(found) == [(Cause.START, "w", "parameter")]


def test_a_buffer_of_which_no_module_was_recorded(tmp_path):
    found = compare(tmp_path, ["x input 0!", "k.mean buffer!"])
    assert blamed(found) == [(Cause.DATA, "x", "input")]
    alone = compare(tmp_path / "alone", ["x input 0", "k.mean buffer!"])
    assert blamed(alone) == [(Cause.FORWARD, "k.mean", "buffer")]


def test_an_output_of_which_no_input_was_recorded(tmp_path):
    found = compare(tmp_path, ["x input 0!", "x output", "m output!"])
    assert blamed(found) == [(Cause.DATA, "x", "input")]


def test_all_outputs_of_one_call_are_one_culprit(tmp_path):
    found = compare(tmp_path, ["m input 0", "m output 0!", "m output 1!"])
    assert blamed(found) == [(Cause.FORWARD, "m", "output")]
    assert found.inherits_count == 0


def test_a_gradient_that_an_inner_module_spoilt(tmp_path):
    """m sends its input two gradients: its own, which is equal, and one by way of m.a."""
    found = compare(
        tmp_path,
        [
            *("m grad_output", "m grad_input 0"),
            *("m.a grad_output", "m.a grad_input 0!", "m grad_input 0!"),
        ],
    )
    assert blamed(found) == [(Cause.BACKWARD, "m.a", "grad_input")]


def test_state_that_is_equal_again_excuses_nothing(tmp_path):
    module = ["m input 0", "m output", "m.w parameter"]
    found = compare(
        tmp_path,
        [*module[:2], "m.w parameter!"],
        module,
        ["m input 0", "m output!", "m.w parameter"],
    )
    assert blamed(found) == [(Cause.SET, "m.w", "parameter"), (Cause.FORWARD, "m", "output")]


def test_a_parameter_that_other_code_than_an_optimizer_wrote(tmp_path):
    """When in the step is not recorded, so its module is not blamed for what it made of it."""
    steps = ["m input 0", "m output", "m.w parameter"], ["m input 0", "m output!", "m.w parameter!"]
    found = compare(tmp_path / "set", *steps)
    assert blamed(found) == [(Cause.SET, "m.w", "parameter")]
    assert "weights that were loaded or synchronised" in sentence(found.culprit, found)
    later = compare(tmp_path / "later", *steps, ["m input 0", "m output!", "m.w parameter!"])
    assert blamed(later) == [(Cause.SET, "m.w", "parameter")]
    other = compare(tmp_path / "other", ["n input 0", "n output!", "m.w parameter!"])
    assert blamed(other) == [(Cause.FORWARD, "n", "output"), (Cause.SET, "m.w", "parameter")]
    left = ["m input 0", "m output!", "m.w grad", "m.w parameter!"]  # of an earlier step
    assert blamed(compare(tmp_path / "left", left)) == [(Cause.SET, "m.w", "parameter")]
    stepped = compare(tmp_path / "stepped", [*left[:1], "m output", *left[2:], "m.w optimizer x"])
    assert blamed(stepped) == [(Cause.OPTIMIZER, "m.w", "parameter")]
    trained = compare(tmp_path / "t", ["m input 0", "m output!", "m.w grad!", "m.w parameter!"])
    assert blamed(trained) == [(Cause.FORWARD, "m", "output")]
    behind = compare(tmp_path / "b", ["m grad_output", "m grad_input 0!", "m.w parameter!"])
    assert blamed(behind)[0] == (Cause.BACKWARD, "m", "grad_input")


def test_tensors_without_elements_are_no_evidence(tmp_path):
    for side in "ab":
        writer = TraceWriter(tmp_path / side, header())
        writer.step(0, [writer.define("m", "output", "", "float32", (0, 4))], bytes(32))
        writer.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, found.compared) == (Verdict.UNVERIFIED, 0)
