"""Signals wait until what must not be struck is over, and then each reaches its own handler."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest
from struck_starts import strike_start

from verify import joining
from verify.interrupts import interrupts_held


class Told(Exception):
    pass


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def held(number: int, times: int, reached: list[str]) -> None:
    with interrupts_held():
        for _ in range(times):
            signal.raise_signal(number)
        reached.append("end")


def test_an_interrupt_comes_after_the_block() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        held(signal.SIGINT, 2, reached)
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_termination_reaches_the_handler_of_the_program() -> None:
    def tell(number: int, frame: object) -> None:
        raise Told

    signal.signal(signal.SIGTERM, tell)
    reached: list[str] = []
    with pytest.raises(Told):
        held(signal.SIGTERM, 1, reached)
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGTERM) is tell


def test_a_termination_is_not_lost_behind_an_interrupt() -> None:
    reached: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: reached.append("terminated"))

    def both() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        both()
    assert reached == ["terminated"]


def test_holds_inside_of_a_hold_deliver_at_the_end_of_the_outer_one() -> None:
    reached: list[str] = []

    def nested() -> None:
        with interrupts_held():
            held(signal.SIGINT, 1, reached)
            reached.append("between")
            with interrupts_held():
                reached.append("again")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert reached == ["end", "between", "again"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_the_system_handles_stays_as_it_is(ignored: signal.Handlers) -> None:
    signal.signal(signal.SIGTERM, ignored)
    with interrupts_held():
        assert signal.getsignal(signal.SIGTERM) is ignored
        if ignored is signal.SIG_IGN:
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is ignored


def test_silent_without_a_signal_and_off_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen = []

    def hold() -> None:
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    with interrupts_held():
        pass
    other = threading.Thread(target=hold)
    other.start()
    other.join()
    assert seen == [before[0]]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_error_of_the_block_is_not_lost() -> None:
    with pytest.raises(ValueError, match="mine"), interrupts_held():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_does_not_hide_the_error_of_the_block() -> None:
    def fail() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("mine")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, ValueError)


def test_an_interrupt_leaves_no_fresh_process_of_a_joined_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = strike_start(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        joining._exit_code(["sleep", "60"], {"PATH": "/bin:/usr/bin"}, subprocess.DEVNULL, 60)
    assert [one.returncode for one in started] == [-signal.SIGKILL]


@pytest.mark.parametrize(
    ("words", "seconds", "code"), [("exit 3", 60, 3), ("true", 60, 0), ("sleep 60", 0.05, None)]
)
def test_the_exit_code_of_a_fresh_process(words: str, seconds: float, code: int | None) -> None:
    found = joining._exit_code(["sh", "-c", words], {}, subprocess.DEVNULL, seconds)
    assert found == code
