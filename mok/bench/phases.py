"""What is done with one shape: accuracy, first calls, rotations, loops.

Contenders are prepared for one phase and dropped after it, so that memory is free between
them. Refuses to time what failed its first calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from mok.bench import accuracy, document
from mok.bench.contenders import DIRECTIONS, OURS, Inputs, Prepared
from mok.bench.determinism import quoted
from mok.bench.layer_inputs import load_spread, make_inputs
from mok.bench.protocols import Timing, direction_calls, loop
from mok.bench.runs import (
    Run,
    attempt,
    close,
    directions_of,
    go_on,
    prepare,
    save_now,
    setting,
    wanted_alone,
)
from mok.bench.shapes import SHAPES, Shape
from mok.bench.turns import gemm_rotation, rotations, slow_ones

SLOW_CALL_SECONDS = 0.5
"""A first call (which may compile) that takes longer is followed by one more and not by two."""


def small_accuracy(run: Run) -> None:
    """Every contender on the small shape, all outputs, against float64."""
    shape = SHAPES["small"]
    if shape.E % run.together.ranks:
        run.say(f"no accuracy: {shape.E} experts on {run.together.ranks} ranks")
        return
    go_on(run)
    together = run.together
    made_inputs: list[Inputs] = []
    expected: dict[str, Tensor] = {}

    def refer() -> None:
        made_inputs.append(_inputs(run, shape, "gaussian"))
        whole = accuracy.gathered(made_inputs[0])
        part = accuracy.own_part(made_inputs[0], together.rank)
        expected.update(accuracy.reference(whole, part))

    if not attempt(run, shape, "reference", "accuracy (reference)", refer):
        return
    inputs = made_inputs[0]
    for name in run.contenders:
        go_on(run)
        one = {name: made} if (made := prepare(run, shape, name, inputs)) is not None else {}
        if one:
            whole = accuracy.everything(inputs)
            _compare(run, shape, "gaussian", name, one[name], expected, whole, "whole")
        close(run, one)
        save_now(run)


def _compare(
    run: Run,
    shape: Shape,
    routing: str,
    name: str,
    prepared: Prepared,
    expected: Mapping[str, Tensor],
    selection: accuracy.Selection,
    what: str,
) -> None:
    found: dict[str, float] = {}

    def step() -> None:
        out = prepared.forward()
        gradients = prepared.arrange(prepared.backward(out, False))
        found.update(accuracy.errors({"out": out, **gradients}, expected, selection))

    if attempt(run, shape, name, f"accuracy ({what})", step):
        most = dict(zip(found, run.together.largest(list(found.values())), strict=True))
        broken = [output for output, error in most.items() if error == float("inf")]
        run.document["accuracy"].append(
            {
                "shape": shape.name,
                "routing": routing,
                "contender": name,
                "what": what,
                "tokens": selection.tokens.numel(),
                "experts": selection.experts.numel(),
                **{output: None if output in broken else error for output, error in most.items()},
                "not_finite": broken,
            }
        )
        run.say(f"{shape.name}: {name} error {what}: out {most['out']:.2e}")


@dataclass(frozen=True)
class Called:
    """What the first calls showed, by contender: seconds of forward and backward, peak bytes.

    seconds: of one that is timed in one direction as if both took what that one does for its work.
    """

    seconds: dict[str, float]
    memory: dict[str, int | None]


def measure_turns(run: Run, shape: Shape) -> Called:
    """First calls and rotations of one shape; ends early only with RunEnded."""
    inputs = _attempt_inputs(run, shape)
    if inputs is None:
        return Called({}, {})
    run.document["shapes"].append(
        {
            **asdict(shape),
            "forward_flops": shape.forward_flops,
            "backward_flops": shape.backward_flops,
            "busiest_expert_over_mean": load_spread(inputs, shape.E),
        }
    )
    prepared, called = _first_calls(run, shape, inputs)
    if run.options.rounds:
        rotations(run, shape, inputs, prepared, called.seconds, called.memory)
    close(run, prepared)
    if run.options.gemms and run.options.rounds and run.together.ranks == 1:
        gemm_rotation(run, shape, inputs)
        run.instruments.release()
    save_now(run)
    return called


def measure_loops(run: Run, shape: Shape, called: Called) -> None:
    """Tight loops of one shape, of what survived its first calls; ends early only with RunEnded.

    A slow contender is looped only if it was asked for by name.
    """
    options, slow = run.options, slow_ones(called.seconds)
    alone = [
        (name,)
        for name in wanted_alone(options, run.contenders)
        if name in called.seconds and (name not in slow or options.alone is not None)
    ]
    pairs = [pair for pair in options.pairs if set(pair) <= set(called.seconds)]
    if not options.seconds or not (alone or pairs):
        return
    inputs = _attempt_inputs(run, shape)
    if inputs is None:
        return
    for names in (*alone, *pairs):
        _loops(run, shape, inputs, names, called.memory)


def _attempt_inputs(run: Run, shape: Shape) -> Inputs | None:
    go_on(run)
    holder: list[Inputs] = []

    def step() -> None:
        holder.append(_inputs(run, shape, run.options.routing))

    if attempt(run, shape, "inputs", "inputs", step):
        return holder[0]
    save_now(run)
    return None


def _inputs(run: Run, shape: Shape, routing: str) -> Inputs:
    together = run.together
    return make_inputs(
        shape,
        routing,
        run.instruments.device,
        rank=together.rank,
        ranks=together.ranks,
        group=together.group,
    )


def _first_calls(run: Run, shape: Shape, inputs: Inputs) -> tuple[dict[str, Prepared], Called]:
    """Prepared contenders and what their calls after the first showed; compiles and tunes."""
    instruments = run.instruments
    prepared: dict[str, Prepared] = {}
    seconds: dict[str, float] = {}
    memory: dict[str, int | None] = {}
    chosen: dict[str, Tensor] = {}
    selection = accuracy.sample(inputs, run.options.sample_tokens, run.options.sample_experts)
    if run.options.sample_tokens and run.together.ranks == 1:

        def refer() -> None:
            chosen.update(accuracy.reference(inputs, selection))

        attempt(run, shape, "reference", "accuracy (reference)", refer)
    for name in run.contenders:
        go_on(run)
        made = prepare(run, shape, name, inputs)
        if made is None:
            continue
        both = "backward" in directions_of(run.options, run.contenders[name])
        share = 1.0 if both else shape.work(DIRECTIONS) / shape.work(["forward"])

        def call(made: Prepared = made, both: bool = both) -> None:
            out = made.forward()
            if both:
                made.backward(out, False)

        def step(
            name: str = name,
            made: Prepared = made,
            call: Callable[[], None] = call,
            share: float = share,
        ) -> None:
            began = time.perf_counter()
            call()
            instruments.synchronize()
            first = time.perf_counter() - began
            instruments.release()
            instruments.reset_peak()
            before = instruments.allocated()
            start = instruments.record()
            count = 1 if first > SLOW_CALL_SECONDS and run.together.ranks == 1 else 2
            for _ in range(count):
                call()
            end = instruments.record()
            instruments.synchronize()
            peak = instruments.peak()
            memory[name] = None if before is None or peak is None else peak - before
            seconds[name] = share * instruments.seconds(start, end) / count
            run.document["choices"].append(
                {"shape": shape.name, "contender": name, "first_call_seconds": round(first, 3)}
                | {"choices": dict(made.choices())}
            )

        if not attempt(run, shape, name, "first calls", step):
            seconds.pop(name, None)
            made.close()
            continue
        seconds[name] = run.together.largest([seconds[name]])[0]
        most = run.together.largest_known(memory[name])
        memory[name] = None if most is None else int(most)
        prepared[name] = made
        took = 1e3 * seconds[name] / share
        what = "forward and backward" if both else "forward"
        run.say(f"{shape.name}: {name} ready, {took:.2f} ms {what}")
        if chosen:
            routing = run.options.routing
            _compare(run, shape, routing, name, made, chosen, selection, "sample")
    save_now(run)
    return prepared, Called(seconds, memory)


def _loops(
    run: Run,
    shape: Shape,
    inputs: Inputs,
    names: Sequence[str],
    memory: Mapping[str, int | None],
) -> None:
    """One contender alone, or two alternating, in the directions in which they are timed."""
    protocol = "alone" if len(names) == 1 else "pair"
    prepared: dict[str, Prepared] = {}
    for name in names:
        made = prepare(run, shape, name, inputs)
        if made is not None:
            prepared[name] = made
    sides = {name: directions_of(run.options, run.contenders[name]) for name in names}
    for direction in DIRECTIONS:
        if not all(direction in sides[name] for name in names):
            continue
        go_on(run)
        if len(prepared) < len(names):
            break
        found: dict[str, Timing] = {}

        def step(direction: str = direction, found: dict[str, Timing] = found) -> None:
            calls = {name: direction_calls(prepared[name], direction) for name in names}
            found.update(loop(run.instruments, run.together, calls, run.options.seconds))

        if not attempt(run, shape, " and ".join(names), f"{protocol} {direction}", step):
            break
        for place, name in enumerate(names):
            timing = found[name]
            run.document["rows"].append(
                document.row(
                    setting(run, shape),
                    protocol,
                    name,
                    run.contenders[name].version,
                    direction,
                    timing,
                    ours=name == OURS,
                    sides=sides[name],
                    partner=names[1 - place] if len(names) > 1 else None,
                    memory=memory.get(name),
                )
                | {"determinism": quoted(run.findings, name, shape.name, run.together.ranks)}
            )
            run.say(f"{shape.name}: {protocol}: {name} {direction} {1e3 * timing.median:.3f} ms")
        run.instruments.release()
    close(run, prepared)
    save_now(run)
