"""Rotations of one shape: contenders with ceilings, slow contenders apart, grouped GEMMs apart.

A contender or ceiling that fails in a rotation is left out and the rotation begun again, since the
rounds before had another mixture. Refuses rows from a rotation that was not finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from mok.bench import document
from mok.bench.ceilings import Ceiling, ceilings
from mok.bench.contenders import OURS, Inputs, Missing, Prepared
from mok.bench.determinism import quoted
from mok.bench.protocols import WARM_ROUNDS, ContenderFailed, Timing, quantile, rotation
from mok.bench.runs import Run, attempt, directions_of, go_on, save_now, setting
from mok.bench.shapes import Shape

SLOW_FACTOR = 5.0
"""A contender this many times slower than the fastest is timed apart: it would let the card cool
for the others and take most of the time."""
SLOW_ROUNDS = 3


def slow_ones(seconds: Mapping[str, float]) -> list[str]:
    """Names of those SLOW_FACTOR times slower than the fastest, all on the same work."""
    fastest = min(seconds.values(), default=0.0)
    return [name for name, taken in seconds.items() if taken > SLOW_FACTOR * fastest]


def rotations(
    run: Run,
    shape: Shape,
    inputs: Inputs,
    prepared: dict[str, Prepared],
    seconds: Mapping[str, float],
    memory: Mapping[str, int | None],
) -> None:
    """The contenders in turn with the ceilings; those much slower than the fastest apart.

    seconds: of one forward and backward (Called); memory: bytes, for the rows. Both by name.
    """
    slow = slow_ones(seconds)
    fast = {name: made for name, made in prepared.items() if name not in slow}
    beside: list[Ceiling] = []

    def step() -> None:
        beside.extend(ceilings(shape, inputs.w_gate_up[0], run.together.ranks))

    attempt(run, shape, "ceilings", "ceilings", step)
    _rotate(run, shape, beside, fast, memory, run.options.rounds, apart=False)
    if slow:
        apart = {name: prepared[name] for name in slow if name in prepared}
        rounds = min(SLOW_ROUNDS, run.options.rounds)
        _rotate(run, shape, beside, apart, memory, rounds, apart=True)


def _rotate(
    run: Run,
    shape: Shape,
    beside: Sequence[Ceiling],
    runners: dict[str, Prepared],
    memory: Mapping[str, int | None],
    rounds: int,
    *,
    apart: bool,
) -> None:
    """One rotation; begun again without a contender that fails in it."""
    calls = {ceiling.name: ceiling.call for ceiling in beside}
    warm = 1 if apart else WARM_ROUNDS
    sides = {name: directions_of(run.options, run.contenders[name]) for name in runners}
    found: list[tuple[dict[str, Timing], dict[tuple[str, str], Timing]]] = []
    while runners:
        go_on(run)
        failed: list[str] = []

        def step(failed: list[str] = failed) -> None:
            try:
                found.append(
                    rotation(run.instruments, run.together, calls, runners, rounds, warm, sides)
                )
            except ContenderFailed as error:
                failed.append(error.who)
                raise

        if attempt(run, shape, ", ".join(runners), "rotation", step):
            break
        for name in failed or list(runners):
            runners.pop(name, None)
            calls.pop(name, None)
    if not runners:
        return
    of_ceilings, of_runners = found[0]
    if not apart:
        _note_ceilings(run, shape, beside, of_ceilings, "layers")
    common = setting(run, shape)
    for (name, direction), timing in of_runners.items():
        version = run.contenders[name].version
        run.document["rows"].append(
            document.row(
                common,
                "rotation",
                name,
                version,
                direction,
                timing,
                ours=name == OURS,
                sides=sides[name],
                apart=apart,
                memory=memory.get(name),
            )
            | {"determinism": quoted(run.findings, name, shape.name, run.together.ranks)}
        )
        run.say(f"{shape.name}: rotation: {name} {direction} {1e3 * timing.median:.3f} ms")
    save_now(run)


def _note_ceilings(
    run: Run, shape: Shape, beside: Sequence[Ceiling], timings: Mapping[str, Timing], among: str
) -> None:
    for ceiling in beside:
        timing = timings.get(ceiling.name)
        if timing is None:
            continue
        run.document["ceilings"].append(
            {
                "shape": shape.name,
                "name": ceiling.name,
                "among": among,
                "samples": len(timing.seconds),
                "median_ms": 1e3 * timing.median,
                "p10_ms": 1e3 * quantile(timing.seconds, 0.1),
                "p90_ms": 1e3 * quantile(timing.seconds, 0.9),
                "rate": ceiling.amount / timing.median / 1e12,
                "unit": ceiling.unit,
                "clock_mhz": timing.reading.clock_mhz,
                "watts": timing.reading.watts,
            }
        )


def gemm_rotation(run: Run, shape: Shape, inputs: Inputs) -> None:
    """Peers' grouped GEMMs by themselves, in a rotation of their own with the dense ones."""
    from mok.bench import peers

    beside: list[Ceiling] = []
    missing: list[dict[str, str]] = []

    def make() -> None:
        beside.extend(ceilings(shape, inputs.w_gate_up[0])[:2])
        for gemm in peers.grouped_gemms(inputs):
            if isinstance(gemm, Missing):
                missing.append(asdict(gemm))
            else:
                beside.append(Ceiling(gemm.name, gemm.run, gemm.flops, "TFLOP/s"))

    if not attempt(run, shape, "grouped GEMMs", "gemms", make):
        return
    run.document["skipped"] += [one for one in missing if one not in run.document["skipped"]]
    calls = {ceiling.name: ceiling.call for ceiling in beside}
    found: list[dict[str, Timing]] = []
    while calls and not found:
        go_on(run)
        failed: list[str] = []

        def step(failed: list[str] = failed) -> None:
            try:
                rounds = run.options.rounds
                found.append(rotation(run.instruments, run.together, calls, {}, rounds)[0])
            except ContenderFailed as error:
                failed.append(error.who)
                raise

        if not attempt(run, shape, "grouped GEMMs", "gemms", step):
            for name in failed or list(calls):
                calls.pop(name)
    if found:
        _note_ceilings(run, shape, beside, found[0], "gemms")
