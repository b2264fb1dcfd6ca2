"""The model that is looked at: a folder of save_pretrained, or what a function returns.

A folder is read from the disk alone: nothing is asked of a network, no code that lies in it is run,
and weights are safetensors. `file.py::function` runs a file of the user's, as pytest would.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mok.variables import variables_set
from verify import targets
from verify.errors import CaseError, InputFileError, UnsupportedError
from verify.input_files import exists, parse_json, read_text
from verify.onpolicy.live.calling import device_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPES["float64"] = torch.float64
_OFFLINE = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True, eq=False)
class Live:
    """A model in evaluation mode, on its device. prompts: token ids that came with it, or None."""

    name: str
    model: nn.Module
    prompts: tuple[tuple[int, ...], ...] | None
    vocabulary: int
    ends: tuple[int, ...]
    pad: int
    longest: int | None

    def facts(self) -> dict[str, Any]:
        """What was looked at, for the report."""
        config = getattr(self.model, "config", None)
        experts = any("experts" in name for name, _ in self.model.named_modules())
        dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in self.model.parameters()})
        return {
            "name": self.name,
            "class": type(self.model).__name__,
            "parameters": sum(one.numel() for one in self.model.parameters()),
            "dtype": ", ".join(dtypes),
            "device": str(device_of(self.model)),
            "attention": _text(getattr(config, "_attn_implementation", None)),
            "experts": _text(getattr(config, "_experts_implementation", None)) if experts else None,
        }


def promises_equal_rows(model: nn.Module) -> bool:
    """Whether its experts are mok's, on a device and of sizes where a row's bits depend on no other
    row: any on a CPU, and what the Hopper kernels take. Elsewhere that was not measured."""
    config = getattr(model, "config", None)
    if getattr(config, "_experts_implementation", None) != "mok":
        return False
    device = device_of(model)
    if device.type != "cuda":
        return device.type == "cpu"
    sizes = [
        size
        for name, one in model.named_parameters()
        if name.endswith("experts.down_proj")
        for size in one.shape[1:]
    ]
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return hopper and bool(sizes) and all(size % 64 == 0 for size in sizes)


def load(
    what: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    attention: str | None = None,
    experts: str | None = None,
) -> Live:
    """A model by `FOLDER` or `file.py::function`.

    dtype: of the parameters, a name of DTYPES; None leaves them as they are stored. device: "cpu",
    "cuda", "cuda:1"; None leaves a function's model where it is, and puts a folder's on the first
    GPU if there is one. attention, experts: implementations by transformers' names; experts "mok"
    is mok's layer. Raises InputFileError, CaseError or UnsupportedError.
    """
    where = _device(device)
    if "::" in what:
        model, prompts = _called(what)
    elif what.endswith(".py"):
        raise InputFileError(f"{what}: name the function that returns the model: {what}::function")
    else:
        model, prompts = _saved(Path(what), dtype), None
        where = where or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if dtype is not None:
        for parameter in model.parameters():  # buffers keep theirs: positions need it
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(DTYPES[dtype])
    if where is not None:
        model.to(where)
    _choose(model, attention, "set_attn_implementation")
    if experts == "mok":
        _import_mok()
    _choose(model, experts, "set_experts_implementation")
    model.eval()
    return described(what, model, prompts)


def described(
    name: str, model: nn.Module, prompts: tuple[tuple[int, ...], ...] | None = None
) -> Live:
    """A model with what has to be known of it; of its configuration, where it has one."""
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        tables = (one for one in model.modules() if isinstance(one, nn.Embedding))
        table = next(tables, None)
        if table is None:
            raise UnsupportedError(
                f"{name}: {type(model).__name__} has neither config.vocab_size nor an "
                "nn.Embedding, so how many tokens it knows is unknown; give it a config.vocab_size"
            )
        vocabulary = table.num_embeddings
    for number, prompt in enumerate(prompts or ()):
        wrong = [token for token in prompt if not 0 <= token < vocabulary]
        if wrong or not prompt:
            given = f"token {wrong[0]}" if wrong else "no token"
            raise InputFileError(
                f"{name}: prompt {number} has {given}; allowed are ids from 0 to {vocabulary - 1}"
            )
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = getattr(config, "eos_token_id", None) if ends is None else ends
    listed = tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (ends,)
    pad = getattr(config, "pad_token_id", None)
    longest = getattr(config, "max_position_embeddings", None)
    return Live(
        name,
        model,
        prompts,
        vocabulary,
        tuple(int(one) for one in listed),
        pad if isinstance(pad, int) and 0 <= pad < vocabulary else 0,
        longest if isinstance(longest, int) else None,
    )


def _saved(folder: Path, dtype: str | None) -> nn.Module:
    if not exists(folder):
        raise InputFileError(
            f"{folder}: no such folder; give a folder of save_pretrained, or file.py::function "
            "that returns the model. Nothing is downloaded"
        )
    config = folder / "config.json"
    held = parse_json(read_text(config, "a model's configuration"), str(config), "a configuration")
    if not isinstance(held, dict):
        raise InputFileError(f"{config}: not a configuration: it holds no JSON object")
    if held.get("auto_map"):
        raise InputFileError(
            f"{folder}: its config.json names code of its own (auto_map), which is not run; build "
            "the model in a file of yours and give file.py::function"
        )
    # read when transformers is imported; local_files_only is given as well
    with variables_set(dict.fromkeys(_OFFLINE, "1")):
        return _from_disk(folder, dtype)


def _from_disk(folder: Path, dtype: str | None) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise UnsupportedError(
            f"{folder}: reading it needs transformers ({error}); install mok-verify[transformers], "
            "or give file.py::function that returns a torch.nn.Module"
        ) from error
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder.resolve()),
            dtype=DTYPES[dtype] if dtype else "auto",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers has no class for a bad folder
        raise InputFileError(
            f"{folder}: transformers cannot load it: {type(error).__name__}: {targets.told(error)}"
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    assert isinstance(model, nn.Module)
    return model


def _called(what: str) -> tuple[nn.Module, tuple[tuple[int, ...], ...] | None]:
    path, _, name = what.partition("::")
    module = targets.import_file(Path(path))
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        known = [one for one, value in vars(module).items() if callable(value)]
        held = [one for one in known if not one.startswith("_")][:8]
        raise InputFileError(f"{path} has no function {name!r}; it has {', '.join(held) or 'none'}")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout belongs to the report
            found = function()
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit too, and what pytest raises to skip a file
        kind = type(error).__name__
        raise CaseError(f"{what} raised {kind}: {targets.told(error)}") from error
    prompts = None
    if isinstance(found, tuple) and len(found) == 2:
        found, given = found
        prompts = _prompts(what, given)
    if not isinstance(found, nn.Module):
        raise InputFileError(
            f"{what} returned a {type(found).__name__}; it must return a torch.nn.Module, or one "
            "and a list of prompts (lists of token ids)"
        )
    return found, prompts


def _prompts(what: str, given: Any) -> tuple[tuple[int, ...], ...]:
    rows = given.tolist() if isinstance(given, Tensor) else given
    good = isinstance(rows, Sequence) and not isinstance(rows, str) and len(rows) > 0
    listed: list[tuple[int, ...]] = []
    for row in rows if good else ():
        one = row.tolist() if isinstance(row, Tensor) else row
        if isinstance(one, list | tuple) and all(type(token) is int for token in one):
            listed.append(tuple(one))
    if not good or len(listed) != len(rows):
        raise InputFileError(
            f"{what} returned prompts of another form; they are lists of token ids, at least one"
        )
    return tuple(listed)


def _device(given: str | None) -> torch.device | None:
    if given is None:
        return None
    try:
        device = torch.device(given)
    except RuntimeError:
        raise UnsupportedError(
            f"--device {given!r} is unknown; allowed are cpu, cuda, cuda:N and torch's others"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"--device {given}: torch sees no GPU here; give --device cpu")
    return device


def _choose(model: nn.Module, name: str | None, method: str) -> None:
    if name is None:
        return
    setter = getattr(model, method, None)
    option = "--attention" if "attn" in method else "--experts"
    if setter is None:
        raise UnsupportedError(
            f"{option} {name}: {type(model).__name__} has no {method}; set it in your function"
        )
    try:
        setter(name)
    except Exception as error:
        raise UnsupportedError(f"{option} {name}: {targets.told(error)}") from error


def _import_mok() -> None:
    try:
        import mok.integrations.transformers  # noqa: F401
    except (ImportError, NotImplementedError) as error:  # no transformers, or another version
        raise UnsupportedError(f"--experts mok: {error}") from error


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
