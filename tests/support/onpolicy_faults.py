"""The twelve causes as faults of the toy model's two sides, each by its true mechanism.

A fault changes how a side computes (`hows`), what was written of it (`edit`), or which tokens the
trainer was given (`retoken`). Strengths are drawn here, log-uniform, from what is hardly there to
what nobody overlooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onpolicy_world import EOS, Batch, Change, Floats, How, Ints, World

Values = list[Floats]


class Retokened(NamedTuple):
    """The trainer's responses, and which of their tokens the policy drew."""

    responses: list[Ints]
    drawn: list[NDArray[np.bool_]]


class Hows(NamedTuple):
    """How tokens were drawn, how the sampler's values were computed, and how the trainer's."""

    draw: How
    rollout: How
    trainer: How


class Written(NamedTuple):
    """Values [R] of each sample as both sides write them."""

    rollout: Values
    trainer: Values


@dataclass(frozen=True, eq=False)
class Scene:
    """What surrounds the numbers. Arrays are [S]; `span` is the longest prompt and response."""

    world: World
    span: int
    step: Ints
    rank: Ints
    rollout_rank: Ints
    batch_position: Ints

    @property
    def count(self) -> int:
        return len(self.step)


@dataclass(frozen=True, eq=False)
class Fault:
    """One cause at work. detail: its hidden strength. factor: how far its effect must lie above
    the noise where both are seen; least: on how many tokens. needs: what must have been recorded.
    """

    name: str
    detail: Mapping[str, object]
    hows: Callable[[Hows], Hows] = field(default=lambda given: given)
    edit: Callable[[Written, Batch, Written], Written] | None = None
    retoken: Callable[[Batch], Retokened] | None = None
    again: Callable[[How], How] = field(default=lambda how: how)
    factor: float = 1.0
    least: int = 8
    needs: frozenset[str] = frozenset()


def between(rng: np.random.Generator, low: float, high: float) -> float:
    """Log-uniform."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def noise(rng: np.random.Generator, scene: Scene, level: float) -> Floats:
    """Relative errors of hidden states, [S, span, D], of another size from row to row."""
    sizes = level * np.exp(rng.normal(0, 0.7, (scene.count, scene.span, 1)))
    return sizes * rng.normal(size=(scene.count, scene.span, scene.world.width))


def other_tokens(rng: np.random.Generator, scene: Scene) -> Fault:
    """Text went round: neighbours come back as one token, or a token as its twin of equal text."""
    share = between(rng, 0.01, 1.0)
    hit = rng.random(scene.count) < share
    hit[rng.integers(scene.count)] = True
    twins = bool(rng.random() < 0.4)
    rate = between(rng, 0.005, 0.2)
    seed = int(rng.integers(1 << 32))

    def retoken(batch: Batch) -> Retokened:
        own = np.random.default_rng(seed)
        out = Retokened([], [])
        for index, (ids, drawn) in enumerate(zip(batch.responses, batch.drawn, strict=True)):
            if not hit[index]:
                out.responses.append(ids)
                out.drawn.append(drawn)
                continue
            picked = own.random(len(ids)) < rate
            picked[own.integers(len(ids) - 2)] = True
            picked[-2:] = False
            other = own.integers(1, scene.world.vocabulary, len(ids))
            other = np.where(other == ids, other % (scene.world.vocabulary - 1) + 1, other)
            changed = np.where(picked, other, ids)
            stays = np.ones(len(ids), dtype=bool)
            if not twins:
                stays[1:] = ~picked[:-1]
            out.responses.append(changed[stays])
            out.drawn.append(drawn[stays])
        return out

    detail = {"samples": int(hit.sum()), "rate": rate, "twins": twins}
    return Fault("other-tokens", detail, retoken=retoken, least=1)


def temperature(rng: np.random.Generator, scene: Scene) -> Fault:
    """One side divides logits by a temperature, the other does not, or does it twice."""
    size = between(rng, 0.003, 0.6)
    value = float(np.exp(size if rng.random() < 0.4 else -size))
    kind = str(rng.choice(["not by the trainer", "not in the sampler's values", "twice"]))

    def hows(given: Hows) -> Hows:
        hot = [with_sampling(h, temperature=h.sampling.temperature * value) for h in given]
        if kind == "not by the trainer":
            return Hows(hot[0], hot[1], given.trainer)
        if kind == "twice":
            once = given.trainer.sampling.temperature
            return Hows(hot[0], hot[1], with_sampling(given.trainer, temperature=once * value**2))
        return Hows(hot[0], given.rollout, hot[2])

    return Fault("temperature", {"temperature": value, "kind": kind}, hows)


def truncated_support(rng: np.random.Generator, scene: Scene) -> Fault:
    """The sampler's values are over what top-p, top-k or min-p left, the trainer's over all."""
    drawn: dict[str, float | int] = {}
    kinds = ["top_p", "top_k", "min_p"]
    picked = [str(rng.choice(kinds, p=[0.55, 0.3, 0.15]))]
    if rng.random() < 0.2:
        picked = ["top_p", "top_k"]
    for kind in picked:
        if kind == "top_p":
            drawn[kind] = 1 - between(rng, 0.003, 0.6)
        elif kind == "top_k":
            drawn[kind] = int(between(rng, 2, 200))
        else:
            drawn[kind] = between(rng, 0.001, 0.3)
    return Fault("truncated-support", drawn, _sampler_only(drawn))


def penalties(rng: np.random.Generator, scene: Scene) -> Fault:
    """The sampler lowers what already stood there, the trainer does not."""
    kind = str(rng.choice(["repetition", "presence", "frequency"], p=[0.5, 0.25, 0.25]))
    size = between(rng, 0.005, 0.6)
    drawn = {kind: 1 + size if kind == "repetition" else 2 * size}
    return Fault("penalties", drawn, _sampler_only(drawn))


def shift(rng: np.random.Generator, scene: Scene) -> Fault:
    """One side's list is one off: it begins with the prompt's last token, or ends with padding."""
    by = int(rng.choice([1, -1]))
    share = 1.0 if rng.random() < 0.5 else between(rng, 0.05, 1.0)
    hit = rng.random(scene.count) < share
    hit[rng.integers(scene.count)] = True
    trainer = bool(rng.random() < 0.7)
    pad = float(np.float32(-rng.uniform(0.5, 15)))

    def edit(written: Written, batch: Batch, before: Written) -> Written:
        own, firsts = (
            (written.trainer, before.trainer) if trainer else (written.rollout, before.rollout)
        )
        moved = [
            one
            if not hit[index]
            else np.append(one[1:], pad)
            if by < 0
            else np.append(firsts[index][:1], one[:-1])
            for index, one in enumerate(own)
        ]
        return Written(written.rollout, moved) if trainer else Written(moved, written.trainer)

    return Fault("shift", {"by": by, "samples": int(hit.sum()), "trainer": trainer}, edit=edit)


def padded_vocabulary(rng: np.random.Generator, scene: Scene) -> Fault:
    """Columns that are no tokens join one side's softmax."""
    number = max(1, int(scene.world.vocabulary * between(rng, 0.002, 0.3)))
    middle = rng.uniform(-2, 3) if rng.random() < 0.4 else 0.0
    spread = rng.uniform(0.02, 1.0) if rng.random() < 0.4 else 0.0
    pads = middle + spread * rng.normal(size=number)
    trainer = bool(rng.random() < 0.8)

    def hows(given: Hows) -> Hows:
        if trainer:
            return given._replace(trainer=replace(given.trainer, pads=pads))
        return given._replace(rollout=replace(given.rollout, pads=pads))

    detail = {"columns": number, "middle": middle, "trainer": trainer}
    return Fault("padded-vocabulary", detail, hows)


def low_precision_head(rng: np.random.Generator, scene: Scene) -> Fault:
    """One side rounds log-probabilities, logits or both to bf16 or fp16.

    Rounded logits under an exact softmax can be told from other noise only by the differences of
    alternatives at one place, so those are recorded then.
    """
    low = str(rng.choice(["stored", "softmax", "logits"]))
    bits = int(rng.choice([8, 11], p=[0.8, 0.2]))
    trainer = bool(rng.random() < 0.5)

    def hows(given: Hows) -> Hows:
        if trainer:
            return given._replace(trainer=replace(given.trainer, low=low, bits=bits))
        return Hows(
            replace(given.draw, low=low if low != "stored" else "", bits=bits),
            replace(given.rollout, low=low, bits=bits),
            given.trainer,
        )

    needs = f"top of {'trainer' if trainer else 'rollout'}"
    detail = {"what": low, "bits": bits, "trainer": trainer}
    return Fault(
        "low-precision-head",
        detail,
        hows,
        needs=frozenset([needs] if low == "logits" else []),
    )


def stale_weights(rng: np.random.Generator, scene: Scene) -> Fault:
    """From some step on the sampler has older weights: told by versions or by that step."""
    steps = np.unique(scene.step)
    versions = len(steps) < 2 or bool(rng.random() < 0.5)
    begin = int(rng.choice(steps[1:])) if len(steps) > 1 else int(steps[0])
    change = Change(directions(rng, scene.world), between(rng, 1e-3, 0.3), scene.step >= begin)

    def hows(given: Hows) -> Hows:
        return Hows(
            replace(given.draw, change=change),
            replace(given.rollout, change=change),
            given.trainer,
        )

    return Fault(
        "stale-weights",
        {"begin": begin, "amount": change.amount, "lag": int(rng.integers(1, 4))},
        hows,
        factor=2.0,
        needs=frozenset({"versions", "step"} if versions else {"step"}),
    )


def dropout(rng: np.random.Generator, scene: Scene) -> Fault:
    """The trainer scores with dropout on. Told by scoring twice, so a second scoring is there."""
    rate = between(rng, 0.001, 0.2)
    shape = (scene.count, scene.span, scene.world.width)
    masks = [(rng.random(shape) >= rate) / (1 - rate) for _ in range(2)]

    def hows(given: Hows) -> Hows:
        return given._replace(trainer=replace(given.trainer, kept=masks[0]))

    return Fault(
        "dropout",
        {"rate": rate},
        hows,
        again=lambda how: replace(how, kept=masks[1]),
        needs=frozenset({"again"}),
    )


def routing_flips(rng: np.random.Generator, scene: Scene) -> Fault:
    """The trainer's router logits are noisy, and where the margin is small other experts serve."""
    experts = scene.world.experts
    assert experts is not None
    level = between(rng, 3e-4, 0.2)
    layers, number, _ = experts.router.shape
    routed = level * rng.normal(size=(scene.count, scene.span, layers, number))

    def hows(given: Hows) -> Hows:
        return given._replace(trainer=replace(given.trainer, routed=routed))

    return Fault("routing-flips", {"level": level}, hows, needs=frozenset({"routing"}))


def outlier_place(rng: np.random.Generator, scene: Scene) -> Fault:
    """One rank, engine or batch position computes worse, or with other weights, than the rest."""
    places = {
        name: getattr(scene, name)
        for name in ("rank", "rollout_rank", "batch_position")
        if len(counts := np.unique(getattr(scene, name), return_counts=True)[1]) >= 3
        and counts.max() >= 2
    }
    where = str(rng.choice(sorted(places)))
    numbers, counts = np.unique(places[where], return_counts=True)
    place = int(rng.choice(numbers[counts >= 2]))
    hit = places[where] == place
    trainer = where == "batch_position" or where == "rank"
    if rng.random() < 0.5:
        level = between(rng, 1e-3, 0.2)
        error = noise(rng, scene, level) * hit[:, None, None]

        def worse(how: How) -> How:
            return replace(how, noise=error if how.noise is None else how.noise + error)
    else:
        level = between(rng, 1e-3, 0.3)
        change = Change(directions(rng, scene.world), level, hit)

        def worse(how: How) -> How:
            return replace(how, change=change)

    def hows(given: Hows) -> Hows:
        if trainer:
            return given._replace(trainer=worse(given.trainer))
        return Hows(worse(given.draw), worse(given.rollout), given.trainer)

    return Fault(
        "outlier-place",
        {"where": where, "place": place, "level": level},
        hows,
        factor=2.0,
        needs=frozenset({where}),
    )


def sentinel(rng: np.random.Generator, scene: Scene) -> Fault:
    """Values that are none stand in for log-probabilities: at places, in runs, or at the end."""
    shape = str(rng.choice(["places", "end", "start", "last"]))
    value = float(rng.choice([0.0, 1.0, -np.inf, -100.0, -9999.0], p=[0.5, 0.1, 0.15, 0.15, 0.1]))
    rate = between(rng, 0.001, 0.3)
    trainer = bool(rng.random() < 0.3)
    seed = int(rng.integers(1 << 32))

    def edit(written: Written, batch: Batch, before: Written) -> Written:
        own = np.random.default_rng(seed)
        out = []
        own_values = written.trainer if trainer else written.rollout
        for one, ids in zip(own_values, batch.responses, strict=True):
            length = len(one)
            filled = np.zeros(length, dtype=bool)
            run = int(own.integers(1, max(2, length // 2)))
            if shape == "places":
                filled = own.random(length) < rate
            elif shape == "last":
                filled[-1] = ids[-1] == EOS
            elif own.random() < rate:
                filled[-run:] = shape == "end"
                filled[:run] |= shape == "start"
            out.append(np.where(filled, value, one))
        return Written(written.rollout, out) if trainer else Written(out, written.trainer)

    detail = {"value": value, "shape": shape, "rate": rate, "trainer": trainer}
    return Fault("sentinel", detail, edit=edit, least=3)


Maker = Callable[[np.random.Generator, Scene], Fault]
CAUSES: Mapping[str, Maker] = MappingProxyType(
    {
        "other-tokens": other_tokens,
        "temperature": temperature,
        "truncated-support": truncated_support,
        "penalties": penalties,
        "shift": shift,
        "padded-vocabulary": padded_vocabulary,
        "low-precision-head": low_precision_head,
        "stale-weights": stale_weights,
        "dropout": dropout,
        "routing-flips": routing_flips,
        "outlier-place": outlier_place,
        "sentinel": sentinel,
    }
)


def directions(rng: np.random.Generator, world: World) -> Floats:
    """What an update of a few dimensions moves the head by, [V, D], of unit size per element."""
    rank = int(rng.integers(1, 9))
    left, right = rng.normal(size=(world.vocabulary, rank)), rng.normal(size=(rank, world.width))
    return left @ right / np.sqrt(rank)


def with_sampling(how: How, **changes: Any) -> How:
    """The same side with other sampling parameters."""
    return replace(how, sampling=replace(how.sampling, **changes))


def _sampler_only(drawn: Mapping[str, float | int]) -> Callable[[Hows], Hows]:
    def hows(given: Hows) -> Hows:
        return Hows(
            with_sampling(given.draw, **drawn), with_sampling(given.rollout, **drawn), given.trainer
        )

    return hows
