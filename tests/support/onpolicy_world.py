"""A toy language model that samples and scores, so that mismatches are made as they arise.

A token's context is a fading sum of the embeddings before it; a hidden state is made of it (by
routed experts, where the world has them), and the head makes logits of that. Contexts differ as a
language model's do: many are all but certain, some are wide open. Everything is float64, and both
sides are computed by the same function on the same rows, so two sides without a fault between them
have the same bits.

Shapes: S samples, N rows (a row is a sample and a position whose next token is scored), V tokens,
D width, L layers of E experts of which K are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
EOS = 0
FIRST_EOS = 20  # responses are at least this long, so that there is something to see


@dataclass(frozen=True)
class Sampling:
    """What a sampler does to logits. Neutral by default."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    @property
    def truncated(self) -> bool:
        return (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)


@dataclass(frozen=True, eq=False)
class Experts:
    """Layers of routed experts. router: [L, E, D]; weights: [L, E, D, D]."""

    router: Floats
    weights: Floats
    chosen: int


@dataclass(frozen=True, eq=False)
class World:
    """The model. head, embed: [V, D]; bias: [V]; open: [D], what makes a context wide open.

    successor, bonus: [V], which token comes next after each, and how much its logit gains by that.
    level, sharpness: mean and spread of the logarithm of the logits' size over contexts.
    """

    embed: Floats
    head: Floats
    bias: Floats
    successor: Ints
    bonus: Floats
    open: Floats
    level: float
    sharpness: float
    decay: float
    experts: Experts | None

    @property
    def vocabulary(self) -> int:
        return len(self.bias)

    @property
    def width(self) -> int:
        return self.embed.shape[1]


@dataclass(frozen=True, eq=False)
class Change:
    """Other weights: the head moves by `amount` along `direction` [V, D], for some samples."""

    direction: Floats
    amount: float
    samples: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class How:
    """How one side computes. Random fields are [S, positions, ...], drawn beforehand.

    noise: relative error of the hidden state, [S, positions, D]. kept: what dropout multiplies by,
    of the same shape. routed: error of the router's logits, [S, positions, L, E]. pads: logits of
    columns that are no tokens, or None. low: "logits" (rounded, softmax exact), "softmax" (both
    rounded) or "stored" (the result rounded), to `bits` bits of mantissa.
    """

    sampling: Sampling = field(default_factory=Sampling)
    noise: Floats | None = None
    kept: Floats | None = None
    routed: Floats | None = None
    change: Change | None = None
    pads: Floats | None = None
    low: str = ""
    bits: int = 8


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences that were drawn: prompt and response ids, and where the policy drew them."""

    prompts: tuple[Ints, ...]
    responses: tuple[Ints, ...]
    drawn: tuple[NDArray[np.bool_], ...]
    contexts: tuple[Floats, ...]  # [P + R, D], after each token


@dataclass(frozen=True, eq=False)
class Scored:
    """One sample's values: from the last prompt token on, so [R + 1]; experts [P + R - 1, L, K]."""

    values: Floats
    top: tuple[Mapping[int, float], ...]
    experts: Ints | None
    margins: Floats | None


def make_world(rng: np.random.Generator, routed: bool) -> World:
    """A model with 300 to 3,000 tokens."""
    vocabulary = int(np.exp(rng.uniform(np.log(300), np.log(3000))))
    width = int(rng.integers(24, 56))
    order = rng.permutation(vocabulary)
    certain = rng.random(vocabulary) < rng.uniform(0.4, 0.85)
    experts = None
    if routed:
        layers, number = int(rng.integers(1, 4)), int(rng.choice([8, 16, 32]))
        experts = Experts(
            rng.normal(size=(layers, number, width)) / np.sqrt(width),
            rng.normal(size=(layers, number, width, width)) / np.sqrt(width),
            int(rng.choice([1, 2, 4])),
        )
    bias = -rng.uniform(0.3, 1.0) * np.log1p(order)
    bias[EOS] = rng.uniform(-1, 3)
    return World(
        rng.normal(size=(vocabulary, width)),
        rng.normal(size=(vocabulary, width)),
        bias,
        rng.integers(1, vocabulary, vocabulary),
        np.where(certain, rng.uniform(5, 36, vocabulary), 0.0),
        rng.normal(size=width),
        rng.uniform(0.9, 2.0),
        rng.uniform(0.4, 1.2),
        rng.uniform(0.5, 0.9),
        experts,
    )


def draw(
    world: World,
    how: How,
    prompts: Sequence[Ints],
    limits: Sequence[int],
    tools: Sequence[Mapping[int, int]],
    rng: np.random.Generator,
) -> Batch:
    """Samples from the distribution of `how`. tools: ids that were not drawn, by place, [S]."""
    count = len(prompts)
    contexts = [[np.zeros(world.width)] for _ in prompts]
    for one, prompt in zip(contexts, prompts, strict=True):
        for token in prompt:
            one.append(world.decay * one[-1] + world.embed[token])
    seen = np.zeros((count, world.vocabulary), dtype=bool)
    for index, prompt in enumerate(prompts):
        seen[index, prompt] = True
    times = np.zeros((count, world.vocabulary))
    responses: list[list[int]] = [[] for _ in prompts]
    live = list(range(count))
    for step in range(max(limits)):
        live = [i for i in live if step < limits[i] and EOS not in responses[i][FIRST_EOS:]]
        if not live:
            break
        rows = np.array(live)
        places = np.array([len(prompts[i]) + step - 1 for i in live])
        x = np.stack([contexts[i][-1] for i in live])
        last = np.array([responses[i][-1] if responses[i] else prompts[i][-1] for i in live])
        early = np.full(len(live), step < FIRST_EOS)
        logits, *_ = logits_of(world, how, rows, places, x, last, early)
        logits = processed(logits, how.sampling, seen[rows], times[rows])
        weights = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1)
        spots = rng.random(len(live)) * weights[:, -1]
        picked = (weights <= spots[:, None]).sum(axis=1)
        for i, token in zip(live, picked, strict=True):
            chosen = int(tools[i].get(step, token))
            responses[i].append(chosen)
            seen[i, chosen] = True
            times[i, chosen] += 1
            contexts[i].append(world.decay * contexts[i][-1] + world.embed[chosen])
    drawn = tuple(
        np.array([step not in tool for step in range(len(ids))])
        for ids, tool in zip(responses, tools, strict=True)
    )
    return Batch(
        tuple(np.array(p, dtype=np.int64) for p in prompts),
        tuple(np.array(r, dtype=np.int64) for r in responses),
        drawn,
        tuple(np.stack(one[1:]) for one in contexts),
    )


def with_responses(
    world: World, batch: Batch, responses: Sequence[Ints], drawn: Sequence[NDArray[np.bool_]]
) -> Batch:
    """The same prompts with other responses."""
    contexts = []
    for prompt, response in zip(batch.prompts, responses, strict=True):
        states = [np.zeros(world.width)]
        for token in np.concatenate([prompt, response]):
            states.append(world.decay * states[-1] + world.embed[token])
        contexts.append(np.stack(states[1:]))
    return Batch(batch.prompts, tuple(responses), tuple(drawn), tuple(contexts))


def score(world: World, batch: Batch, how: How, top: int = 0) -> list[Scored]:
    """Natural log-probabilities of every drawn token and of the last prompt token before them."""
    return [_score_one(world, batch, how, top, index) for index in range(len(batch.prompts))]


def _score_one(world: World, batch: Batch, how: How, top: int, index: int) -> Scored:
    prompt, response = batch.prompts[index], batch.responses[index]
    ids = np.concatenate([prompt, response])
    first = len(prompt) - 2
    places = np.arange(first, len(ids) - 1)
    routing = np.arange(len(ids) - 1) if world.experts is not None else places
    rows = np.full(len(routing), index)
    early = (routing - len(prompt) + 1) < FIRST_EOS
    logits, experts, margins = logits_of(
        world, how, rows, routing, batch.contexts[index][routing], ids[routing], early, places[0]
    )
    times = np.zeros((len(places), 0))
    seen = np.zeros((len(places), 0), dtype=bool)
    if how.sampling.penalised:
        times = np.zeros((len(places), world.vocabulary))
        for row, place in enumerate(places):
            np.add.at(times[row], ids[len(prompt) : place + 1], 1)
        seen = times > 0
        seen[:, prompt] = True
    chosen = ids[places + 1]
    logits = processed(logits, how.sampling, seen, times, chosen)
    if how.pads is not None:
        extra = np.broadcast_to(how.pads / how.sampling.temperature, (len(places), len(how.pads)))
        logits = np.concatenate([logits, extra], axis=1)
    peak = logits.max(axis=1)
    total = np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    values = _log_softmax(logits[np.arange(len(places)), chosen], peak, total, how)
    tops: tuple[Mapping[int, float], ...] = ()
    if top:
        best = np.argpartition(-logits[:, : world.vocabulary], top, axis=1)[:, :top]
        shown = _log_softmax(
            np.take_along_axis(logits, best, axis=1), peak[:, None], total[:, None], how
        )

        def by_value(one: tuple[int, float]) -> float:
            return -one[1]

        tops = tuple(
            {
                int(t): float(v)
                for t, v in sorted(zip(*pair, strict=True), key=by_value)
                if v > -np.inf
            }
            | {int(token): float(value)}
            for pair, token, value in zip(
                zip(best, shown.astype(np.float32), strict=True),
                chosen,
                values.astype(np.float32),
                strict=True,
            )
        )
    return Scored(values.astype(np.float32).astype(np.float64), tops, experts, margins)


def _log_softmax(logits: Floats, peak: Floats, total: Floats, how: How) -> Floats:
    if how.low == "softmax":
        shifted = rounded(logits - peak, how.bits)
        return rounded(shifted - rounded(total, how.bits), how.bits)
    values = (logits - peak) - total
    return rounded(values, how.bits) if how.low == "stored" else values


def logits_of(
    world: World,
    how: How,
    rows: Ints,
    places: Ints,
    x: Floats,
    last: Ints,
    early: NDArray[np.bool_],
    scored_from: int = 0,
) -> tuple[Floats, Ints | None, Floats | None]:
    """Logits [N, V] of contexts x [N, D] from place `scored_from` on; experts of all of them."""
    x = x / np.linalg.norm(x, axis=1, keepdims=True) * np.sqrt(world.width)
    sharp = np.exp(world.level + world.sharpness * (x @ world.open) / np.linalg.norm(world.open))
    hidden, experts, margins = x, None, None
    if world.experts is not None:
        error = None if how.routed is None else how.routed[rows, places]
        hidden, experts, margins = _route(world.experts, x, error)
        hidden = hidden / np.linalg.norm(hidden, axis=1, keepdims=True) * np.sqrt(world.width)
    kept = places >= scored_from
    hidden, sharp, rows, places = hidden[kept], sharp[kept], rows[kept], places[kept]
    last, early = last[kept], early[kept]
    if how.noise is not None:
        hidden = hidden * (1 + how.noise[rows, places])
    if how.kept is not None:
        hidden = hidden * how.kept[rows, places]
    scaled = hidden * (np.minimum(sharp, 12.0) / np.sqrt(world.width))[:, None]
    logits = scaled @ world.head.T + world.bias
    if how.change is not None and how.change.samples[rows].any():
        other = how.change.samples[rows]
        logits[other] += scaled[other] @ (how.change.amount * how.change.direction).T
    everywhere = np.arange(len(rows))
    logits[everywhere, world.successor[last]] += world.bonus[last]
    logits[early, EOS] -= 30.0
    return (
        rounded(logits, how.bits) if how.low in ("logits", "softmax") else logits,
        experts,
        margins,
    )


def _route(experts: Experts, x: Floats, error: Floats | None) -> tuple[Floats, Ints, Floats]:
    layers, number, _ = experts.router.shape
    chosen = np.empty((len(x), layers, experts.chosen), dtype=np.int64)
    margins = np.empty((len(x), layers))
    hidden = x
    for layer in range(layers):
        scores = hidden @ experts.router[layer].T
        if error is not None:
            scores = scores + error[:, layer]
        order = np.argsort(-scores, axis=1)
        best = order[:, : experts.chosen]
        chosen[:, layer] = best
        held = np.take_along_axis(scores, order[:, : experts.chosen + 1], axis=1)
        margins[:, layer] = held[:, -2] - held[:, -1]
        gates = np.exp(held[:, :-1] - held[:, :1])
        gates = gates / gates.sum(axis=1, keepdims=True)
        added = np.zeros_like(hidden)
        for expert in range(number):
            row, slot = np.nonzero(best == expert)
            if len(row):
                out = np.tanh(hidden[row] @ experts.weights[layer, expert])
                np.add.at(added, row, gates[row, slot, None] * out)
        hidden = hidden + added
    return hidden, chosen, margins


def processed(
    logits: Floats,
    sampling: Sampling,
    seen: NDArray[np.bool_],
    times: Floats,
    keep: Ints | None = None,
) -> Floats:
    """What the sampler makes of logits: penalties, temperature, then top-k, top-p and min-p.

    keep: ids [N] that stay in the support: what was drawn lay in it, up to the last bit.
    """
    if sampling.penalised:
        factor = np.where(logits > 0, 1 / sampling.repetition, sampling.repetition)
        logits = np.where(seen, logits * factor, logits)
        logits = logits - sampling.frequency * times - sampling.presence * (times > 0)
    logits = logits / sampling.temperature
    if not sampling.truncated:
        return logits
    order = np.argsort(-logits, axis=1)
    ranked = np.take_along_axis(logits, order, axis=1)
    out = np.zeros(ranked.shape, dtype=bool)
    if sampling.top_k:
        out[:, sampling.top_k :] = True
    chances = np.where(out, 0.0, np.exp(ranked - ranked[:, :1]))
    chances /= chances.sum(axis=1, keepdims=True)
    out |= np.cumsum(chances, axis=1) - chances >= sampling.top_p
    out |= chances < sampling.min_p * chances[:, :1]
    out[:, 0] = False
    gone = np.empty_like(out)
    np.put_along_axis(gone, order, out, axis=1)
    if keep is not None:
        gone[np.arange(len(gone)), keep] = False
    return np.where(gone, -np.inf, logits)


def rounded(values: Floats, bits: int) -> Floats:
    """To the nearest number with `bits` bits of mantissa (bf16: 8, fp16: 11), ties to even."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)
