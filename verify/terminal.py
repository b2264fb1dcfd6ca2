"""What all verbs share: how errors end a command, where output goes, when progress is shown.

The exit codes are a closed list (0, 1, 2, 3), so nothing that goes wrong in the tool may look like
a verdict: an interrupt, SIGTERM, a closed pipe, a `sys.exit(0)` in the code under test and an
unexpected exception all end with 2; and the process ends without running what the code under test
registered for its exit. It refuses to print progress anywhere but on a terminal's stderr.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import click

from verify.errors import VerifyError
from verify.reasons import EXIT_USAGE
from verify.rendering.escaping import printable
from verify.targets import told

EXITS = (
    "Exit codes: 0 verified, 1 mismatch, 2 usage, input-file or tool error, "
    "3 nothing wrong found but something unverified, or nothing ran."
)
TEXT_OR_JSON = click.option(
    "--format",
    "form",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="What is printed on stdout.",
)


class Terminated(SystemExit):
    """SIGTERM came: everything is cleaned up on the way out."""


class Verbs(click.Group):
    """A group whose commands end with the documented exit codes, whatever is raised in them."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """What the console script and `python -m verify` call: it ends the process.

        By os._exit, since the code under test was imported here and may have registered an exit
        of its own (atexit), or threads that never end.
        """
        _clean_up_when_told_to_end()
        try:
            self.main(*args, **kwargs)
            code = EXIT_USAGE  # not reached: main exits
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else EXIT_USAGE
        except KeyboardInterrupt:
            code = EXIT_USAGE
        except BaseException:
            traceback.print_exc()
            code = EXIT_USAGE
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                code = EXIT_USAGE  # the verdict was not delivered
        os._exit(code)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """As click's, except that an interrupt does not end with 1, and a verb's result counts."""
        rest = (args, prog_name, complete_var)
        if not standalone_mode:
            return super().main(*rest, standalone_mode=False, **extra)
        try:
            code = super().main(*rest, standalone_mode=False, **extra)
        except click.ClickException as error:
            error.show()
            code = EXIT_USAGE
        except click.Abort:
            code = fail("interrupted; nothing is claimed")
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb; whatever escapes from it becomes a message and exit code 2."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            return fail("interrupted; nothing is claimed")
        except Terminated:
            return fail("terminated; nothing is claimed")
        except SystemExit as error:
            return fail(f"the code under test called sys.exit({error.code!r})")
        except BrokenPipeError:
            _discard_output()  # the reader is gone: the verdict was not delivered
            return EXIT_USAGE
        except VerifyError as error:
            return fail(str(error))
        except Exception as error:
            if os.environ.get("VERIFY_DEBUG") == "1":
                click.echo(traceback.format_exc(), err=True)
            kind = type(error).__name__
            return fail(f"unexpected {kind}: {told(error)} (VERIFY_DEBUG=1 shows the traceback)")


def fail(message: str) -> int:
    """Prints the message on stderr and returns the exit code of errors."""
    click.echo("verify: " + "\n".join(map(printable, message.splitlines())), err=True)
    return EXIT_USAGE


def epilog(*examples: str) -> str:
    """The end of a verb's help: examples, then the exit codes."""
    shown = "\n".join(f"  {example}" for example in examples)
    return f"\b\nExamples:\n{shown}\n\n{EXITS}"


def speaks() -> bool:
    """Whether this process prints: under torchrun only rank 0 does."""
    return not os.environ.get("WORLD_SIZE") or os.environ.get("RANK", "0") == "0"


def emit(text: str) -> None:
    """Prints a report on stdout; characters that its encoding lacks become backslash escapes."""
    if not speaks():
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    click.echo(text, nl=not text.endswith("\n"))


def progress() -> Callable[[str], None]:
    """Prints single lines on stderr if it is a terminal and no CI; otherwise nothing."""
    if not speaks() or os.environ.get("CI") or not sys.stderr.isatty():
        return lambda message: None
    return lambda message: click.echo(printable(message), err=True)


def _clean_up_when_told_to_end() -> None:
    """SIGTERM raises, so that workers are ended and folders removed; a second one is ignored. So
    does SIGHUP, when a terminal is closed, unless it is ignored, as under nohup.

    Not under torchrun, which waits for its ranks: one that is inside a collective would not notice.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        for number in ended:
            signal.signal(number, signal.SIG_IGN)
        raise Terminated(EXIT_USAGE)

    hangup = getattr(signal, "SIGHUP", None)
    ended = [signal.SIGTERM]
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        ended.append(hangup)
    for number in ended:
        signal.signal(number, end)


def _discard_output() -> None:
    """Keeps the interpreter from complaining about the closed pipe once more at its end."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
