"""What a recording does besides when a tool runs its script again: it keeps the tensors of chosen
events, notes the generators at the beginning of each step, and stops.

Kept tensors lie beside the recording, `rank-00000.step-3.safetensors`, complete or not at all: each
file is written under another name first. They are copies as of the moment of the event. It refuses
a second recording in one run, since nobody could say which of the two is meant, and keeps no more
than MOST_BYTES of each run's events besides the first that is wanted, the culprit's.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from verify.errors import UnsupportedError
from verify.hashing import plain_tensor
from verify.replaying.orders import BEFORE, Orders, Stopped
from verify.tensor_files import opened
from verify.tracing.choices import Choice
from verify.tracing.definitions import START, Key
from verify.tracing.frames import file_name, unwritable
from verify.tracing.states import Held, ModelState, random_state

MOST_BYTES = 2**31  # of one rank and run
_FEWEST = 4  # distinct values, from which on all of them being narrow is no chance
_LOOKED_AT = 4096  # elements among which there must be so many
_NARROW = (torch.bfloat16, torch.float16)
_WIDE = (torch.float32, torch.float64)
Kept = dict[Key, Tensor]


class Keeper:
    """Follows a recorder of one rank. Not for several threads at a time."""

    def __init__(self, orders: Orders, rank: int) -> None:
        if (Path(orders.folder) / file_name(rank)).exists():
            raise UnsupportedError(
                "a second recording in one run: a script that is run again has one `with "
                "verify.record(...)`, around all its steps"
            )
        self._orders, self._rank = orders, rank
        self._wanted: dict[int, dict[tuple[str, str, str], set[int]]] = {}
        for one, step, name, kind, path, occurrence in orders.keep:
            if one in (None, rank):
                places = self._wanted.setdefault(step, {})
                places.setdefault((name, kind, path), set()).add(occurrence)
        self._seen: dict[tuple[str, str, str], int] = {}
        self._kept: dict[str, Tensor] = {}
        self._left: dict[str, str] = {}
        self._bytes = 0
        self._narrow: list[tuple[str, str, str, str]] = []
        self._optimizers: list[Optimizer] = []
        self._searches: bool | None = None
        self._looked = False
        self._entering = False

    def choice(self, script: Choice) -> Choice:
        """The steps that are recorded in full, where the script's own choice is this."""
        if self._orders.steps is not None:
            return range(*self._orders.steps)
        return None if self._orders.states else script

    def optimizers(self, known: list[Optimizer], state: ModelState) -> list[Optimizer]:
        """The optimizers of a border: those that are known there, or at the start all that serve
        the model, so that what a resumed run has loaded is looked at."""
        if self._searches is None:
            self._searches = self._orders.states and not known
            known = self._search(state) if self._searches else known
        mine = {id(one.param_groups) for one in self._optimizers}  # a wrapper shares its inner's
        self._optimizers += [one for one in known if id(one.param_groups) not in mine]
        return known

    def _search(self, state: ModelState) -> list[Optimizer]:
        gc.collect()  # one that a resume replaced lives on in a cycle with its scheduler
        return in_use(state.served())

    def opens(self, first: bool, enters: bool) -> bool:
        """Whether the state is taken before what comes now: where a step begins, and where a pass
        of training does, since a checkpoint may be saved behind a validation or a step that a loss
        scaler skipped. enters: whether what comes is read by such a pass."""
        opens = first or (enters and not self._entering)
        self._entering = enters
        return opens

    def opening(
        self, number: int, opens: bool, held: Iterable[Held], state: ModelState
    ) -> Iterator[Held]:
        """`held`, and if it `opens` the state before it: generators, and probes with the names of
        `probed`."""
        if self._orders.states and opens:
            if number > START:
                if self._searches and number == 0 and not self._looked:
                    self._looked = True  # trainers make theirs behind the start
                    self._optimizers = self._search(state)
                for one in state.values():
                    yield probed(one)
                for optimizer in self._optimizers:
                    for one in state.optimizer(optimizer):
                        yield probed(one)
            for one in random_state():
                yield one._replace(path=BEFORE)
        yield from held

    def stop(self, number: int) -> None:
        """Raises Stopped when the steps before `number` are all that were asked for."""
        if self._orders.stop_after is not None and number >= self._orders.stop_after:
            raise Stopped(number)

    def see(self, number: int, one: Held, local: Tensor) -> None:
        """Takes note of an event of step `number`. local: the tensor that this rank has."""
        if number == START and self._orders.narrow:
            dtype = narrow_dtype(local)
            if dtype:
                self._narrow.append((one.name, one.kind, one.path, dtype))
        place = (one.name, one.kind, one.path)
        wanted = self._wanted.get(number, {}).get(place)
        if wanted is None:
            return
        occurrence = self._seen.get(place, 0)
        self._seen[place] = occurrence + 1
        if occurrence in wanted:
            first = self._orders.keep[0][1:] == (number, *place, occurrence)
            self._keep(_name((*place, occurrence)), local, 0 if first else self._bytes)

    def pass_over(self, number: int, place: tuple[str, str, str], why: str) -> None:
        """Takes note of an event of step `number` whose tensor cannot be had."""
        wanted = self._wanted.get(number, {}).get(place)
        if wanted is not None:
            occurrence = self._seen.get(place, 0)
            self._seen[place] = occurrence + 1
            if occurrence in wanted:
                self._left[_name((*place, occurrence))] = why

    def close(self, number: int) -> None:
        """A step has ended: writes what was kept of it."""
        if number == START and self._orders.narrow:
            self._write("narrow.json", json.dumps(self._narrow).encode())
        if self._left:
            self._write(f"step-{number}.left.json", json.dumps(self._left).encode())
        if self._kept:
            from safetensors.torch import save

            self._write(f"step-{number}.safetensors", save(self._kept))
        self._seen, self._kept, self._left = {}, {}, {}

    def _keep(self, name: str, local: Tensor, used: int) -> None:
        if used + local.nbytes > MOST_BYTES:
            self._left[name] = f"more than {MOST_BYTES / 2**30:.0f} GiB would be kept"
            return
        plain = plain_tensor(local).detach()
        try:
            copy = plain.resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
            _storable(copy)
        except (RuntimeError, NotImplementedError, KeyError, ValueError, TypeError) as error:
            self._left[name] = f"{type(error).__name__}: {error}"
            return
        self._bytes += copy.nbytes
        self._kept[name] = copy

    def _write(self, ending: str, content: bytes) -> None:
        path = Path(self._orders.folder) / f"{Path(file_name(self._rank)).stem}.{ending}"
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise unwritable(path, error) from error


def in_use(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Optimizers without wrappers of others, and without those that nothing was loaded into where
    another one has state for their parameters."""
    found = list({id(one.param_groups): one for one in reversed(optimizers)}.values())[::-1]
    held = {
        id(p) for one in found if one.state for group in one.param_groups for p in group["params"]
    }
    return [
        one
        for one in found
        if one.state or not all(id(p) in held for g in one.param_groups for p in g["params"])
    ]


def probed(one: Held) -> Held:
    """A value of the state as the probe by which a step begins with it; `found_state` of
    `verify.replaying.borders` reads it back."""
    path = f"{one.path} {BEFORE}".strip()
    return one._replace(name=f"{one.kind} {one.name}", kind="probe", path=path)


def kept_tensors(folder: Path, rank: int, step: int) -> tuple[Kept, dict[Key, str]]:
    """The tensors that a rank kept of a step, and what it could not keep, with the reasons.

    Empty where nothing was kept. InputFileError for a file that cannot be read.
    """
    stem = f"{Path(file_name(rank)).stem}.step-{step}"
    path, beside = folder / f"{stem}.safetensors", folder / f"{stem}.left.json"
    left = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    kept: Kept = {}
    if path.exists():
        with opened(path) as file:
            kept = {_key(name): file.tensor(name) for name in file.names}
    return kept, {_key(name): why for name, why in left.items()}


def narrow_dtype(t: Tensor) -> str:
    """The narrower dtype that holds all values of a float tensor, or "".

    "" also for values that say nothing: few distinct ones, and integers, which any may hold.
    """
    if t.dtype not in _WIDE or t.numel() < _FEWEST:
        return ""
    values = plain_tensor(t)
    if not bool(torch.isfinite(values).all()) or bool((values == values.round()).all()):
        return ""
    if len(values.reshape(-1)[:_LOOKED_AT].unique()) < _FEWEST:
        return ""
    for dtype in _NARROW:
        if bool((values.to(dtype).to(values.dtype) == values).all()):
            return str(dtype).removeprefix("torch.")
    return ""


def _storable(t: Tensor) -> None:
    """Raises for a dtype that a safetensors file cannot hold."""
    from safetensors.torch import save

    save({"x": t.new_empty(0)})


def _name(key: Key) -> str:
    return json.dumps(key)


def _key(name: str) -> Key:
    module, kind, path, occurrence = json.loads(name)
    return (module, kind, path, occurrence)
