"""Planted faults in small models are found and named, and clean twins are VERIFIED."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Callable

import jsonschema
import live_models
import numpy as np
import pytest
import torch
from live_models import Model, WithoutPositions, planted
from torch import nn

from verify.errors import UnsupportedError
from verify.onpolicy import documents, report_text
from verify.onpolicy.gates import parse_gate
from verify.onpolicy.live.conditions import Condition, Request
from verify.onpolicy.live.examining import Examined, examine
from verify.onpolicy.live.layouts import LAYOUTS
from verify.onpolicy.live.models import described
from verify.reasons import Verdict

SMALL = Request(tokens=3, samples=2, chunk=3)
EVERY = ("decode", *LAYOUTS)
V, M, U = Verdict.VERIFIED, Verdict.MISMATCH, Verdict.UNVERIFIED

MODELS: dict[str, Callable[[], nn.Module]] = {
    "clean": Model,
    "float64": lambda: Model(fused=True, dtype=torch.float64),
    "fused": lambda: Model(fused=True),
    "single": lambda: planted(Model(), live_models.SingleToken),
    "by-batch": lambda: planted(Model(), live_models.ByBatch),
    "by-count": lambda: planted(Model(), live_models.ByCount),
    "no-positions": lambda: WithoutPositions(Model()),
}


@functools.cache
def examined(name: str) -> Examined:
    return examine(described(name, MODELS[name]()), SMALL)


def conditions(found: Examined) -> dict[str, Condition]:
    return {one.name: one for one in found.report.conditions}


def texts(found: Examined) -> str:
    return f"{report_text.text(found.analysis)}\n{found.report.text()}"


@pytest.mark.parametrize("name", ["clean", "float64"])
def test_a_model_whose_bits_depend_on_no_layout_is_verified(name):
    found = examined(name)
    assert found.analysis.verdict.verdict is V
    assert found.analysis.verdict.findings == ()
    assert [one.name for one in found.report.conditions] == list(EVERY)
    assert all(one.verdict is V for one in found.report.conditions)
    assert all(one.compared > 0 and one.differing == 0 for one in found.report.conditions)


def test_rows_one_by_one_have_equal_bits_in_every_module():
    for one in examined("clean").report.conditions:
        assert one.parted is None
        assert one.wide is None
        assert sum(kind.rows for kind in one.rows) > 0
        assert not any(kind.other for kind in one.rows)


def test_products_of_whole_batches_round_and_are_no_structural_fault():
    """Whether they round otherwise at these sizes is up to the machine."""
    found = examined("fused")
    assert found.analysis.verdict.verdict in (U, V)
    assert {one.reason for one in found.analysis.verdict.findings} <= {"no-bound"}
    for one in found.report.conditions:
        assert one.wide is None or (not one.wide.structural and one.wide.problem == "")
        assert one.parted is not None or not one.differing
    assert not any(one.claimed and one.structural for one in found.analysis.causes)


def test_a_module_that_treats_single_tokens_otherwise_is_named():
    found = conditions(examined("single"))
    decode = found["decode"]
    assert decode.verdict is M
    assert decode.parted is not None
    assert (decode.parted.module, decode.parted.type) == ("layers.1.mlp", "SingleToken")
    assert decode.wide is not None
    assert decode.wide.structural
    for name in ("batch", "padded-left", "padded-right", "packed"):
        assert found[name].verdict is V
    assert "layers.1.mlp (SingleToken)" in texts(examined("single"))
    claimed = [one.name for one in examined("single").analysis.causes if one.claimed]
    assert "numeric-drift" not in claimed


def test_experts_whose_rows_depend_on_the_batch_are_named():
    for one in examined("by-batch").report.conditions:
        assert one.verdict is M
        assert one.parted is not None
        assert (one.parted.module, one.parted.type) == ("layers.1.mlp.experts", "ByBatch")
        experts = {kind.type: kind for kind in one.rows if kind.experts}
        assert experts["ByBatch"].other > 0
        assert experts["Experts"].other == 0
        assert experts["Experts"].rows > 0


@pytest.mark.parametrize("kind", [live_models.ByCount, live_models.Experts])
def test_experts_on_mok_have_to_give_equal_bits(kind):
    """A drift that is nobody's promise elsewhere is a fault of mok's."""
    model = planted(Model(), kind)
    model.config._experts_implementation = "mok"
    found = examine(described("mok", model), dataclasses.replace(SMALL, layouts=()))
    (decode,) = found.report.conditions
    if kind is live_models.Experts:
        assert decode.verdict is V
        return
    assert decode.verdict is M
    (finding, *_) = found.analysis.verdict.findings
    assert finding.reason == "experts-differ"
    assert "layers.1.mlp.experts (ByCount): other bits for equal inputs" in finding.what


def test_drift_of_the_size_of_rounding_gets_no_verdict_without_a_bound():
    found = examined("by-count")
    assert found.analysis.verdict.verdict is U
    assert {one.reason for one in found.analysis.verdict.findings} == {"no-bound"}
    decode = conditions(found)["decode"]
    assert decode.verdict is U
    assert decode.parted is not None
    assert (decode.parted.module, decode.parted.type) == ("layers.1.mlp.experts", "ByCount")
    assert decode.wide is not None
    assert (decode.wide.structural, decode.wide.problem) == (False, "")
    experts = {kind.type: kind for kind in decode.rows if kind.experts}
    assert experts["ByCount"].other > 0


def test_left_padding_without_position_ids_is_a_mismatch():
    found = conditions(examined("no-positions"))
    left = found["padded-left"]
    assert left.verdict is M
    assert left.parted is not None
    assert left.parted.before == "inner.places"
    assert left.wide is not None
    assert left.wide.structural
    for name in ("decode", "batch", "padded-right", "chunked"):
        assert found[name].verdict is V
    assert found["packed"].verdict is U
    assert found["packed"].reasons == ("not-run",)
    assert "position_ids" in found["packed"].problem


def test_sampler_and_trainer_are_analysed_as_any_pair():
    found = examined("clean")
    assert found.analysis.numbers.figures["compared_tokens"] == 6
    assert found.analysis.routing is not None
    assert len(found.analysis.routing.layers) == 2
    for one, other in zip(found.trainer.samples, found.rollout.samples, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        routes = one.routing["trainer"]
        assert routes.experts.shape == (len(one.prompt) + len(one.tokens) - 1, 2, 2)
        assert routes.layers == (0, 1)
        assert routes.margins is not None
        assert (routes.margins >= 0).all()


def test_bounds_hold_for_every_condition():
    live = described("bounded", MODELS["single"]())
    request = dataclasses.replace(SMALL, layouts=("batch",))
    strict = examine(live, request, gates=[parse_gate("differing_tokens>0")])
    assert strict.analysis.verdict.verdict is M
    assert conditions(strict)["decode"].reasons == ("structural-cause", "bound-exceeded")
    drift = described("drift", MODELS["by-count"]())
    wide = examine(drift, request, gates=[parse_gate("abs_max>0.1")])
    assert wide.analysis.verdict.verdict is V


def test_one_sample_is_no_batch_and_that_is_no_pass():
    request = Request(tokens=2, samples=1, layouts=("batch", "chunked"))
    found = conditions(examine(described("one", Model()), request))
    assert [found[name].verdict for name in ("decode", "batch", "chunked")] == [V, U, V]


@pytest.mark.parametrize("name", MODELS)
def test_documents_keep_to_the_schema(name):
    found = examined(name)
    file = importlib.resources.files("verify") / "schema" / "onpolicy-model-v1.schema.json"
    held = json.loads(json.dumps(found.report.to_json(), allow_nan=False))
    jsonschema.validate(held, json.loads(file.read_text(encoding="utf-8")))
    whole = documents.to_json(found.analysis) | {"model": held}
    jsonschema.validate(whole, documents.schema())
    assert whole["verdict"] == str(found.analysis.verdict.verdict)
    assert texts(found).startswith(f"verdict={whole['verdict']} ")


def test_names_of_modules_are_harmless_on_a_terminal():
    model = planted(Model(), live_models.ByBatch)
    model.layers[1].mlp.experts.__class__ = type(
        "By\x1b[2JBatch\n::error::", (live_models.ByBatch,), {}
    )
    request = dataclasses.replace(SMALL, layouts=())
    found = examine(described("evil\n::error::", model), request)
    said = texts(found)
    assert "\x1b" not in said
    assert not any(line.startswith("::") for line in said.splitlines())


@pytest.mark.parametrize("prompts", [((1,), (2,)), ((3,), (4, 5))])
def test_experts_that_are_called_one_by_one_are_not_taken_for_tokens(prompts):
    """With one token each expert has as many rows as there are tokens; so has one with all."""
    model = planted(planted(Model(), live_models.OneByOne), live_models.OneByOne, layer=0)
    request = Request(tokens=4, samples=2, layouts=("packed", "chunked"), chunk=2)
    found = examine(described("one by one", model, prompts), request)
    assert found.analysis.verdict.verdict is U
    for one in found.report.conditions:
        assert one.wide is None or not one.wide.structural
        assert one.parted is None or one.parted.before == ""
        assert not any(kind.type == "Softsign" for kind in one.rows)


def test_a_model_that_hands_use_cache_on_makes_no_cache_in_one_pass():
    request = dataclasses.replace(SMALL, layouts=("packed", "chunked"))
    found = examine(described("hands on", live_models.HandsOn(Model())), request)
    assert found.analysis.verdict.verdict is V
    assert all(one.compared > 0 for one in found.report.conditions)


@pytest.mark.parametrize(("inner", "verdict"), [(live_models.ByCount, U), (live_models.ByBatch, M)])
def test_padding_that_is_nan_in_the_copy_alone_hides_no_fault_and_is_none(inner, verdict):
    model = planted(planted(Model(), inner), live_models.BlindPadding, layer=0)
    request = dataclasses.replace(SMALL, layouts=("padded-left",))
    _, left = examine(described("blind", model), request).report.conditions
    assert left.wide is not None
    assert left.wide.problem == ""
    assert left.wide.largest is not None
    assert left.verdict is verdict


def test_a_copy_that_gives_nan_where_the_model_does_not_says_nothing():
    model = planted(Model(), live_models.NotWide)
    (decode,) = examine(
        described("nan", model), dataclasses.replace(SMALL, layouts=())
    ).report.conditions
    assert decode.wide is not None
    assert (decode.wide.structural, decode.wide.largest) == (False, None)
    assert "the model does not" in decode.wide.problem
    assert decode.verdict is U


class Narrow(live_models.ByCount):
    """Gives bfloat16 whatever it is given."""

    def forward(self, x, chosen, weights):
        return super().forward(x, chosen, weights).bfloat16()


@pytest.mark.parametrize("kind", [Narrow, live_models.Rounded])
def test_a_copy_that_still_rounds_says_nothing(kind):
    request = dataclasses.replace(SMALL, layouts=())
    found = examine(described("narrow", planted(Model(), kind)), request)
    (decode,) = found.report.conditions
    assert decode.differing
    assert decode.wide is not None
    assert "bfloat16" in decode.wide.problem
    assert not decode.wide.structural
    assert decode.verdict is U


def test_a_model_without_a_copy_in_float64_is_judged_without_it():
    model = planted(Model(), live_models.SingleToken)
    model.__deepcopy__ = lambda memo: 1 / 0  # type: ignore[assignment]
    request = dataclasses.replace(SMALL, layouts=())
    (decode,) = examine(described("uncopied", model), request).report.conditions
    assert decode.wide is not None
    assert "no copy in float64" in decode.wide.problem
    assert decode.verdict is U


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tokens": 0}, "--tokens 0"),
        ({"samples": 0}, "--samples 0"),
        ({"layouts": ("sideways",)}, "padded-left"),
    ],
)
def test_requests_that_make_no_sense_are_refused(given, why):
    with pytest.raises(UnsupportedError, match=why):
        Request(**given)
