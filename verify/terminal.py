"""What all verbs share: how errors end a command, where output goes, when progress is shown.

The exit codes are a closed list (0, 1, 2, 3), so nothing that goes wrong in the tool may look like
a verdict: an interrupt, a closed pipe, a `sys.exit(0)` in the code under test and an unexpected
exception all end with 2. It refuses to print progress anywhere but on a terminal's stderr.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import click

from verify.errors import VerifyError
from verify.reasons import EXIT_USAGE
from verify.rendering.escaping import printable

EXITS = (
    "Exit codes: 0 verified, 1 mismatch, 2 usage, input-file or tool error, "
    "3 nothing wrong found but something unverified, or nothing ran."
)


class Verbs(click.Group):
    """A group whose commands end with the documented exit codes, whatever is raised in them."""

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
            return fail(f"unexpected {kind}: {error} (VERIFY_DEBUG=1 shows the traceback)")


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


def _discard_output() -> None:
    """Keeps the interpreter from complaining about the closed pipe once more at its end."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
