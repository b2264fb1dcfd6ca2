"""ci/gpu.sh --ranks N: what N GPUs do together, how long it may take, and in which environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from gpu_scripts import FOLDER, gpu_scripts, load_script

from mok.bench.shapes import Shape
from verify.staging import prepare

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOGETHER = ("tests", "verify", "training", "peers", "forward", "backward", "bench")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with gpu_scripts() as loaded:
        yield loaded


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_part_of_ranks_knows_how_many_they_are(
    scripts: dict[str, ModuleType], tmp_path: Path, ranks: int
) -> None:
    commands = scripts["commands"]
    found = {part.name: part for part in commands.parts(commands.Place("python", tmp_path, ranks))}
    assert scripts["options"].TOGETHER == TOGETHER
    for name in TOGETHER:
        for step in found[name].steps:
            words = list(step.command)
            if name == "tests":
                continue  # see test_gpu_pytests.py
            assert words[words.index("--ranks") + 1] == str(ranks), step.name
    assert all(found[name].steps for name in TOGETHER)
    for name in found.keys() - set(TOGETHER):
        assert not any("--ranks" in step.command for step in found[name].steps)


def test_what_ranks_do_together_gets_more_time_the_more_they_are(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    commands, grown = scripts["commands"], scripts["side_by_side"].grown
    assert [grown(100.0, ranks) for ranks in (1, 2, 4, 8)] == [100, 150, 200, 250]
    seconds = {
        ranks: {
            part.name: part.seconds for part in commands.parts(commands.Place("x", tmp_path, ranks))
        }
        for ranks in (1, 2, 4, 8)
    }
    for name, least in seconds[1].items():
        times = [seconds[ranks][name] for ranks in (1, 2, 4, 8)]
        if name == "tests":
            assert times == [160, 540, 720, 900]
        elif name in TOGETHER:
            assert times == [grown(least, ranks) for ranks in (1, 2, 4, 8)]
        else:
            assert set(times) == {least}


@pytest.mark.parametrize(
    ("ranks", "words", "chosen"),
    [
        ("1", [], None),
        ("4", [], ("tests", "verify", "training", "peers", "forward", "bench")),
        ("8", ["--parts", "verify,backward"], ("verify", "backward")),
        ("1", ["--parts", "digest,verify"], ("digest", "verify")),
    ],
)
def test_ranks_run_the_parts_that_they_share(
    scripts: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: str,
    words: list[str],
    chosen: tuple[str, ...] | None,
) -> None:
    parts, seen = scripts["parts"], []

    def run_all(*given: object) -> dict[str, object]:
        seen.append(given[0])
        return {"commit": COMMIT, "seconds": 1.0, "parts": [{"name": "x", "status": "passed"}]}

    monkeypatch.setattr(parts.devices, "count", lambda: 8)
    monkeypatch.setattr(parts, "run_all", run_all)
    monkeypatch.setattr(parts.signal, "signal", lambda *_: None)
    words = [*words, "--ranks", ranks, "--commit", COMMIT, "--out", str(tmp_path)]
    done = CliRunner().invoke(parts.main, words)
    assert done.exit_code == 0, done.output
    assert seen == [chosen or scripts["options"].USUAL]


def test_a_part_of_one_gpu_is_refused_with_several_ranks(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = scripts["parts"]
    monkeypatch.setattr(parts.devices, "count", lambda: 8)
    monkeypatch.setattr(parts, "run_all", lambda *_: pytest.fail("it ran"))
    for name in set(scripts["options"].NAMES) - set(TOGETHER):
        words = ["--ranks", "2", "--parts", f"verify,{name}", "--commit", COMMIT]
        done = CliRunner().invoke(parts.main, words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"part {name} has one GPU, 2 ranks were given" in " ".join(done.stderr.split())


@pytest.mark.parametrize("given", [{}, {"NCCL_NVLS_ENABLE": "2"}])
def test_multicast_is_off_for_all_parts_unless_the_environment_says_otherwise(
    tmp_path: Path, given: dict[str, str]
) -> None:
    names = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    script = tmp_path / "ci" / "gpu.sh"
    script.parent.mkdir()
    shutil.copy(FOLDER.parent / "gpu.sh", script)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $NCCL_NVLS_ENABLE $TORCH_SYMM_MEM_DISABLE_MULTICAST\n")
    python.chmod(0o755)
    left = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        ["bash", str(script)],
        env={**left, "PYTHON": str(python), **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == list({**names, **given}.values())


@pytest.mark.parametrize("ranks", [None, 2, 4, 8])
def test_peers_have_the_small_shape_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: int | None
) -> None:
    monkeypatch.setenv("QUACK_FORCE_CACHE_UPDATE", "1")  # setup leaves it
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks is not None)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    try:
        cases = load_script("peer_rank_cases")
        count, whole = ranks or 1, cases.whole()
        small = cases.peer_cases.SMALL
        assert whole == replace(small, name="ranks", T=count * 512, E=count * 8, note=whole.note)
        monkeypatch.setattr(cases.peer_cases, "SMALL", Shape("tiny", 64, 4, 32, 16, 2))
        case = next(one for one in cases.CASES if one.name == "peers/torch/ranks")
        made = prepare(case).tensors
        assert set(made) < set(cases.SHARDED)
        for name, one in made.items():
            assert one.shape[0] == count * (4 if name.startswith("w_") else 64), name
        assert int(made["topk_experts"].max()) == 4 * count - 1  # experts of the last rank too
    finally:
        for name in ("peer_rank_cases", "peer_cases"):
            sys.modules.pop(name, None)
