"""The formats that can be read, what each can give, and which of them a file is.

The format is found from what a file holds, never from its name. A folder is read file by file;
its files have one format. Modules are imported when a file of theirs is met, so that reading JSON
needs neither torch nor pyarrow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

from verify.errors import InputFileError
from verify.onpolicy.formats.folders import files_in, joined
from verify.onpolicy.formats.heads import (
    CONTAINERS,
    JSON,
    PARQUET,
    PICKLE,
    SAFETENSORS,
    TORCH,
    Head,
    head_of,
)
from verify.onpolicy.samples import SIDES, Dump

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "tokens": "token ids of the response; without them nothing can be paired",
        "prompt": "token ids of the prompt",
        "rollout": "log-probabilities of the sampler",
        "trainer": "log-probabilities of the trainer",
        "mask": "which tokens count",
        "routing": "experts that were chosen",
        "top": "alternatives at each position, with their log-probabilities",
        "text": "the decoded response",
        "sampling": "temperature, top-p and the like",
        "version": "which weights sampled or scored",
        "finish": "why the response ended",
    }
)
"""The columns of the matrix of formats and fields."""

ALWAYS = "yes"
_SHOWN = 20  # files that were left out


class _Reader(Protocol):
    """What a module of a format has."""

    def fits(self, head: Head) -> bool: ...

    def read(self, path: Path, side: str) -> Dump: ...


@dataclass(frozen=True)
class Format:
    """One format. what: who writes it, and where. containers: names of heads.CONTAINERS.

    fields: by the names of FIELDS, ALWAYS or the condition under which the format has it; a field
    that the format cannot hold is missing.
    """

    name: str
    what: str
    containers: tuple[str, ...]
    fields: Mapping[str, str]
    module: str = ""

    def reader(self) -> _Reader:
        home = self.module or self.name.replace("-", "_")
        return cast(_Reader, import_module(f"verify.onpolicy.formats.{home}"))


FORMATS: tuple[Format, ...] = (
    Format(
        "plain",
        "our own JSON lines: verify.onpolicy.recorder, or ten lines of your code",
        (JSON,),
        {
            "tokens": ALWAYS,
            "prompt": "prompt_ids",
            "rollout": "sampler_logprobs",
            "trainer": "trainer_logprobs",
            "mask": "mask",
            "routing": "routing",
            "top": "sampler_top, trainer_top",
            "text": "text",
            "sampling": "meta",
            "version": "meta",
            "finish": "meta",
        },
    ),
    Format(
        "nemo-rl",
        "NeMo-RL: train_data_step{N}.jsonl of its logger",
        (JSON,),
        {
            "tokens": ALWAYS,
            "prompt": ALWAYS,
            "rollout": ALWAYS,
            "trainer": "prev_logprobs; not under force_on_policy_ratio",
            "mask": ALWAYS,
            "text": "content",
        },
    ),
    Format(
        "verl",
        "verl: {step}.jsonl of trainer.rollout_data_dir; decoded text, nothing to score",
        (JSON,),
        {"text": ALWAYS},
    ),
    Format(
        "sglang",
        "SGLang: answers of /generate with return_logprob",
        (JSON,),
        {
            "tokens": ALWAYS,
            "prompt": "input_token_logprobs with logprob_start_len 0",
            "rollout": ALWAYS,
            "routing": "return_routed_experts; its shape has to be added",
            "top": "top_logprobs_num",
            "text": ALWAYS,
            "sampling": "sampling_params put beside the answer",
            "version": "weight_version",
            "finish": ALWAYS,
        },
    ),
    Format(
        "vllm",
        "vLLM: RequestOutput as JSON",
        (JSON,),
        {
            "tokens": ALWAYS,
            "prompt": ALWAYS,
            "rollout": "logprobs asked for",
            "routing": "enable_return_routed_experts",
            "top": "logprobs above 0",
            "text": ALWAYS,
            "sampling": "sampling_params put beside the output",
            "finish": ALWAYS,
        },
    ),
    Format(
        "openai-chat",
        "OpenAI chat completions as JSON, of any server",
        (JSON,),
        {
            "tokens": "vLLM's return_token_ids, or its tokens as token_id:N",
            "prompt": "vLLM's return_token_ids",
            "rollout": "logprobs: true",
            "top": "top_logprobs, where its tokens are token_id:N",
            "routing": "vLLM's and SGLang's routed_experts",
            "text": ALWAYS,
            "version": "SGLang's weight_version",
            "finish": ALWAYS,
        },
    ),
    Format(
        "prime-rl",
        "prime-rl: TrainingSample as JSON, and traces.jsonl",
        (JSON,),
        {
            "tokens": ALWAYS,
            "prompt": ALWAYS,
            "rollout": ALWAYS,
            "mask": ALWAYS,
            "routing": "TrainingSample",
            "sampling": "TrainingSample",
            "finish": "traces.jsonl",
        },
    ),
    Format(
        "slime",
        "slime: --save-debug-rollout-data and --save-debug-train-data",
        (TORCH, PICKLE),
        {
            "tokens": ALWAYS,
            "prompt": ALWAYS,
            "rollout": "rollout_log_probs",
            "trainer": "of --save-debug-train-data",
            "mask": "loss_mask",
            "routing": "rollout_routed_experts",
            "text": "of --save-debug-rollout-data",
            "version": "weight_versions",
            "finish": "status",
        },
    ),
    Format(
        "miles",
        "miles: dashboard_columns/rollout_{id}.parquet, train_data/{id}_{rank}.pt, "
        "policy_loss_debug/*.pt, run_megatron's rank_{r}.json",
        (PARQUET, TORCH, PICKLE, JSON),
        {
            "tokens": "not in policy_loss_debug",
            "prompt": "parquet, train_data",
            "rollout": "not in rank_{r}.json",
            "trainer": "train_data, policy_loss_debug, rank_{r}.json",
            "mask": "not in rank_{r}.json",
            "routing": "train_data",
        },
    ),
    Format(
        "trl",
        "TRL: completions_{step}.parquet; decoded text, nothing to score",
        (PARQUET,),
        {"text": ALWAYS},
    ),
    Format(
        "tensors",
        "safetensors of named tensors, as any code can save them",
        (SAFETENSORS,),
        {
            "tokens": ALWAYS,
            "prompt": "prompt_ids",
            "rollout": "sampler_logprobs",
            "trainer": "trainer_logprobs",
            "mask": "mask",
            "routing": "sampler_routing, trainer_routing",
            "sampling": "metadata",
            "version": "metadata",
        },
    ),
)

NAMES = tuple(form.name for form in FORMATS)


def matrix() -> list[tuple[str, ...]]:
    """The matrix of formats and fields: a row of headings, then a row for each format."""
    rows = [("format", *FIELDS)]
    rows += [(form.name, *(form.fields.get(name, "-") for name in FIELDS)) for form in FORMATS]
    return rows


def read_dump(path: Path, side: str, format: str | None = None) -> Dump:
    """What a file, or all files of a folder, hold.

    side: TRAINER or ROLLOUT, for values of which the file does not say whose they are. format: a
    name of FORMATS, where it should not be found from the content.

    Raises InputFileError where nothing can be read; what can be read of a file that is partly
    broken is there, with problems.
    """
    if side not in SIDES:
        raise ValueError(f"side is {side!r}; allowed are {' and '.join(SIDES)}")
    if format is not None and format not in NAMES:
        raise InputFileError(f"--read-as {format!r}: no such format; known are {', '.join(NAMES)}")
    chosen = next((form for form in FORMATS if form.name == format), None)
    if os.path.isdir(path):  # unlike Path.is_dir, False for what cannot be looked at
        return _folder(path, side, chosen)
    head = head_of(path)
    return _read(chosen or _format_of(head), head, side)


def _read(form: Format, head: Head, side: str) -> Dump:
    if head.container not in form.containers:
        allowed = " or ".join(CONTAINERS[name] for name in form.containers)
        raise InputFileError(
            f"{head.path}: is {CONTAINERS[head.container]}; {form.name} is {allowed}"
        )
    return form.reader().read(head.path, side)


def _format_of(head: Head) -> Format:
    """The one format that fits. InputFileError with what was seen, and what would be taken."""
    asked = [form for form in FORMATS if head.container in form.containers]
    fitting = [form for form in asked if form.reader().fits(head)]
    if len(fitting) == 1:
        return fitting[0]
    seen = f"{CONTAINERS[head.container]}{_seen(head)}"
    if fitting:
        names = " and ".join(form.name for form in fitting)
        raise InputFileError(f"{head.path}: {seen}: {names} would fit; say which: --read-as NAME")
    raise InputFileError(
        f"{head.path}: no format that is known: {seen}; of this kind are read: "
        f"{', '.join(form.name for form in asked)}; if it is one of them, say so: --read-as NAME; "
        "what each holds: verify onpolicy --formats"
    )


def _seen(head: Head) -> str:
    names = [name if len(name) <= 40 else name[:40] + "..." for name in list(head.first)[:12]]
    if not names:
        return ""
    more = f" and {len(head.first) - 12} more" if len(head.first) > 12 else ""
    return f" with the names {', '.join(map(repr, names))}{more}"


def _folder(path: Path, side: str, chosen: Format | None) -> Dump:
    heads: list[tuple[Head, Format]] = []
    others: list[str] = []
    for file in files_in(path):
        try:
            head = head_of(file)
            form = chosen or _format_of(head)
            if head.container not in form.containers:
                others.append(f"{file}: is {CONTAINERS[head.container]}")
                continue
        except InputFileError as error:
            others.append(str(error))
            continue
        heads.append((head, form))
    if not heads:
        first = f"; the first: {others[0]}" if others else ""
        raise InputFileError(
            f"{path}: is a folder in which no file could be read ({len(others)} tried){first}"
        )
    names = {form.name: head.path for head, form in heads}
    if len(names) > 1:
        which = ", ".join(f"{name} ({file.name})" for name, file in names.items())
        raise InputFileError(
            f"{path}: its files have several formats: {which}; give one file, or --read-as NAME"
        )
    dumps = _together(heads[0][1], [head.path for head, _ in heads], side, others)
    if not dumps:
        raise InputFileError(f"{path}: none of its {len(heads)} files could be read: {others[-1]}")
    notes = [f"left out: {other}" for other in others[:_SHOWN]]
    if len(others) > _SHOWN:
        notes.append(f"left out: {len(others) - _SHOWN} more files")
    return joined(dumps, tuple(notes))


def _together(form: Format, paths: list[Path], side: str, others: list[str]) -> list[Dump]:
    """The files of a folder; one that cannot be read is told in `others` and left out.

    A module may have read_together(paths, side) for files that hold parts of the same samples.
    """
    reader = form.reader()
    together: Callable[[list[Path], str], list[Dump]] | None
    together = getattr(reader, "read_together", None)
    if together is not None:
        with suppress(InputFileError):  # which of them is broken is found below
            return together(paths, side)
    dumps, good = [], []
    for path in paths:
        try:
            dumps.append(reader.read(path, side))
            good.append(path)
        except InputFileError as error:
            others.append(str(error))
    return dumps if together is None or not good else together(good, side)
