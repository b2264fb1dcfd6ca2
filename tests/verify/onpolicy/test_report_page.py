"""The page of `verify onpolicy --html`: what it says, that it is harmless, that it stays small."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from html_pages import harmless
from onpolicy_analyses import analysed, drift, faulty, hostile, large, odd, routed
from onpolicy_records import sample

from verify import rendering
from verify.onpolicy import report_page
from verify.onpolicy.figures import FIGURES
from verify.onpolicy.metrics import METRICS

TEMPLATES = Path(rendering.__file__).parent / "templates"


def in_order(text, *parts):
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_verdict_and_first_cause_come_first_then_numbers_tokens_and_places():
    page = harmless(report_page.render(faulty("temperature")))
    in_order(
        page.text,
        "MISMATCH 600 of 600 tokens differ in 12 samples",
        "structural-cause temperature: ",
        "to do divide by the sampling temperature",
        "exit code 1, mismatch trainer trainer.jsonl (plain) rollout rollout.jsonl (plain)",
        "First cause claimed temperature carries ",
        "one side divided its logits by another temperature",
        " for ",
        "Numbers d = trainer - rollout",
        "tokens compared 600",
        "first sample s0 position 0 token ",
        "all figures, with their formulas",
        "Token by token",
        "among the worst: 50 tokens, 50 differ",
        "Where the mismatch lies",
        "Both log-probabilities 600 tokens",
        "By position in the response",
        "By sample",
        "samples with the largest sums of |d|",
        "How large the differences are",
        "The field's metrics",
        "All samples were aligned, and all records were read.",
    )
    assert all(name in page.text for name in (*FIGURES, *METRICS))


def test_a_strip_can_be_walked_with_the_arrow_keys():
    text = report_page.render(faulty("temperature"))
    page = harmless(text)
    # One group, and so one stop of the tab key, for each sample; the first may be among the worst.
    assert len(page.radios) == text.count("<fieldset") in (5, 6)
    for tokens in page.radios.values():
        assert len(tokens) == 50
        assert sum(tokens) == 1
    assert re.search(r"position 49, token \d+: trainer -[\d.]+, rollout -[\d.]+, d -?\d", page.text)
    assert "past the tokens" in page.text


def test_pages_of_other_verdicts():
    page = harmless(report_page.render(faulty("")))
    assert "VERIFIED 0 of 600 tokens differ" in page.text
    assert "No cause is claimed." in page.text
    assert "the first sample: 50 tokens, 0 differ" in page.text
    assert "First cause" not in page.text
    page = harmless(report_page.render(analysed(*drift(), gates=["abs_max>9", "k3>1"])))
    in_order(page.text, "bound value state", "abs_max>9", "holds", "k3>1")
    page = harmless(report_page.render(analysed()))
    assert "UNVERIFIED 0 of 0 tokens differ" in page.text
    assert "Nothing was compared, so no cause is claimed." in page.text
    assert "nothing can be drawn" in page.text
    assert page.radios == {}


def test_what_is_odd_is_told_token_by_token():
    text = report_page.render(analysed(*odd()))
    page = harmless(text)
    assert "position 1, token 6: trainer nan, rollout -0.25, d nan" in page.text
    assert "position 3, token 8: trainer none, rollout -0.75" in page.text
    assert re.search(r'<label class="n"><input type="radio" name="t0" checked>', text)
    assert '<label class="x">' in text
    text = report_page.render(analysed(*drift(1)))
    assert re.search(r'<label class="[ud]\d m">.*, masked</span>', text)
    assert "response 0" in harmless(text).text


def test_routing_has_its_layers_margins_and_flips():
    page = harmless(report_page.render(analysed(routed([2, 4]))))
    in_order(page.text, "By layer", "tokens with a flip carry 100 %", "layers and margins")
    assert "1 6 2 33.3 % 0.8333 0.001 0.5" in page.text
    assert "d 0.25, other experts in 1 layer" in page.text
    assert "the same experts" in page.text


def test_samples_are_grouped_by_what_is_recorded():
    page = harmless(report_page.render(analysed(*drift(6))))
    assert "By rank rank samples tokens differ" in page.text
    assert "By step" not in page.text


def test_misalignments_problems_and_notes_are_listed_and_counted():
    samples = [sample(str(at), [1, 2], trainer=[-1.0], rollout=[-1.0, -2.0]) for at in range(60)]
    page = harmless(report_page.render(analysed(*samples, *drift(1), problems=70)))
    assert "misalignments: 60" in page.text
    assert "problems of the files: 70" in page.text
    assert "10 more are only counted here" in page.text
    assert "20 more are only counted here" in page.text
    found = analysed(*drift(1))
    noted = replace(found, pairs=replace(found.pairs, notes=("a note",)))
    assert harmless(report_page.render(noted)).text.count("a note") == 1


def test_what_the_model_says_is_shown_as_text():
    page = harmless(report_page.render(analysed(*drift(1)), "condition  |d|\n<b>alone</b>\x1b 0"))
    in_order(page.text, "The model on this machine", "condition |d| <b>alone</b>\\x1b 0")


def test_the_same_analysis_gives_the_same_bytes():
    found = faulty("temperature")
    assert report_page.render(found) == report_page.render(found)


def test_hostile_texts_are_text():
    text = report_page.render(hostile())
    page = harmless(text)
    assert "alert(1)" in page.text
    assert "By rollout version" in page.text
    assert "##\\x5b" in page.text


def test_many_tokens_give_a_small_page_that_says_what_it_folded():
    text = report_page.render(large(130, 105))
    assert len(text.encode()) < 700_000
    page = harmless(text)
    assert "13,650 tokens with two finite values" in page.text
    assert "Folded: tokens are counted in squares; the 120 with the largest |d|" in page.text
    assert "Folded: a column is up to 2 samples." in page.text
    assert "Folded: a column is up to 2 positions." in page.text
    assert "115 more are only counted here" in page.text
    long = harmless(report_page.render(large(1, 2000)))
    assert "1,680 are folded" in long.text
    assert re.search(r"\d+ to 1,999: [\d,]+ differ, \|d\| to 0\.0\d", long.text)


def test_a_page_that_would_be_too_large_shows_fewer_tokens(monkeypatch):
    found = large(6, 400)
    whole = report_page.render(found)
    monkeypatch.setattr(report_page, "LIMIT", 300_000)
    less = report_page.render(found)
    assert len(less.encode()) <= 300_000 < len(whole.encode())
    assert 0 < less.count("<label") < whole.count("<label")
    harmless(less)


def test_texts_as_long_as_they_can_be_keep_the_page_below_its_limit():
    long = '"&<' * 4000
    samples = [
        sample(f"{at}{long}", [1, 2], trainer=[-1.0], rollout=[-1.0, -2.0], place=long)
        for at in range(120)
    ]
    tokens = [-1.0 - at / 100 for at in range(320)]
    rest = [
        sample(
            f"s{at}{long}",
            range(320),
            trainer=[one - 0.1 * at for one in tokens],
            rollout=tokens,
            text=long,
            place=long,
            finish_reason=f"{at}{long}",
            rank=at,
        )
        for at in range(20)
    ]
    text = report_page.render(analysed(*samples, *rest, problems=100))
    assert len(text.encode()) <= report_page.LIMIT == 2_000_000
    harmless(text)


def colours(scheme):
    style = (TEMPLATES / "style.jinja").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    return dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", block))


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["bad-solid", "link", "open-solid", "muted", "ink"])
def test_what_cells_and_lines_are_drawn_with_can_be_told_from_their_ground(scheme, name):
    held = colours(scheme)
    for ground in ("surface", "soft"):
        light, dark = sorted((luminance(held[name]), luminance(held[ground])), reverse=True)
        least = 2.6 if (name, ground) == ("open-solid", "soft") else 3.0  # fills its whole cell
        assert (light + 0.05) / (dark + 0.05) >= least  # WCAG 2.2, 1.4.11
