"""Files and folders of other people: each is read, or refused with a reason."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import weakref
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    KINDS,
    Runs,
    digests,
    distributed,
    model,
    refused,
    safetensors,
    saved,
    shards,
    weights,
)

from verify.checkpoints import comparing, parameters
from verify.checkpoints.opening import opened


@pytest.fixture
def whole(tmp_path) -> Path:
    return safetensors(tmp_path / "whole.safetensors", model())


def test_nested_values_of_torch_save(tmp_path, whole) -> None:
    state = model()
    nested = {"model": state, "epoch": 3, "rates": [0.1, torch.ones(1)]}
    path = saved(tmp_path / "all.pt", nested)
    words = ("--rename", "model.*=*", "--ignore", "rates.1")
    code, out, _ = weights(path, whole, *words)
    assert code == 0
    assert "note: A: 2 values are no tensors and not compared: epoch, rates.0\n" in out
    torch.save(nested, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert weights(tmp_path / "old.pt", whole, *words)[0] == 0


def test_torch_save_with_code_is_refused(tmp_path) -> None:
    mark = tmp_path / "mark"
    path = saved(tmp_path / "a.pt", {"w": torch.ones(2), "run": Runs(os.system, f"touch {mark}")})
    said = refused(path)
    assert "not a torch.save file of tensors: " in said
    assert "posix.system" in said
    assert not mark.exists()
    assert "Linear" in refused(saved(tmp_path / "b.pt", torch.nn.Linear(2, 2)))
    endless: list = [torch.ones(1)]
    endless.append(endless)
    assert "nested without end" in refused(saved(tmp_path / "c.pt", endless))
    content = KINDS["saved"](tmp_path, model()).read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    assert "not a torch.save file of tensors: " in refused(tmp_path / "cut.pt")


def test_sparse_tensors_are_refused_until_ignored(tmp_path, whole) -> None:
    state = {**model(), "norm": torch.eye(3).to_sparse()}
    path = saved(tmp_path / "a.pt", state)
    other = safetensors(tmp_path / "b.safetensors", {**model(), "norm": torch.eye(3)})
    code, _, err = weights(path, other)
    assert code == 2
    assert "'norm': no digest of a tensor of layout torch.sparse_coo" in err
    assert "or leave it out with --ignore" in err
    assert weights(path, whole, "--ignore", "norm")[0] == 0


def test_an_index_that_does_not_fit_its_files(tmp_path, whole) -> None:
    top = shards(tmp_path / "s", model())
    index = top / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    assert weights(index, whole)[0] == 0

    def told(change) -> str:
        changed = json.loads(json.dumps(document))
        change(changed["weight_map"])
        index.write_text(json.dumps(changed))
        return refused(top)

    one, two = sorted(set(document["weight_map"].values()))
    name = next(name for name, home in document["weight_map"].items() if home == one)
    assert f"{name!r} is not in {two}; {one} holds it" in told(lambda m: m.update({name: two}))
    assert "'more' is not in" in told(lambda m: m.update(more=one))
    assert f"does not name tensor {name!r}, which {one} holds" in told(lambda m: m.pop(name))
    assert "'../x', which is no name of a file" in told(lambda m: m.update(more="../x"))
    index.write_text("{}")
    assert "it has no weight_map" in refused(top)
    index.write_text(json.dumps(document))
    safetensors(top / "consolidated.safetensors", {"x": torch.ones(1)})
    assert "does not name consolidated.safetensors: not read\n" in weights(top, whole)[1]
    (top / "other.safetensors.index.json").write_text(json.dumps(document))
    assert "holds several indices" in refused(top)


def test_what_is_no_checkpoint(tmp_path) -> None:
    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    assert "no such file or folder" in refused(tmp_path / "gone")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no checkpoint; taken are safetensors files" in refused(empty)
    assert "as no checkpoint does; taken are" in refused(file("a.npy", b"\x93NUMPY" + b"\0" * 90))
    assert "is empty (0 bytes)" in refused(file("b.bin", b""))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4096\n"
    for name in ("c.safetensors", "c.bin"):
        assert "is a Git LFS pointer" in refused(file(name, pointer))
    content = safetensors(tmp_path / "d.safetensors", model()).read_bytes()
    assert "is truncated" in refused(file("d.safetensors", content[:-8]))
    assert "bytes follow after" in refused(file("d.safetensors", content + b"\0" * 8))
    with opened(file("no-suffix", content)) as found:
        assert len(found.parameters) == 7
    with zipfile.ZipFile(tmp_path / "e.zip", "w") as archive:
        archive.writestr("x", "y")
    assert "not a torch.save file of tensors" in refused(tmp_path / "e.zip")
    two = distributed(tmp_path / "two", model())
    safetensors(two / "m.safetensors", model())
    assert "holds torch.distributed.checkpoint and safetensors: give the file, or" in refused(two)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "__0.metadata").write_bytes(b"")
    assert "without the coordination of ranks" in refused(alone)
    saved(alone / "pytorch_model.bin", model())
    (alone / "__0.metadata").unlink()
    assert "holds pytorch_model.bin, give the file" in refused(alone)


def test_comparing_digests_and_help_import_no_torch(tmp_path) -> None:
    state = model()
    a, b = digests(tmp_path / "a.json", state), digests(tmp_path / "b.json", state)
    code = (
        "import sys; from verify.cli import main\n"
        "end = 0\n"
        "for words in (['weights', '--help'], ['weights', *sys.argv[1:]]):\n"
        "    try: end += main.main(words, standalone_mode=False) or 0\n"
        "    except SystemExit as stop: end += stop.code\n"
        "sys.exit(end or 9 * ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(a), str(b)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "verdict=VERIFIED 7 parameters, 0 differ\n" in done.stdout


def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch) -> None:
    """Of each side, whatever differs: loads are counted, and what they gave is gone by the next."""

    alive: list[weakref.ref] = []
    most = 0

    def load(value: int):
        def made() -> torch.Tensor:
            nonlocal most
            tensor = torch.full((4, 4), float(value))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in alive))
            return tensor

        return made

    sides = []
    for side in range(2):
        found = {
            f"w.{n}": parameters.Parameter(
                f"w.{n}", "float32", (4, 4), load(n + 50 * side * (n > 3))
            )
            for n in range(9)
        }
        sides.append(parameters.Checkpoint("here", "test", found))
    diff = comparing.compare_checkpoints(*sides)
    assert len(diff.findings) == 5
    assert most == 2


def test_bytes_of_a_pickle_are_not_run_while_the_kind_is_found_out(tmp_path) -> None:
    mark = tmp_path / "mark"
    stream = io.BytesIO()
    pickle.dump(Runs(os.system, f"touch {mark}"), stream, protocol=2)
    (tmp_path / "weights.bin").write_bytes(stream.getvalue())
    refused(tmp_path / "weights.bin")
    assert not mark.exists()
