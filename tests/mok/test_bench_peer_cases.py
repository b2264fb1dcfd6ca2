"""The cases in ci/gpu/peer_cases.py that need no GPU to be wrong: names, reference, absence."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import mok
from mok.bench import determinism
from mok.bench.contenders import Missing
from verify import budgets
from verify.targets import cases_in, find

FILE = Path(mok.__file__).parent.parent / "ci" / "gpu" / "peer_cases.py"


@pytest.fixture(scope="module")
def cases() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("peer_cases_under_test", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def _inputs(cases: ModuleType) -> dict[str, torch.Tensor]:
    shape = cases.Shape("tiny", 48, 4, 64, 32, 2)
    made: dict[str, torch.Tensor] = cases._generated(shape, torch.device("cpu"))
    return made


def _judged(cases: ModuleType, found: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    wanted = cases.reference(_inputs(cases), {}, None)
    assert wanted.keys() == found.keys()
    return {name: budgets.check(name, found[name], wanted[name]) for name in wanted}


def test_every_peer_has_its_cases(cases: ModuleType) -> None:
    names = {case.name.removeprefix("peers/"): case for case in cases_in(cases)}
    layers = ("torch", "huggingface", "liger", "sonicmoe")
    assert set(names) == {
        *(f"{peer}/{kind}" for peer in layers for kind in ("small", "qwen3-30b")),
        "deepgemm/small",
        "sonicmoe/tiles",
    }
    for name, case in names.items():
        assert "repeat" in case.claims, name
        assert case.ranks == 1, name  # so that the whole file runs on one GPU
        assert ("process" in case.claims) == (name != "sonicmoe/tiles"), name
    assert names["liger/small"].device == "cuda"
    assert names["torch/small"].device == ""  # also where there is no GPU


def test_a_result_tells_which_version_was_checked(cases: ModuleType) -> None:
    small = next(case for case in cases_in(cases) if case.name == "peers/torch/small")
    document = {"tool": {"version": "0"}, "environment": {}}
    case = {"case": small.name, "description": small.description, "verdict": "VERIFIED"}
    here = determinism.Here("cpu", None, torch.__version__, None)
    versions: dict[str, str | None] = {"torch": torch.__version__}
    found = determinism._finding(document, {**case, "claims": []}, versions, here)
    assert found is not None
    assert (found.version, found.differs) == (torch.__version__, "")
    assert small.description.startswith(f"torch {torch.__version__}, T=512 E=8")


def test_cases_of_two_ranks_are_in_a_file_of_their_own() -> None:
    found = {one.case.name: one.case for one in find(str(FILE.with_name("peer_rank_cases.py")))}
    assert set(found) == {"peers/torch/ranks", "peers/sonicmoe/ranks"}
    for case in found.values():
        assert case.ranks == 2
        assert "rank" in case.claims


def test_a_right_layer_fits_the_reference(cases: ModuleType) -> None:
    found = cases.layer(**_inputs(cases), peer="torch")
    for name, measured in _judged(cases, found).items():
        assert measured["over_budget"] == measured["forbidden"] == 0, name
        assert 0.05 < measured["worst_ratio"] < 0.8, name
        assert 4 * measured["permissive"] < measured["numel"], name  # else it would be vacuous
        assert 2e-3 < measured["relative_l2"] < 6e-3, name


@pytest.mark.parametrize("name", ["out", "d_x", "d_gate_up", "d_down", "d_router"])
def test_a_lost_row_does_not_fit(cases: ModuleType, name: str) -> None:
    found = cases.layer(**_inputs(cases), peer="torch")
    found[name][1] = 0
    judged = _judged(cases, found)
    assert judged[name]["over_budget"] > 0
    assert all(judged[n]["over_budget"] == 0 for n in judged if n != name)


def test_a_missing_peer_is_named_before_anything_is_executed(
    cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "contender_of", lambda peer: Missing(peer.name, "install it"))
    small = next(case for case in cases_in(cases) if case.name == "peers/sonicmoe/small")
    with pytest.raises(RuntimeError, match="sonicmoe is left out: install it"):
        small.setup()


def test_every_process_tunes_anew(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUACK_FORCE_CACHE_UPDATE", raising=False)
    cases.require(cases.BY_NAME["torch"])
    assert cases.os.environ.pop("QUACK_FORCE_CACHE_UPDATE") == "1"


def test_one_candidate_is_forced_and_the_list_is_put_back(cases: ModuleType) -> None:
    tuner = SimpleNamespace(configs=[1, 2, 3, 2])
    with cases._only(tuner, lambda config: config == 2):
        assert tuner.configs == [2]
    assert tuner.configs == [1, 2, 3, 2]
    with (
        pytest.raises(RuntimeError, match="no such candidate"),
        cases._only(tuner, lambda config: config == 5),
    ):
        pass
    assert tuner.configs == [1, 2, 3, 2]
