"""The page of `verify trace diff --html`: what it says, that it is harmless, how it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from html_pages import Page
from trace_toy import header, record_toy, write_step

from verify import rendering
from verify.cli import main
from verify.tracing import timeline_page
from verify.tracing.definitions import KINDS
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter, file_name
from verify.tracing.timeline import Row, timeline
from verify.tracing.timeline_events import ShownEvent, State, StepEvents
from verify.tracing.timeline_lanes import Lane
from verify.tracing.timeline_sides import read_pairs

NASTY = "\"><script>alert(1)</script><b onclick='x'>&\x1b[2J\u202e\n##[group]::error::"
TEMPLATES = Path(rendering.__file__).parent / "templates"


def invoke(*words):
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="verify")


def page_of(a, b, steps=(None, None)):
    found = diff(a, b, steps)
    return timeline_page.render(found, timeline(found, read_pairs(a, b, found)))


@pytest.fixture
def runs(tmp_path):
    record_toy(tmp_path / "a")
    record_toy(tmp_path / "same")
    record_toy(tmp_path / "b", [(1, "forward", "blocks.0.mlp")])
    record_toy(tmp_path / "cut", close=False, steps=2)
    return tmp_path


def test_verdict_and_culprit_come_first_then_the_picture_then_tables(runs):
    text = page_of(runs / "a", runs / "b")
    page = Page(text)
    order = [
        "MISMATCH 117 of 210 digests differ over 3 steps of 1 rank, first at step 1",
        "culprit rank 0, step 1, forward: module blocks.0.mlp (MLP) has equal inputs",
        "last equal before it probe blocks.0.mlp.hidden",
        "Ranks over steps",
        "rank 0: equal from start to step 0; culprit at step 1; differs at step 2",
        "Modules of rank 0 In the order",
        "Step 1 of rank 0, event by event",
        "65 events in the order of execution: 1 culprit, 54 inherits, 10 equal",
        "Around the first to look at",
        "inherits: 54 events",
        "Tables Ranks",
        "Inherits: 116 events of all steps and ranks",
        "96 more are only counted here",
    ]
    places = [page.text.index(one) for one in order]
    assert places == sorted(places)
    found = diff(runs / "a", runs / "b")
    assert text.count(found.culprit.place.a) >= 3  # card, strip and table
    assert text.count(found.culprit.place.b) >= 3
    assert text.endswith("</html>\n")


def test_every_event_of_the_strip_leads_to_its_row(runs):
    page = Page(page_of(runs / "a", runs / "b"))
    assert len(page.ids) == len(set(page.ids))
    assert [link for link in page.links if link.startswith("#e") and link != "#events"] == [
        f"#e{at}" for at in range(65)
    ]
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_the_page_is_the_same_again_and_needs_nothing(runs):
    text = page_of(runs / "a", runs / "b")
    assert text == page_of(runs / "a", runs / "b")
    page = Page(text)
    assert set(page.tags).isdisjoint({"script", "link", "img", "iframe", "object", "form", "input"})
    assert "src" not in page.names
    assert not [name for name in page.names if name.startswith("on")]
    assert all(link.startswith("#") for link in page.links)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(|@import", text)


def test_pages_of_other_verdicts(runs):
    page = Page(page_of(runs / "a", runs / "same"))
    assert "VERIFIED 0 of 210 digests differ" in page.text
    assert "event by event" not in page.text
    assert "culprit" not in page.text
    page = Page(page_of(runs / "a", runs / "cut"))
    assert "UNVERIFIED" in page.text
    assert "unverified B, rank 0 is incomplete" in page.text
    assert "only in one run at step 2" in page.text
    found = replace(diff(runs / "a", runs / "same"), ranks=())
    page = Page(timeline_page.render(found, timeline(found, [])))
    assert "Nothing was compared, so nothing can be drawn." in page.text
    page = Page(page_of(runs / "a", runs / "b", (2, 3)))
    assert "no culprit in these steps" in page.text
    assert "--steps=2:3" in page.text


def nasty(folder, mark):
    """A recording in which every text is hostile."""
    writer = TraceWriter(folder, header(environment={NASTY: mark}))
    entries = [(NASTY + kind, kind, NASTY, mark) for kind in KINDS]
    dtypes = {NASTY + "output": NASTY} if mark == "2" else {}
    write_step(writer, 0, entries, dtypes=dtypes)
    write_step(writer, 1, [(f"{NASTY}.{NASTY}/{mark}", "output", NASTY, mark)])
    writer.close(NASTY, {NASTY: NASTY})
    return folder


def test_hostile_names_are_text(tmp_path):
    text = page_of(nasty(tmp_path / "a", "1"), nasty(tmp_path / "b", "2"))
    page = Page(text)
    assert "script" not in page.tags
    assert "onclick" not in page.names
    assert "alert(1)" in page.text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "##[" not in text


def wide(found, picture):
    """1,000 steps of 64 ranks with 64 lanes, in which each state follows another, and 400 events
    with names as long and as costly as they can be."""
    steps = tuple(range(1000))
    states = tuple(list(State)[at % 3] for at in steps)
    long = '"&<' * 4000
    lanes = tuple(Row(Lane("forward", f"{long}{at}", 9), states) for at in range(64))
    shown = [
        ShownEvent(at, at, at, long, long, "forward", State.DIFFERS, "bits", None, long, long)
        for at in range(400)
    ]
    events = StepEvents(5, tuple(shown), {State.DIFFERS: 1200})
    ranks = tuple(Row(rank, states) for rank in range(64))
    return replace(picture, steps=steps, ranks=ranks, lanes=lanes, events=events, folded=300)


def test_a_large_page_stays_small_and_says_what_it_left_out(runs, monkeypatch):
    found = diff(runs / "a", runs / "b")
    picture = wide(found, timeline(found, read_pairs(runs / "a", runs / "b", found)))
    text = timeline_page.render(found, picture)
    assert len(text.encode()) <= timeline_page.LIMIT == 2_000_000
    page = Page(text)
    assert "a column is up to 5 steps; a cell shows the worst of them" in page.text
    assert "holds n modules more" in page.text
    assert "are only counted here; verify trace show" in page.text
    monkeypatch.setattr(timeline_page, "LIMIT", 900_000)
    less = timeline_page.render(found, picture)
    assert len(less.encode()) <= 900_000
    assert 0 < less.count('class="tip"') < text.count('class="tip"') <= 400


def test_the_option_writes_the_page_and_changes_nothing_else(runs):
    for other, code in (("b", 1), ("same", 0), ("cut", 3)):
        plain = invoke("trace", "diff", runs / "a", runs / other)
        page = runs / "deep" / f"{other}.html"
        shown = invoke("trace", "diff", runs / "a", runs / other, "--html", page)
        assert (shown.exit_code, shown.stdout, shown.stderr) == (code, plain.stdout, "")
        assert page.read_text(encoding="utf-8") == page_of(runs / "a", runs / other)
        again = invoke("trace", "diff", runs / "a", runs / other, "--html", page, "--format=json")
        assert again.exit_code == code
    assert sorted(os.listdir(runs / "deep")) == ["b.html", "cut.html", "same.html"]


def test_a_page_is_not_written_over_a_recording_nor_into_a_folder(runs):
    record = runs / "b" / file_name(0)
    before = record.read_bytes()
    (runs / "alias.html").hardlink_to(record)
    for page, said in (
        (record, "a recording has, or could have, this name"),
        (runs / "new" / file_name(3), "a recording has, or could have, this name"),
        (runs / "b", "is a folder"),
    ):
        shown = invoke("trace", "diff", runs / "a", runs / "b", "--html", page)
        assert (shown.exit_code, shown.stdout) == (2, "")
        assert said in shown.stderr
    alias = runs / "alias.html"
    shown = invoke("trace", "diff", runs / "a" / file_name(0), record, "--html", alias)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert record.read_bytes() == before
    assert not (runs / "new").exists()


def test_a_page_that_cannot_be_written_is_an_error_and_the_verdict_was_said(runs):
    (runs / "file").write_text("x")
    page = runs / "file" / "page.html"
    shown = invoke("trace", "diff", runs / "a", runs / "b", "--html", page)
    assert shown.exit_code == 2
    assert shown.stdout.startswith("verdict=MISMATCH ")
    assert "cannot write" in shown.stderr


def test_drawing_imports_no_torch():
    code = "import sys, verify.tracing.timeline_page; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_cells_can_be_told_from_their_ground(scheme):
    style = (TEMPLATES / "style.jinja").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", block))
    ground = luminance(colours["surface"])
    for name in ("good-solid", "bad-solid", "open-solid", "muted", "ink"):
        light, dark = sorted((luminance(colours[name]), ground), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, name  # WCAG 2.2, 1.4.11
