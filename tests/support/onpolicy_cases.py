"""Reports of the field about on-policy mismatches, as files: tokens, what each side says of them.

Logits are drawn, tokens are sampled from what the sampler makes of them, and each side's values
come from its own function of the logits. `Toy` is a model for the reports in which the context
matters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.causes.ranking import diagnose
from verify.onpolicy.causes.table import Cause, Evidence
from verify.onpolicy.formats.table import read_dump
from verify.onpolicy.numbers import Numbers, measure
from verify.onpolicy.pairing import Pairs, pair
from verify.onpolicy.routing import RoutingCheck, check
from verify.onpolicy.samples import ROLLOUT, TRAINER
from verify.onpolicy.verdicts import OnPolicyVerdict, judge

Floats = NDArray[np.float64]
Ids = list[int]
Line = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """What a side does to logits [R, V] before the softmax, given what stood before each token.

    contexts: whether it looks at them, so that tokens have to be drawn one after the other.
    """

    apply: Callable[[Floats, Sequence[Sequence[int]]], Floats]
    contexts: bool = False


@dataclass(frozen=True)
class Files:
    """What a user has: lines of the trainer's and of the sampler's file (None: one for both).

    evidence: as Evidence takes it; trainer_again and steps as lines. format: "" to let it be found.
    """

    trainer: Sequence[Line | str]
    rollout: Sequence[Line | str] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Seen:
    """What the doctor made of the files."""

    pairs: Pairs
    numbers: Numbers
    causes: tuple[Cause, ...]
    verdict: OnPolicyVerdict
    routing: RoutingCheck | None

    @property
    def claimed(self) -> list[str]:
        return [cause.name for cause in self.causes if cause.claimed]

    @property
    def misaligned(self) -> list[str]:
        return [one.kind for one in self.pairs.misalignments]

    @property
    def text(self) -> str:
        """All that is said, for patterns and for whoever reads a failing test."""
        said = [f"verdict={self.verdict.verdict}"]
        said += [f"finding {one.reason} {one.kind}: {one.what}" for one in self.verdict.findings]
        said += [f"{one.kind} {one.key}: {one.what}" for one in self.pairs.misalignments]
        said += [f"note: {note}" for note in self.pairs.notes]
        said += [f"problem {one.place} {one.field}: {one.what}" for one in self.pairs.problems]
        for cause in self.causes:
            sure = "claimed" if cause.claimed else "not claimed"
            said.append(f"cause {cause.name} ({sure}, {cause.weight:.3f}) {cause.where}")
            said.append(f"  fitted {dict(cause.fitted)}")
            said += [f"  for: {one}" for one in cause.for_]
            said += [f"  against: {one}" for one in cause.against]
            said.append(f"  remedy: {cause.remedy}")
        if self.routing is not None:
            said += [f"routing {one.kind} {one.where}: {one.what}" for one in self.routing.faults]
            said += [str(one.to_json()) for one in self.routing.layers]
        return "\n".join(said)


def examine(folder: Path, files: Files) -> Seen:
    """Writes the files, reads them back and asks everybody."""
    trainer = read_dump(_written(folder / "trainer.jsonl", files.trainer), TRAINER)
    rollout = None
    if files.rollout is not None:
        rollout = read_dump(_written(folder / "rollout.jsonl", files.rollout), ROLLOUT)
    evidence = dict(files.evidence)
    if "trainer_again" in evidence:
        path = _written(folder / "again.jsonl", evidence["trainer_again"])
        evidence["trainer_again"] = read_dump(path, TRAINER)
    if "steps" in evidence:
        evidence["steps"] = {
            version: read_dump(_written(folder / f"scored-by-{version}.jsonl", lines), TRAINER)
            for version, lines in evidence["steps"].items()
        }
    pairs = pair(trainer, rollout)
    numbers = measure(pairs)
    causes = diagnose(pairs, numbers, Evidence(**evidence))
    return Seen(pairs, numbers, causes, judge(pairs, numbers, causes), check(pairs))


def _written(path: Path, lines: Sequence[Line | str]) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True, eq=False)
class Drawn:
    """Samples: prompt and response ids, and the logits [R, V] that each token was drawn from."""

    prompts: tuple[Ids, ...]
    responses: tuple[Ids, ...]
    logits: tuple[Floats, ...]

    def values(self, process: Process) -> list[list[float]]:
        """Log-probabilities of the sampled tokens by a side's own function, as float32."""
        return [
            chosen(process.apply(logits, before(prompt, response)), response)
            for prompt, response, logits in zip(
                self.prompts, self.responses, self.logits, strict=True
            )
        ]


def before(prompt: Ids, response: Ids) -> list[Ids]:
    """What stood before each token of the response."""
    return [prompt + response[:at] for at in range(len(response))]


def chosen(logits: Floats, response: Ids) -> list[float]:
    """Log-probabilities of the tokens, as float32."""
    return single(log_softmax(logits)[np.arange(len(response)), response])


def picked(logits: Floats, rng: np.random.Generator) -> Ids:
    """A token for each row [R, V] of logits."""
    sums = np.cumsum(np.exp(log_softmax(logits)), axis=-1)
    spots = rng.random(len(logits)) * sums[:, -1]
    return [int(one) for one in (sums <= spots[:, None]).sum(axis=1)]


def drawn(
    seed: int,
    process: Process,
    *,
    count: int = 16,
    length: int = 40,
    vocabulary: int = 100,
    scale: float = 2.0,
) -> Drawn:
    """Logits at random, tokens sampled from what `process` makes of them."""
    rng = np.random.default_rng(seed)
    prompts, responses, logits = [], [], []
    for _ in range(count):
        prompt = [int(one) for one in rng.integers(0, vocabulary, int(rng.integers(3, 12)))]
        sizes = scale * np.exp(rng.normal(0, 0.6, (length, 1)))
        own = sizes * rng.normal(size=(length, vocabulary))
        if process.contexts:
            response: Ids = []
            for row in own:
                response += picked(process.apply(row[None], [prompt + response]), rng)
        else:
            response = picked(process.apply(own, ()), rng)
        prompts.append(prompt)
        responses.append(response)
        logits.append(own)
    return Drawn(tuple(prompts), tuple(responses), tuple(logits))


def lines(
    samples: Drawn,
    sampler: Sequence[Sequence[float]] | None,
    trainer: Sequence[Sequence[float]] | None,
    **more: Any,
) -> list[Line]:
    """Records of our own format. more: a value for all, or a function of the sample's number."""
    found = []
    for at, (prompt, response) in enumerate(zip(samples.prompts, samples.responses, strict=True)):
        line: Line = {"id": str(at), "prompt_ids": prompt, "response_ids": response}
        if sampler is not None:
            line["sampler_logprobs"] = list(sampler[at])
        if trainer is not None:
            line["trainer_logprobs"] = list(trainer[at])
        line |= {name: value(at) if callable(value) else value for name, value in more.items()}
        found.append(line)
    return found


def two(samples: Drawn, sampler: Any, trainer: Any, **more: Any) -> Files:
    """Two files with the same ids."""
    return Files(lines(samples, None, trainer, **more), lines(samples, sampler, None, **more))


def best(row: Floats, number: int) -> dict[str, float]:
    """The likeliest alternatives with their log-probabilities."""
    values = single(log_softmax(row))
    return {str(one): values[one] for one in np.argsort(-row)[:number]}


def noisy(values: Sequence[Sequence[float]], level: float, seed: int = 1) -> list[list[float]]:
    """Values with symmetric noise, larger where a token is less certain, never above 0."""
    rng = np.random.default_rng(seed)
    out = []
    for one in values:
        own = np.asarray(one)
        error = level * rng.normal(size=len(own)) * -np.expm1(own)
        out.append(single(np.minimum(own + error, 0.0)))
    return out


def single(values: Any) -> list[float]:
    """As float32."""
    return [float(one) for one in np.asarray(values, dtype=np.float32)]


def log_softmax(logits: Floats) -> Floats:
    """Over the last dimension."""
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


RAW = Process(lambda logits, contexts: logits)


def heated(temperature: float) -> Process:
    return Process(lambda logits, contexts: logits / temperature)


def top_p(mass: float) -> Process:
    def apply(logits: Floats, contexts: Any) -> Floats:
        order = np.argsort(-logits, axis=1)
        chances = np.exp(log_softmax(np.take_along_axis(logits, order, axis=1)))
        out = np.empty(logits.shape, dtype=bool)
        np.put_along_axis(out, order, np.cumsum(chances, axis=1) - chances >= mass, axis=1)
        return np.where(out, -np.inf, logits)

    return Process(apply)


def top_k(number: int) -> Process:
    return Process(
        lambda logits, contexts: np.where(
            logits >= np.sort(logits, axis=1)[:, -number, None], logits, -np.inf
        )
    )


def min_p(share: float) -> Process:
    return Process(
        lambda logits, contexts: np.where(
            logits >= logits.max(axis=1, keepdims=True) + np.log(share), logits, -np.inf
        )
    )


def repetition(penalty: float) -> Process:
    def apply(logits: Floats, contexts: Sequence[Sequence[int]]) -> Floats:
        lowered = logits.copy()
        for row, context in enumerate(contexts):
            seen = np.unique(np.asarray(context, dtype=np.int64))
            own = logits[row, seen]
            lowered[row, seen] = np.where(own > 0, own / penalty, own * penalty)
        return lowered

    return Process(apply, contexts=True)


def padded(columns: int, value: float = 0.0) -> Process:
    return Process(
        lambda logits, contexts: np.concatenate(
            [logits, np.full((len(logits), columns), value)], axis=1
        )
    )


def both(*steps: Process) -> Process:
    def apply(logits: Floats, contexts: Sequence[Sequence[int]]) -> Floats:
        for step in steps:
            logits = step.apply(logits, contexts)
        return logits

    return Process(apply, any(step.contexts for step in steps))


def bfloat16(values: Any) -> Floats:
    """Rounded to bf16, ties to even."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


WINDOW, WIDTH = 4, 24


@dataclass(frozen=True, eq=False)
class Toy:
    """A model whose logits depend on the last four tokens, on the prompt (less and less)
    and, of one kind, on position.

    kind: "absolute" adds an embedding of the position, "relative" does not, "convolution" lets the
    tokens before the prompt, padding or nothing, into the window.
    """

    kind: str = "relative"
    vocabulary: int = 64
    seed: int = 5

    @cached_property
    def _tables(self) -> tuple[Floats, Floats, Floats, Floats]:
        rng = np.random.default_rng(self.seed)
        return (
            rng.normal(size=(WINDOW, self.vocabulary + 1, WIDTH)),
            rng.normal(size=(512, WIDTH)),
            rng.normal(size=(self.vocabulary, WIDTH)),
            rng.normal(size=(WIDTH, self.vocabulary)),
        )

    def logits(self, prompt: Ids, before: Ids, pads: int = 0) -> Floats:
        """[V], of what comes after prompt and `before`, behind `pads` pad tokens without a mask."""
        table, places, whole, head = self._tables
        ids = [*prompt, *before]
        leaked = [self.vocabulary] * pads if self.kind == "convolution" else []
        window = [*leaked, *ids][-WINDOW:][::-1]
        fading = 1.5 * np.exp(-len(before) / 8)
        hidden = table[np.arange(len(window)), window].sum(axis=0)
        hidden = hidden + fading * whole[prompt].sum(axis=0) / np.sqrt(len(prompt))
        if self.kind == "absolute":
            hidden = hidden + places[len(ids) + pads]
        return np.asarray(0.6 * np.tanh(hidden) @ head)

    def draw(self, prompts: Sequence[Ids], length: int, seed: int = 3) -> Drawn:
        """Responses that the model samples."""
        rng = np.random.default_rng(seed)
        responses: list[Ids] = []
        logits: list[Floats] = []
        for prompt in prompts:
            response: Ids = []
            rows = []
            for _ in range(length):
                rows.append(self.logits(prompt, response))
                response += picked(rows[-1][None], rng)
            responses.append(response)
            logits.append(np.stack(rows))
        return Drawn(tuple(prompts), tuple(responses), tuple(logits))

    def score(self, prompt: Ids, response: Ids, pads: int = 0) -> list[float]:
        """Log-probabilities [R] of the response behind a prompt."""
        rows = [self.logits(prompt, response[:at], pads) for at in range(len(response))]
        return chosen(np.stack(rows), response)
