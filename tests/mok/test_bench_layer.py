"""A whole run of the benchmark: document, failures, limits; end to end, and on two ranks."""

import importlib.resources
import json
from pathlib import Path

import jsonschema
import pytest
import torch
from bench_instruments import FakeDevice, fake_contender
from click.testing import CliRunner

from mok.bench import layer, layer_command, ours, phases
from mok.bench.contenders import Missing, available
from mok.bench.document import load, ratios
from mok.bench.layer_inputs import make_inputs
from mok.bench.ranks import Together
from mok.bench.runs import Options, Run
from mok.bench.shapes import SHAPES, Shape
from mok.cli import main
from mok.errors import InputError
from mok.hopper import support

SHAPE = Shape("test", 16, 4, 16, 8, 2)


def _schema():
    text = importlib.resources.files("mok.bench").joinpath("schema/layer-v1.schema.json")
    return json.loads(text.read_text(encoding="utf-8"))


@pytest.fixture
def device():
    return FakeDevice()


def _measure(device, listing, *, saved=None, said=None, **given):
    settings = {"shapes": (SHAPE,), "device": "cpu", "rounds": 3, "seconds": 1.0, **given}
    save = (lambda found: saved.append(json.dumps(found))) if saved is not None else None
    more = {"save": save} if save else {}
    if said is not None:
        more["say"] = said.append
    document = layer.measure(
        Options(**{"accuracy": False, **settings}),
        device.instruments(),
        Together(),
        listing,
        **more,
    )
    jsonschema.validate(document, _schema())
    return document


def _rows(document, protocol="rotation"):
    return {
        (row["contender"], row["direction"]): row
        for row in document["rows"]
        if row["protocol"] == protocol
    }


def test_the_document_holds_what_the_clock_said(device):
    contenders = [
        fake_contender(device, "mok", 0.010, 0.030),
        fake_contender(device, "torch", 0.020, 0.040),
        Missing("liger", "not installed"),
    ]
    device.memory = 2**20
    document = _measure(device, contenders, pairs=(("mok", "torch"),))
    assert document["ended"] == "finished"
    for protocol in ("rotation", "alone", "pair"):
        rows = _rows(document, protocol)
        assert rows["mok", "forward"]["median_ms"] == pytest.approx(10)
        assert rows["torch", "backward"]["p90_ms"] == pytest.approx(40)
        assert rows["torch", "backward"]["tflops"] == pytest.approx(
            SHAPE.backward_flops / 0.04 / 1e12
        )
        assert rows["mok", "forward"]["memory_bytes"] == 3 * 2**20
    assert _rows(document, "pair")["mok", "forward"]["partner"] == "torch"
    assert document["skipped"] == [{"name": "liger", "reason": "not installed"}]
    ratio = {(r["protocol"], r["direction"]): r for r in document["ratios"]}
    assert len(ratio) == 6
    assert ratio["alone", "forward"]["time"] == pytest.approx(2)
    assert not ratio["alone", "forward"]["counts"]
    assert {row["name"] for row in document["ceilings"]} == {
        "GEMM 128^3",
        "GEMM gate-up size",
        "read (int64 sum)",
    }


def _at(shape, tflops, direction):
    return shape.flops(direction) / (tflops * 1e12)


@pytest.mark.parametrize(("share", "counts"), [(1.0, True), (0.95, True), (0.9, False)])
def test_a_ratio_counts_only_if_the_peer_runs_at_its_known_rate(device, monkeypatch, share, counts):
    # Rates as of kimi-shard, on a shape that fits a test.
    monkeypatch.setitem(SHAPES, "test", SHAPE)
    monkeypatch.setattr("mok.bench.rates.ROTATION", {("test", "torch"): (462.0, 487.0)})
    monkeypatch.setattr("mok.bench.rates.PEERS", {"torch": "1.0"})
    device.tick = 0.0
    monkeypatch.setattr("mok.bench.turns.ceilings", lambda shape, weight, ranks: [])
    contenders = [
        fake_contender(device, "mok", _at(SHAPE, 600, "forward"), _at(SHAPE, 600, "backward")),
        fake_contender(
            device, "torch", _at(SHAPE, 462 * share, "forward"), _at(SHAPE, 487, "backward")
        ),
    ]
    document = _measure(device, contenders, seconds=0.0)
    found = {ratio["direction"]: ratio for ratio in document["ratios"]}
    assert found["backward"]["counts"]
    assert found["forward"]["counts"] is counts
    assert found["forward"]["why"].startswith("peer at" if counts else "not comparable: peer at 90")
    skewed = _measure(device, contenders, seconds=0.0, routing="skewed")
    assert not any(ratio["counts"] for ratio in skewed["ratios"])


def test_a_pair_is_a_ratio_with_its_own_partner_only(device):
    contenders = [
        fake_contender(device, "mok", 0.010, 0.030),
        fake_contender(device, "torch", 0.020, 0.040),
        fake_contender(device, "liger", 0.040, 0.080),
    ]
    pairs = (("mok", "torch"), ("torch", "liger"), ("liger", "mok"))
    document = _measure(device, contenders, pairs=pairs, rounds=0, alone=("liger",))
    found = [ratio for ratio in document["ratios"] if ratio["protocol"] == "pair"]
    assert [(r["peer"], r["direction"]) for r in found] == [
        (peer, direction) for peer in ("torch", "liger") for direction in ("forward", "backward")
    ]


def test_joules_have_a_ratio_only_where_both_were_counted():
    common = {
        **dict.fromkeys(("shape", "routing", "direction", "comparability"), "same"),
        **dict.fromkeys(("ranks", "comparable"), True),
        **dict.fromkeys(("apart", "partner"), None),
        "protocol": "alone",
    }

    def ratio(ours, peers):
        rows = [
            {**common, "contender": "mok", "median_ms": 1.0, "joules": 2.0, "joules_kind": ours},
            {**common, "contender": "torch", "median_ms": 3.0, "joules": 8.0, "joules_kind": peers},
        ]
        for row in rows:
            row["joules"] = row["joules"] if row["joules_kind"] else None
        (found,) = ratios(rows, "mok")
        assert found["time"] == 3.0
        return found["joules"]

    assert ratio("counter", "counter") == 4.0
    for kinds in (("estimate", "estimate"), ("counter", "estimate"), ("estimate", "counter")):
        assert ratio(*kinds) is None
    assert ratio(None, None) is None
    assert ratio(None, "counter") is None


@pytest.mark.parametrize("unknown", [False, True])
def test_memory_is_the_largest_over_ranks(device, unknown):
    def largest(values):
        # The other rank always agrees; of two values the first is bytes, if it is that large.
        if len(values) == 2 and values[0] >= 2**20:
            return [max(values[0], 2.0**30), 1.0 if unknown else values[1]]
        return values

    inputs = make_inputs(SHAPE, "gaussian", "cpu")
    contenders = {"mok": fake_contender(device, "mok", 0.01, 0.03)}
    options = Options((SHAPE,), device="cpu", rounds=0, accuracy=False)
    document = {"failures": [], "choices": [], "rows": []}
    run = Run(
        *(options, device.instruments(), Together(0, 2, None, largest), contenders, (), document),
        *(lambda line: None, lambda found: None),
    )
    _, called = phases._first_calls(run, SHAPE, inputs)
    assert document["failures"] == []
    assert called.memory == {"mok": None if unknown else 2**30}


@pytest.mark.parametrize(
    ("fails", "stage"),
    [
        ({"prepare": 1}, "prepare"),
        ({"forward": 1}, "first calls"),
        ({"backward": 5}, "rotation"),
        ({"prepare": 2}, "prepare"),
    ],
)
def test_a_contender_that_fails_is_a_line_and_the_others_go_on(device, fails, stage):
    contenders = [
        fake_contender(device, "mok", 0.01, 0.03),
        fake_contender(device, "torch", 0.01, 0.03, fails=fails),
    ]
    document = _measure(device, contenders)
    assert document["ended"] == "finished"
    (failure,) = document["failures"]
    assert (failure["contender"], failure["stage"]) == ("torch", stage)
    assert failure["error"].startswith("RuntimeError: torch cannot")
    assert "second line" in failure["error"]
    assert {("mok", "forward"), ("mok", "backward")} <= set(_rows(document))
    assert ("mok", "backward") in _rows(document, "alone")
    assert all(row["samples"] == 3 for row in _rows(document).values())


def test_a_failure_alone_is_no_row_of_that_protocol(device):
    # Calls of forward: 3 first ones, 5 in the rotation; the ninth is the first one alone.
    contenders = [
        fake_contender(device, "mok", 0.01, 0.03, fails={"forward": 9}),
        fake_contender(device, "torch", 0.01, 0.03),
    ]
    document = _measure(device, contenders)
    assert [item["stage"] for item in document["failures"]] == ["alone forward"]
    assert {name for name, _ in _rows(document, "alone")} == {"torch"}


def test_a_broken_device_ends_the_run_with_what_was_measured_written(device):
    def breaks():
        device.broken = True

    contenders = [
        fake_contender(device, "mok", 0.01, 0.03),
        fake_contender(device, "torch", 0.01, 0.03, fails={"forward": 9}, failure=breaks),
    ]
    saved = []
    document = _measure(device, contenders, alone=("torch",), saved=saved)
    assert document["ended"].startswith("the device stopped answering after torch on test")
    assert ("torch", "forward") in _rows(document)
    assert json.loads(saved[-1])["rows"] == document["rows"]
    assert json.loads(saved[0])["ended"] == "not finished"


def test_a_time_limit_begins_nothing_new(device):
    saved = []
    document = _measure(device, [fake_contender(device, "mok", 1, 1)], limit=0.0, saved=saved)
    assert document["ended"] == "stopped at the time limit of 0 s"
    assert document["rows"] == []
    assert len(saved) == 1


def test_a_much_slower_contender_is_timed_apart_and_counts_nowhere(device):
    contenders = [
        fake_contender(device, "mok", 0.1, 0.3),
        fake_contender(device, "torch", 0.01, 0.02),
    ]
    document = _measure(device, contenders, rounds=9)
    rows = _rows(document)
    assert (rows["mok", "forward"]["apart"], rows["mok", "forward"]["samples"]) == (True, 3)
    assert (rows["torch", "forward"]["apart"], rows["torch", "forward"]["samples"]) == (False, 9)
    assert set(document["ratios"][0]) >= {"counts"}
    assert {ratio["why"] for ratio in document["ratios"]} == {"not comparable: timed apart"}
    assert {name for name, _ in _rows(document, "alone")} == {"torch"}
    asked = _measure(device, contenders, alone=("mok",))
    assert {name for name, _ in _rows(asked, "alone")} == {"mok"}


def _sides(document, protocol):
    return {
        name: [d for n, d in _rows(document, protocol) if n == name] for name in ("mok", "torch")
    }


@pytest.mark.parametrize(
    ("asked", "mok", "torch"),
    [
        (None, ["forward"], ["forward", "backward"]),
        ("both", ["forward", "backward"], ["forward", "backward"]),
        ("forward", ["forward"], ["forward"]),
        ("backward", ["backward"], ["backward"]),
    ],
)
def test_contenders_are_timed_in_their_own_directions_unless_the_run_says_which(
    device, asked, mok, torch
):
    contenders = [
        fake_contender(device, "mok", 0.010, 0.030, directions=("forward",)),
        fake_contender(device, "torch", 0.020, 0.040),
    ]
    document = _measure(device, contenders, direction=asked, pairs=(("mok", "torch"),))
    for protocol in ("rotation", "alone"):
        assert _sides(document, protocol) == {"mok": mok, "torch": torch}
    both = [direction for direction in torch if direction in mok]
    assert _sides(document, "pair") == {"mok": both, "torch": both}
    assert [(r["protocol"], r["direction"]) for r in document["ratios"]] == [
        (protocol, direction) for protocol in ("rotation", "alone", "pair") for direction in both
    ]
    assert [one["directions"] for one in document["contenders"]] == [mok, torch]
    (remark,) = {row["comparability"] for row in document["rows"] if row["contender"] == "mok"}
    assert remark == "our own layer" + (f", {mok[0]} only" if len(mok) == 1 else "")
    # who is timed forward only is never called backward, and a backward needs its forward
    assert ("mok backward" in device.calls) == ("backward" in mok)
    assert "torch forward" in device.calls


def test_who_is_timed_forward_only_is_slow_only_for_its_work(device):
    # 11 ms of forward alone beside 72 ms of both: a third of the work, and 2.2 times as fast
    contenders = [
        fake_contender(device, "mok", 0.011, 9.0, directions=("forward",)),
        fake_contender(device, "torch", 0.024, 0.048),
        fake_contender(device, "liger", 0.070, 0.140),
    ]
    apart = {n: r["apart"] for (n, _), r in _rows(_measure(device, contenders)).items()}
    assert apart == {"mok": False, "torch": False, "liger": True}
    contenders[0] = fake_contender(device, "mok", 0.130, 9.0, directions=("forward",))
    apart = {n: r["apart"] for (n, _), r in _rows(_measure(device, contenders[:2])).items()}
    assert apart == {"mok": True, "torch": False}


def test_our_forward_alone_is_timed_where_its_backward_is_a_stand_in(monkeypatch):
    monkeypatch.setenv(support.BACKWARD_VARIABLE, "0")
    monkeypatch.setattr("mok.hopper.support.backend_here", lambda: ("hopper", "an H200"))
    kernel, portable, on_cpu = ours.contender("cuda"), ours.portable("cuda"), ours.contender("cpu")
    assert kernel.version.endswith(" hopper forward, portable backward")
    assert kernel.directions == ("forward",)
    assert kernel.tflops["forward"] > 10 * kernel.tflops["backward"]
    for other in (portable, on_cpu):
        assert other.version.endswith(" portable")
        assert other.directions == ("forward", "backward")
    found = {entry.name: entry for entry in available("cpu")}
    assert found["mok"].directions == ("forward", "backward")


def test_both_directions_are_timed_where_the_kernels_run_the_backward(monkeypatch):
    monkeypatch.delenv(support.BACKWARD_VARIABLE, raising=False)
    monkeypatch.setattr("mok.hopper.support.backend_here", lambda: ("hopper", "an H200"))
    kernel, adding = ours.contender("cuda"), ours.adding("cuda")
    assert kernel.version.endswith(" hopper")
    assert kernel.directions == ("forward", "backward")
    assert kernel.tflops["backward"] == kernel.tflops["forward"] > 100
    assert adding.directions == ("backward",)
    assert adding.by_name_only
    assert "fp32 main gradients" in adding.version
    assert ours.portable("cuda").tflops["backward"] < 100
    assert ours.contender("cpu").tflops["backward"] < 100


def test_progress_says_what_is_skipped_and_how_long_it_takes(device):
    said = []
    _measure(device, [fake_contender(device, "mok", 1, 1), Missing("hf", "gone")], said=said)
    assert said[0] == "skipped: hf: gone"
    assert said[1].startswith("about ")


def test_unknown_names_and_nothing_to_time_are_refused(device):
    mok = fake_contender(device, "mok", 1, 1)
    for given in ({"contenders": ("mock",)}, {"alone": ("mock",)}, {"pairs": (("mok", "x"),)}):
        with pytest.raises(InputError, match=r"allowed: mok\. Check the spelling"):
            _measure(device, [mok], **given)
    with pytest.raises(InputError, match="no contender can run"):
        _measure(device, [mok, Missing("hf", "gone")], contenders=("hf",))
    with pytest.raises(InputError, match="works on one rank only"):
        _measure(device, [mok], ranks=2)
    with pytest.raises(InputError, match="Check the path"):
        _measure(device, [mok], routing="nowhere.safetensors")


def test_grouped_gemms_get_a_rotation_of_their_own(device):
    document = _measure(device, [fake_contender(device, "mok", 1, 1)], gemms=True, seconds=0.0)
    among = {row["name"]: row["among"] for row in document["ceilings"] if row["among"] == "gemms"}
    assert any("grouped_mm" in name for name in among), document["failures"]


def _invoke(*arguments):
    return CliRunner().invoke(main, ["bench", "layer", *arguments])


_TINY = ("--device", "cpu", "--shape", "T=64,E=4,H=64,I=32,K=2", "--rounds", "2")


def test_end_to_end_on_a_cpu_with_the_torch_pipeline(tmp_path):
    only = ("--contender", "mok", "--contender", "torch")  # whatever else is installed
    words = ("--seconds", "0.05", "--sample", "8", "--out", str(tmp_path), *only)
    result = _invoke(*_TINY, *words)
    assert result.exit_code == 0, result.output
    document = load(tmp_path / "layer.json")
    jsonschema.validate(document, _schema())
    assert document["failures"] == []
    assert {row["contender"] for row in document["rows"]} == {"mok", "torch"}
    assert {row["protocol"] for row in document["rows"]} == {"rotation", "alone"}
    errors = {(item["contender"], item["what"]): item for item in document["accuracy"]}
    assert set(errors) == {(n, w) for n in ("mok", "torch") for w in ("whole", "sample")}
    outputs = ("out", "d_x", "d_gate_up", "d_down", "d_router")
    assert all(1e-4 < item[name] < 8e-3 for item in errors.values() for name in outputs)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {
        "layer.json",
        "layer.txt",
        "layer.md",
        "layer-rotation.svg",
        "layer-alone.svg",
    }
    assert "Took" in result.stdout
    assert (tmp_path / "layer.txt").read_text() in result.stdout


def test_json_goes_to_stdout_alone(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    only = ("--contender", "torch", "--seconds", "0", "--no-accuracy", "--json")
    result = _invoke(*_TINY, *only)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert {row["protocol"] for row in document["rows"]} == {"rotation"}
    assert result.stderr == ""


@pytest.mark.slow
def test_two_ranks_agree_on_one_document(tmp_path):
    result = _invoke(
        *_TINY, "--ranks", "2", "--seconds", "0.02", "--contender", "mok", "--out", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    document = load(tmp_path / "layer.json")
    jsonschema.validate(document, _schema())
    assert document["failures"] == []
    assert {row["ranks"] for row in document["rows"]} == {2}
    (whole,) = document["accuracy"]
    assert (whole["tokens"], whole["experts"]) == (512, 4)
    assert 1e-4 < whole["out"] < 4e-3
    assert 1e-4 < whole["d_gate_up"] < 4e-3


def test_ranks_that_die_early_leave_no_older_document_in_their_place(monkeypatch, tmp_path):
    def dies(work, ranks, job):
        raise RuntimeError("rank 1 was killed")

    def writes_and_dies(work, ranks, job):
        assert not (tmp_path / "layer.json").exists()
        Path(job.target).write_text(old.replace('"finished"', '"not finished"'))
        dies(work, ranks, job)

    device = FakeDevice()
    document = _measure(device, [fake_contender(device, "mok", 1, 1)], seconds=0.0)
    old = json.dumps(document)
    (tmp_path / "layer.json").write_text(old)
    arguments = (*_TINY, "--ranks", "2", "--out", str(tmp_path))
    monkeypatch.setattr("mok.bench.ranks.spawn", dies)
    result = _invoke(*arguments)
    assert result.exit_code == 2
    assert "no rank measured anything; an earlier document is now" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["layer.previous.json"]
    assert (tmp_path / "layer.previous.json").read_text() == old
    again = _invoke(*arguments)
    assert "earlier document" not in again.stderr
    assert (tmp_path / "layer.previous.json").read_text() == old  # a second death loses nothing
    monkeypatch.setattr("mok.bench.ranks.spawn", writes_and_dies)
    result = _invoke(*arguments)
    assert result.exit_code == 2
    assert "broke off: a rank failed: rank 1 was killed" in result.stderr
    assert load(tmp_path / "layer.json")["ended"] == "a rank failed: rank 1 was killed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shape", "none"), "allowed: one of"),
        (("--pair", "mok"), "two different contenders"),
        (("--device", "tpu"), "allowed: cpu, cuda or cuda:N"),
        (("--device", "meta"), "allowed: cpu, cuda or cuda:N"),
        (("--device", "cuda:99"), "torch sees"),
        (("--device", "cuda:1", "--ranks", "2"), "rank r uses cuda:r"),
        (("--device", "cpu:1"), "allowed: cpu, cuda or cuda:N"),
        (("--device", "garbage", "--ranks", "2"), "allowed: cpu, cuda or cuda:N"),
        (("--device", "cpu", "--ranks", "64"), "E = 8 experts on 64 ranks"),
        (("--device", "cpu", "--ranks", "2", "--routing", "nowhere"), "Check the path"),
        (("--device", "cpu", "--seconds", "nan"), "give a finite one"),
        (("--device", "cpu", "--limit", "nan"), "give a finite one"),
        (("--device", "cpu", "--limit", "inf"), "give a finite one"),
        (("--contender", "none", "--device", "cpu"), "Check the spelling"),
        (("--routing", "nowhere", "--device", "cpu"), "Check the path"),
    ],
)
def test_usage_errors_are_exit_2_and_say_what_is_allowed(arguments, said):
    result = _invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


def test_what_is_asked_for_twice_is_measured_once():
    only = ("--contender", "torch", "--seconds", "0", "--no-accuracy", "--json")
    once, twice = (
        json.loads(_invoke(*_TINY, *again, *only).stdout) for again in ((), ("--shape", _TINY[3]))
    )
    assert len(once["rows"]) == len(twice["rows"]) > 0
    assert twice["options"]["shapes"] == [_TINY[3]]


def test_wrong_options_put_no_earlier_document_aside(tmp_path):
    (tmp_path / "layer.json").write_text("{}")
    result = _invoke(*_TINY, "--ranks", "3", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["layer.json"]


def test_of_a_rank_that_died_the_last_line_is_told(monkeypatch):
    def dies(work, ranks, job):
        raise RuntimeError("\n-- Process 1 --\nTraceback (most recent call last):\nValueError: no")

    monkeypatch.setattr("mok.bench.ranks.spawn", dies)
    result = _invoke(*_TINY, "--ranks", "2")
    assert result.exit_code == 2
    assert result.stderr == "Error: no rank measured anything: ValueError: no\n"


def test_nothing_measured_is_exit_3_and_a_broken_run_exit_2(monkeypatch):
    nothing = _invoke(*_TINY, "--limit", "0")
    assert nothing.exit_code == 3
    assert "nothing measured" in nothing.stderr

    fast = ("--contender", "mok", "--no-accuracy")
    original = layer_command._measure
    calls = []

    def once(*given):
        calls.append(given)
        return original(*given) | {"ended": "the device stopped answering"}

    monkeypatch.setattr(layer_command, "_measure", once)
    broken = _invoke(*_TINY, "--seconds", "0", *fast)
    assert calls
    assert broken.exit_code == 2
    assert "broke off: the device stopped answering" in broken.stderr


def test_every_known_layer_is_there_or_missing_with_a_reason():
    found = {entry.name: entry for entry in available("cpu")}
    assert next(iter(found)) == "mok"
    assert {"torch", "huggingface", "liger", "sonicmoe"} <= set(found)
    assert all(entry.reason for entry in found.values() if isinstance(entry, Missing))


@pytest.mark.gpu
def test_end_to_end_on_a_gpu(tmp_path):
    result = _invoke(
        *("--device", "cuda", "--shape", "small", "--rounds", "5", "--seconds", "2"),
        *("--contender", "mok", "--contender", "torch", "--alone", "torch", "--sample", "16"),
        *("--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    document = load(tmp_path / "layer.json")
    jsonschema.validate(document, _schema())
    assert document["failures"] == []
    assert all(row["memory_bytes"] > 0 for row in document["rows"])
    counted = "none" not in str(document["machine"]["energy_counter"])
    alone = [row for row in document["rows"] if row["protocol"] == "alone"]
    # a counter that is read too seldom for 3 % is an estimate, and says so
    kinds = {row["joules_kind"] for row in alone}
    assert kinds <= {"counter", "estimate"} if counted else kinds == {None}
    assert all(row["joules"] is None or 0 < row["watts"] < 2000 for row in alone)
    assert all(item["out"] < 8e-3 for item in document["accuracy"])
    assert torch.cuda.memory_allocated() < 2**30
