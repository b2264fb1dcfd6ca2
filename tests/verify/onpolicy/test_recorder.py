"""What the recorder writes is read back with every bit; so is what its snippet writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verify.errors import InputFileError
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.recorder import SIDES, SNIPPET, Recorder
from verify.onpolicy.samples import ROLLOUT, TRAINER

_SIDES = {"sampler": ROLLOUT, "trainer": TRAINER}


def _snippet() -> Any:
    names: dict[str, Any] = {}
    exec(SNIPPET, names)  # as in the engine of somebody who pasted it
    return names["record_onpolicy"]


@pytest.mark.parametrize("side", SIDES)
def test_everything_is_read_back(tmp_path: Path, side: str) -> None:
    path = tmp_path / "f.jsonl"
    recorder = Recorder(path, side, temperature=0.7, vocab_size=100)
    experts = torch.arange(12, dtype=torch.int64).reshape(3, 2, 2)
    recorder.add(
        "a",
        torch.tensor([9, 2]),
        torch.tensor([-0.1, -2.3], dtype=torch.bfloat16),
        prompt_ids=(1, 5),
        mask=np.array([True, False]),
        experts=experts,
        experts_start=1,
        margins=np.zeros((3, 2)),
        layers=range(2),
        text="\ud800 and \u00e9",
        finish_reason="stop",
    )
    recorder.add(7, [4], [None])
    dump = read_dump(path, ROLLOUT)
    assert (dump.format, dump.problems, dict(dump.config)) == (
        "plain",
        (),
        {"temperature": 0.7, "vocab_size": 100},
    )
    first, second = dump.samples
    series = first.series[_SIDES[side]]
    assert series.stored == "bfloat16"
    assert torch.tensor(series.values).to(torch.bfloat16).tolist() == series.values.tolist()
    assert first.mask is not None
    assert first.mask.tolist() == [True, False]
    routing = first.routing[_SIDES[side]]
    assert np.array_equal(routing.experts, experts.numpy())
    assert (routing.start, routing.layers) == (1, (0, 1))
    assert routing.margins is not None
    assert (first.text, dict(first.meta)) == ("\ud800 and \u00e9", {"finish_reason": "stop"})
    assert (second.key, second.series[_SIDES[side]].absent.tolist()) == ("7", [True])


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_values_keep_every_bit(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    path = tmp_path_factory.mktemp("recorder") / "f.jsonl"
    written = np.array(values, dtype=np.float32)
    Recorder(path, "sampler").add("a", range(len(values)), written)
    _snippet()(path, "sampler", "b", list(range(len(values))), written, temperature=1.0)
    for sample in read_dump(path, TRAINER).samples:
        series = sample.series[ROLLOUT]
        assert series.stored == "float32"
        read = series.values.astype(np.float32)
        assert np.array_equal(np.isnan(read), np.isnan(written))
        kept = ~np.isnan(written)
        assert (read.view(np.uint32)[kept] == written.view(np.uint32)[kept]).all()


def test_the_snippet_is_ten_lines_that_need_nothing_of_ours(tmp_path: Path) -> None:
    assert SNIPPET.count("\n") == 10
    assert "verify" not in SNIPPET
    path = tmp_path / "f.jsonl"
    record = _snippet()
    tensor = torch.tensor([-0.5, -1.5], dtype=torch.float16)
    record(path, "trainer", 7, torch.tensor([4, 5]), tensor, prompt_ids=[1], mask=[1, 0], step=3)
    dump = read_dump(path, ROLLOUT)
    assert dump.problems == ()
    (sample,) = dump.samples
    assert sample.series[TRAINER].stored == "float16"
    assert (sample.key, dict(sample.meta)) == ("7", {"step": 3})
    assert sample.mask is not None
    assert sample.mask.tolist() == [True, False]


def test_a_misspelt_setting_of_the_snippet_is_noted_once(tmp_path: Path) -> None:
    """The snippet cannot check names, and a setting that nobody reads would say nothing."""
    path = tmp_path / "f.jsonl"
    for at in range(3):
        _snippet()(path, "sampler", at, [4], [-1.0], temperture=0.7, zzz=1, policy_version=3)
    dump = read_dump(path, ROLLOUT)
    assert [(one.kind, one.field) for one in dump.problems] == [
        ("note", "meta.temperture"),
        ("note", "meta.zzz"),
    ]
    assert "did you mean temperature?" in dump.problems[0].what
    assert "samples.META" in dump.problems[1].what
    path.write_text('{"onpolicy": 1, "config": {"topp": 0.9}}\n' + path.read_text())
    assert read_dump(path, ROLLOUT).problems[0].field == "config.topp"


def test_several_recorders_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    for number in range(3):
        Recorder(path, "sampler").add(number, [1], [-1.0])
    assert [sample.key for sample in read_dump(path, TRAINER).samples] == ["0", "1", "2"]


def test_what_it_refuses(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    with pytest.raises(ValueError, match="side is 'rollout'; allowed are sampler and trainer"):
        Recorder(path, "rollout")
    with pytest.raises(ValueError, match="no setting is called 'temprature'; known are"):
        Recorder(path, "sampler", temprature=1.0)
    recorder = Recorder(path, "sampler")
    with pytest.raises(ValueError, match="no setting is called"):
        recorder.add(1, [1], [-1.0], colour="red")
    for experts in ([1, 2], np.zeros((1, 1, 1)), [[[2**31]]], [[[-2]]]):
        with pytest.raises(ValueError, match="experts are"):
            recorder.add(1, [1], [-1.0], experts=experts)
    for ids, values, mask in (
        ([1, 2], [-1.0, -2.0, -3.0], None),
        (torch.tensor([1, 2]), torch.zeros(2, 3)[:1], None),
        ([1], [-1.0], [1, 0]),
    ):
        with pytest.raises(ValueError, match=r"has . tokens and (logprobs|mask) . entries"):
            recorder.add(1, ids, values, mask=mask)
    with pytest.raises(ValueError, match="response_ids and logprobs are lists, arrays or tensors"):
        recorder.add(1, [1], -1.0)
    assert not path.exists()
    with pytest.raises(InputFileError, match="cannot be written: No such file"):
        Recorder(tmp_path / "gone" / "f", "sampler", step=1)
