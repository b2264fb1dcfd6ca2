"""Adapters of peers: layouts, routing, absence, and each installed peer against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rank_scripts import run_ranks

import mok
from mok.bench.contenders import Contender, Inputs, Missing, leaf
from mok.bench.peers import (
    PEERS,
    adapting,
    available,
    deepgemm,
    float64,
    grouped_gemms,
    liger,
    sonic,
    torch_pipeline,
    tuning,
    warming,
)
from mok.bench.peers.adapting import Loaded, Peer, deinterleave, interleave, prepare_peer
from mok.bench.peers.nccl import plan
from mok.bench.shapes import SHAPES
from mok.errors import InputError

ROOT = Path(mok.__file__).parent.parent


def inputs_of(
    tokens: int = 40,
    experts: int = 4,
    hidden: int = 64,
    width: int = 32,
    slots: int = 2,
    device: str = "cpu",
) -> Inputs:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    scores, chosen = random(tokens, experts).topk(slots, 1)
    return Inputs(
        random(tokens, hidden).bfloat16().to(device),
        (random(experts, 2 * width, hidden) * hidden**-0.5).bfloat16().to(device),
        (random(experts, hidden, width) * width**-0.5).bfloat16().to(device),
        chosen.to(device),
        scores.softmax(1).bfloat16().float().to(device),
        random(tokens, hidden).bfloat16().to(device),
    )


def run(peer: Peer, inputs: Inputs) -> dict[str, torch.Tensor]:
    prepared = prepare_peer(peer, inputs)
    out = prepared.forward()
    return {"out": out.detach(), **prepared.arrange(prepared.backward(out, False))}


def worst(found: dict[str, torch.Tensor], inputs: Inputs) -> dict[str, float]:
    """Largest error by output, in units of its budget."""
    names = ("x", "w_gate_up", "w_down", "topk_experts", "router_weights", "d_out")
    wanted = float64.layer(*(getattr(inputs, name).cpu() for name in names))
    assert wanted.keys() == found.keys()
    ratios = {}
    for name, spread in wanted.items():
        assert found[name].shape == spread.v.shape
        error = (found[name].double().cpu() - spread.v).abs()
        ratios[name] = float((error / float64.budget(spread)).max())
    return ratios


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_interleaving_is_undone(experts: int, width: int, hidden: int) -> None:
    rows = torch.arange(experts * 2 * width * hidden).view(experts, 2 * width, hidden)
    mixed = interleave(rows)
    assert torch.equal(deinterleave(mixed), rows)
    assert torch.equal(mixed[:, 0::2], rows[:, :width])  # gate rows
    assert torch.equal(mixed[:, 1::2], rows[:, width:])  # up rows
    assert mixed.is_contiguous()


@given(st.data())
def test_the_plan_sends_every_route_to_its_expert(data: st.DataObject) -> None:
    ranks, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    tokens, slots = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
    ids = st.integers(0, ranks * experts - 1)
    flat = data.draw(st.lists(ids, min_size=tokens * slots, max_size=tokens * slots))
    found = plan(torch.tensor(flat, dtype=torch.int64).view(tokens, slots), experts, ranks)
    order = sorted(range(len(flat)), key=lambda route: (flat[route], route))
    assert found.order.tolist() == order
    assert [order[place] for place in found.inverse.tolist()] == list(range(len(flat)))
    assert found.local.tolist() == [flat[route] % experts for route in order]
    wanted = [sum(i // experts == rank for i in flat) for rank in range(ranks)]
    assert found.counts.tolist() == wanted


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.sampled_from([1, 4, 8]))
def test_padding_keeps_every_row_with_its_expert(counts: list[int], alignment: int) -> None:
    padded = deepgemm.pad(counts, alignment)
    groups = padded.groups.tolist()
    assert len(groups) == sum(-(-count // alignment) * alignment for count in counts)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert [groups[row] for row in padded.rows.tolist()] == experts
    assert sum(group >= 0 for group in groups) == sum(counts)
    starts = {groups.index(e) for e, count in enumerate(counts) if count}
    assert all(start % alignment == 0 for start in starts)


def test_routes_are_sorted_stably_and_experts_without_rows_end_where_they_start() -> None:
    order, inverse, ends = torch_pipeline.sort_routes(torch.tensor([[2, 0], [0, 2], [2, 5]]), 6)
    assert order.tolist() == [1, 2, 0, 3, 4, 5]
    assert order[inverse].tolist() == list(range(6))
    assert ends.tolist() == [2, 2, 5, 5, 5, 6]
    assert ends.dtype == torch.int32


@pytest.mark.parametrize("peer", [torch_pipeline.PEER, PEERS[1]], ids=lambda peer: peer.name)
def test_a_peer_on_a_cpu_is_inside_the_budget(peer: Peer) -> None:
    found = adapting.contender_of(peer)
    if isinstance(found, Missing):
        pytest.skip(f"{found.name}: {found.reason}")
    inputs = inputs_of()
    ratios = worst(run(peer, inputs), inputs)
    assert max(ratios.values()) < 1, ratios
    assert min(ratios.values()) > 0.02, ratios  # a budget that is never used judges nothing


def _changed(name: str, inputs: Inputs) -> Inputs:
    if name == "gate and up swapped":
        return replace(inputs, w_gate_up=inputs.w_gate_up.roll(inputs.w_gate_up.shape[1] // 2, 1))
    if name == "one token to another expert":
        ids = inputs.topk_experts.clone()
        ids[7] = (ids[7] + 1) % inputs.w_down.shape[0]
        return replace(inputs, topk_experts=ids)
    weights = inputs.router_weights.clone()
    weights[5, 1] *= 1.25
    return replace(inputs, router_weights=weights)


@pytest.mark.parametrize(
    "fault", ["gate and up swapped", "one token to another expert", "one wrong router weight"]
)
def test_a_wrong_layer_is_outside_of_the_budget(fault: str) -> None:
    inputs = inputs_of()
    ratios = worst(run(torch_pipeline.PEER, _changed(fault, inputs)), inputs)
    assert ratios["out"] > 1, ratios
    assert ratios["d_x"] > 1, ratios


def test_interleaved_peers_get_their_layout_and_give_ours() -> None:
    def load() -> Loaded:
        def layer(x: Any, gate_up: Any, down: Any, ids: Any, router: Any) -> torch.Tensor:
            assert ids.dtype == torch.int32
            assert router.dtype == torch.float32
            return torch_pipeline.layer(
                x, deinterleave(gate_up), down, ids.long(), router.bfloat16()
            )

        return Loaded(layer, lambda: {"kernel": "tile"})

    peer = Peer(
        "mixed",
        "torch",
        ("torch",),
        "",
        load,
        index_dtype=torch.int32,
        score_dtype=torch.float32,
        interleaved=True,
    )
    inputs = inputs_of()
    direct, mixed = run(torch_pipeline.PEER, inputs), run(peer, inputs)
    for name, value in direct.items():
        assert torch.equal(value.float(), mixed[name].float()), name
    assert prepare_peer(peer, inputs).choices() == {"kernel": "tile"}


def test_inputs_stay_as_they_were() -> None:
    inputs = inputs_of()
    before = {name: value.clone() for name, value in vars(inputs).items() if value is not None}
    run(torch_pipeline.PEER, inputs)
    for name, value in before.items():
        assert torch.equal(getattr(inputs, name), value), name
        assert not getattr(inputs, name).requires_grad


@pytest.mark.parametrize("bad", [-1, 4])
def test_routing_that_would_be_read_out_of_bounds_is_refused(bad: int) -> None:
    inputs = inputs_of()
    inputs.topk_experts[3, 1] = bad
    with pytest.raises(InputError, match=r"torch was given expert ids from .* allowed: 0 to 3"):
        prepare_peer(torch_pipeline.PEER, inputs)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="no tokens"):
        prepare_peer(torch_pipeline.PEER, inputs_of(tokens=0))


def test_a_peer_of_one_rank_refuses_several() -> None:
    group: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(InputError, match="liger runs on one rank, 2 were given"):
        prepare_peer(liger.PEER, replace(inputs_of(), group=group))


def test_available_names_every_peer_in_order_and_says_what_to_install() -> None:
    found = available()
    assert [entry.name for entry in found] == ["torch", "huggingface", "liger", "sonicmoe"]
    assert isinstance(found[0], Contender)
    assert found[0].version == torch.__version__
    assert found[0].parallel
    for entry, peer in zip(found, PEERS, strict=True):
        if isinstance(entry, Missing):
            assert peer.install in entry.reason
        else:
            assert entry.devices == peer.devices


def test_a_module_that_is_not_there_is_named() -> None:
    peer = replace(liger.PEER, modules=("torch", "mok_no_such_module"))
    found = adapting.contender_of(peer)
    assert isinstance(found, Missing)
    assert found.reason == (
        "the module mok_no_such_module is not installed; install it: "
        "pip install liger-kernel==0.8.5"
    )


def test_an_old_version_is_refused_and_a_new_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = replace(PEERS[1], modules=("torch",), least=(5,))
    for version, wanted in (("4.57.1", False), ("5.17.0", True), ("", False)):
        monkeypatch.setattr(adapting, "version_of", lambda _name, v=version: v)
        found = adapting.contender_of(peer)
        assert isinstance(found, Contender) == wanted
        assert wanted or "too old, 5 or later is needed" in found.reason  # type: ignore[union-attr]


def test_nothing_of_a_peer_is_imported_by_looking_for_it() -> None:
    code = (
        "import sys\nfrom mok.bench.peers import available\navailable()\n"
        "heavy = {'transformers', 'liger_kernel', 'sonicmoe', 'quack', 'cutlass', 'deep_gemm'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert told.stdout.strip() == "[]"


def test_the_tuning_mode_is_short_unless_full_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    assert tuning.mode() == "short"
    monkeypatch.setenv(tuning.VARIABLE, "full")
    assert tuning.mode() == "full"
    monkeypatch.setenv(tuning.VARIABLE, "quick")
    with pytest.raises(InputError, match="MOK_PEERS_TUNING='quick'; allowed: short"):
        tuning.mode()


def test_shortening_replaces_candidates_and_refuses_to_leave_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(tuning.VARIABLE, raising=False)

    def gather() -> None: ...

    kernel = SimpleNamespace(base_fn=gather, configs=[1, 2, 3], cache={"a": "x", "b": "x"})
    tuning.shorten(kernel, [2])
    assert kernel.configs == [2]
    assert kernel.do_bench is not None
    assert tuning.picked([kernel]) == {"tuning": "short", "gather": "x"}
    with pytest.raises(InputError, match="the short tuning list of gather is empty"):
        tuning.shorten(kernel, [])
    assert kernel.configs == [2]


def test_grouped_gemms_give_what_the_layer_needs() -> None:
    inputs = inputs_of()
    found = {gemm.name: gemm for gemm in torch_pipeline.grouped_gemms(inputs)}
    shapes = {name.split()[-1]: tuple(gemm.run().shape) for name, gemm in found.items()}
    assert shapes == {
        "up": (80, 64),
        "down": (80, 64),
        "dx": (80, 64),
        "d_gate_up": (4, 64, 64),
        "d_down": (4, 64, 32),
    }
    assert sum(gemm.flops for gemm in found.values()) == (6 + 12) * 80 * 64 * 32 - 2 * 80 * 64 * 32


def test_gemm_rows_name_deepgemm_where_it_is_missing() -> None:
    if deepgemm.missing() is None:
        pytest.skip("deepgemm is installed")
    last = grouped_gemms(inputs_of())[-1]
    assert isinstance(last, Missing)
    assert last.name == "deepgemm"


def test_warming_shares_out_every_candidate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    shapes = [SHAPES["small"], SHAPES["kimi-shard"]]
    labels = [label for label, _ in warming.tasks(["deepgemm", "sonicmoe", "liger"], shapes)]
    assert len(labels) == len(set(labels)) == 2 * (1 + 3 + 6)
    assert labels[0] == "deepgemm small"


def test_warming_refuses_a_peer_that_it_does_not_know() -> None:
    told = CliRunner().invoke(warming.main, ["--peers", "torch"])
    assert told.exit_code == 2
    assert "allowed are deepgemm, sonicmoe, liger" in told.output


def test_a_worker_goes_on_after_a_candidate_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ValueError("no such tile")

    done: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    warming._work([("liger a", fail), ("liger b", lambda: done.append("b"))])
    assert done == ["b"]
    assert capsys.readouterr().out == "warming liger a: ValueError: no such tile\n"


@pytest.mark.slow
def test_all_to_all_around_the_torch_pipeline_over_two_ranks(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("peers_worker.py"), 2, tmp_path / "store", [ROOT])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_on_a_gpu_is_inside_the_budget(peer: Peer) -> None:
    found = adapting.contender_of(peer)
    if isinstance(found, Missing):
        pytest.skip(f"{found.name}: {found.reason}")
    inputs = inputs_of(512, 8, 1024, 512, 2, device="cuda")
    ratios = worst(run(peer, inputs), inputs)
    assert max(ratios.values()) < 1, ratios


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_the_graph_of_a_peer_survives_a_backward_that_keeps_it() -> None:
    for peer in (torch_pipeline.PEER, liger.PEER, sonic.PEER):
        if isinstance(adapting.contender_of(peer), Missing):
            continue
        prepared = prepare_peer(peer, inputs_of(512, 8, 1024, 512, 2, device="cuda"))
        out = prepared.forward()
        first, second = prepared.backward(out, True), prepared.backward(out, True)
        for name, value in first.items():
            assert torch.allclose(value, second[name], rtol=0.1, atol=0.1), (peer.name, name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_deepgemm_products_are_those_of_float64() -> None:
    if (missing := deepgemm.missing()) is not None:
        pytest.skip(f"{missing.name}: {missing.reason}")
    inputs = inputs_of(512, 8, 1024, 512, 2, device="cuda")
    order, _, _ = torch_pipeline.sort_routes(inputs.topk_experts, 8)
    x = inputs.x[order // 2]
    h = x[:, :512].contiguous()
    made = deepgemm.products(inputs, x, h)
    ids = inputs.topk_experts.reshape(-1)[order]
    for rows, weights, got in (
        (x, inputs.w_gate_up, made.up()),
        (h, inputs.w_down, made.down_product()),
    ):
        got = got[made.padded.rows].double()
        for expert in range(8):
            wanted = rows[ids == expert].double() @ weights[expert].double().t()
            error = (got[ids == expert] - wanted).norm() / wanted.norm()
            assert float(error) < 2.0**-8, expert


def test_leaves_share_memory_with_the_inputs() -> None:
    inputs = inputs_of()
    assert leaf(inputs.x).data_ptr() == inputs.x.data_ptr()
