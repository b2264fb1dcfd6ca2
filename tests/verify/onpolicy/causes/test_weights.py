"""What a document of `verify weights` changes: other weights are a cause, equal ones are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onpolicy_pairs as toy
import pytest

from verify.errors import InputFileError
from verify.onpolicy.analysing import evidence_from
from verify.onpolicy.causes.ranking import diagnose
from verify.onpolicy.causes.table import Cause, Evidence
from verify.onpolicy.causes.weights import problem
from verify.onpolicy.numbers import measure
from verify.onpolicy.pairing import Pairs


def document(*names: str, parameters: int = 30, verdict: str = "") -> dict[str, Any]:
    differences = [{"name": name, "kind": "bits"} for name in names]
    said = verdict or ("MISMATCH" if names else "VERIFIED")
    return {"verdict": said, "parameters": parameters, "differences": differences}


def causes(pairs: Pairs, weights: dict[str, Any] | None) -> dict[str, Cause]:
    found = diagnose(pairs, measure(pairs), Evidence(weights=weights))
    return {one.name: one for one in found}


@pytest.fixture(scope="module")
def drift() -> Pairs:
    return toy.drifting(1e-3).pairs


def test_other_weights_are_the_cause_of_what_looks_like_noise(drift: Pairs) -> None:
    alone = causes(drift, None)
    assert alone["numeric-drift"].claimed
    assert "stale-weights" not in alone
    found = causes(drift, document("layers.0.down", "layers.1.down", "a", "b"))
    assert next(iter(found)) == "stale-weights"
    stale = found["stale-weights"]
    assert stale.claimed
    assert stale.structural
    assert stale.for_ == (
        "weights: 4 of 30 parameters differ: layers.0.down (bits), layers.1.down (bits), a (bits)"
        " and 1 more",
    )
    assert not found["numeric-drift"].claimed


def test_equal_weights_take_the_claim_from_versions(drift: Pairs) -> None:
    equal, alone = causes(drift, document()), causes(drift, None)
    said = "weights: 30 parameters were compared, all are equal bit for bit"
    assert equal.keys() == alone.keys() == {"numeric-drift"}
    assert equal["numeric-drift"].for_ == (*alone["numeric-drift"].for_, said)
    given = toy.logits(3)
    tokens = toy.drawn(toy.log_softmax(given))
    ours = toy.chosen(toy.log_softmax(given), tokens)
    theirs = toy.chosen(toy.log_softmax(given + toy.noise(0.3, given.shape)), tokens)
    meta = {"rollout_version": "1", "trainer_version": "2"}
    pairs = toy.pairs(ours, theirs, tokens, meta=lambda index: meta)
    assert causes(pairs, None)["stale-weights"].claimed
    cleared = causes(pairs, document())["stale-weights"]
    assert not cleared.claimed
    assert cleared.against[0] == "weights: 30 parameters were compared, all are equal bit for bit"
    both = causes(pairs, document("w"))["stale-weights"]
    assert both.claimed
    assert len(both.for_) > 1


def test_an_unverified_comparison_says_nothing(drift: Pairs) -> None:
    assert causes(drift, document("w", verdict="UNVERIFIED")) == causes(drift, None)


def test_equal_log_probabilities_have_no_cause_whatever_the_weights() -> None:
    assert causes(toy.drifting(0.0).pairs, document("w")) == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "it has no verdict"),
        ({"verdict": "VERIFIED"}, "it has no number of parameters"),
        ({"verdict": "VERIFIED", "parameters": 3, "differences": {}}, "or no list of differences"),
        ({"verdict": "MISMATCH", "parameters": 3, "differences": [3]}, "a difference has no name"),
    ],
)
def test_another_document_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(given))
    with pytest.raises(InputFileError, match=said):
        evidence_from(weights=path)


def test_what_verify_weights_prints_is_taken(tmp_path: Path) -> None:
    assert problem(document("w")) == ""
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(document("w")))
    assert evidence_from(weights=path).weights == document("w")


@pytest.mark.parametrize("value", ["0.7", [0.7], True])
def test_a_setting_that_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"temperature": value, "other": "x"}))
    with pytest.raises(InputFileError, match=r"temperature is .*; give a number"):
        evidence_from(run_config=path)
    path.write_text(json.dumps({"temperature": 0.7, "top_k": None, "other": "x"}))
    assert evidence_from(run_config=path).run_config == {"temperature": 0.7, "top_k": None}
