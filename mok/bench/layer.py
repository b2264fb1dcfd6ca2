"""`mok bench layer`: all contenders on all shapes, in both protocols, into one document.

It decides nothing: it times, counts joules and measures errors, quotes what `verify` found on
determinism, and marks what may not be compared. Refuses options that fit no contender or shape
before anything runs; whatever goes wrong later is in the document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from mok.bench import document
from mok.bench.contenders import OURS, Contender, Missing
from mok.bench.determinism import Finding
from mok.bench.instruments import Instruments
from mok.bench.layer_inputs import check_routing
from mok.bench.phases import measure_loops, measure_turns, small_accuracy
from mok.bench.prediction import predict
from mok.bench.ranks import Together
from mok.bench.runs import Options, Run, RunEnded, directions_of, save_now, wanted_alone
from mok.bench.turns import SLOW_FACTOR, SLOW_ROUNDS
from mok.errors import InputError


def choose(
    listing: Sequence[Contender | Missing], options: Options
) -> tuple[dict[str, Contender], list[Missing]]:
    """Contenders to time by name, and those left out with the reason.

    Raises InputError when a name is not known, or when nothing remains.
    """
    names = [entry.name for entry in listing]
    pairs = [name for pair in options.pairs for name in pair]
    for asked in (*(options.contenders or ()), *(options.alone or ()), *pairs):
        if asked not in names:
            raise InputError(
                f"contender {asked!r}; allowed: {', '.join(names)}. Check the spelling."
            )
    usual = [entry.name for entry in listing if not getattr(entry, "by_name_only", False)]
    wanted = [*(usual if options.contenders is None else options.contenders), *pairs]
    wanted += [name for name in options.alone or () if name not in wanted]
    chosen: dict[str, Contender] = {}
    missing: list[Missing] = []
    for entry in listing:
        if entry.name not in wanted:
            continue
        if isinstance(entry, Missing):
            missing.append(entry)
        elif options.ranks > 1 and not entry.parallel:
            missing.append(Missing(entry.name, "works on one rank only"))
        else:
            chosen[entry.name] = entry
    if not chosen:
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in missing)
        raise InputError(f"no contender can run ({reasons}). Choose others, or install them.")
    return chosen, missing


def predicted(options: Options, contenders: Mapping[str, Contender]) -> float:
    """Seconds that the run will take, about."""
    return predict(
        options.shapes,
        list(contenders),
        wanted_alone(options, contenders) if options.seconds else (),
        [pair for pair in options.pairs if options.seconds and set(pair) <= set(contenders)],
        rounds=options.rounds,
        seconds=options.seconds,
        slow_rounds=SLOW_ROUNDS,
        slow_factor=SLOW_FACTOR,
        device=options.device.split(":", 1)[0],
        directions={name: directions_of(options, one) for name, one in contenders.items()},
        tflops={name: one.tflops for name, one in contenders.items()},
    )


def measure(
    options: Options,
    instruments: Instruments,
    together: Together,
    listing: Sequence[Contender | Missing],
    *,
    findings: Sequence[Finding] = (),
    command: str = "mok bench layer",
    say: Callable[[str], None] = lambda line: None,
    save: Callable[[document.Document], None] = lambda document: None,
) -> document.Document:
    """The document of one run. Collective over the ranks; only rank 0's document is whole.

    Raises InputError for options that fit no contender or shape; everything later is in the
    document (`failures`, `ended`).
    """
    contenders, missing = choose(listing, options)
    for shape in options.shapes:
        check_routing(shape, options.routing, options.ranks)
    expected = predicted(options, contenders)
    names = [*contenders, *(entry.name for entry in missing)]
    run = Run(
        options,
        instruments,
        together,
        contenders,
        findings,
        {
            "schema": document.SCHEMA,
            "schema_version": document.SCHEMA_VERSION,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "ours": OURS,
            "protocols": document.PROTOCOLS,
            "conventions": document.CONVENTIONS,
            "options": {
                **{key: value for key, value in asdict(options).items() if key != "shapes"},
                "shapes": [shape.name for shape in options.shapes],
                "slow_factor": SLOW_FACTOR,
                "slow_rounds": SLOW_ROUNDS,
            },
            "machine": {**instruments.facts, "clock": instruments.clock_name},
            "contenders": [
                {
                    "name": entry.name,
                    "version": entry.version,
                    "directions": list(directions_of(options, entry)),
                }
                for entry in contenders.values()
            ],
            "skipped": [asdict(entry) for entry in missing],
            "shapes": [],
            "ceilings": [],
            "rows": [],
            "ratios": [],
            "accuracy": [],
            "determinism": [asdict(finding) for finding in findings if finding.contender in names],
            "choices": [],
            "failures": [],
            "predicted_seconds": round(expected, 1),
            "seconds": 0.0,
            "ended": "not finished",
        },
        say,
        save,
    )
    for entry in missing:
        say(f"skipped: {entry.name}: {entry.reason}")
    say(
        f"about {expected:.0f} s for {len(contenders)} contender(s), {len(options.shapes)} shape(s)"
    )
    ended = _everything(run)
    save_now(run, ended)
    return run.document


def _everything(run: Run) -> str:
    options = run.options
    try:
        if options.accuracy:
            small_accuracy(run)
        # Every shape's rotation before any loop: a time limit then leaves no shape without one. By
        # shape it leaves the first ones with both protocols.
        at_once = [(shape,) for shape in options.shapes] if options.by_shape else [options.shapes]
        for shapes in at_once:
            called = {shape.name: measure_turns(run, shape) for shape in shapes}
            for shape in shapes:
                measure_loops(run, shape, called[shape.name])
    except RunEnded as end:
        return str(end)
    return "finished"
