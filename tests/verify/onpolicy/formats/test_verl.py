"""verl's dump, written by hand from what its trainer writes: text only, and it is said."""

from __future__ import annotations

from pathlib import Path

from onpolicy_files import VERL, write

from verify.onpolicy.formats.verl import MISSING, read
from verify.onpolicy.samples import ROLLOUT, TRAINER


def test_text_and_what_is_missing(tmp_path: Path) -> None:
    dump = read(write(tmp_path / "4.jsonl", [VERL, {**VERL, "request_id": "r"}]), TRAINER)
    assert dump.problems == ()
    assert dump.notes == (MISSING,)
    assert "verify.onpolicy.recorder" in MISSING
    assert [sample.key for sample in dump.samples] == ["4:0", "r"]
    for sample in dump.samples:
        assert (sample.text, dict(sample.meta)) == ("2", {"step": 4})
        assert (sample.tokens, sample.mask, dict(sample.series)) == (None, None, {})


def test_tensors_that_a_reward_function_passed_on(tmp_path: Path) -> None:
    record = {
        **VERL,
        "uid": "u",
        "prompts": [1, 5],
        "responses": [9, 2],
        "response_mask": [1, 1],
        "rollout_log_probs": [-0.25, -0.5],
        "old_log_probs": [-0.25, -1.5],
        "meta": {"temperature": 1.0},
    }
    dump = read(write(tmp_path / "4.jsonl", [record]), TRAINER)
    (sample,) = dump.samples
    assert (dump.problems, dump.notes) == ((), ())
    assert sample.tokens is not None
    assert sample.mask is not None
    assert sample.tokens.tolist() == [9, 2]
    assert sample.mask.all()
    assert sample.series[ROLLOUT].values.tolist() == [-0.25, -0.5]
    assert sample.series[TRAINER].values.tolist() == [-0.25, -1.5]
    assert (sample.key, dict(sample.meta)) == ("u", {"temperature": 1.0, "step": 4})


def test_bad_fields(tmp_path: Path) -> None:
    bad = {**VERL, "step": "four", "output": ["2"]}
    dump = read(write(tmp_path / "4.jsonl", [bad, {"input": "no output"}]), TRAINER)
    assert [(problem.field, problem.kind) for problem in dump.problems] == [
        ("step", "bad-value"),
        ("text", "bad-value"),
        ("", "unreadable"),
    ]
