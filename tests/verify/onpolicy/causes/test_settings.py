"""Who says what of sampling: the sampler's word, the trainer's own file, where they disagree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onpolicy_pairs as toy
import pytest

from verify.onpolicy.causes import support, temperature
from verify.onpolicy.causes.facts import Facts, gather
from verify.onpolicy.causes.settings import disagreeing, in_force, temperatures, told
from verify.onpolicy.causes.table import Evidence
from verify.onpolicy.pairing import pair
from verify.onpolicy.samples import ROLLOUT, TRAINER

GIVEN = toy.logits(51, samples=24)
HOT = toy.log_softmax(GIVEN / 0.7)
TOKENS = toy.drawn(HOT)
Meta = dict[str, Any]


def facts(
    ours: Meta, theirs: Meta, *, where: str = "config", evidence: Evidence | None = None
) -> Facts:
    """A sampler that divided by 0.7 and a trainer that did not, and what their files say."""
    dumps = []
    for side, values, said in ((TRAINER, toy.log_softmax(GIVEN), ours), (ROLLOUT, HOT, theirs)):
        made = toy.samples(side, toy.chosen(values, TOKENS), TOKENS)
        if where == "config":
            made = replace(made, config=said)
        else:
            marked = [replace(one, meta={**one.meta, **said}) for one in made.samples]
            made = replace(made, samples=tuple(marked))
        dumps.append(made)
    return gather(pair(*dumps), evidence or Evidence())


def sentences(given: Facts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = temperature.detect(given)
    assert found is not None
    assert found.cause.claimed
    return found.cause.for_, found.cause.against


@pytest.mark.parametrize("where", ["config", "samples"])
def test_a_trainers_temperature_in_its_own_file_is_its_own(where: str) -> None:
    """Once it was "against: the record says temperature 1", under the right cause."""
    given = facts({"temperature": 1.0}, {"temperature": 0.7}, where=where)
    assert temperatures(given) == ([0.7], [1.0])
    for_, against = sentences(given)
    assert for_[0] == (
        "the record says temperature 0.7 of the sampler, the trainer's file says temperature 1:"
        " they disagree, by a ratio of 0.7"
    )
    assert against == ()


def test_the_proper_name_says_the_same() -> None:
    given = facts({"trainer_temperature": 1.0}, {"temperature": 0.7})
    assert temperatures(given) == ([0.7], [1.0])
    assert "they disagree" in sentences(given)[0][0]
    both = facts({"trainer_temperature": 1.0, "temperature": 0.7}, {})
    assert temperatures(both) == ([0.7], [1.0])


def test_values_that_disagree_the_other_way_speak_against_it() -> None:
    for_, against = sentences(facts({"temperature": 0.7}, {"temperature": 1.0}))
    assert not any("disagree" in one for one in for_)
    assert "the values disagree the other way" in against[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "for_", "against"),
    [
        ({}, {}, "", ""),
        ({}, {"temperature": 0.7}, "the record says temperature 0.7", ""),
        ({}, {"temperature": 1.0}, "", "the record says temperature 1 (it may not know)"),
        ({"temperature": 1.0}, {"temperature": 1.0}, "", "temperature 1 (it may not know)"),
        ({"temperature": 0.7}, {"temperature": 0.7}, "one may not apply it, or apply it twice", ""),
        ({"temperature": 0.7}, {}, "nothing is said of the sampler's", ""),
        ({"temperature": 1.0}, {}, "", ""),
    ],
)
def test_what_agrees_is_no_disagreement(ours: Meta, theirs: Meta, for_: str, against: str) -> None:
    said, contrary = sentences(facts(ours, theirs))
    assert "disagree" not in " ".join((*said, *contrary))
    assert for_ in " ".join(said)
    assert against in " ".join(contrary)
    assert bool(contrary) == bool(against)


def test_a_sampler_whose_values_leave_its_temperature_out_agrees_with_a_trainer_of_1() -> None:
    theirs = {"temperature": 0.7, "processed": False}
    said, against = sentences(facts({"trainer_temperature": 1.0}, theirs))
    assert "disagree" not in " ".join((*said, *against))


def test_of_other_parameters_the_samplers_word_counts_and_the_trainers_file_is_told_of() -> None:
    given = facts({"top_p": 1.0}, {"top_p": 0.9}, where="samples")
    assert told(given, "top_p") == [0.9]
    assert in_force(given, ("top_p",)) == ["top_p=0.9"]
    assert disagreeing(given, ("top_p", "top_k")) == [
        "the sampler's samples say top_p=0.9; the trainer's file says top_p=1"
    ]
    alone = facts({"top_p": 0.9}, {})
    assert told(alone, "top_p") == [0.9]
    assert disagreeing(alone, ("top_p",)) == []
    assert disagreeing(facts({"top_p": 0.9}, {"top_p": 0.9}), ("top_p",)) == []


def test_one_file_of_both_sides_and_the_configurations_speak_as_before() -> None:
    evidence = Evidence(run_config={"top_p": 0.8}, generation_config={"top_p": 0.9})
    made = toy.samples(TRAINER, toy.chosen(HOT, TOKENS), TOKENS)
    meta = {"temperature": 0.7, "top_p": 1.0}
    both = [
        replace(one, series={**one.series, ROLLOUT: one.series[TRAINER]}, meta=meta)
        for one in made.samples
    ]
    given = gather(pair(replace(made, samples=tuple(both))), evidence)
    assert told(given, "top_p") == [0.8, 0.9, 1.0]
    assert len(disagreeing(given, ("top_p",))) == 1
    assert temperatures(given) == ([0.7], [])


def test_constant_values_do_not_give_thousands_of_standard_errors() -> None:
    values = toy.chosen(toy.log_softmax(GIVEN), TOKENS)
    found = support.detect(toy.facts(values, values + 0.01, TOKENS))
    assert "(more than 100 standard errors from 0" in found[0].cause.for_[0]
