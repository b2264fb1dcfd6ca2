"""Events as brackets: what belongs to a call, what is inside, and whose code lies between."""

from __future__ import annotations

from verify.tracing.calls import calls_of, inside
from verify.tracing.definitions import Definition, Program


def calls(*events):
    """Of events `name kind path`, written as one text each; "-" is the empty name or path."""
    made = []
    for number, text in enumerate(events):
        name, kind, *path = text.split()
        path = path[0] if path else ""
        made.append(Definition(number, name.strip("-"), kind, path, "float32", (2,)))
    return calls_of(Program(tuple(made)))


def shown(call):
    return None if call is None else (call.name, call.start, call.given, call.made)


def test_nested_calls_and_the_code_between():
    found = calls(
        "- input 0", "a input 0", "a.b input 0", "a.b output", "a.c input 0", "a.c output",
        "a output", "- output",
    )  # fmt: skip
    assert shown(found.of[3]) == ("a.b", 2, [2], [3])
    assert shown(found.of[6]) == ("a", 1, [1], [6])
    assert [None if one is None else one.name for one in found.around] == [
        None, "", "a", "a.b", "a", "a.c", "a", "",
    ]  # fmt: skip


def test_several_inputs_and_outputs_are_one_call():
    found = calls("m input 0", "m input kwargs.mask", "m output 0", "m output 1")
    assert {id(one) for one in found.of} == {id(found.of[0])}
    assert shown(found.of[0]) == ("m", 0, [0, 1], [2, 3])


def test_a_shared_module_has_a_call_each_time():
    found = calls("m input 0", "m output", "m input 0", "m output")
    assert [call.start for call in found.forward["m"]] == [0, 2]
    recursive = calls("m input 0", "m input 0", "m output", "m output")
    assert [shown(call)[2:] for call in recursive.forward["m"]] == [([0], [3]), ([1], [2])]


def test_a_call_that_never_ended_does_not_take_what_follows():
    found = calls("- input 0", "a input 0", "b input 0", "b output", "- output")
    assert found.around[2].name == ""
    assert shown(found.of[4]) == ("", 0, [0], [4])


def test_a_call_without_tensors_among_its_inputs_holds_its_parts():
    found = calls("x output", "m.a input 0", "m.a output", "m output")
    assert shown(found.of[3]) == ("m", 1, [], [3])
    assert calls("(root).x output", "p output", "(root) output").of[2].start == 0


def test_backward_calls_take_every_gradient_of_an_input():
    found = calls(
        "a grad_output", "a grad_input 0", "a.b grad_output", "a.b grad_input 0", "a grad_input 0",
        "c grad_output 0", "c grad_output 1", "c grad_input 0",
    )  # fmt: skip
    assert shown(found.of[4]) == ("a", 0, [0], [1, 4])
    assert found.around[2].name == "a"
    assert shown(found.of[7]) == ("c", 5, [5, 6], [7])
    twice = calls("m grad_output", "m grad_input 0", "m grad_output", "m grad_input 0")
    assert [shown(call)[2:] for call in twice.backward["m"]] == [([0], [1]), ([2], [3])]
    assert twice.around[2] is None  # the first call's backward is over


def test_probes_and_ops_belong_to_the_module_that_runs():
    found = calls(
        "- input 0", "m input 0", "rows probe", "m/aten.mm output 0", "m output", "loss probe",
        "- output", "m grad_output", "rows probe grad", "(backward)/aten.mm output 0",
    )  # fmt: skip
    assert found.around[2].name == found.around[3].name == "m"
    assert found.around[5].name == ""
    assert (found.around[8].name, found.around[8].backward) == ("m", True)
    assert found.around[9] is None
    assert all(found.of[place] is None for place in (2, 3, 5, 8, 9))


def test_state_has_no_code_around_it():
    found = calls("m input 0", "m.w parameter", "cpu rng", "m.w grad")
    assert found.around[1:] == (None, None, None)


def test_inside_goes_by_dots():
    assert inside("a.b", "a")
    assert inside("a", "a")
    assert not inside("ab", "a")
    assert not inside("a", "a.b")
    assert inside("anything", "")
    assert inside("anything", "(root)")
