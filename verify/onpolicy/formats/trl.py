"""TRL's completions_{step}.parquet, written with log_completions: text, and nothing to score.

Columns of trl 1.16.0: step, prompt, completion (text, or messages), one for each reward function,
whatever a reward function logged beside them, and advantage. Neither token ids nor
log-probabilities are in it, which the notes say, with what to record instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verify.errors import InputFileError
from verify.onpolicy.formats import parquet_files, values
from verify.onpolicy.formats.heads import PARQUET, Head
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import Dump, Sample

_READ = ("step", "prompt", "completion")
NOTE = (
    "TRL's completions hold decoded text only: no token ids and no log-probabilities, so nothing "
    "can be compared; record prompt_ids, completion_ids, completion_mask, sampling_per_token_logps "
    "and old_per_token_logps of the inputs of compute_loss with verify.onpolicy.recorder"
)


def fits(head: Head) -> bool:
    """A Parquet file with the columns step, prompt, completion and advantage."""
    return head.container == PARQUET and {*_READ, "advantage"} <= set(
        parquet_files.columns(head.path)
    )


def read(path: Path, side: str) -> Dump:
    """The texts of one file; `side` plays no part. Raises InputFileError where it has none."""
    names = parquet_files.columns(path)
    if "completion" not in names:
        raise InputFileError(
            f"{path}: has the columns {', '.join(map(repr, list(names)[:12]))}; TRL's completions "
            "have step, prompt, completion and advantage"
        )
    problems = Problems()
    samples: list[Sample] = []
    for spot, row in parquet_files.rows(path, _READ, problems):
        step = values.integer(row.get("step"), spot, "step", -1)
        before = "" if step is None else f"step {step}, "
        samples.append(
            Sample(
                key=f"{before}{spot.place.record}",
                place=spot.place,
                text=_text(row.get("completion"), spot),
                meta={} if step is None else {"step": step},
            )
        )
    return Dump("trl", (str(path),), tuple(samples), problems.listed(), (NOTE,))


def _text(completion: Any, spot: Spot) -> str | None:
    """The response: text, or the content of the assistant's messages."""
    if not isinstance(completion, list):
        return values.text(completion, spot, "completion")
    parts: list[str] = []
    for at, message in enumerate(completion):
        field = f"completion[{at}].content"
        if not isinstance(message, Mapping):
            spot.bad(f"completion[{at}]", f"is {values.described(message)}; it is a message")
        elif message.get("role") == "assistant" and isinstance(message.get("content"), str | None):
            part = values.text(message.get("content"), spot, field)
            parts += [part] if part else []
    return "\n".join(parts) if parts else None
