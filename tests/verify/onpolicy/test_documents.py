"""The JSON document of `verify onpolicy`: every analysis fits its schema, whatever a file holds."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onpolicy_analyses import INF, NAN, NASTY, analysed, drift, faulty, hostile, odd, routed
from onpolicy_records import sample

from verify.onpolicy import documents
from verify.onpolicy.figures import FIGURES

SCHEMA = documents.schema()
CHECK = jsonschema.Draft202012Validator(SCHEMA)


def document(found):
    """As a reader of the command's output has it: strict JSON, checked against the schema."""
    text = json.dumps(documents.to_json(found), allow_nan=False)
    held = json.loads(text)
    CHECK.validate(held)
    return held


def test_the_schema_is_one_and_knows_every_figure():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    known = SCHEMA["$defs"]["numbers"]
    assert set(FIGURES) <= set(known["properties"])
    assert set(known["required"]) == set(known["properties"])


def test_what_was_found_is_in_it():
    held = document(analysed(*drift(), gates=["differing_tokens>0", "abs_max>9"], problems=2))
    assert (held["verdict"], held["exit_code"]) == ("MISMATCH", 1)
    assert held["trainer"] == {"path": "a.jsonl", "format": "plain"}
    assert held["rollout"] is None
    assert held["numbers"]["tokens"] == 24
    assert held["numbers"]["masked_tokens"] == 3
    assert held["numbers"]["first"]["key"] == "s0"
    assert held["metrics"]["compute_logp/r3/n_valid_tokens"] == 21
    assert [one["fired"] for one in held["gates"]] == [True, False]
    assert held["findings"][0]["reason"] == "bound-exceeded"
    assert (held["problems"][0]["place"], held["problems_count"]) == ("a.jsonl, line 0", 2)
    assert held["routing"] is None


def test_routing_is_in_it():
    held = document(analysed(routed([2, 4])))
    assert (held["routing"]["flipped"], held["routing"]["samples"]) == (2, 1)
    layer = held["routing"]["layers"][1]
    assert (layer["layer"], layer["flipped"], layer["margin_kept"]) == (1, 2, 0.5)
    assert layer["margin_flipped"] == pytest.approx(0.001)


def test_what_json_has_no_number_for_is_text():
    held = document(analysed(*odd(), gates=["k3>1"]))
    assert held["numbers"]["nan_trainer"] == 1
    assert held["numbers"]["inf_rollout"] == 1
    assert held["metrics"]["gen_kl_error"] == "nan"
    assert held["numbers"]["first"]["trainer"] == "nan"


def test_nothing_at_all():
    held = document(analysed())
    assert held["verdict"] == "UNVERIFIED"
    assert held["numbers"]["abs_max"] is None
    assert set(held["metrics"].values()) == {None}


def test_hostile_texts_are_kept_as_they_are():
    held = document(hostile())
    assert held["trainer"]["path"] == NASTY
    assert held["misalignments"][0]["key"] == NASTY + "short"
    assert held["notes"][0] == NASTY
    assert held["problems"][0]["what"] == NASTY


def test_long_lists_are_cut_and_counted():
    samples = [sample(str(at), [1, 2], trainer=[-1.0], rollout=[-1.0, -2.0]) for at in range(150)]
    held = document(analysed(*samples, problems=120))
    assert (len(held["misalignments"]), held["misalignments_count"]) == (100, 150)
    assert (len(held["problems"]), held["problems_count"]) == (100, 120)


@pytest.mark.parametrize(
    ("cause", "verdict"),
    [
        ("", "VERIFIED"),
        ("numeric-drift", "UNVERIFIED"),
        ("temperature", "MISMATCH"),
        ("shift", "MISMATCH"),
        ("sentinel", "MISMATCH"),
        ("other-tokens", "MISMATCH"),
    ],
)
def test_documents_of_causes(cause, verdict):
    held = document(faulty(cause))
    assert held["verdict"] == verdict
    assert [one["name"] for one in held["causes"] if one["claimed"]][:1] == [cause][: bool(cause)]


@pytest.mark.parametrize(
    "path",
    [
        ("verdict",),
        ("numbers", "differing_tokens"),
        ("numbers", "first"),
        ("causes", 0, "for"),
        ("causes", 0, "meaning"),
        ("findings", 0, "remedy"),
        ("notes_count",),
        ("rollout",),
    ],
)
def test_a_document_without_a_field_is_refused(path):
    held = document(faulty("temperature"))
    broken = copy.deepcopy(held)
    inner = broken
    for one in path[:-1]:
        inner = inner[one]
    del inner[path[-1]]
    assert not CHECK.is_valid(broken)
    held["of a later version"] = {"x": 1}  # additive: that is no fault
    assert CHECK.is_valid(held)


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": 0},
        {"findings": []},
        {"verdict": "VERIFIED"},
        {"verdict": "maybe"},
        {"schema_version": 2},
    ],
)
def test_a_document_that_contradicts_itself_is_refused(change):
    held = document(faulty("temperature"))
    assert held["verdict"] == "MISMATCH"
    assert not CHECK.is_valid(held | change)


values = st.lists(
    st.one_of(st.none(), st.floats(-1e300, 1e300), st.sampled_from([NAN, INF, -INF, 0.0, -1.5])),
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    ours=values,
    theirs=values,
    ids=st.lists(st.integers(0, 9), max_size=6),
    mask=st.one_of(st.none(), st.lists(st.integers(0, 1), max_size=6)),
    key=st.text(max_size=5),
)
def test_any_lists_give_a_document(ours, theirs, ids, mask, key):
    one = sample(key, ids, trainer=ours, rollout=theirs, mask=mask)
    document(analysed(one, *drift(1), gates=["abs_max>1"]))
