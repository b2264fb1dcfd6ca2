"""The report of `verify onpolicy` in a terminal: what it says, in which order, harmlessly."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from onpolicy_analyses import INF, NAN, analysed, drift, faulty, hostile, odd, routed
from onpolicy_records import sample

from verify.onpolicy import report_page, report_text
from verify.onpolicy.formats.table import FORMATS
from verify.onpolicy.metrics import METRICS
from verify.onpolicy.verdicts import ONPOLICY_REASONS

WORDS = re.compile(
    r"(verdict=|trainer: |rollout: |both sides: |cause \d|  for: |  against: |  to do: |tokens: |"
    r"first: |largest: |d: |KL: |not finite: |gate: |misaligned: |not read: |note: |routing|"
    rf"and \d|all compared tokens|({'|'.join(ONPOLICY_REASONS)})( \(|: ))"
)


def lines(found, **more):
    return report_text.text(found, **more).split("\n")


def test_the_verdict_comes_first_then_causes_then_numbers():
    said = lines(faulty("temperature"))
    assert said[0].startswith("verdict=MISMATCH 600 of 600 tokens differ in 12 samples (")
    assert said[0].endswith("first cause: temperature")
    assert said[1:3] == ["trainer: trainer.jsonl (plain)", "rollout: rollout.jsonl (plain)"]
    starts = ["structural-cause: temperature: ", "cause 1: temperature, carries ", "tokens: 600, "]
    places = [next(at for at, line in enumerate(said) if line.startswith(one)) for one in starts]
    assert places == sorted(places)
    cause = said[places[1] :]
    assert "one side divided its logits by another temperature" in cause[0]
    assert cause[1].startswith("  for: ")
    assert any(line.startswith("  to do: divide by the sampling temperature") for line in cause)
    assert sum(line.startswith("  to do: divide by the sampling") for line in said) == 1
    assert any(line.startswith("first: sample s0 position 0 token ") for line in said)


def test_where_nothing_is_claimed_the_first_line_says_so():
    rng = np.random.default_rng(4)
    given = [-rng.exponential(2.0, 60) - 1.0 for _ in range(8)]
    made = [
        sample(f"s{at}", range(60), trainer=one + rng.normal(0, 0.05, 60), rollout=one)
        for at, one in enumerate(given)
    ]
    said = lines(analysed(*made))
    assert said[0].endswith("; the cause cannot be told from these files (cannot-tell)")
    causes = [line for line in said if line.startswith("cause ")]
    assert causes[0].startswith("cause 1: cannot-tell: there is a mismatch")
    assert not any("carries" in line for line in causes)
    page = report_page.render(analysed(*made))
    page = page[page.index("First cause") :]
    assert page.index("cannot-tell") < page.index("numeric-drift") < page.index("Numbers")


def test_a_finding_of_a_cause_that_is_not_shown_says_itself_what_to_do():
    found = faulty("temperature")
    text = lines(replace(found, causes=()))
    at = next(n for n, line in enumerate(text) if line.startswith("structural-cause"))
    assert text[at + 1].startswith("  to do: divide by the sampling temperature")


def test_equal_values_are_said_to_be_equal():
    said = lines(faulty(""))
    assert said[0] == "verdict=VERIFIED 0 of 600 tokens differ in 12 samples"
    assert said[-1] == "all compared tokens have the same log-probability on both sides"
    assert not any(line.startswith(("cause", "first", "largest")) for line in said)


def test_bounds_are_told_with_what_they_measured():
    said = lines(analysed(*drift(), gates=["differing_tokens>0", "abs_max>9", "k3>1"]))
    assert "gate: differing_tokens>0: 21, fired" in said
    assert any(re.fullmatch(r"gate: abs_max>9: 0\.0\d+, holds", line) for line in said)
    assert "bound-exceeded: differing_tokens>0: 21" in said
    said = lines(analysed(gates=["abs_max>9"]))
    assert "gate: abs_max>9: -, not measured" in said
    assert said[0].startswith("verdict=UNVERIFIED 0 of 0 tokens differ in 0 samples (")


def test_values_that_are_not_finite_are_counted():
    said = lines(analysed(*odd()))
    assert any(
        line.startswith("non-finite (trainer): 2 of the trainer, first odd") for line in said
    )
    assert "not finite: 1 nan of the trainer, 1 inf of the trainer, 1 inf of the rollout" in said


def test_routing_is_told_by_layer():
    said = lines(analysed(routed([2, 4])))
    start = "routing: 2 of 6 tokens chose other experts in at least one of 3 layers"
    assert any(line.startswith(start) for line in said)
    row = next(line for line in said if re.match(r"  +1 +2 of 6 ", line))
    assert row.split()[-2:] == ["0.001", "0.5"]


def test_metrics_are_printed_when_asked_for():
    found = analysed(*drift())
    assert not any("token_mult_prob_error" in line for line in lines(found))
    said = "\n".join(lines(found, metrics=True))
    assert all(name in said for name in METRICS)
    assert re.search(r"AReaL +compute_logp/r3/n_valid_tokens +21 +tokens compared", said)


def test_what_does_not_fit_is_counted():
    samples = [sample(str(at), [1, 2], trainer=[-1.0], rollout=[-1.0, -2.0]) for at in range(9)]
    said = lines(analysed(*samples, problems=8))
    assert "misaligned: 4 more" in said
    assert "not read: 3 more" in said


def test_hostile_texts_do_nothing():
    text = report_text.text(hostile())
    assert "alert(1)" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "##[" not in text
    assert [line for line in text.split("\n") if not WORDS.match(line)] == []
    assert max(map(len, text.split("\n"))) < 1200


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "-"),
        (0, "0"),
        (1234567, "1,234,567"),
        (1000000.0, "1,000,000"),
        (0.0, "0"),
        (0.00012345, "0.0001234"),
        (1e300, "1e+300"),
        (NAN, "nan"),
        (-INF, "-inf"),
    ],
)
def test_how_values_are_written(given, said):
    assert report_text.value(given) == said


def test_the_matrix_of_formats_names_all_of_them():
    said = report_text.formats_text().split("\n")
    assert said[0].split() == ["format", "what", "can", "be", "read", "of", "it"]
    assert [line.split()[0] for line in said[2:]] == [form.name for form in FORMATS]
    assert all(len(line.split()) > 1 for line in said[2:])
