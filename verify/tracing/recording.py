"""`verify.record` and `verify.probe`: digests of all that a training run computes, in a file.

    with verify.record("run_a", model, optimizer):
        for batch in batches:
            train_step(batch)

A step ends behind `optimizer.step()`: it holds the inputs, outputs and gradients of all modules in
the order of execution, the parameters' gradients as the optimizer found them, and behind them the
parameters, buffers, optimizer state and random-number state that it left. Step -1 is the state at
the start. Recording changes no bit of the run: it draws no random numbers, adds no node to the
graph, and leaves what torch.compile compiles alone. What is captured into a CUDA graph inside of
the `with` is recorded at each of its replays (`graphs`).

With `every=100`, or `steps=range(1000, 1010)`, the other steps are not recorded but for the state
behind the last one before a chosen step and that at the end (`choices`). They cost a few
microseconds a call of a module, at op level a few an operation.

Refuses a second recording inside of one, and a folder that has one of this rank already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from verify.errors import UnsupportedError
from verify.tracing.choices import chosen
from verify.tracing.definitions import LEVELS
from verify.tracing.graphs import capturing
from verify.tracing.hooks import gradients_follow
from verify.tracing.recorder import Recorder
from verify.tracing.states import listed_optimizers
from verify.tracing.tensors import tensors_in

_active: list[Recorder] = []  # the recording that is under way, for `probe`; at most one
Value = TypeVar("Value")


@contextmanager
def record(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    level: str = "module",
    every: int = 1,
    steps: range | None = None,
    overwrite: bool = False,
) -> Iterator[Recorder]:
    """Records what happens inside the `with`, to `folder/rank-00000.trace` (and so on by rank).

    optimizer: a step ends behind its `step()`; of several, behind that of the last one. None takes
    every optimizer that holds a parameter of the model; without one the block is a single step.
    level: "module", or "op" for every operation of torch, too. every: steps 0, `every`, 2 `every`
    and so on are recorded in full; steps: these are, instead. Of the others only the state behind
    the last one before such a step is, and that at the end of the `with`. overwrite: replaces a
    file that is there.

    UnsupportedError inside of another recording, InputFileError for a file that is there or cannot
    be written. An exception ends the file with a step marked as failed, and goes on.
    """
    if level not in LEVELS:
        raise UnsupportedError(f"level is {level!r}; allowed are {' and '.join(LEVELS)}")
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            "record takes a folder and then a torch.nn.Module, not a "
            f"{type(folder).__name__} and then a {type(model).__name__}"
        )
    if _active:
        raise UnsupportedError(
            "a recording is under way: end it first, or give one module that holds both models"
        )
    if capturing():
        raise UnsupportedError(
            "a recording cannot begin while a CUDA graph is captured: begin it before"
        )
    choice = chosen(every, steps)
    optimizers = listed_optimizers(optimizer)
    recorder = Recorder(Path(folder), model, optimizers, level, choice, overwrite)
    _active.append(recorder)
    try:
        recorder.begin()
        yield recorder
    except BaseException as error:
        recorder.end(f"{type(error).__name__}: {error}")
        raise
    else:
        recorder.end(None)
    finally:
        if recorder in _active:  # not in a process that was forked inside
            _active.remove(recorder)


def probe(name: str, value: Value) -> Value:
    """Records the tensors in `value` (in any nesting) under `name`, and their gradients.

    Returns `value` itself. Does nothing outside of a recording, and inside of what torch.compile
    compiles. A gradient's path ends in `grad`.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not _active:
        return value
    recorder = _active[0]
    if not recorder.wants():
        recorder.pass_over(lambda: tensors_in(value))
        return value
    found = list(tensors_in(value))
    recorder.take(name, "probe", "", found)
    for path, t in found:
        if isinstance(t, torch.Tensor) and t.requires_grad and gradients_follow():
            recorder.hooks.on_gradient(t, name, "probe", "", f"{path}.grad" if path else "grad")
    return value


def _forked() -> None:
    """In a child process, such as a worker of a DataLoader: the recording is its parent's."""
    while _active:
        _active.pop().leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
