"""Finds out what a path is, by its content, and opens it as a checkpoint.

It refuses to guess: a folder that holds two kinds of checkpoints, or a file of none, is an error
that says what was found and what is taken. torch is imported only for what holds tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from verify import input_files
from verify.checkpoints import digest_files
from verify.checkpoints.parameters import Checkpoint
from verify.errors import InputFileError

_TAKEN = (
    "taken are safetensors files and folders, folders of torch.distributed.checkpoint, files of "
    "torch.save, and files or folders of digests (verify.save_weights_digests)"
)


def opened(path: Path) -> AbstractContextManager[Checkpoint]:
    """The checkpoint. InputFileError naming the file and the reason, then or when it is entered."""
    if not input_files.exists(path):
        raise InputFileError(f"{path}: no such file or folder")
    return _folder(path) if path.is_dir() else _file(path)


def _folder(path: Path) -> AbstractContextManager[Checkpoint]:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from None
    tensors = [name for name in names if name.endswith(".safetensors")]
    index = [name for name in names if name.endswith(".safetensors.index.json")]
    digests = [
        path / name
        for name in names
        if name.endswith(".json") and not name.startswith(".") and digest_files.is_one(path / name)
    ]
    kinds = [
        kind
        for kind, there in (
            ("torch.distributed.checkpoint", ".metadata" in names),
            ("safetensors", tensors or index),
            ("digests", digests),
        )
        if there
    ]
    if len(kinds) > 1:
        raise InputFileError(
            f"{path}: holds {' and '.join(kinds)}: give the file, or a folder of one"
        )
    if kinds == ["torch.distributed.checkpoint"]:
        from verify.checkpoints import distributed

        return distributed.folder(path)
    if kinds == ["safetensors"]:
        from verify.checkpoints import tensor_folders

        return tensor_folders.folder(path)
    if kinds == ["digests"]:
        return nullcontext(digest_files.read(digests, str(path), folder=True))
    if any(name.startswith("__") and name.endswith(".metadata") for name in names):
        raise InputFileError(
            f"{path}: was saved by torch.distributed.checkpoint without the coordination of ranks: "
            "only a folder with a .metadata of all ranks is taken"
        )
    if any(name.endswith((".distcp", ".bin", ".pt", ".pth")) for name in names):
        some = next(name for name in names if name.endswith((".distcp", ".bin", ".pt", ".pth")))
        what = "but no .metadata" if some.endswith(".distcp") else "give the file"
        raise InputFileError(f"{path}: holds {some}, {what}; {_TAKEN}")
    raise InputFileError(f"{path}: holds no checkpoint; {_TAKEN}")


def _file(path: Path) -> AbstractContextManager[Checkpoint]:
    problem = input_files.problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    if path.name.endswith(".safetensors.index.json"):
        from verify.checkpoints import tensor_folders

        return tensor_folders.folder(path.parent, path)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from None
    if path.suffix == ".json" or digest_files.is_one(path):
        return nullcontext(digest_files.read([path], str(path), folder=False))
    if path.suffix != ".safetensors" and head[:2] in (b"PK", b"\x80\x02"):
        from verify.checkpoints import saved

        return saved.file(path)
    known = path.suffix == ".safetensors" or head[8:9] == b"{" or head.startswith(b"version ")
    if head and not known:
        raise InputFileError(f"{path}: begins with {head!r}, as no checkpoint does; {_TAKEN}")
    from verify.checkpoints import tensor_folders

    return tensor_folders.file(path)
