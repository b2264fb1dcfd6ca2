"""Broken resumes, each planted and each named; and the twin in which nothing is wrong."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from replayed_toys import STOP, Training, ordered, replayed
from trace_toy import header, write_step

from verify.errors import CaseError
from verify.reasons import Verdict
from verify.replaying import replay_report
from verify.replaying.borders import States, border_of
from verify.replaying.findings import REMEDIES, Kind
from verify.replaying.orders import BEFORE, Orders
from verify.replaying.replays import Replay, judge
from verify.tracing.divergence import diff
from verify.tracing.files import TraceWriter, read_folder

COMMAND = ("python", "train.py")


def judged(folder: Path) -> Replay:
    found = judge(COMMAND, folder, STOP)
    document = replay_report.to_json(found)
    jsonschema.validate(document, replay_report.schema())
    json.dumps(document, allow_nan=False)
    return found


def kinds(found: Replay) -> list[Kind]:
    return [one.kind for one in found.pairs[-1].findings]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return replayed(tmp_path_factory.mktemp("clean"))


def resumed(clean: Path, folder: Path, fault: str) -> Path:
    """The clean recordings, and a resumed run with a fault."""
    for name in ("whole", "again", "stopped"):
        (folder / name).symlink_to(clean / name)
    stopped = Training()
    with ordered(folder / "unused", Orders("", STOP)):
        stopped.run()
    with ordered(folder / "resumed", Orders("", states=True, narrow=True)):
        Training(fault).run(stopped.saved)
    return folder


def test_a_good_resume_is_verified(clean: Path) -> None:
    found = judged(clean)
    assert found.verdict is Verdict.VERIFIED, replay_report.text(found)
    assert (found.steps, found.stop_after, found.border.step) == (8, 5, 3)
    assert [pair.verdict for pair in found.pairs] == [Verdict.VERIFIED] * 3
    assert all(pair.diff.compared > 100 for pair in found.pairs)
    shown = replay_report.text(found).splitlines()
    assert shown[0] == (
        "verdict=VERIFIED 3 pairs of runs equal; 8 steps, stopped after 5, resumed at step 4"
    )
    assert [line.split()[:4] for line in shown[3:6]] == [
        ["repeat", "whole,", "again", "0-7"],
        ["stopped", "whole,", "stopped", "0-4"],
        ["resumed", "whole,", "resumed", "4-7"],
    ]


@pytest.mark.parametrize(
    ("fault", "expected", "says"),
    [
        ("generator", [Kind.GENERATORS], "generator torch: as before the first step: not restored"),
        ("optimizer", [Kind.OPTIMIZER], "optimizer step of 0.weight.*: missing in the resumed run"),
        ("scheduler", [Kind.SETTINGS], "optimizer lr of .group 0.: other than in the whole run"),
        ("bfloat16", [Kind.BUFFERS], "1.running_mean: restored with values that bfloat16 can hold"),
        ("unsaved", [Kind.BUFFERS], "buffer 1.scale: restored with other bits"),
        ("order", [Kind.DATA], "probe batch.*: the data of step 0: their order started again"),
        ("counter", [Kind.DATA, Kind.STEPS], "the data of step 3: 1 batch read again"),
        ("skips", [Kind.DATA, Kind.STEPS], "the data of step 5: 1 batch left out"),
        ("draws", [Kind.DRAWS], "generator torch: restored, and then drawn from.*data are equal"),
        ("generator order", [Kind.GENERATORS, Kind.DATA], "step 0: their order started again"),
        ("weights", [Kind.PARAMETERS, Kind.BUFFERS], "parameter 0.weight.*: as before the first"),
    ],
)
def test_a_broken_resume_is_named(
    clean: Path, tmp_path: Path, fault: str, expected: list[Kind], says: str
) -> None:
    found = judged(resumed(clean, tmp_path, fault))
    shown = replay_report.text(found)
    assert found.verdict is Verdict.MISMATCH
    assert kinds(found)[: len(expected)] == expected, shown
    assert re.search(says, shown), shown
    assert found.border.step == 3
    assert found.pairs[-1].findings[0].step == (5 if fault == "scheduler" else 4)
    assert [pair.verdict for pair in found.pairs[:2]] == [Verdict.VERIFIED] * 2
    assert shown.startswith("verdict=MISMATCH parted: resumed (whole, resumed); 8 steps, stopped")
    assert f"  do: {REMEDIES[expected[0]]}" in shown
    assert "  do: " + REMEDIES[expected[-1]] in shown


def test_the_part_behind_a_resume_can_be_compared_by_hand(clean: Path, tmp_path: Path) -> None:
    judged(resumed(clean, tmp_path, "generator"))
    found = diff(tmp_path / "whole-from-step-4", tmp_path / "resumed-from-step-4")
    assert found.verdict is Verdict.MISMATCH
    assert (found.culprit.place.step, found.culprit.place.kind) == (-1, "rng")
    assert [one.steps for one in found.ranks] == [4]


def test_a_run_that_begins_anew_has_resumed_nothing(clean: Path, tmp_path: Path) -> None:
    found = judged(resumed(clean, tmp_path, "forgets"))
    assert found.verdict is Verdict.UNVERIFIED
    assert not found.pairs[-1].findings
    (reason,) = found.reasons
    assert reason.startswith("resumed: it began at the beginning, so no resume was tested")


def test_a_checkpoint_of_another_run(clean: Path, tmp_path: Path) -> None:
    stale = Training()
    with ordered(tmp_path / "unused", Orders("")):
        stale.run(steps=6)
    for name in ("whole", "again", "stopped"):
        (tmp_path / name).symlink_to(clean / name)
    with ordered(tmp_path / "resumed", Orders("", states=True)):
        Training().run(stale.saved)
    with pytest.raises(CaseError, match=r"resumed: it went on at step 6.*another run.*\{run\}"):
        judge(COMMAND, tmp_path, STOP)
    (tmp_path / "again").unlink()
    (tmp_path / "resumed").rename(tmp_path / "again")
    with pytest.raises(CaseError, match="again: it began with the state of the first run after"):
        judge(COMMAND, tmp_path, None)


def test_loading_behind_the_first_event_is_told(clean: Path, tmp_path: Path) -> None:
    """Its recording begins with the initial state, and its second step is a later one."""
    for name in ("whole", "again", "stopped"):
        (tmp_path / name).symlink_to(clean / name)
    whole = read_folder(clean / "whole")
    (one,) = whole.values()
    start, first, *later = one.steps
    steps = (start, first, *(replace(s, number=s.number - 4) for s in later if s.number > 4))
    writer = TraceWriter(tmp_path / "resumed", one.header)
    for step in steps:
        ids = [
            writer.define(d.name, d.kind, d.path, d.dtype, d.shape, module=d.module)
            for d in step.program.definitions
        ]
        writer.step(step.number, ids, step.lanes)
    writer.close()
    with pytest.raises(CaseError, match=r"its first step is step 4.*load it before"):
        judge(COMMAND, tmp_path, STOP)


def test_a_difference_of_fresh_runs_is_not_blamed_on_the_resume(tmp_path: Path) -> None:
    found = judged(replayed(tmp_path, "generator", again="leak"))
    shown = replay_report.text(found, "kept")
    assert [pair.verdict for pair in found.pairs] == [
        Verdict.MISMATCH,
        Verdict.VERIFIED,
        Verdict.MISMATCH,
    ]
    assert "parted: repeat (whole, again) and resumed (whole, resumed)" in shown
    assert "but fresh runs differ from each other, too: mend that first" in shown
    assert "verify trace explain kept/whole kept/again -- python train.py" in shown
    assert "verify trace diff kept/whole-from-step-4 kept/resumed-from-step-4" in shown


def test_borders_are_found_by_state(clean: Path) -> None:
    (whole,) = read_folder(clean / "whole").values()
    states = States(whole)
    for number in range(8):
        border = border_of({0: states}, {0: states.opening(number)}, 2)
        assert (border.step, border.whole) == (number - 1, True)
    settings = {k: v for k, v in states.start.items() if k[2] == "betas.0"}
    assert settings
    assert border_of({0: states}, {0: settings}, 2).step == 2  # of equals the expected one
    assert not border_of({0: states}, {0: settings}, 2).whole


def by_hand(
    folder: Path, first: int = 0, *, noise: str = "r", data: str = "", moments: bool = True
) -> None:
    """A run whose data are drawn from its generator, or are `data`. moments: whether its optimizer
    is there before the recording."""
    writer = TraceWriter(folder, header())
    write_step(writer, -1, [("w", "parameter", "", f"w {first}"), ("g", "rng", "", f"{noise} 0")])
    for step in range(first, 4):
        entries = [
            ("parameter w", "probe", BEFORE, f"w {step}"),
            *[("optimizer w", "probe", f"exp_avg {BEFORE}", f"m {step}")] * moments,
            ("g", "rng", BEFORE, f"{noise} {step}"),
            ("batch", "probe", "", data or f"drawn {noise} {step}"),
            ("", "input", "0", f"x {step}"),
            ("", "output", "0", f"y {step}"),
            ("w", "parameter", "", f"w {step + 1}"),
            ("w", "optimizer", "exp_avg", f"m {step + 1}"),
            ("g", "rng", "", f"{noise} {step + 1}"),
        ]
        write_step(writer, step - first, entries)
    writer.close()


@pytest.mark.parametrize(
    ("noise", "data", "expected"),
    [
        ("lost", "", [Kind.GENERATORS]),  # which may have drawn them
        ("r", "other", [Kind.DATA]),
        ("r", "", []),
    ],
)
def test_data_that_a_lost_generator_may_have_drawn_are_not_spoken_of(
    tmp_path: Path, noise: str, data: str, expected: list[Kind]
) -> None:
    for name in ("whole", "again", "stopped"):
        by_hand(tmp_path / name)
    by_hand(tmp_path / "resumed", 2, noise=noise, data=data)
    found = judge(COMMAND, tmp_path, 3)
    assert kinds(found) == expected
    if expected == [Kind.DATA]:
        assert "data that the whole run never read" in found.pairs[-1].findings[0].what


def test_an_optimizer_that_is_made_inside_is_not_called_lost(tmp_path: Path) -> None:
    for name in ("whole", "again", "stopped"):
        by_hand(tmp_path / name)
    by_hand(tmp_path / "resumed", 2, moments=False)
    assert kinds(judge(COMMAND, tmp_path, 3)) == []


def test_what_made_each_run_is_suggested_for_an_explanation(clean: Path) -> None:
    found = judge((*COMMAND, "{run}"), clean, None, ("--log", "a b"))
    parted = replace(found.pairs[0], verdict=Verdict.MISMATCH)
    shown = replay_report.text(replace(found, verdict=Verdict.MISMATCH, pairs=(parted,)), "kept")
    words = shlex.split(next(line for line in shown.splitlines() if "explain" in line))
    assert words[-4:] == [
        *("--a", "python train.py '{run}'"),
        *("--b", "python train.py '{run}' --log 'a b'"),
    ]
