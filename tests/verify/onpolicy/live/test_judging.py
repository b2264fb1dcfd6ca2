"""What float64 overrules, what counts as a choice, and rows by place, on hand-made pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from live_models import Model
from torch import Tensor, nn

from verify.onpolicy.causes.table import cause
from verify.onpolicy.live import choices, examining, rowwise
from verify.onpolicy.live.capturing import INPUT, OUTPUT, Capture, Event, Rows, Seen
from verify.onpolicy.live.conditions import Request
from verify.onpolicy.live.judging import Judged, informed, judge
from verify.onpolicy.live.locating import Parted
from verify.onpolicy.live.models import described
from verify.onpolicy.live.scoring import Scored
from verify.onpolicy.live.sequences import Sampled
from verify.onpolicy.live.widening import Wide, compared, narrow_module
from verify.onpolicy.verdicts import Finding, OnPolicyVerdict
from verify.reasons import Verdict

WHERE = Parted("m.0", "Block", "", "", 3, 9, 0.5, 0.1, 0, 2, choice=False)
CHOICE = Parted("m.0", "Block", "m.0.experts", "1", 3, 9, None, None, 0, 2, choice=True)
ROUNDS, ELSE, FLIPS = Wide(1e-9, None), Wide(0.25, WHERE), Wide(0.25, CHOICE)
UNKNOWN = Wide(None, WHERE, "too large")
CAUSES = (
    cause("positions", weight=1.0, claimed=True),
    cause("numeric-drift", weight=1.0, claimed=True),
)


def analysis(*reasons: str) -> Any:
    findings = tuple(Finding(one, f"what of {one}", count=2) for one in reasons)
    return SimpleNamespace(
        verdict=OnPolicyVerdict(Verdict.UNVERIFIED, findings), causes=CAUSES, numbers=None
    )


def judged(wide: Wide | None, *reasons: str, name: str = "decode", broken: str = "") -> Judged:
    return Judged(name, analysis(*reasons), wide, "", broken)


@pytest.mark.parametrize(
    ("wide", "expected"),
    [
        (None, ["structural-cause", "no-bound"]),
        (UNKNOWN, ["structural-cause", "no-bound"]),
        (ROUNDS, ["no-bound"]),
        (FLIPS, ["no-bound"]),
        (ELSE, ["structural-cause", "structural-cause", "no-bound"]),
    ],
)
def test_a_structural_finding_stands_unless_float64_shows_rounding(wide, expected):
    found = judged(wide, "structural-cause", "no-bound")
    assert [one.reason for one in found.findings()] == expected


@pytest.mark.parametrize(
    ("wide", "verdict"),
    [
        (ROUNDS, Verdict.UNVERIFIED),
        (FLIPS, Verdict.UNVERIFIED),
        (UNKNOWN, Verdict.UNVERIFIED),
        (ELSE, Verdict.MISMATCH),
    ],
)
def test_drift_is_a_mismatch_only_where_float64_computes_something_else(wide, verdict):
    assert judged(wide, "no-bound").verdict() is verdict


def test_no_finding_is_verified_and_what_was_not_run_is_not():
    assert judged(None).verdict() is Verdict.VERIFIED
    skipped = Judged("packed", None, None, "the model takes no position_ids")
    assert skipped.verdict() is Verdict.UNVERIFIED
    (finding,) = skipped.findings()
    assert (finding.reason, finding.what) == ("not-run", "the model takes no position_ids")
    assert judged(None, broken="experts").verdict() is Verdict.MISMATCH


@pytest.mark.parametrize(
    ("wide", "positions", "drift"),
    [(None, True, True), (ROUNDS, False, True), (ELSE, True, False), (UNKNOWN, True, True)],
)
def test_causes_are_told_what_float64_knows(wide, positions, drift):
    one = judged(wide)
    found = informed(one.analysis, [one])  # type: ignore[arg-type]
    assert [each.claimed for each in found] == [positions, drift]
    assert all(each.claimed or "float64" in each.against[0] for each in found)


def test_findings_of_one_kind_are_told_together():
    some = [judged(ROUNDS, "no-bound", name=name) for name in ("decode", "batch")]
    whole = judge(some[0].analysis, [*some, judged(None, name="packed", broken="at m")])  # type: ignore[arg-type]
    assert whole.verdict is Verdict.MISMATCH
    assert [(one.reason, one.count) for one in whole.findings] == [
        ("experts-differ", 1),
        ("no-bound", 4),
    ]
    assert whole.findings[1].what == "decode, batch: what of no-bound; others in the table"


def seen(**events: tuple[str, str, Tensor]) -> Seen:
    """name=(kind, path, values), each of a module of its own name."""
    return Seen(
        {
            Event(name.rstrip("_"), 0, kind, path, "M", "(root)"): Rows(
                torch.arange(len(values)), values
            )
            for name, (kind, path, values) in events.items()
        }
    )


INDEX, WEIGHTS = torch.tensor([[0, 2], [1, 3]]), torch.tensor([[0.6, 0.4], [0.5, 0.5]])


def test_a_choice_is_integers_beside_weights_of_the_same_shape():
    found = choices.choices(seen(m=(INPUT, "1", INDEX), m_=(INPUT, "2", WEIGHTS)))
    assert [(one.layer, one.module) for one in found] == [(0, "m")]
    assert not choices.choices(seen(m=(INPUT, "1", INDEX), m_=(INPUT, "2", WEIGHTS[:, :1])))
    assert not choices.choices(seen(m=(INPUT, "1", INDEX), n=(INPUT, "2", WEIGHTS)))
    assert not choices.choices(seen(m=(INPUT, "1", INDEX)))


def test_margins_come_from_logits_whose_largest_are_the_choice():
    logits = torch.tensor([[3.0, 0.0, 2.0, 1.0], [0.0, 3.0, 0.5, 2.0]])
    chosen = {"m": (OUTPUT, "1", INDEX), "m_": (OUTPUT, "2", WEIGHTS)}
    (one,) = choices.choices(seen(**chosen, m__=(OUTPUT, "0", logits)))
    odds = torch.softmax(logits, dim=1)
    assert one.margins is not None
    assert torch.allclose(
        one.margins, torch.stack([odds[0, 2] - odds[0, 3], odds[1, 3] - odds[1, 2]])
    )
    (one,) = choices.choices(seen(**chosen, m__=(OUTPUT, "0", -logits)))
    assert one.margins is None


def test_records_of_experts_need_every_token():
    samples = [Sampled((1, 2), (3,))]
    (routes,) = (
        choices.routing(seen(m=(INPUT, "1", INDEX), m_=(INPUT, "2", WEIGHTS)), samples) or []
    )
    assert routes.experts.tolist() == [[[0, 2]], [[1, 3]]]
    assert (routes.start, routes.layers) == (0, (0,))
    short = seen(m=(INPUT, "1", INDEX[:1]), m_=(INPUT, "2", WEIGHTS[:1]))
    assert choices.routing(short, samples) is None


def test_rows_are_judged_only_where_every_input_is_equal():
    def side(first: list[float], second: list[float], out: list[float]) -> Seen:
        columns = [torch.tensor(one)[:, None] for one in (first, second, out)]
        return seen(
            m=(INPUT, "0", columns[0]), m_=(INPUT, "1", columns[1]), m__=(OUTPUT, "", columns[2])
        )

    a = side([1, 1, 1], [1, 1, 1], [1, 1, 1])
    b = side([2, 1, 1], [1, 1, 1], [9, 9, 1])
    (found,) = rowwise.by_type(a, b, {"m"}, ())
    assert (found.rows, found.other) == (2, 1)


def test_rows_are_kept_by_place_whatever_order_they_came_in():
    model = nn.Identity()
    capture = Capture(model)
    with capture.listening():
        capture.begin(torch.tensor([[5, 3]]))
        model(torch.tensor([[[50.0], [30.0]]]))
        capture.begin(torch.tensor([[4, -1]]))
        model(torch.tensor([[[40.0], [9.0]]]))
    rows = list(capture.taken().rows.values())[1]
    assert rows.places.tolist() == [3, 4, 5]
    assert rows.values.flatten().tolist() == [30.0, 40.0, 50.0]


def test_narrow_values_are_told_from_wide_ones():
    wide = torch.linspace(0, 1, 8, dtype=torch.float64)[:, None]
    at = Parted("m", "M", "", "", 1, 8, 0.1, 0.1, 0, 0, choice=False)
    assert narrow_module(seen(m=(OUTPUT, "", wide)), at) == ""
    assert "m rounds to bfloat16" in narrow_module(
        seen(m=(OUTPUT, "", wide.bfloat16().double())), at
    )
    assert "m computes in float16" in narrow_module(seen(m=(OUTPUT, "", wide.half())), None)


def scored(part: float, output: float | None, value: float) -> Scored:
    """A module whose part was given one number, which gave another, and a log-probability."""
    root = Event("m.part", 0, INPUT, "", "P", "m")
    made = {root: Rows(torch.arange(2), torch.full((2, 1), part, dtype=torch.float64))}
    if output is not None:
        values = torch.full((2, 1), output, dtype=torch.float64)
        made[Event("m", 0, OUTPUT, "", "M", "(root)")] = Rows(torch.arange(2), values)
    return Scored("alone", (np.array([value], dtype=np.float32),), Seen(made))


BASE = (0.1, 0.2, -1.0)


@pytest.mark.parametrize(
    ("other", "structural"),
    [
        ((0.3, 0.2, -1.0), False),  # only its parts were given others
        ((0.3, 0.2, -1.0 - 2.0**-8), False),
        ((0.3, 0.2, -1.5), True),  # no output shows what moves the log-probabilities
        ((0.3, 0.4, -1.0), True),
        ((0.1, 0.4, -1.0), True),
        ((0.1, 0.2 + 1e-9, -1.0), False),
    ],
)
def test_a_module_computes_something_else_only_where_its_output_differs(other, structural):
    found = compared(scored(*BASE), scored(*other), (), finite=True)
    assert found.structural is structural
    assert (found.parted is not None) is structural


@pytest.mark.parametrize(
    ("value", "structural"), [(-1.0, False), (-1.0 + 2.0**-20, False), (-2.0, True)]
)
def test_log_probabilities_tell_where_the_output_cannot_be_seen(value, structural):
    found = compared(scored(0.1, None, -1.0), scored(0.3, None, value), (), finite=True)
    assert found.structural is structural


def test_log_probabilities_that_no_module_explains_are_not_called_rounding():
    found = compared(scored(*BASE), scored(0.1, 0.2, -1.5), (), finite=True)
    assert not found.structural
    assert "what modules give does not" in found.problem


@pytest.mark.parametrize("finite", [True, False])
def test_nan_of_the_copy_alone_says_nothing(finite):
    nan = float("nan")
    found = compared(scored(*BASE), scored(nan, nan, nan), (), finite=finite)
    assert found.structural is not finite
    assert bool(found.problem) is finite


def test_a_difference_that_reaches_no_token_is_said_so():
    (finding,) = judged(Wide(0.0, WHERE)).findings()
    assert "no log-probability does" in finding.what
    (finding,) = judged(ELSE).findings()
    assert "log-probabilities differ by up to 0.25" in finding.what


def test_the_doctor_is_told_of_the_padding(monkeypatch):
    given = []
    original = examining.analyse_dumps

    def spy(trainer: Any, rollout: Any, **rest: Any) -> Any:
        given.append([one.meta.get("padding") for one in rollout.samples])
        return original(trainer, rollout, **rest)

    monkeypatch.setattr(examining, "analyse_dumps", spy)
    request = Request(tokens=2, samples=2, layouts=("padded-left", "padded-right"))
    found = examining.examine(described("padded", Model()), request)
    assert given == [[None, None], [3, 0], [None, None]]
    assert np.isfinite(found.trainer.samples[0].series["trainer"].values).all()
