"""What a training run carries from step to step, as named tensors: parameters, gradients, buffers,
optimizer state and random-number state.

Names are the model's, without wrappers, so a wrapped and a bare model agree. Python numbers and
text that optimizers keep become their bytes, with a dtype of their own (`py_float` ...).
"""

from __future__ import annotations

import gc
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from verify.errors import UnsupportedError
from verify.tracing.arrays import NoDigest
from verify.tracing.hooks import plain_name
from verify.tracing.tensors import tensors_in


class Held(NamedTuple):
    """A value of the state. dtype: overrides the tensor's name of it, for Python values."""

    name: str
    kind: str
    path: str
    value: Tensor | NoDigest
    dtype: str | None = None


Item = tuple[str, str, str, Tensor | NoDigest, str | None]
"""The fields of a Held, where there are too many to give each a class."""


class ModelState:
    """Reads a model's state by names that are worked out once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plain: dict[str, str] = {}

    def values(self) -> Iterator[Held]:
        """Parameters, then buffers; shared ones once, under their first name."""
        for name, parameter in self._model.named_parameters():
            if not is_lazy(parameter):  # it has no value yet
                yield Held(self._name(name), "parameter", "", parameter)
        for name, buffer in self._model.named_buffers():
            if not is_lazy(buffer):
                yield Held(self._name(name), "buffer", "", buffer)

    def gradients(self, optimizer: Optimizer | None) -> Iterator[Held]:
        """Gradients that are there, of all parameters or of those that an optimizer holds."""
        held = None if optimizer is None else {id(one) for one in _parameters_of(optimizer)}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and (held is None or id(parameter) in held):
                yield Held(self._name(name), "grad", "", parameter.grad)

    def optimizer(self, optimizer: Optimizer) -> Iterator[Held]:
        """An optimizer's state by parameter, and the settings of its groups."""
        for name, parameter in self._model.named_parameters():
            state = optimizer.state.get(parameter)
            if state:
                yield from _settings(self._name(name), state)
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            yield from _settings(f"(group {number})", settings)

    def serves(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a parameter of the model."""
        mine = {id(one) for one in self._model.parameters()}
        return any(id(one) in mine for one in _parameters_of(optimizer))

    def served(self) -> list[Optimizer]:
        """All optimizers that hold a parameter of the model, by their first one. Slow: it asks the
        garbage collector."""
        every = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
        order = {id(one): place for place, one in enumerate(self._model.parameters())}
        first = {
            id(one): min((order.get(id(p), len(order)) for p in _parameters_of(one)), default=-1)
            for one in every
            if self.serves(one)
        }
        return sorted((one for one in every if id(one) in first), key=lambda one: first[id(one)])

    def _name(self, name: str) -> str:
        found = self._plain.get(name)
        if found is None:
            found = self._plain[name] = plain_name(self._model, name)
        return found


def listed_optimizers(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer] | None:
    """One or several as a list; UnsupportedError for what is no optimizer."""
    if optimizer is None:
        return None
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not given or not all(isinstance(one, Optimizer) for one in given):
        raise UnsupportedError(
            "optimizer is a torch.optim.Optimizer, a list of them or None; of a wrapper give the "
            "optimizer inside"
        )
    return given


def rank_and_world() -> tuple[int, int]:
    """This process in torch.distributed, or the only one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def random_state() -> Iterator[Held]:
    """The global generators of torch (each device that is in use), numpy and Python."""
    yield Held("torch", "rng", "", torch.get_rng_state())
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            yield Held(f"cuda:{index}", "rng", "", torch.cuda.get_rng_state(index))
    state: Any = np.random.get_state(legacy=False)
    key = np.asarray(state["state"].get("key", ()), np.uint32)
    rest = repr((state["bit_generator"], state["state"].get("pos"), state["has_gauss"]))
    gauss = struct.pack("<d", state["gauss"])
    yield Held("numpy", "rng", "", _bytes(key.tobytes() + rest.encode() + gauss))
    version, numbers, gauss_next = random.getstate()
    words = np.array(numbers, np.uint32).tobytes()
    yield Held("python", "rng", "", _bytes(words + repr((version, gauss_next)).encode()))


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _settings(name: str, settings: Mapping[str, Any]) -> Iterator[Held]:
    for key, value in settings.items():
        for path, plain in _python_values(str(key), value):
            yield Held(name, "optimizer", path, _bytes(_packed(plain)), f"py_{_kind(plain)}")
        for path, t in tensors_in(value, str(key)):
            yield Held(name, "optimizer", path, t)


def _python_values(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool | int | float | str) or value is None:
        yield path, value
    elif isinstance(value, tuple | list):
        for index, inner in enumerate(value):
            yield from _python_values(f"{path}.{index}", inner)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _python_values(f"{path}.{key}", inner)


def _kind(value: Any) -> str:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind.__name__
    return "None"


def _packed(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return int(value).to_bytes(int(value).bit_length() // 8 + 1, "little", signed=True)


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
