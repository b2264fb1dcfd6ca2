"""Every cause is told from what merely inherits: planted in the toy, at any step, and absent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_toy import LEAVES, WEIGHTED, Toy, header, record_toy, write_step

from verify.reasons import Verdict
from verify.tracing.causes import Cause
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter
from verify.tracing.sentences import sentence

SITES = {
    ("data", ""): (Cause.DATA, "input 0 of the model"),
    ("forward", "blocks.0.mlp"): (Cause.FORWARD, "module blocks.0.mlp (MLP)"),
    ("forward", "blocks.1"): (Cause.FORWARD, "module blocks.1 (Block)"),
    ("forward", "head"): (Cause.FORWARD, "module head (Linear)"),
    ("between", "blocks.1"): (
        Cause.BETWEEN,
        "code of module blocks.1 (Block), after output of blocks.1.norm and before "
        "input 0 of blocks.1.mlp",
    ),
    ("probe", "blocks.0.mlp"): (Cause.BETWEEN, "before probe blocks.0.mlp.hidden"),
    ("buffer", "blocks.0.norm"): (Cause.FORWARD, "buffer blocks.0.norm.running_mean"),
    ("loss", ""): (Cause.LOSS, "the loss, or code between the model and it"),
    ("backward", "blocks.0.mlp"): (Cause.BACKWARD, "module blocks.0.mlp (MLP)"),
    ("backward", "blocks.1"): (Cause.BACKWARD, "module blocks.1 (Block)"),
    ("gradient", "blocks.1.mlp"): (Cause.BACKWARD, "gradient of blocks.1.mlp.weight differs"),
    ("optimizer", "head"): (Cause.OPTIMIZER, "parameter head.weight differs after it"),
    ("rng", ""): (Cause.RNG, "generator cpu differs alone"),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return record_toy(tmp_path_factory.mktemp("clean"))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("step", [0, 2])
def test_a_planted_fault_is_the_only_culprit(clean, tmp_path, site, step):
    cause, said = SITES[site]
    found = diff(clean, record_toy(tmp_path / "b", [(step, *site)]))
    assert found.verdict is Verdict.MISMATCH
    assert found.culprit.cause is cause
    assert found.culprit.place.step == step
    assert said in sentence(found.culprit, found)
    assert found.others_count == 0
    assert found.ranks[0].first == found.culprit.place
    assert found.ranks[0].cause is cause
    assert found.inherits_count + len(found.culprit.names) == found.differing


@pytest.mark.parametrize("site", SITES)
def test_the_same_fault_in_both_runs_is_no_difference(tmp_path, site):
    folders = [record_toy(tmp_path / side, [(1, *site)]) for side in "ab"]
    found = diff(*folders)
    assert found.verdict is Verdict.VERIFIED
    assert (found.culprit, found.differing, found.inherits) == (None, 0, ())


@pytest.mark.parametrize(
    ("where", "name", "said"),
    [
        ("start", "head.weight", "parameter head.weight: other weights, seed or resume"),
        ("seed", "", "generator cpu differs already: another seed"),
    ],
)
def test_other_state_at_the_start(clean, tmp_path, where, name, said):
    found = diff(clean, record_toy(tmp_path / "b", [(-1, where, name)]))
    assert found.culprit.cause is Cause.START
    assert said in sentence(found.culprit, found)
    assert found.others_count == 0


def test_all_that_differs_at_the_start_is_one_culprit(clean, tmp_path):
    faults = [(-1, "start", f"{leaf}.weight") for leaf in WEIGHTED]
    found = diff(clean, record_toy(tmp_path / "b", faults))
    assert found.culprit.names == tuple(f"{leaf}.weight" for leaf in WEIGHTED)
    assert f"and {len(WEIGHTED) - 1} more" in sentence(found.culprit, found)


def test_gradients_of_one_step_are_not_separated(clean, tmp_path):
    faults = [(1, "gradient", "head"), (1, "gradient", "embed")]
    found = diff(clean, record_toy(tmp_path / "b", faults))
    assert set(found.culprit.names) == {"head.weight", "embed.weight"}
    assert "clipping by a common norm, or what they were added to" in sentence(found.culprit, found)


def test_a_second_culprit_that_the_first_cannot_have_caused(clean, tmp_path):
    faults = [(1, "buffer", "blocks.0.norm"), (1, "loss", "")]
    found = diff(clean, record_toy(tmp_path / "b", faults))
    assert found.culprit.cause is Cause.LOSS
    (other,) = found.others
    assert (other.cause, other.names) == (Cause.FORWARD, ("blocks.0.norm.running_mean",))


def test_dropout_that_drew_is_hinted_at(clean, tmp_path):
    faults = [(1, "forward", "blocks.0.drop"), (1, "rng", "")]
    found = diff(clean, record_toy(tmp_path / "b", faults))
    assert found.culprit.names == ("blocks.0.drop",)
    assert "drew other random numbers" in found.culprit.hints[0]
    alone = diff(clean, record_toy(tmp_path / "c", faults[:1]))
    assert "whose generators agree" in alone.culprit.hints[0]
    other = diff(clean, record_toy(tmp_path / "d", [(1, "forward", "head")]))
    assert other.culprit.hints == ()


def test_the_consumer_of_a_generator_is_named(clean, tmp_path):
    found = diff(clean, record_toy(tmp_path / "b", [(0, "rng", "")]))
    assert "the first to differ after it: output of blocks.0.drop, step 1" in sentence(
        found.culprit, found
    )


def test_a_range_of_steps_after_the_culprit_blames_nobody(clean, tmp_path):
    other = record_toy(tmp_path / "b", [(1, "forward", "head")])
    after = diff(clean, other, (2, None))
    assert after.verdict is Verdict.MISMATCH
    assert after.culprit is None
    assert after.differing == after.inherits_count > 0
    before = diff(clean, other, (0, 1))
    assert (before.verdict, before.differing, before.ranks[0].steps) == (Verdict.VERIFIED, 0, 1)
    assert diff(clean, other, (1, 2)).culprit.names == ("head",)


def _ops(folder, changed=""):
    writer = TraceWriter(folder, header(level="op"))
    entries = [("", "input", "0", "x"), ("a", "input", "0", "x")]
    spoilt = False
    for number, op in enumerate(("aten.mm", "aten.index_add_", "aten.relu")):
        spoilt = spoilt or op == changed
        entries.append((f"a/{op}", "output", "0", f"{number}{spoilt}"))
    entries += [("a", "output", "", f"out{spoilt}"), ("", "output", "", f"out{spoilt}")]
    write_step(writer, 0, entries)
    writer.close()
    return folder


def test_an_op_is_blamed_before_its_module(tmp_path):
    found = diff(_ops(tmp_path / "a"), _ops(tmp_path / "b", "aten.index_add_"))
    assert found.culprit.cause is Cause.OP
    assert "op aten.index_add_ in module a:" in sentence(found.culprit, found)
    assert (found.others_count, found.inherits_count) == (0, 3)
    assert diff(_ops(tmp_path / "c"), tmp_path / "a").culprit is None


def test_a_module_of_which_no_input_was_recorded_is_blamed_only_if_nothing_differs(tmp_path):
    for side, x, y in (("a", "x", "y"), ("b", "x", "z"), ("c", "w", "z")):
        writer = TraceWriter(tmp_path / side, header())
        write_step(writer, 0, [("m.part", "output", "", x), ("m", "output", "", y)])
        writer.close()
    alone = diff(tmp_path / "a", tmp_path / "b")
    assert (alone.culprit.cause, alone.culprit.names) == (Cause.FORWARD, ("m",))
    both = diff(tmp_path / "a", tmp_path / "c")
    assert both.culprit.names == ("m.part",)
    assert both.inherits_count == 1


def test_a_recomputed_forward_does_not_take_the_blame(tmp_path):
    """Checkpointing runs a block's forward once more inside its backward."""

    def entries(out, grad):
        forward = [("m", "input", "0", "x"), ("m", "output", "", out)]
        return [*forward, ("m", "grad_output", "0", grad), *forward, ("m", "grad_input", "0", grad)]

    for side, out, grad in (("a", "y", "g"), ("b", "z", "h"), ("c", "y", "h")):
        writer = TraceWriter(tmp_path / side, header())
        write_step(writer, 0, entries(out, grad))
        writer.close()
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.culprit.cause, found.culprit.place.occurrence) == (Cause.FORWARD, 0)
    assert found.others_count == 0
    assert diff(tmp_path / "a", tmp_path / "c").culprit.cause is Cause.LOSS


@settings(max_examples=40)
@given(
    st.tuples(st.integers(0, 2), st.sampled_from(["forward", "backward"]), st.sampled_from(LEAVES))
)
def test_any_leaf_at_any_step(tmp_path_factory, fault):
    step, where, name = fault
    if (where, name) == ("backward", "embed"):
        return  # it has no gradient of its input
    base = tmp_path_factory.mktemp("runs")
    found = diff(record_toy(base / "a"), record_toy(base / "b", [fault]))
    assert found.culprit.names == (name,)
    assert (found.culprit.place.step, found.others_count) == (step, 0)
    swapped = diff(base / "b", base / "a")
    assert swapped.culprit.names == (name,)
    assert swapped.differing == found.differing
    assert (swapped.culprit.place.a, swapped.culprit.place.b) == (
        found.culprit.place.b,
        found.culprit.place.a,
    )


def test_the_toy_is_deterministic():
    assert Toy().step() == Toy().step()
    assert Toy().step() != Toy([(0, "data", "")]).step()
