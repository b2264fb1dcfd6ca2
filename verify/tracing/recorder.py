"""A recording under way: what it takes into which step, and when a step is written.

`recording` begins and ends it, and says what users may expect of it. A step's digests are written
when the next step ends, so that nobody waits for a device. It refuses to lose what was taken: an
error while a step is taken or written leaves a file that can be read up to the step before.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mok.stages import listened
from verify.environment import environment
from verify.errors import UnsupportedError
from verify.hashing import dtype_name
from verify.replaying.orders import given
from verify.tracing.choices import Choice, has_border, in_full
from verify.tracing.definitions import START
from verify.tracing.files import Header, TraceWriter
from verify.tracing.graphs import Captured, GraphEvent, GraphWatch
from verify.tracing.hooks import ModuleHooks
from verify.tracing.keeping import Keeper
from verify.tracing.queues import DigestQueue
from verify.tracing.stages import LayerStages
from verify.tracing.states import Held, Item, ModelState, random_state, rank_and_world
from verify.tracing.tensors import Found, has_digest, located

_ENVIRONMENT = (
    *("platform", "cpu_model", "cpu_capability", "python", "torch", "numpy", "blas"),
    *("num_threads", "flags", "variables", "cuda", "source"),
)
_REPEATED = ("input", "output", "grad_output", "grad_input", "probe")  # state comes once a step


class _Busy(threading.local):
    """busy: whether this thread does the recording's own work."""

    busy = False


class Recorder:
    """A recording under way. Users need `step` only."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: list[Optimizer] | None,
        level: str,
        choice: Choice,
        overwrite: bool,
    ) -> None:
        rank, world = rank_and_world()
        facts, orders = environment(), given()
        self._keeper: Keeper | None = None
        if orders is not None:  # a tool runs this script again
            self._keeper, folder, overwrite = Keeper(orders, rank), Path(orders.folder), False
            choice = self._keeper.choice(choice)
        header = Header(
            rank,
            world,
            level,
            datetime.now(UTC).isoformat(timespec="seconds"),
            {name: facts[name] for name in _ENVIRONMENT if name in facts},
            steps=choice,
        )
        self._writer = TraceWriter(folder, header, overwrite=overwrite)
        self._optimizers, self._level, self._choice = optimizers, level, choice
        self._state, self._queue = ModelState(model), DigestQueue()
        self.hooks = ModuleHooks(model, self)
        self._lock, self._busy = threading.RLock(), _Busy()
        self._graphs = GraphWatch(self, model, level)
        self._undo = ExitStack()
        self._entries: list[int] = []
        self._waiting: tuple[int, list[int], Any, dict[str, bool]] | None = None
        self._number = START
        self._full = True  # everything of this step is taken
        self._begun = False  # this step, though nothing of it was taken
        self._owes = False  # the state behind the step before, which was not taken
        self._moved: dict[Optimizer, None] = {}  # since state was taken
        self._stepping: list[Optimizer] = []
        self._stepped: list[Optimizer] = []
        self._skipped: dict[str, str] = {}
        self._open = False

    @property
    def listening(self) -> bool:
        """Whether what happens now is the program's: not after the end, nor our own work."""
        return self._open and not self._busy.busy

    def wants(self) -> bool:
        """Whether tensors are taken now, and not left out by choice. What a CUDA graph captures is
        taken, since its replays come in other steps."""
        open_now = self._open and not self._busy.busy
        return open_now and (self._full or self._graphs.capturing())

    def pass_over(self, found: Callable[[], Iterable[Found]]) -> None:
        """Takes note of tensors that are not taken by choice: with the first of them that would
        have been, their step has begun."""
        if not self.listening or self._begun or self.wants():
            return
        if any(has_digest(t) for _, t in found()):
            self._begun = True

    @property
    def left_out(self) -> bool:
        """Whether there are steps that are not taken."""
        return self._choice is not None

    def _hears(self) -> bool:
        """Whether a pass of mok's layer tells its stages; its step has begun all the same."""
        if self.wants():
            return True
        self._begun |= self.listening
        return False

    @property
    def number(self) -> int:
        """Of the step that is being recorded."""
        return self._number

    @property
    def path(self) -> Path:
        """The file of this rank."""
        return self._writer.path

    def step(self) -> None:
        """Ends the step here. Directly behind the end of a step it does nothing. While a CUDA graph
        is captured: the step ends behind each of its replays."""
        if self._open and self._graphs.capturing():
            self._graphs.ends_step(None, True)
        elif self._open and (self._entries or self._begun):
            if self._keeper is not None:
                self._keeper.stop(self._number)
            self._border()

    def begin(self) -> None:
        """Writes the state at the start, and attaches the hooks."""
        self._open = True
        self._border()
        self.hooks.attach()
        self._undo.callback(self.hooks.detach)
        self._undo.enter_context(self._graphs.attached())
        self._undo.enter_context(listened(LayerStages(self), self._hears))
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        if self._level == "op":
            from verify.tracing.operations import OperationMode

            self._undo.enter_context(OperationMode(self))

    def end(self, failure: str | None) -> None:
        """Takes the hooks away, writes what there is, and the end."""
        self._undo.close()
        if not self._open:
            return
        try:
            if failure is None:
                if self._entries or self._begun or self._number == 0:
                    self._border(last=True)
                elif self._owes:  # the step before was the last one
                    self._number, self._full = self._number - 1, False
                    self._border(last=True, late=True)
            elif self._entries or not self._full:
                self._close_step(failed=True)
            self._write_waiting()
        except BaseException as error:  # then the last step is not there
            failure = failure or f"{type(error).__name__}: {error}"
            raise
        finally:
            self._open = False
            self._queue.close()
            self._writer.close(failure or "finished", self._skipped)

    def leave(self) -> None:
        """Takes and writes nothing more, not even the end."""
        self._open = False
        self._writer.leave()

    def take(self, name: str, kind: str, module: str, found: Iterable[Found]) -> None:
        """Appends digests of tensors as they are now."""
        enters = self._keeper is not None and self._enters(kind)
        self._take(module, ((name, kind, path, t, None) for path, t in found), enters=enters)

    def skip(self, what: str, why: str) -> None:
        """Notes a value that has no digest; of the same ones, the first reason."""
        self._skipped.setdefault(what, why)

    def replay(self, captured: Captured, run: Callable[[], Any]) -> Any:
        """Runs a replay of a CUDA graph, and appends the events that were captured with it."""
        if self._keeper is not None:
            if captured.ends:
                self._keeper.stop(self._number)
            self._take("", ())  # the state before, where a step begins
        self._busy.busy = True
        try:
            with self._lock, torch.no_grad():
                before, digests = len(self._entries), captured.digests
                if digests is None or not self._full:
                    result = run()
                    self._begun |= digests is not None and bool(captured.events)
                else:
                    digests.clear()
                    result = run()
                    try:
                        places = [event.rows for event in captured.events]
                        rows = digests.lanes()
                        self._queue.put_rows(digests.index, rows, places, digests.expected)
                        for event in captured.events:
                            self._append_replayed(event)
                    except BaseException:
                        del self._entries[before:]
                        self._queue.keep(before)
                        raise
        finally:
            self._busy.busy = False
        self._stepped += [kept for one in captured.optimizers if (kept := one()) is not None]
        if captured.ends:
            self._border()
        return result

    def running_module(self) -> str:
        """The module whose forward is running, for operations."""
        return self.hooks.running()

    def _enters(self, kind: str) -> bool:
        """Whether a pass of training begins here, with what it reads: no validation (no_grad), no
        forward that a backward runs again."""
        reads = kind in ("input", "probe") and torch.is_grad_enabled() and self.hooks.idle()
        return reads and torch._C._current_graph_task_id() == -1

    def _take(
        self, module: str, held: Iterable[Item], *, enters: bool = False, state: bool = False
    ) -> None:
        """Appends digests to this step. state: also to one that is not recorded in full."""
        busy = self._busy
        if not (self._open and not busy.busy):
            return
        capturing = self._graphs.capturing()
        if not (state or self._full or capturing):
            return
        before, graded = -1, torch.is_grad_enabled()
        busy.busy = True
        try:
            with self._lock:
                if graded:  # torch.no_grad takes 1.5 us
                    torch._C._set_grad_enabled(False)
                if capturing:  # an event of each replay, and none of now
                    self._graphs.take(module, itertools.starmap(Held, held))
                    return
                before = len(self._entries)
                if self._keeper is not None:
                    opens = self._keeper.opens(before == 0, enters)
                    told = itertools.starmap(Held, held)
                    held = self._keeper.opening(self._number, opens, told, self._state)
                try:
                    for one in held:
                        self._append(module, one)
                    self._queue.launch()
                except BaseException:  # Ctrl-C comes anywhere, and a program may go on after it
                    del self._entries[before:]
                    self._queue.keep(before)
                    raise
        finally:
            if graded:
                torch._C._set_grad_enabled(True)
            busy.busy = False

    def _append(self, module: str, item: Item) -> None:
        name, kind, path, value, dtype = item
        try:
            local, whole = located(value)
            self._queue.put(local, whole, again=kind in _REPEATED)
        except UnsupportedError as error:
            self.skip(f"{kind} of {name} {path}".rstrip(), str(error))
            return
        if self._keeper is not None:
            self._keeper.see(self._number, Held(*item), local)
        told = dtype or dtype_name(local.dtype)
        self._entries.append(
            self._writer.define(name, kind, path, told, local.shape, module, whole)
        )

    def _append_replayed(self, one: GraphEvent) -> None:
        if self._keeper is not None:
            why = "it is inside of a CUDA graph, which writes over it before anybody could copy it"
            self._keeper.pass_over(self._number, (one.name, one.kind, one.path), why)
        fields = (one.name, one.kind, one.path, one.dtype, one.shape)
        self._entries.append(self._writer.define(*fields, one.module, one.whole))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._open and self._follows(optimizer):
            if self._keeper is not None:
                self._keeper.stop(self._number)
            if any(optimizer is one for one in self._stepping):
                self._stepping.clear()  # an exception ended its last step
            self._stepping.append(optimizer)
            if len(self._stepping) == 1:
                self._take("", self._state.gradients(optimizer))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._open and self._follows(optimizer) and self._stepping:
            self._stepping.pop()
            if not self._stepping:  # not of an optimizer that another one drives
                last = self._optimizers is None or optimizer is self._optimizers[-1]
                if self._graphs.capturing():
                    self._graphs.ends_step(optimizer, last)
                    return
                self._stepped.append(optimizer)
                if last:
                    self._border()

    def _follows(self, optimizer: Optimizer) -> bool:
        if self._optimizers is not None:
            return any(optimizer is one for one in self._optimizers)
        return self._state.serves(optimizer)

    def _border(self, *, last: bool = False, late: bool = False) -> None:
        """Takes the state, and ends the step. Without its state where it is not of a chosen step,
        nor before one, nor the last. Where steps before were left out, of all optimizers that have
        stepped in them, and with the gradients that they left. late: at the end, and not behind the
        step."""
        bare = not self._full
        if self._number > START and not self._stepped:
            self._take("", self._state.gradients(None))
        self._moved |= dict.fromkeys(self._stepped)
        self._owes = True
        if last or has_border(self._choice, self._number):
            stepped = list(self._moved) if bare else list(dict.fromkeys(self._stepped))
            optimizers = self._optimizers or stepped
            if bare:
                self._take("", self._state.gradients(None), state=True)
            if self._keeper is not None:
                optimizers = self._keeper.optimizers(optimizers, self._state)
            self._take("", self._state.values(), state=True)
            for optimizer in optimizers:
                self._take("", self._state.optimizer(optimizer), state=True)
            self._take("", random_state(), state=True)
            self._owes, self._moved = False, {}
        self._close_step(late=late)

    def _close_step(self, *, failed: bool = False, late: bool = False) -> None:
        with self._lock:
            # First of all, so that an error below leaves no entries without digests.
            number, entries = self._number, self._entries
            self._number, self._entries, self._stepped = number + 1, [], []
            self._full, self._begun = in_full(self._choice, number + 1), False
            if self._keeper is not None:
                self._keeper.close(number)
            try:
                self._write_waiting()
                takes_time, lanes = self._queue.drain()
            except BaseException:
                self._queue.keep(0)
                raise
            if entries or failed:
                self._waiting = (number, entries, lanes, {"failed": failed, "late": late})
            if not takes_time:
                self._write_waiting()
        self.hooks.forget_leaves()

    def _write_waiting(self) -> None:
        """Writes the step whose digests were on their way from a device."""
        if self._waiting is not None:
            number, entries, lanes, flags = self._waiting
            self._waiting = None
            self._writer.step(number, entries, lanes(), **flags)
