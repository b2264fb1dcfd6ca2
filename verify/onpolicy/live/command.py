"""The options of `verify onpolicy` that concern a model, and what they do. Imports torch late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from verify.onpolicy.gates import Gate
    from verify.onpolicy.live.examining import Examined

Function = TypeVar("Function", bound=Callable[..., Any])
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_LAYOUTS = ("batch", "padded-left", "padded-right", "packed", "chunked")
_OPTIONS = (
    click.option(
        "--model",
        metavar="FOLDER|FILE.py::FUNCTION",
        help="Sample and score with this model instead of reading files.",
    ),
    click.option("--dtype", type=click.Choice(_DTYPES), help="Of its parameters."),
    click.option("--device", metavar="NAME", help="Where it runs: cpu, cuda, cuda:1."),
    click.option("--attention", metavar="NAME", help="Its attention implementation: eager, sdpa."),
    click.option("--experts", metavar="NAME", help="Its experts implementation: mok, eager."),
    click.option("--samples", type=click.IntRange(min=1), help="Responses to sample; 4."),
    click.option("--tokens", type=click.IntRange(min=1), help="Of a response, at most; 16."),
    click.option("--chunk", type=click.IntRange(min=1), help="Tokens of a prefill's chunk; 4."),
    click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), help="Of what is drawn; 0."),
    click.option(
        "--layout",
        "layouts",
        type=click.Choice(_LAYOUTS),
        multiple=True,
        help="Compare this layout only; may be repeated.",
    ),
    click.option(
        "--save",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write what was sampled and scored there, as JSON lines.",
    ),
)
NAMES = (
    *("model", "dtype", "device", "attention", "experts"),
    *("samples", "tokens", "chunk", "seed", "layouts", "save"),
)


def model_options(function: Function) -> Function:
    """Adds the options; they arrive as keyword arguments of NAMES."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def asked(live: Mapping[str, Any], files: Sequence[Path | None]) -> bool:
    """Whether a model is to be looked at. UsageError for options that do not go together."""
    if live["model"] is None:
        given = next((name for name in NAMES if live[name] not in (None, ())), None)
        if given is not None:
            name = "layout" if given == "layouts" else given
            raise click.UsageError(f"--{name} belongs to --model")
        return False
    if any(one is not None for one in files):
        raise click.UsageError("--model samples by itself: give either it or files")
    return True


def run(
    live: Mapping[str, Any], gates: Sequence[Gate], progress: Callable[[str], None]
) -> Examined:
    """Loads the model, looks at it, and saves the pair if that was asked for."""
    from verify.onpolicy.live import models, saving
    from verify.onpolicy.live.examining import Request, examine

    if live["save"] is not None:
        saving.refuse(live["save"])
    wanted = {name: live[name] for name in ("tokens", "samples", "seed", "chunk")}
    given = {name: value for name, value in wanted.items() if value is not None}
    if live["layouts"]:
        given["layouts"] = tuple(dict.fromkeys(live["layouts"]))
    request = Request(**given)
    progress(f"loading {live['model']}")
    loaded = models.load(
        live["model"],
        dtype=live["dtype"],
        device=live["device"],
        attention=live["attention"],
        experts=live["experts"],
    )
    found = examine(loaded, request, gates=gates, progress=progress)
    if live["save"] is not None:
        saving.save(live["save"], found.trainer, found.rollout)
    return found
