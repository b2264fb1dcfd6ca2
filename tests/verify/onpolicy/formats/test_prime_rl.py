"""prime-rl: files that its own code wrote, and lines with something wrong.

tests/data/onpolicy/prime_rl.jsonl is `msgspec.json.encode` (msgspec 0.23.0) of TrainingSample as of
commit 559b4477; prime_traces.jsonl is what its file monitor writes of an Episode of verifiers
0.4.0: `orjson.dumps(episode.to_record())`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onpolicy_files import EXPERTS, PRIME_RL, PRIME_TRACE, write

from verify.errors import InputFileError
from verify.onpolicy.formats import prime_traces
from verify.onpolicy.formats.prime_rl import read
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Sample

_DATA = Path(__file__).parents[3] / "data" / "onpolicy"


def _told(dump: Dump) -> list[str]:
    return [f"{problem.field} {problem.what}" for problem in dump.problems]


def _tokens(sample: Sample) -> tuple[list[int], list[int], list[bool]]:
    assert sample.prompt is not None
    assert sample.tokens is not None
    assert sample.mask is not None
    return sample.prompt.tolist(), sample.tokens.tolist(), sample.mask.tolist()


def test_samples_of_the_producers_own_code() -> None:
    dump = read(_DATA / "prime_rl.jsonl", TRAINER)
    assert dump.problems == ()
    first, second = dump.samples
    assert _tokens(first) == ([5, 6], [7, 8, 2], [True] * 3)
    assert first.series[ROLLOUT].values.tolist() == [-0.25, -1.5, -0.125]
    assert first.meta == {"temperature": 0.7}
    assert first.routing[ROLLOUT].experts.ravel().tolist() == list(range(20))
    assert first.routing[ROLLOUT].start == 0
    assert _tokens(second) == ([5], [9], [True])
    assert list(second.series) == [ROLLOUT]
    assert [sample.key for sample in dump.samples] == ["0", "1"]


def test_traces_of_the_producers_own_code() -> None:
    dump = read(_DATA / "prime_traces.jsonl", TRAINER)
    assert (dump.problems, dump.notes) == ((), ())
    by_key = {sample.key: sample for sample in dump.samples}
    assert set(by_key) == {"trace-a:0", "trace-a:1"}
    long, short = by_key["trace-a:0"], by_key["trace-a:1"]
    mask = [True, True, False, False, True]
    assert _tokens(long) == ([5, 6, 7], [8, 9, 10, 7, 3], mask)
    assert long.series[ROLLOUT].absent.tolist() == [not counted for counted in mask]
    assert long.series[ROLLOUT].values[[0, 1, 4]].tolist() == [-0.25, -1.5, -0.125]
    assert _tokens(short) == ([5, 6, 7], [4], [True])
    assert long.meta == {"finish_reason": "agent_completed"}


def test_a_sample_as_an_object(tmp_path: Path) -> None:
    folder = tmp_path / "step_12"
    folder.mkdir()
    dump = read(write(folder / "f", [PRIME_RL]), TRAINER)
    assert dump.problems == ()
    (sample,) = dump.samples
    assert _tokens(sample) == ([1, 5, 6], [9, 8, 2], [True] * 3)
    assert np.array_equal(sample.routing[ROLLOUT].experts, EXPERTS)
    assert (sample.key, dict(sample.meta)) == ("12:0", {"step": 12, "temperature": 0.7})


def test_a_sample_of_an_older_version(tmp_path: Path) -> None:
    record = {
        "prompt_ids": [1, 5],
        "prompt_mask": [False, False],
        "completion_ids": [9, 2],
        "completion_mask": [True, True],
        "completion_logprobs": [-0.5, -0.25],
        "completion_temperatures": [1.0, 0.5],
    }
    dump = read(write(tmp_path / "f", [record]), TRAINER)
    (sample,) = dump.samples
    assert _tokens(sample) == ([1, 5], [9, 2], [True, True])
    assert sample.series[ROLLOUT].values.tolist() == [-0.5, -0.25]
    assert _told(dump) == [
        "completion_temperatures 2 temperatures in one sample; none is taken for it"
    ]


@pytest.mark.parametrize(
    ("changed", "field", "why"),
    [
        ({"mask": [True]}, "mask", "1 entries for 6 tokens"),
        ({"mask": "x"}, "mask", "is 'x'"),
        ({"logprobs": [-1.0]}, "logprobs", "1 entries for 6 tokens"),
        ({"temperatures": 5}, "temperatures", "is 5"),
        ({"routed_experts": ["AAAA", [1], "uint8"]}, "routed_experts", "holds 3 bytes"),
        ({"routed_experts": 5}, "routed_experts", "is 5"),
    ],
)
def test_a_bad_field_is_named_and_the_rest_is_read(
    tmp_path: Path, changed: dict[str, Any], field: str, why: str
) -> None:
    dump = read(write(tmp_path / "f", [{**PRIME_RL, **changed}]), TRAINER)
    told = _told(dump)[0]
    assert told.startswith(f"{field} ")
    assert why in told
    assert dump.samples[0].tokens is not None


def test_records_that_are_no_samples(tmp_path: Path) -> None:
    bad = [{**PRIME_RL, "token_ids": ["a"]}, [[1], [True]]]
    dump = read(write(tmp_path / "f", [*bad, PRIME_RL]), TRAINER)
    assert [problem.kind for problem in dump.problems] == ["bad-value", "unreadable", "unreadable"]
    assert len(dump.samples) == 1


@pytest.mark.parametrize(
    ("node", "field", "why"),
    [
        ({"parent": 5}, "nodes[3].parent", "is 5; it is an earlier node"),
        ({"parent": 3}, "nodes[3].parent", "is 3; it is an earlier node"),
        ({"parent": True}, "nodes[3].parent", "is true"),
        ({"mask": []}, "nodes[3].mask", "have one length"),
        ({"token_ids": ["a"]}, "nodes[3].token_ids", "entry 0 is 'a'"),
        ({"logprobs": [-1.0, -2.0]}, "nodes[3].logprobs", "2 entries for 1 sampled"),
    ],
)
def test_bad_nodes(tmp_path: Path, node: dict[str, Any], field: str, why: str) -> None:
    trace = json.loads(json.dumps(PRIME_TRACE))
    trace["nodes"][3] |= node
    dump = read(write(tmp_path / "f", [PRIME_TRACE, trace]), TRAINER)
    told = _told(dump)[0]
    assert told.startswith(f"{field} ")
    assert why in told
    assert [sample.key for sample in dump.samples][:2] == ["t1:0", "t1:1"]


def test_paths_that_share_a_long_beginning_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime_traces, "MOST_TOKENS", 12)  # the paths have 5 tokens in 3, 3 in 2
    with pytest.raises(InputFileError, match="more than 12 tokens together"):
        read(write(tmp_path / "f", [PRIME_TRACE]), TRAINER)
    monkeypatch.setattr(prime_traces, "MOST_TOKENS", 13)
    assert len(read(write(tmp_path / "f", [PRIME_TRACE]), TRAINER).samples) == 2
    monkeypatch.setattr(prime_traces, "MOST_NODES", 3)
    with pytest.raises(InputFileError, match="has 4 messages, at most 3 are read"):
        read(write(tmp_path / "f", [PRIME_TRACE]), TRAINER)
