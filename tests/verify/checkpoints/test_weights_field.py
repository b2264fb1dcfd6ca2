"""Reports of the field about weights that were handed on: each is found, its twin stays silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import KINDS, digests, flipped, model, safetensors, weights

import verify

Counts = Callable[[str, str], None]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 130\n"


@pytest.fixture
def counts(record_property: Callable[[str, object], None]) -> Counts:
    """As for the other reports: called at the end of a test that passed."""
    return lambda identity, side: record_property("field", f"{identity} {side}")


def test_bug_27_a_selection_bias_exported_in_bf16(tmp_path: Path, counts: Counts) -> None:
    state = {**model(), "e_score_correction_bias": torch.linspace(6.817, 7.063, 238)}
    a = safetensors(tmp_path / "trainer.safetensors", state)
    b = safetensors(tmp_path / "same.safetensors", state)
    assert weights(a, b)[0] == 0
    counts("BUG-27", "twin")
    state["e_score_correction_bias"] = state["e_score_correction_bias"].bfloat16()
    code, out, _ = weights(a, safetensors(tmp_path / "sampler.safetensors", state))
    assert code == 1
    assert out.startswith("verdict=MISMATCH 8 parameters, 1 differ: 1 dtype\n")
    assert "e_score_correction_bias: equal after a cast of A to bfloat16, which changes 23" in out
    assert "| 238 distinct values in A, 9 in B\n" in out
    counts("BUG-27", "fault")


def test_bug_40_weights_that_never_arrive_after_a_wake_up(tmp_path: Path, counts: Counts) -> None:
    """Each side writes its digests at every step; from step 3 on the sampler is one behind."""
    trainer, sampler = model(), model()
    paths = []
    for step in range(6):
        trainer = {name: t + 1 for name, t in trainer.items()}
        if step < 3:
            sampler = trainer
        paths.append(
            (
                digests(tmp_path / f"trainer-{step}.json", trainer),
                digests(tmp_path / f"sampler-{step}.json", sampler),
            )
        )
        if step >= 3:
            sampler = trainer
    assert [weights(*pair)[0] for pair in paths] == [0, 0, 0, 1, 1, 1]
    assert weights(*paths[1])[1].startswith("verdict=VERIFIED 7 parameters, 0 differ\n")
    counts("BUG-40", "twin")
    assert weights(*paths[3])[1].startswith("verdict=MISMATCH 7 parameters, 7 differ: 7 bits\n")
    for step in (3, 4, 5):
        assert weights(paths[step - 1][0], paths[step][1])[0] == 0, "one version behind"
    counts("BUG-40", "fault")


class Block(torch.nn.Module):
    """Tied weights, a buffer, and a buffer that a state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.w = torch.nn.Parameter(torch.randn(1000, generator=draw))
        self.head = self.w
        self.register_buffer("expert_bias", torch.linspace(-1, 1, 16))
        self.register_buffer("inv_freq", torch.linspace(0, 1, 8), persistent=False)

    def all(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_buffers()), **self.state_dict()}


def changed(name: str) -> Block:
    block = Block()
    with torch.no_grad():
        tensor = block.all()[name]
        at = 500 if name == "w" else 3
        tensor.copy_(flipped(tensor, (at,)))
    return block


@pytest.mark.parametrize(
    ("name", "seen"),
    [("w", {"w", "head"}), ("expert_bias", {"expert_bias"}), ("inv_freq", {"inv_freq"})],
)
def test_bug_57_checksums_that_cover_too_little(
    name: str, seen: set[str], tmp_path: Path, counts: Counts
) -> None:
    before = verify.weights_digests(Block().all())
    after = verify.weights_digests(changed(name).all())
    assert {key for key in before if before[key] != after[key]} == seen
    a, b = (digests(tmp_path / f"{n}.json", x.all()) for n, x in enumerate((Block(), Block())))
    assert weights(a, b)[0] == 0
    counts("BUG-57", "twin")
    c = digests(tmp_path / "c.json", changed(name).all())
    code, out, _ = weights(a, c)
    assert code == 1
    assert all(f"\n{key}: digests differ\n" in out for key in seen)
    counts("BUG-57", "fault")


def test_bug_57_one_key_for_the_shards_of_two_ranks(tmp_path: Path, counts: Counts) -> None:
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    a = safetensors(tmp_path / "a.safetensors", {"w": whole})
    files, ranks = tmp_path / "files", tmp_path / "ranks"
    files.mkdir()
    for rank, half in enumerate(whole.chunk(2)):
        safetensors(files / f"tp{rank}.safetensors", {"w": half})
        digests(ranks / f"{rank}.json", {"w": half}, rank=rank, world=2)
    code, out, err = weights(a, files)
    assert (code, out) == (2, "")
    assert "tp1.safetensors: holds tensor 'w', as " in err
    code, out, _ = weights(a, ranks)
    assert code == 1
    assert "1 differ: 1 shape\n" in out
    counts("BUG-57", "fault")
    for rank, half in enumerate(whole.chunk(2)):
        place = {"w": (0, 4 * rank, (8, 4))}
        digests(ranks / f"{rank}.json", {"w": half}, rank=rank, world=2, places=place)
    assert weights(a, ranks)[0] == 0
    counts("BUG-57", "twin")


def test_bug_58_files_that_are_not_what_their_names_say(tmp_path: Path, counts: Counts) -> None:
    a = KINDS["file"](tmp_path, model())
    content = a.read_bytes()
    for name, broken, said in (
        ("pointer.safetensors", POINTER, "is a Git LFS pointer, not the file of 130 bytes itself"),
        ("empty.safetensors", b"", "is empty (0 bytes)"),
        ("cut.safetensors", content[:-8], "is truncated: its tensors need"),
        ("long.safetensors", content + b"\0" * 8, "8 bytes follow after its tensors'"),
        ("npy.safetensors", b"\x93NUMPY" + b"\0" * 100, "a NumPy file (.npy)"),
        ("model.pt", POINTER, "is a Git LFS pointer"),
        ("digests.json", POINTER, "is a Git LFS pointer"),
    ):
        path = tmp_path / name
        path.write_bytes(broken)
        for pair in ((a, path), (path, a)):
            code, out, err = weights(*pair)
            assert (code, out) == (2, "")
            assert err.startswith(f"verify: {path}: ")
            assert said in err
            assert err.count("\n") == 1
    counts("BUG-58", "fault")
    base = torch.randn(64, generator=torch.Generator().manual_seed(3))
    views = {"row": base[:4], "t": base[:16].view(4, 4).t(), "same": base[:1].expand(4)}
    torch.save(views, tmp_path / "views.pt")  # keeps the storage that they share
    copies = {name: view.contiguous() for name, view in views.items()}
    b = safetensors(tmp_path / "copies.safetensors", copies)
    assert weights(tmp_path / "views.pt", b)[0] == 0
    counts("BUG-58", "twin")
