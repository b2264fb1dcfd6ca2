"""What the marks of an experts module are worth: which ones the installed library can set at all.

transformers marks modules by a decorator, and its marks came one by one. A mark that the installed
decorator does not take cannot say that something is so, hence is taken at "not so"; one that it
does take and that a module lacks says nothing. Told from the decorator's parameters, not from a
version. A parameter that is not known here may mean that a module computes something else: a module
that has another value there than the decorator's default is refused.

Needs no transformers: it reads a signature and attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from mok.errors import UnsupportedError

MARKS = (
    ("is_transposed", False, "its weights are stored transposed, [E, H, 2 I] and [E, I, H]"),
    ("is_concatenated", True, "columns of gate and up alternate in gate_up_proj"),
    ("has_gate", True, "it has no gate, so no SwiGLU"),
    ("has_bias", False, "its products have biases (gate_up_proj_bias, down_proj_bias)"),
    ("has_post_expert_norm", False, "it normalises the result of each expert"),
)
"""Name, the value that fits mok, and what the other value means."""
NAMES = tuple(name for name, _, _ in MARKS)
OLDEST = "5.7"
"""The first transformers in which a model may choose an implementation that is not the library's.
Its decorator is the first that takes all of _NEEDED."""
_NEEDED = ("is_transposed", "is_concatenated", "has_gate", "has_bias")
_NO_MARKS = ("experts_class", "experts_interface")
_READ_IF_SO = (("has_post_expert_norm", "post_expert_norm"),)
"""What the library's own implementations read of a module that is so, where it cannot be marked."""


@dataclass(frozen=True)
class Marks:
    """said: the names of MARKS that a decorator takes. others: its other parameters, each with its
    default."""

    said: tuple[str, ...] = NAMES
    others: tuple[tuple[str, object], ...] = ()


ALL = Marks()


def marks_of(decorator: Callable[..., object], version: str) -> Marks:
    """The marks that a library's decorator of experts classes can set.

    version: the library's, for the error. Raises UnsupportedError for a decorator that takes less
    than mok needs to know, or whose parameters have no names.
    """
    parameters = inspect.signature(decorator).parameters
    missing = [name for name in _NEEDED if name not in parameters]
    unnamed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    if any(one.kind in unnamed for one in parameters.values()):
        raise unsuited(version, "use_experts_implementation takes parameters without names")
    if missing:
        raise unsuited(version, f"use_experts_implementation does not take {', '.join(missing)}")
    said = tuple(name for name in NAMES if name in parameters)
    others = tuple(
        (name, one.default) for name, one in parameters.items() if name not in (*NAMES, *_NO_MARKS)
    )
    return Marks(said, others)


def unsuited(version: str, why: str) -> UnsupportedError:
    """The refusal of a version of transformers."""
    return UnsupportedError(
        f"mok.integrations.transformers cannot use transformers {version} ({why}); allowed: "
        f"{OLDEST} or newer, below 6. Install mok-verify[transformers]."
    )


def read(experts: nn.Module, marks: Marks) -> tuple[object, ...]:
    """The values of MARKS of a module; None where it does not say what its library can say."""
    found = []
    for name, fits, _ in MARKS:
        value = getattr(experts, name, None)
        if value is None and name not in marks.said:
            so = [attribute for mark, attribute in _READ_IF_SO if mark == name]
            value = not fits if any(hasattr(experts, attribute) for attribute in so) else fits
        found.append(value)
    return tuple(found)


def unknown(experts: nn.Module, marks: Marks) -> tuple[str, ...]:
    """Names of marks that mok does not know, at which a module has no default.

    A parameter that leaves no attribute of its name is passed over: an implementation is given the
    module alone, so the library's own ones cannot tell either.
    """
    return tuple(
        name for name, default in marks.others if getattr(experts, name, default) != default
    )
