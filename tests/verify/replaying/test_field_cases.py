"""Reports of the field: random numbers that an evaluation takes, resumes, and runs too equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from replayed_toys import ordered, replayed
from trace_toy import header, write_step

import verify
from verify.reasons import Verdict
from verify.replaying import replay_report
from verify.replaying.findings import Kind
from verify.replaying.orders import BEFORE, Orders
from verify.replaying.replays import judge
from verify.replaying.suspects import Suspicion, period_of, suspects
from verify.tracing.causes import Cause
from verify.tracing.files import TraceWriter, read_folder

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("twin", [False, True])
def test_bug_09_a_validation_takes_random_numbers(tmp_path: Path, twin: bool) -> None:
    """The order of the data is drawn behind an optional validation that draws, too."""

    def train(evaluates: bool) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.arange(18.0).view(6, 3)
        with verify.record("run", model, optimizer):
            if evaluates and twin:
                with torch.random.fork_rng():
                    torch.randperm(4)
            elif evaluates:
                torch.randperm(4)
            for index in torch.randperm(6).view(3, 2):
                optimizer.zero_grad()
                model(rows[index]).sum().backward()
                optimizer.step()

    for name, evaluates in (("whole", True), ("again", False)):
        with ordered(tmp_path / name, Orders("", states=True)):
            train(evaluates)
    found = judge(("train.py",), tmp_path, None)
    shown = replay_report.text(found)
    if twin:
        assert found.verdict is Verdict.VERIFIED, shown
        return
    assert found.verdict is Verdict.MISMATCH
    culprit = found.pairs[0].diff.culprit
    assert culprit is not None
    place = culprit.place
    assert (culprit.cause, place.step, place.kind, place.name) == (Cause.RNG, 0, "rng", "torch")
    assert place.path == BEFORE  # the state, and not the data or the loss that follow from it
    assert "generator torch before the first event differs alone" in shown
    assert "torch.random.fork_rng()" in shown


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("generator", Kind.GENERATORS, "not restored"),  # (1)
        ("draws", Kind.DRAWS, "data are equal"),  # (2)
        ("order", Kind.DATA, "the data of step 0"),  # (3)
        ("", None, ""),
    ],
)
def test_bug_10_a_resume_is_not_the_whole_run(
    tmp_path: Path, fault: str, kind: Kind | None, says: str
) -> None:
    found = judge(("train.py",), replayed(tmp_path, fault), 5)
    findings = found.pairs[-1].findings
    if kind is None:
        assert found.verdict is Verdict.VERIFIED
        assert not findings
        return
    assert found.verdict is Verdict.MISMATCH
    assert [(one.kind, one.step) for one in findings] == [(kind, 4)]
    assert says in findings[0].what


def runs(folder: Path, batches: Sequence[Sequence[str]], noise: Sequence[str]) -> Path:
    """A run on as many ranks as `noise` has. batches: by rank, what each step reads. noise: by
    rank, what its generator's state is made of."""
    for rank, name in enumerate(noise):
        writer = TraceWriter(folder, header(rank, len(noise)))
        write_step(writer, -1, [("torch", "rng", "", f"{name} -1")])
        for step, batch in enumerate(batches[rank]):
            entries = [
                ("batch", "probe", "", batch),
                ("", "input", "0", f"x({batch})"),
                ("", "output", "0", f"y({batch},{name})"),
                ("torch", "rng", "", f"{name} {step}"),
            ]
            write_step(writer, step, entries)
        writer.close()
    return folder


EPOCHS = [f"{epoch} {batch}" for epoch in range(3) for batch in range(4)]
SAME = [str(batch) for _ in range(3) for batch in range(4)]


@pytest.mark.parametrize(
    ("batches", "noise", "expected"),
    [
        ([SAME], ["a"], [Suspicion.SAME_ORDER]),
        ([EPOCHS, [f"r {one}" for one in EPOCHS]], ["a", "a"], [Suspicion.SAME_NOISE]),
        ([EPOCHS, EPOCHS], ["a", "b"], [Suspicion.SAME_DATA, Suspicion.SAME_DATA]),
        ([EPOCHS, [f"r {one}" for one in EPOCHS]], ["a", "b"], []),
        ([["x"] * 12], ["a"], []),  # one batch all along is a choice
        # The probe, and not the input, which may be a mask of ones.
        ([["x"] * 12, ["x"] * 12], ["a", "b"], [Suspicion.SAME_DATA]),
    ],
)
def test_bug_11_too_equal(
    tmp_path: Path,
    batches: Sequence[Sequence[str]],
    noise: Sequence[str],
    expected: list[Suspicion],
) -> None:
    for name in ("whole", "again"):
        runs(tmp_path / name, batches, noise)
    found = judge(("train.py",), tmp_path, None)
    assert found.verdict is Verdict.VERIFIED  # it reproduces, and that is what is wrong with it
    assert [one.kind for one in found.suspects] == expected
    lines = replay_report.text(found).splitlines()
    shown = [line for line in lines if line.startswith("suspect: ")]
    assert [line.split()[1] for line in shown] == [f"{one}:" for one in expected]
    if Suspicion.SAME_ORDER in expected:
        assert "probe batch of steps 0-3 comes again in the same order every 4 steps" in shown[0]
        assert "3 times in all" in shown[0]
    if Suspicion.SAME_NOISE in expected:
        assert "generator torch is the same on ranks 0, 1 in every step" in shown[0]


@pytest.mark.parametrize("loaded", ["r0", "r1"])
def test_a_rank_that_restores_the_generator_of_another(tmp_path: Path, loaded: str) -> None:
    def run(name: str, first: int, noise: tuple[str, str]) -> None:
        for rank in (0, 1):
            writer = TraceWriter(tmp_path / name, header(rank, 2))
            state = f"{noise[rank]} {first}" if first else f"seed {rank}"
            write_step(
                writer, -1, [("w", "parameter", "", f"w {first}"), ("torch", "rng", "", state)]
            )
            for step in range(first, 4):
                found = f"{noise[rank]} {step}" if step else f"seed {rank}"
                entries = [
                    ("parameter w", "probe", BEFORE, f"w {step}"),
                    ("torch", "rng", BEFORE, found),
                    ("", "input", "0", f"x {rank} {step}"),
                    ("", "output", "0", f"y {rank} {found}"),
                    ("w", "parameter", "", f"w {step + 1}"),
                    ("torch", "rng", "", f"{noise[rank]} {step + 1}"),
                ]
                write_step(writer, step - first, entries)
            writer.close()

    for name in ("whole", "again", "stopped"):
        run(name, 0, ("r0", "r1"))
    run("resumed", 2, ("r0", loaded))
    found = judge(("train.py",), tmp_path, 3)
    if loaded == "r1":
        assert found.verdict is Verdict.VERIFIED
        return
    (finding,) = found.pairs[-1].findings
    assert (finding.kind, finding.rank, finding.step) == (Kind.GENERATORS, 1, 2)
    assert finding.what == "as rank 0 has it: each rank needs its own"


def test_a_generator_that_nothing_draws_from_is_no_noise(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = TraceWriter(tmp_path, header(rank, 2))
        for step in range(-1, 3):
            write_step(writer, step, [("torch", "rng", "", "seed")])
        writer.close()
    assert not suspects(read_folder(tmp_path))


@pytest.mark.parametrize(
    ("values", "period"),
    [
        ("abcabc", 3),
        ("abcabcab", 3),
        ("abab", 2),
        ("aaaa", None),
        ("abcab", None),
        ("abcdef", None),
        ("abcabd", None),
        ("", None),
    ],
)
def test_periods(values: str, period: int | None) -> None:
    assert period_of(list(values)) == period  # type: ignore[arg-type]
