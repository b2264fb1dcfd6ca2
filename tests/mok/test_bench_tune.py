"""`mok bench tune`: what it measures and chooses, that bits come first, what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

import pytest
import torch
from bench_instruments import FakeDevice
from click.testing import CliRunner
from hopper_fakes import Fakes, simulated_launch

from mok.bench import tuning, tuning_command
from mok.bench.shapes import Shape
from mok.bench.tuning import BitsDiffer, Opened, candidates
from mok.cli import main
from mok.errors import InputError
from mok.hopper import tuned
from mok.hopper.layout import Segments
from mok.hopper.support import device_problem
from mok.hopper.tuned import Choice

SHAPE = Shape("test", 512, 4, 128, 1024, 2)
DEFAULT = tuning.default_choice(SHAPE.I)
SMS = 132


class Layer:
    """A layer whose time and bits depend on knobs, as a test wants."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.gain: Callable[[Choice, int], float] = lambda choice, opened: 1.0
        self.bits: Callable[[Choice, int], float] = lambda choice, asked: 0.0
        self.opened: list[Choice] = []
        self.open_now = 0
        self.call_seconds = 0.01

    def opener_of(self, shape: Shape) -> Callable[[Choice], Opened]:
        return self.opener

    def opener(self, choice: Choice) -> Opened:
        times = self.opened.count(choice)
        self.opened.append(choice)
        self.open_now += 1
        asked = 0

        def call() -> None:
            self.device.work(str(choice), self.call_seconds / self.gain(choice, times))

        def bits() -> Sequence[torch.Tensor]:
            nonlocal asked
            asked += 1
            rows = [torch.zeros(4, 8, dtype=torch.bfloat16) for _ in range(3)]
            rows[1][2, 3] = self.bits(choice, asked)
            return rows

        def close() -> None:
            self.open_now -= 1

        return Opened(call, bits, close)


@pytest.fixture
def layer():
    return Layer(FakeDevice())


def _tune(layer, **options):
    given = {"sms": SMS, "seconds": 1.0, **options}
    outcome = tuning.tune(SHAPE, layer.device.instruments(), layer.opener, **given)
    assert layer.open_now == 0
    return outcome


FIRST, SECOND = candidates(SHAPE, SMS)[:2]


def test_the_best_candidate_is_chosen_with_the_smaller_of_two_ratios(layer):
    gains = {(FIRST, 0): 1.05, (SECOND, 0): 1.2, (SECOND, 1): 1.1}
    layer.gain = lambda choice, opened: gains.get((choice, opened), 1.0)
    said = []
    outcome = _tune(layer, say=said.append)
    assert outcome.chosen == SECOND
    assert outcome.ratio == pytest.approx(1.1)
    assert outcome.decided
    assert [one.choice for one in outcome.tried if one.better] == [FIRST, SECOND]
    assert len(said) == 2 + len(outcome.tried)
    assert said[0].startswith(f"test: {DEFAULT}: 1.0000")
    assert layer.opened == [DEFAULT, DEFAULT, *candidates(SHAPE, SMS), SECOND]
    assert json.loads(json.dumps(tuning.described(outcome)))["chosen"] == {
        "least": SECOND.segments.least,
        "most": SECOND.segments.most,
        "num_sms": 0,
    }


@pytest.mark.parametrize("gain", [0.8, 1.0, 1.009])
def test_defaults_stay_where_nothing_is_enough_faster(layer, gain):
    layer.gain = lambda choice, opened: 1.0 if choice == DEFAULT else gain
    outcome = _tune(layer)
    assert (outcome.chosen, outcome.ratio, outcome.repeated) == (None, None, None)
    assert outcome.decided


def test_luck_has_to_come_twice(layer):
    layer.gain = lambda choice, opened: 1.3 if choice == FIRST and opened == 0 else 1.0
    outcome = _tune(layer)
    assert outcome.chosen is None
    assert outcome.repeated.ratio == pytest.approx(1.0)
    assert "once and not again" in outcome.why


def test_a_second_workspace_that_is_faster_for_equal_code_is_no_gain(layer):
    # place in memory: whatever is opened second is 3 % faster
    layer.gain = lambda choice, opened: 1.0 if choice == DEFAULT and opened == 0 else 1.03
    outcome = _tune(layer)
    assert outcome.noise.ratio == pytest.approx(1.03)
    assert outcome.chosen is None


def test_few_calls_are_said_with_the_seconds_that_would_do(layer):
    layer.call_seconds = 0.1
    outcome = _tune(layer)
    assert not outcome.decided
    assert (outcome.chosen, outcome.tried) == (None, ())
    assert outcome.why == "5 calls, too few of 30: give --seconds 7.2"
    assert _tune(layer, seconds=7.2).decided


@pytest.mark.parametrize(("asked", "when"), [(1, "in its first call"), (2, "after the timed")])
def test_other_bits_end_the_run(layer, asked, when):
    layer.gain = lambda choice, opened: 1.5 if choice == SECOND else 1.0
    # -0.0 is other bits too
    layer.bits = lambda choice, now: -0.0 if choice == SECOND and now == asked else 0.0
    with pytest.raises(BitsDiffer, match=rf"g differs .* {when}.* 1 of 32 .* \[2, 3\]"):
        _tune(layer)
    assert layer.open_now == 0


def test_what_a_launch_raises_passes_through_and_nothing_stays_open(layer):
    def fails(choice, opened):
        if choice == FIRST:
            raise RuntimeError("no memory")
        return 1.0

    layer.gain = fails
    with pytest.raises(Exception, match="no memory"):
        _tune(layer)
    assert layer.open_now == 0


GPU = "NVIDIA H200 of a test"


def _job(tmp_path, *shapes, seconds=1.0):
    return tuning_command.make_job(shapes or (SHAPE,), GPU, seconds, tmp_path / "tuned.json")


def _instruments(layer):
    found = layer.device.instruments()
    return dataclasses.replace(found, facts={**found.facts, "multiprocessors": SMS})


def _run(layer, job):
    return tuning_command.run(job, _instruments(layer), layer.opener_of)


def _entry(key, choice):
    return tuned.Entry(key, choice, 1.5, "0.0.9", None, "2026-01-01")


def test_what_won_is_written_and_the_rest_of_the_table_stays(layer, tmp_path):
    layer.gain = lambda choice, opened: 1.2 if choice == FIRST else 1.0
    job = _job(tmp_path)
    other = dataclasses.replace(job.keys[0], gpu="another")
    job.target.write_text(tuned.table_text([_entry(other, SECOND)]))
    document = _run(layer, job)
    table = tuned.read_table(job.target)
    assert table[other] == _entry(other, SECOND)
    assert table[job.keys[0]].choice == FIRST
    assert table[job.keys[0]].ratio == pytest.approx(1.2)
    assert len(table) == 2
    assert document["changes"] == [f"test: {FIRST}"]
    assert "better" in tuning_command.text(document)
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.json"]


def test_where_nothing_wins_nothing_is_written(layer, tmp_path):
    job = _job(tmp_path)
    document = _run(layer, job)
    assert document["changes"] == []
    assert not job.target.exists()
    assert "nothing to write to" in tuning_command.text(document)


@pytest.mark.parametrize(("gain", "stays"), [(1.2, True), (1.0, False)])
def test_an_earlier_entry_has_to_show_itself_again(layer, tmp_path, gain, stays):
    job, earlier = _job(tmp_path), Choice(Segments(3, 5), 100)
    job.target.write_text(tuned.table_text([_entry(job.keys[0], earlier)]))
    layer.gain = lambda choice, opened: gain if choice == earlier else 1.0
    document = _run(layer, job)
    assert (job.keys[0] in tuned.read_table(job.target)) is stays
    assert ("taken away" in document["changes"][0]) is not stays


def test_a_run_that_decides_nothing_or_differs_in_bits_leaves_the_table(layer, tmp_path):
    job = _job(tmp_path)
    text = tuned.table_text([_entry(job.keys[0], FIRST)])
    job.target.write_text(text)
    layer.call_seconds = 0.1
    assert _run(layer, job)["changes"] == []
    layer.call_seconds = 0.01
    layer.bits = lambda choice, asked: 1.0 if choice == SECOND else 0.0
    with pytest.raises(BitsDiffer):
        _run(layer, job)
    assert job.target.read_text() == text


def test_a_table_that_cannot_be_used_is_found_before_anything_is_measured(layer, tmp_path):
    job = _job(tmp_path)
    job.target.write_text("no table")
    with pytest.raises(InputError, match="Move it away"):
        _run(layer, job)
    inside = dataclasses.replace(job, target=job.target / "below" / "tuned.json")
    with pytest.raises(InputError, match="no folder that can be written to"):
        _run(layer, inside)
    assert layer.opened == []
    assert job.target.read_text() == "no table"


def test_folders_above_a_table_are_made_and_a_link_stays_a_link(layer, tmp_path):
    layer.gain = lambda choice, opened: 1.2 if choice == FIRST else 1.0
    job = _job(tmp_path)
    real = tmp_path / "deep" / "er" / "real.json"
    job.target.symlink_to(real)
    _run(layer, job)
    assert job.target.is_symlink()
    assert len(tuned.read_table(real)) == 1


def test_shapes_that_share_an_entry_or_do_not_fit_are_refused(tmp_path):
    half = dataclasses.replace(SHAPE, name="half", T=SHAPE.T // 2 + 1)
    with pytest.raises(InputError, match="test and half have the same"):
        _job(tmp_path, SHAPE, half)
    assert _job(tmp_path, SHAPE, SHAPE).shapes == (SHAPE,)
    with pytest.raises(InputError, match="H = 100"):
        _job(tmp_path, dataclasses.replace(SHAPE, H=100))


def _invoke(*arguments):
    return CliRunner().invoke(main, ["bench", "tune", *arguments])


@pytest.fixture
def here(layer, monkeypatch, tmp_path):
    """The command on a fake device."""
    monkeypatch.setattr(tuning_command, "_require_hopper", lambda device: None)
    monkeypatch.setattr("mok.bench.instruments.open_instruments", lambda _: _instruments(layer))
    monkeypatch.setattr(tuning_command, "_opener", lambda instruments: layer.opener_of)
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "mine.json"))
    return layer


_SPELLED = "T=512,E=4,H=128,I=1024,K=2"


def test_the_command_writes_the_users_table_and_env_names_it(here, tmp_path):
    here.gain = lambda choice, opened: 1.2 if choice == FIRST else 1.0
    result = _invoke("--shape", _SPELLED, "--seconds", "1")
    assert result.exit_code == 0, result.output
    assert f"written to {tmp_path / 'mine.json'}" in result.stdout
    assert result.stderr == ""
    environment = CliRunner().invoke(main, ["env", "--json"])
    assert json.loads(environment.stdout)["tuned"].startswith(f"{tmp_path / 'mine.json'}: 1 entr")
    again = _invoke("--shape", _SPELLED, "--seconds", "1", "--json", "--out", str(tmp_path / "o"))
    document = json.loads(again.stdout)
    assert document["shapes"][0]["chosen"]["most"] == FIRST.segments.most
    assert document["table"] == str(tmp_path / "o")


def test_exit_codes(here, tmp_path):
    arguments = ("--shape", _SPELLED, "--seconds", "1")
    here.call_seconds = 0.1
    assert _invoke(*arguments).exit_code == 3
    here.call_seconds = 0.01
    here.bits = lambda choice, asked: 1.0 if choice == SECOND else 0.0
    differs = _invoke(*arguments)
    assert differs.exit_code == 1
    assert "BITS DIFFER, nothing was written: segments of" in differs.stderr

    def fails(choice, opened):
        raise RuntimeError("out of memory\nmore")

    here.bits = lambda choice, asked: 0.0
    here.gain = fails
    broken = _invoke(*arguments)
    assert broken.exit_code == 2
    assert "broke off, nothing was written" in broken.stderr
    for wrong in (("--seconds", "nan"), ("--seconds", "0"), ("--shape", "kimi"), ("--out", "/")):
        assert _invoke(*arguments, *wrong).exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to measure")
def test_without_a_device_nothing_is_measured():
    for device in ("cuda", "cuda:1", "cpu"):
        result = _invoke("--device", device)
        assert result.exit_code == 3
        assert "nothing measured: the Hopper backend cannot run here" in result.stderr


def test_the_opener_launches_with_the_knobs_and_compares_rows_without_padding(monkeypatch):
    fakes, launches, opened = Fakes(), [], []

    def open_workspace(sizes, device, *, segments):
        opened.append(fakes.workspace(sizes, segments=segments))
        return opened[-1]

    def launch(workspace, problem, **options):
        launches.append({"workspace": workspace, **options})
        return simulated_launch(workspace, problem, **options)

    monkeypatch.setattr("mok.hopper.workspace.open_workspace", open_workspace)
    monkeypatch.setattr("mok.hopper.forward.launch", launch)
    shape = Shape("few", 40, 4, 64, 64, 2)
    opener = tuning.hopper_opener(shape, torch.device("cpu"))
    one, other = opener(Choice(Segments(2, 4), 7)), opener(tuning.default_choice(64))
    one.call()
    assert launches[0]["num_sms"] == 7
    assert launches[0]["saved"] == 4 * 128
    assert opened[0].layout.segments == Segments(2, 4)
    out, g, u = one.bits()
    assert (out.shape, g.shape, u.shape) == ((40, 64), (80, 64), (80, 64))
    assert not any(bool(tensor.isnan().any()) for tensor in (out, g, u))
    for mine, theirs in zip((out, g, u), other.bits(), strict=True):
        assert torch.equal(mine, theirs)
    one.close()
    assert opened[0].closed
    assert not opened[1].closed


@pytest.mark.gpu
def test_every_candidate_keeps_the_bits_on_a_device(tmp_path):
    problem = device_problem(torch.device("cuda", torch.cuda.current_device()))
    if problem is not None:
        pytest.skip(problem)
    target = tmp_path / "tuned.json"
    arguments = ("--shape", "small", "--seconds", "0.2", "--json", "--out", str(target))
    result = _invoke(*arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (shape,) = document["shapes"]
    assert shape["decided"]
    assert len(shape["tried"]) >= 5
    assert target.exists() is bool(document["changes"])
