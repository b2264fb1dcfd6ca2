"""What miles dumps: dashboard_columns/rollout_{id}.parquet, train_data/{id}_{rank}.pt,
policy_loss_debug/rank_{r}_call_{n}.pt, and run_megatron's rank_{r}.json.

Fields as of commit 31f1ca96. Parquet: sample_index, response_length, total_length, tokens,
loss_mask, rollout_log_probs. Train data: `rollout_data`, a dict of lists with sample_indices,
tokens, response_lengths, loss_masks, log_probs, rollout_log_probs. Policy loss: `samples` with
response_length, train_log_probs, rollout_log_probs, local_loss_mask, and no token ids, so both
sides' values belong together only because they stand in one record. rank_{r}.json:
`logprob_entries[batch][...]` with global_position, token_id (the label, which is the next token),
logprob, is_valid. miles' rollout_data/{id}.pt is as slime's, and read as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verify import input_files
from verify.errors import InputFileError
from verify.onpolicy.formats import parquet_files, rank_entries, slime, torch_files, values
from verify.onpolicy.formats.heads import JSON, PARQUET, PICKLE, TORCH, Head
from verify.onpolicy.formats.torch_files import Content
from verify.onpolicy.formats.values import Problems, Spot
from verify.onpolicy.samples import ROLLOUT, TRAINER, Dump, Place, Sample, Series

_COLUMNS = (
    "sample_index",
    "response_length",
    "total_length",
    "tokens",
    "loss_mask",
    "rollout_log_probs",
)
_PER_SAMPLE = (  # the columns of train data that `slime.sample_of` reads
    "tokens",
    "response_lengths",
    "loss_masks",
    "log_probs",
    "rollout_log_probs",
    "rollout_routed_experts",
    "truncated",
    "weight_versions",
)
_SPLIT = ("log_probs", "rollout_log_probs")  # under context parallelism each rank has a part
_NO_IDS = (
    "policy_loss_debug holds no token ids: both sides' values belong together only because they "
    "stand in one record; train_data and rollout_{id}.parquet have ids"
)


def fits(head: Head) -> bool:
    """By the names of columns, of the outer dict, or of the first object."""
    if head.container == PARQUET:
        return {"sample_index", "tokens", "rollout_log_probs"} <= set(
            parquet_files.columns(head.path)
        )
    if head.container == JSON:
        return head.has("rank", "logprob_entries")
    if head.container not in (TORCH, PICKLE):
        return False
    names = set(torch_files.names_in(head.path))
    if "rollout_id" in names:
        return "rollout_data" in names
    return {"rank", "call", "samples"} <= names


def read(path: Path, side: str) -> Dump:
    """One file. `side` is whose the values of a rank_{r}.json are; the others say it themselves.

    Raises InputFileError where the file cannot be read, or is none of these.
    """
    container = _container(path)
    if container == PARQUET:
        return _parquet(path)
    if container == JSON:
        return rank_entries.read([path], side)
    content = torch_files.opened(path)
    outer = content.value
    if isinstance(outer, Mapping) and isinstance(outer.get("rollout_data"), Mapping):
        return _train_data(path, content, outer)
    if isinstance(outer, Mapping) and isinstance(outer.get("samples"), list):
        return _policy_loss(path, content, outer)
    raise InputFileError(
        f"{path}: holds {slime.names_of(outer)}; of miles are read a dict with `rollout_data` "
        "(train_data) and one with rank, call and `samples` (policy_loss_debug)"
    )


def read_together(paths: Sequence[Path], side: str) -> list[Dump]:
    """Several files: the rank_{r}.json among them as one, since ranks hold parts of samples."""
    of_ranks = [path for path in paths if _container(path) == JSON]
    dumps = [read(path, side) for path in paths if path not in of_ranks]
    return [*dumps, rank_entries.read(of_ranks, side)] if of_ranks else dumps


def _container(path: Path) -> str:
    """Of the three, by the first bytes: `head_of` would read all of a rank_{r}.json."""
    problem = input_files.problem_of(path)
    if problem:
        raise InputFileError(f"{path}: {problem}")
    try:
        with path.open("rb") as file:
            start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise InputFileError(f"{path}: {input_files.absence_of(path, error)}") from None
    if start.startswith(b"PAR1"):
        return PARQUET
    return JSON if start[:1] in (b"{", b"[") else TORCH


def _parquet(path: Path) -> Dump:
    problems = Problems()
    samples: list[Sample] = []
    for spot, row in parquet_files.rows(path, _COLUMNS, problems):
        length = values.integer(row.get("response_length"), spot, "response_length")
        tokens = values.ids(row.get("tokens"), spot, "tokens")
        total = values.integer(row.get("total_length"), spot, "total_length")
        if tokens is not None and total is not None and total != len(tokens):
            spot.bad("total_length", f"is {total}, and there are {len(tokens)} tokens")
        prompt, response = slime.split(tokens, length, spot, "response_length")
        rollout = values.series(row.get("rollout_log_probs"), spot, "rollout_log_probs")
        if response is None and rollout is None:
            spot.unreadable("holds neither tokens nor log-probabilities that can be read")
            continue
        key = values.key(row.get("sample_index"), spot, "sample_index")
        samples.append(
            Sample(
                key=key or spot.place.record,
                place=spot.place,
                prompt=prompt,
                tokens=response,
                mask=values.mask(row.get("loss_mask"), spot, "loss_mask"),
                series={} if rollout is None else {ROLLOUT: rollout},
                meta={} if length is None else {"response_length": length},
            )
        )
    return _dump(path, samples, problems)


def _train_data(path: Path, content: Content, outer: Mapping[str, Any]) -> Dump:
    problems = Problems()
    whole = Spot(Place(str(path)), problems)
    columns = outer["rollout_data"]
    listed = {
        name: column
        for name, column in columns.items()
        if name in (*_PER_SAMPLE, "sample_indices") and isinstance(column, list | tuple)
    }
    count = max((len(column) for column in listed.values()), default=0)
    if count > values.MOST_SAMPLES:
        raise InputFileError(f"{path}: {count} samples, at most {values.MOST_SAMPLES} are read")
    for name in [name for name, column in listed.items() if len(column) != count]:
        has = len(listed.pop(name))
        whole.bad(f"rollout_data.{name}", f"has {has} entries, and there are {count} samples")
    notes: list[str] = []
    parts = values.integer(outer.get("cp_size"), whole, "cp_size", 1) or 1
    if parts > 1 and any(listed.pop(name, None) is not None for name in _SPLIT):
        for name in _SPLIT:
            listed.pop(name, None)
        notes.append(
            f"under context parallelism of {parts} each rank's log-probabilities are a part of a "
            "response, and are left out; dump with --context-parallel-size 1, or give slime's or "
            "the parquet files"
        )
    rank = values.integer(outer.get("rank"), whole, "rank")
    step = values.integer(outer.get("rollout_id"), whole, "rollout_id", -1)
    samples = []
    for at in range(count):
        spot = Spot(Place(str(path), f"rollout_data[{at}]"), problems)
        record = {name: column[at] for name, column in listed.items()}
        key = values.key(record.get("sample_indices"), spot, "sample_indices")
        before = "" if step is None else f"step {step}, "
        sample = slime.sample_of(
            content,
            {**record, "data_parallel_rank": rank},
            spot,
            key or f"{before}rank {rank}, place {at}",
        )
        if sample is not None:
            samples.append(sample)
    return _dump(path, samples, problems, notes, {} if step is None else {"step": step})


def _policy_loss(path: Path, content: Content, outer: Mapping[str, Any]) -> Dump:
    problems = Problems()
    whole = Spot(Place(str(path)), problems)
    rank = values.integer(outer.get("rank"), whole, "rank")
    call = values.integer(outer.get("call"), whole, "call")
    samples: list[Sample] = []
    parts = 0
    records = (
        (Place(str(path), f"samples[{at}]"), each) for at, each in enumerate(outer["samples"])
    )
    for spot, record in values.objects(records, problems):
        series: dict[str, Series] = {}
        for side, name in ((TRAINER, "train_log_probs"), (ROLLOUT, "rollout_log_probs")):
            one = slime.series_of(content, record, spot, name)
            if one is not None:
                series[side] = one
        if not series:
            spot.unreadable("holds no log-probabilities that can be read")
            continue
        length = values.integer(record.get("response_length"), spot, "response_length")
        parts += any(len(one.values) != length for one in series.values())
        index = values.integer(record.get("index"), spot, "index")
        mask = torch_files.plain(content, record.get("local_loss_mask"), spot, "local_loss_mask")
        given = {"rank": rank, "batch_position": index, "response_length": length}
        samples.append(
            Sample(
                key=f"rank {rank}, call {call}, {spot.place.record}",
                place=spot.place,
                mask=values.mask(mask, spot, "local_loss_mask"),
                series=series,
                meta={name: value for name, value in given.items() if value is not None},
            )
        )
    notes = [_NO_IDS]
    if parts:
        notes.append(
            f"{parts} of {len(samples)} records have another number of values than their "
            "response_length: under context parallelism each rank dumps its part"
        )
    return _dump(path, samples, problems, notes)


def _dump(
    path: Path,
    samples: Sequence[Sample],
    problems: Problems,
    notes: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
) -> Dump:
    found = problems.listed()
    return Dump("miles", (str(path),), tuple(samples), found, tuple(notes), config or {})
