"""The terminal report: every claim has a verdict line, every finding a card, the end a total."""

from __future__ import annotations

import re

import pytest

from verify.errors import VerifyError
from verify.rendering import phrases, render, text
from verify.rendering.escaping import printable
from verify.verdicts import CaseVerdict, Finding


def test_all_clear_is_said(make_result, make_claim):
    claims = [make_claim(name, ranks=4) for name in ("repeat", "rank")]
    document = make_result([CaseVerdict("moe", "moe", claims)], ranks=4)
    shown = render(document, "text")
    assert shown.endswith("verdict=VERIFIED 1 case, 2 claims, 4 ranks, 4 executions\n")
    assert (
        "0 of 5 runs on each of 4 ranks differed; "
        "a fault rarer than 45.1 % per run is not excluded" in shown
    )


def test_every_claim_has_one_line_with_its_verdict(mixed):
    lines = render(mixed, "text").splitlines()
    table = [line for line in lines if re.match(r"  (repeat|rank|process) +verdict=", line)]
    assert [re.search(r"verdict=(\w+)", line).group(1) for line in table] == [
        "VERIFIED",
        "MISMATCH",
        "UNVERIFIED",
        "VERIFIED",
    ]
    assert not re.search(r"(?<!verdict=)\b(UN)?VERIFIED", render(mixed, "text"))


def test_ranks_that_gave_no_evidence_show(mixed):
    shown = render(mixed, "text")
    assert re.search(r"rank +verdict=UNVERIFIED \(missing-rank\) .* 0-2 of 4\n", shown)
    assert re.search(r"process .* no executions +none of 4\n", shown)


def test_a_finding_is_a_card_that_ends_with_the_command(mixed):
    card = text.findings(mixed["cases"][1], mixed["cases"][1]["claims"][:1])
    assert card[0].startswith("verdict=MISMATCH bad / repeat: bits-differ: ")
    assert card[1] == "  where: tensor out, rank 0, run 3, process 0, variant restored"
    body = "\n".join(card)
    assert "first: out[2] 1.0 (0x3f800000) vs 2.0" in body
    assert "suggests: one element: a race" in body
    assert "to do: read the first difference" in body
    assert card[-1] == "  reproduce: verify run f.py::bad --claims repeat --ranks 4"


def test_a_rate_and_the_ranks_that_differ_are_given(mixed):
    shown = phrases.evidence(mixed["cases"][1]["claims"][0])
    assert shown == (
        "2 of 5 runs differed (rank 0: 2/5, rank 1: 0/5, rank 2: 0/5, rank 3: 0/5); "
        "rate 40 % (5 % to 85 % at 95 %)"
    )


def test_many_findings_are_counted_not_listed(make_result, make_claim):
    findings = [Finding("bits-differ", f"number {i}") for i in range(9)]
    document = make_result([CaseVerdict("c", "c", [make_claim("repeat", findings, differing=1)])])
    shown = render(document, "text")
    assert "number 5" in shown
    assert "number 6" not in shown
    assert "and 3 findings more of c in the result document" in shown


def test_nothing_run_is_not_silent(make_result):
    shown = render(make_result([]), "text")
    assert shown == "verdict=UNVERIFIED 0 cases, 0 claims, 1 rank, 0 executions; " + (
        "nothing was checked\n"
    )
    assert "verdict=UNVERIFIED no claim was checked" in render(
        make_result([CaseVerdict("c", "c", [])]), "text"
    )


def test_failed_controls_are_named(make_result):
    document = make_result(controls={"status": "failed", "passed": 3, "failed": ["memory/nan"]})
    assert render(document, "text").endswith("; controls failed: memory/nan\n")
    assert document["exit_code"] == 3


def test_timings_only_when_asked(mixed):
    asked = render(mixed, "text", timings=True)
    assert "case 8.000 s, digests and bookkeeping 0.400 s (5 % of the case)" in asked
    assert "timings" not in render(mixed, "text")


def test_hostile_names_stay_inside_their_line(nasty):
    shown = render(nasty, "text")
    shown.encode("utf-8")
    assert "\x1b" not in shown
    assert "##[" not in shown
    assert not any(line.lstrip().startswith("::") for line in shown.splitlines())
    assert all(character.isprintable() for line in shown.splitlines() for character in line)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("plain", "plain"),
        ("a\nb\t", "a\\nb\\t"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\ud800", "\\ud800"),
        ("\u202eabc", "\\u202eabc"),
        ("##[error]x", "##\\x5berror]x"),
        ("caf\u00e9", "caf\u00e9"),
    ],
)
def test_printable(given, expected):
    assert printable(given) == expected


def test_long_details_are_capped(make_result, make_claim):
    finding = Finding("case-error", "\n".join(f"line {i}" for i in range(1000)))
    document = make_result([CaseVerdict("c", "c", [make_claim("repeat", [finding])])])
    shown = render(document, "text")
    assert "... 960 more lines in the result document" in shown


def test_measurements_and_left_out_tensors_are_printed(make_result, make_claim):
    claim = make_claim(
        "reference",
        measurements={
            "out": {"worst_ratio": 0.5678, "numel": 1000, "rounded_elsewhere": 1, "forbidden": 0},
            "dx": {"worst_ratio": 0.25, "relative_l2": 1e-3, "plain_relative_l2": 2e-3},
        },
        not_compared={"aux": "no reference", "aux2": "no reference"},
    )
    shown = render(make_result([CaseVerdict("c", "c", [claim])]), "text")
    assert "reference: worst error / budget 0.5678 (out); 0.1 % of elements" in shown
    assert "plain low-precision run 0.50 to 0.50 over 1 tensor" in shown
    assert "reference did not compare aux, aux2: no reference" in shown


def test_unknown_format_is_refused(mixed):
    with pytest.raises(VerifyError, match="allowed are text, markdown, html, junit, json"):
        render(mixed, "html5")


def test_what_to_do_about_a_golden_is_a_whole_command(make_result, make_claim):
    finding = Finding("golden-differs", "out has other bits than its golden", tensor="out")
    case = CaseVerdict("layer", "a b.py::layer", [make_claim("golden", [finding], differing=1)])
    shown = text.render(make_result([case], options={"golden": "kept here"}))
    command = "verify golden update 'a b.py::layer' --golden 'kept here' --reason TEXT"
    assert f"say why: {command}\n" in shown
    assert "--golden" not in text.render(make_result([case])).split("to do:")[1].splitlines()[0]
    differs = Finding("bits-differ", "out has other bits", tensor="out")
    other = CaseVerdict("layer", "layer", [make_claim("repeat", [differs], differing=1)])
    assert "golden update" not in text.render(make_result([other]))


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [
        (1, "try", "1 try"),
        (3, "try", "3 tries"),
        (2, "replay", "2 replays"),
        (0, "case", "0 cases"),
    ],
)
def test_a_number_of_things(count, noun, said):
    assert phrases.number(count, noun) == said
