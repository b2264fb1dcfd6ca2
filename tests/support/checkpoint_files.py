"""Small checkpoints of every kind for tests of `verify weights`, and the command itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import verify
from verify.checkpoints.opening import opened
from verify.cli import main
from verify.errors import InputFileError

State = dict[str, Tensor]


def model(seed: int = 0) -> State:
    """Two layers, a norm and an embedding; bf16 but for the norm."""
    draw = torch.Generator().manual_seed(seed)
    found: State = {"embed.weight": torch.randn(16, 8, generator=draw).bfloat16()}
    for layer in range(2):
        for name in ("up", "down"):
            found[f"layers.{layer}.{name}.weight"] = torch.randn(8, 8, generator=draw).bfloat16()
        found[f"layers.{layer}.norm.weight"] = torch.randn(8, generator=draw)
    return found


def weights(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `verify weights`; nothing unexpected may be in them."""
    done = CliRunner().invoke(main, ["weights", *map(str, words)], prog_name="verify")
    assert "Traceback" not in done.output
    assert "unexpected" not in done.stderr
    return done.exit_code, done.stdout, done.stderr


def record(*words: object) -> dict:
    """What `verify weights --format json` prints."""
    return json.loads(weights(*words, "--format", "json")[1])


def safetensors(path: Path, state: Mapping[str, Tensor]) -> Path:
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)
    return path


def shards(top: Path, state: Mapping[str, Tensor], *, count: int = 2, index: bool = True) -> Path:
    """A folder as models are published: numbered files, and what lies where."""
    top.mkdir()
    names = list(state)
    homes = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        some = names[number::count]
        safetensors(top / file, {name: state[name] for name in some})
        homes |= dict.fromkeys(some, file)
    if index:
        document = {"metadata": {"total_size": 1}, "weight_map": homes}
        (top / "model.safetensors.index.json").write_text(json.dumps(document))
    return top


def saved(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


def digests(path: Path, state: Mapping[str, object], **options) -> Path:
    verify.save_weights_digests(path, state, **options)
    return path


class Pieces(Tensor):
    """A tensor that torch.distributed.checkpoint stores in pieces, as ranks do together."""

    _boxes: Sequence[Sequence[tuple[int, int]]]

    @classmethod
    def of(cls, whole: Tensor, boxes: Sequence[Sequence[tuple[int, int]]]) -> Pieces:
        made = whole.as_subclass(cls)
        made._boxes = boxes
        return made

    def __create_write_items__(self, fqn: str, _value: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), self.size()),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                torch.Size(start for start, _ in box), torch.Size(end - at for at, end in box)
            )
            for box in self._boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = self._boxes[index.index or 0]
        return self.as_subclass(Tensor)[tuple(slice(*edge) for edge in box)]


def distributed(top: Path, state: Mapping[str, object], **options) -> Path:
    """A folder of torch.distributed.checkpoint, written by this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(top, **options)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
    return top


KINDS: dict[str, Callable[[Path, State], Path]] = {
    "file": lambda top, state: safetensors(top / "m.safetensors", state),
    "shards": lambda top, state: shards(top / "shards", state),
    "unindexed": lambda top, state: shards(top / "unindexed", state, index=False),
    "saved": lambda top, state: saved(top / "m.pt", state),
    "distributed": lambda top, state: distributed(top / "dcp", state),
    "digests": lambda top, state: digests(top / "m.json", state),
}


def flipped(tensor: Tensor, at: tuple[int, ...], bit: int = 0) -> Tensor:
    """A copy with one bit of one element inverted."""
    out = tensor.clone()
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32}[out.element_size()]
    out.view(word)[at] ^= 1 << bit
    return out


def refused(path: Path) -> str:
    """Why this is refused, when it is opened or when its tensors are read."""
    with pytest.raises(InputFileError) as caught:
        load_all(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def refused_at_once(path: Path) -> str:
    """Why this is refused before any tensor is read."""
    with pytest.raises(InputFileError) as caught, opened(path):
        pass
    return str(caught.value)


def load_all(path: Path) -> None:
    with opened(path) as found:
        for parameter in found.parameters.values():
            if parameter.load:
                parameter.load()


class Runs:
    """Unpickled, it calls a function."""

    def __init__(self, function, *words) -> None:
        self._called = (function, words)

    def __reduce__(self):
        return self._called
