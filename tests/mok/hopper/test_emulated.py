"""The real kernels of csrc/moe on emulated threads: values, protocol, and faults that must be seen.

See tests/support/emulation.py for what the emulation sees and what it cannot. Needs g++.
"""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import emulation
import pytest
import torch
from degree_script import load_degrees, load_problem
from emulation import Emulator, Knobs
from emulation_cases import (
    Example,
    Shape,
    draw_example,
    exact,
    joined,
    problems_of,
    split,
)
from emulation_faults import Fault, changed_sources, check_seen

from mok import reference
from mok.exact import same_bits
from mok.hopper.layout import Segments, Sizes
from mok.hopper.packing import Results
from mok.hopper.records import failed_wait
from mok.hopper.ticket_logs import Replay
from mok.reference import MoEInputs

pytestmark = pytest.mark.skipif(emulation.compiler() is None, reason="needs g++")

ONE, TWO, FEW = Segments(1, 1), Segments(1, 2), Segments(2, 3)
KERNELS = ("publish", "count", "scan", "place", "enter", "forward")


@pytest.fixture(autouse=True)
def _one_thread(threads: None) -> None:
    """Small tensors; threads of torch would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return emulation.build(tmp_path_factory.mktemp("emulator"))


def example(*launches: Shape, segments: Segments = TWO, **knobs: object) -> Example:
    return Example(launches, Knobs(segments=segments, **knobs))  # type: ignore[arg-type]


def tokens(shape: Shape, *counts: int) -> Shape:
    """The same layer with other numbers of tokens."""
    return Shape(**{**vars(shape), "tokens": counts})


WRAPS = Shape((400,), 128, 192, 3, 2, "skewed")
PAIR = Shape((70, 130), 128, 128, 2, 2, "skewed", shared=64)
FOUR = Shape((65, 0, 1, 40), 64, 64, 1, 2, "unused-slots")

EXAMPLES = {
    "one token": example(Shape((1,), 64, 64, 1, 1)),
    "tail of 64": example(Shape((64,), 192, 64, 1, 1), ctas=2, seed=1),
    "tail of 65": example(Shape((65,), 192, 64, 1, 1), ctas=2, seed=2),
    "idle half": example(Shape((17,), 768, 64, 1, 1)),
    "full block and one": example(Shape((129,), 64, 128, 2, 1, "one-expert"), ctas=2, seed=3),
    "clipped columns": example(Shape((50,), 320, 192, 3, 2), ctas=3, seed=4),
    "four slots": example(Shape((60,), 128, 64, 5, 4, "unused-slots"), ctas=7, seed=5),
    "empty experts": example(Shape((90,), 128, 64, 6, 2, "empty-experts"), seed=6),
    "clamp and shared": example(
        Shape((150,), 128, 64, 2, 2, shared=192, clamped=True), ctas=2, seed=7
    ),
    "nothing saved": example(Shape((200,), 128, 64, 2, 1), ctas=3, seed=8, save=False),
    "rings wrap": example(WRAPS, segments=ONE, ring_x=1, ring_h=2, ctas=3, seed=9),
    "hidden places reused at once": example(
        Shape((600,), 64, 128, 3, 2, "skewed"), ring_x=4, ring_h=4, ctas=7, seed=19
    ),
    "hidden places reused at once, looking ahead": example(
        Shape((600,), 256, 512, 3, 2, "skewed"), ring_x=4, ring_h=4, ctas=9, seed=19
    ),
    "expert across segments": example(
        Shape((600,), 64, 192, 2, 1, "one-expert"), ring_x=2, ring_h=4, ctas=2, seed=10
    ),
    "one CTA of seven resident": example(WRAPS, segments=ONE, ctas=7, seed=11, resident=1),
    "two launches": example(WRAPS, tokens(WRAPS, 30), segments=ONE, ctas=2, seed=12),
    "looks ahead": example(Shape((600,), 256, 256, 3, 2), ring_x=2, ring_h=6, ctas=2, seed=19),
    "draws within a tile": example(
        Shape((200,), 704, 640, 2, 1), segments=ONE, ring_x=1, ring_h=2, ctas=2, seed=20
    ),
    "group of two": example(PAIR, ctas=2, seed=13),
    "group of two, three launches": example(
        PAIR, tokens(PAIR, 0, 200), tokens(PAIR, 128, 1), segments=ONE, ctas=1, seed=14
    ),
    "two ranks apart": example(PAIR, ctas=2, seed=15, together=False),
    "two ranks apart, three launches": example(
        PAIR, tokens(PAIR, 3, 0), PAIR, segments=ONE, ring_x=1, ctas=1, seed=16, together=False
    ),
    "group of four": example(FOUR, ctas=1, seed=17),
    "four ranks apart": example(FOUR, tokens(FOUR, 1, 2, 0, 90), seed=18, together=False),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_exact_bits(emulator: Emulator, name: str) -> None:
    assert problems_of(EXAMPLES[name], emulator) == []


@pytest.mark.parametrize("seed", range(3))
def test_other_schedules_give_the_same(emulator: Emulator, seed: int) -> None:
    for name in ("rings wrap", "two ranks apart, three launches", "clipped columns"):
        chosen = EXAMPLES[name]
        knobs = Knobs(**{**vars(chosen.knobs), "seed": 100 + seed})
        assert problems_of(Example(chosen.launches, knobs), emulator) == [], name


def test_random_shapes_and_schedules(emulator: Emulator) -> None:
    """More of these: `python tests/support/emulation_search.py SEED SECONDS`."""
    rng = random.Random(5)
    for _ in range(8):
        drawn = draw_example(rng)
        assert problems_of(drawn, emulator) == [], drawn


def test_lanes_of_an_idle_half_stay_together(emulator: Emulator) -> None:
    """At 64 rows or fewer half of the consumers have no products that hold a warp together."""
    for seed in range(24):
        tail = example(Shape((17,), 768, 64, 1, 1), seed=seed)
        assert problems_of(tail, emulator) == [], seed


def test_no_half_gets_two_tiles_ahead(emulator: Emulator) -> None:
    """Tiles of one to three stages leave room for the next ones before the slower half began."""
    for seed in range(6):
        for hidden, width in ((64, 64), (64, 128), (192, 192)):
            short = example(Shape((300,), hidden, width, 2, 2), seed=seed)
            assert problems_of(short, emulator) == [], (hidden, width, seed)


@pytest.mark.parametrize("together", [True, False])
def test_random_values_are_within_rounding(
    emulator: Emulator, make_inputs: Callable[..., MoEInputs], together: bool
) -> None:
    inputs = make_inputs(90, 128, 64, 4, 3, shared_width=64, limit=1.5)
    sizes = Sizes(50, 3, 2, 128, 64, 64, ranks=2)
    knobs = Knobs(ctas=2, seed=21, segments=TWO, together=together)
    outcome = emulation.run(emulator, [split(inputs, (50, 40))], sizes, knobs)
    assert outcome.failure == ""
    judged = reference.agreement(
        reference.moe(inputs, None, "rounded", 2.0**-22)["out"], joined(outcome, 0)
    )
    assert judged.outside == 0
    assert judged.different < judged.count / 50


# ---- degrees of expert parallelism --------------------------------------------------------------

TIGHT = Knobs(ctas=2, segments=ONE, ring_x=1, ring_h=2, save=False)


def test_random_values_have_the_same_bits_at_every_degree(emulator: Emulator) -> None:
    degrees, problems = load_degrees(), load_problem()
    whole = problems.whole_problem(530, 64, 64, 4, 2, 64)
    outs = []
    for degree in (1, 2, 4):
        tokens = problems.shares(whole, degree)
        parts = problems.split(whole, tokens)
        knobs = Knobs(**{**vars(TIGHT), "seed": degree})
        outcome = emulation.run(emulator, [parts], problems.sizes_of(parts), knobs)
        assert outcome.failure == ""
        assert degrees.lacking(degrees.facts_of(outcome.workspaces, tokens)) == []
        outs.append(joined(outcome, 0))
    assert outs[0].abs().amax() > 0.1
    assert all(same_bits(out, outs[0]) for out in outs)


def _logged(emulator: Emulator, degree: int) -> tuple[torch.Tensor, Replay, str]:
    """out, what the rules say of the log, and what went wrong; the launch itself is emulated."""
    degrees, problems = load_degrees(), load_problem()
    whole = problems.whole_problem(530, 64, 64, 4, 2, 64)
    parts = problems.split(whole, problems.shares(whole, degree))
    workspaces, recorder = emulation.open_workspaces(emulator, problems.sizes_of(parts), TIGHT)
    failures = []

    def wait(written: Sequence[torch.Tensor]) -> None:
        regions = emulation.workspace_regions(workspaces)
        regions += [(f"written {index}", tensor) for index, tensor in enumerate(written)]
        for rank, part in enumerate(parts):
            regions += emulation.call_regions(rank, part, Results(written[rank]))
        failures.append(emulation.run_launches(recorder, regions, TIGHT))

    ctas = TIGHT.ctas * max(1, degree)
    out, _, judged = degrees.run_logged(degrees.Ranks(degree, workspaces), parts, ctas, wait)
    return out, judged, failures[0]


def _with_log(emulator: Emulator, folder: Path, *changes: tuple[str, str, str]) -> Emulator:
    """Kernels that log their tickets, after (file, old, new) in their sources."""
    logs = ("moe/log.cuh", "#define LOG 0", "#define LOG 1")
    csrc = changed_sources(folder, logs, *changes)
    return emulation.add_kernels(emulator, folder, csrc, ("forward", "forward_group"))


def test_logs_of_tickets_keep_the_rules_at_every_degree(emulator: Emulator, tmp_path: Path) -> None:
    logging = _with_log(emulator, tmp_path)
    found = [_logged(logging, degree) for degree in (0, 1, 2, 4)]
    for out, judged, failure in found:
        assert failure == ""
        assert judged.findings == ()
        assert judged.records > 1000
        assert min(max(judged.wraps_x), max(judged.wraps_h)) >= 2
        assert same_bits(out, found[0][0])


def test_a_log_tells_of_a_wait_that_is_not_there(emulator: Emulator, tmp_path: Path) -> None:
    wait = "wait_device(r, ready_of(r, block), BLOCK, WAIT_ROWS, block);"
    planted = _with_log(emulator, tmp_path, (PRODUCER, wait, ""))
    _, judged, _ = _logged(planted, 0)
    assert any("it waits for 32" in finding for finding in judged.findings)


# ---- waits that end by time ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (KERNELS, "the expert ids of rank 1"),
        (("enter", "forward"), "rank 1 to enter the launch|the dispatched rows of block"),
        (("forward",), "the results of rank 1"),
    ],
)
def test_missing_peer_ends_in_a_record(
    emulator: Emulator, missing: tuple[str, ...], words: str
) -> None:
    problems, _ = exact(PAIR)
    skip = frozenset((1, name) for name in missing)
    knobs = Knobs(ctas=2, segments=ONE, together=False, skip=skip)
    stuck = emulation.run(emulator, [problems], PAIR.sizes, knobs)
    assert stuck.failure.startswith("deadlock")
    ends = Knobs(**{**vars(knobs), "let_time_pass": True})
    outcome = emulation.run(emulator, [problems], PAIR.sizes, ends)
    assert outcome.failure == ""
    pointer = outcome.workspaces[0].failure.data_ptr()
    assert re.search(words, str(failed_wait(ctypes.string_at(pointer, 32))))


# ---- planted faults -----------------------------------------------------------------------------

CONSUMER, PRODUCER = "moe/consumer.cuh", "moe/producer.cuh"
MOVERS, TELLER = "moe/movers.cuh", "moe/teller.cuh"


FAULTS = {
    "lanes of an idle half drift apart": Fault(
        CONSUMER, "} else {\n      __syncwarp();", "} else {\n", "idle half", "deadlock"
    ),
    "stage released before its products": Fault(
        CONSUMER, "wgmma_wait<1>();", "", "clipped columns", "which a product of warp"
    ),
    "no wait for dispatched rows": Fault(
        PRODUCER,
        "wait_device(r, ready_of(r, block), BLOCK, WAIT_ROWS, block);",
        "",
        "rings wrap",
        "x_ring",
    ),
    "no wait for a place of x": Fault(
        MOVERS, "if (block >= r.ring_x && lane == 0)", "if (false)", "rings wrap", "x_ring"
    ),
    "no wait for a place of hidden rows": Fault(
        PRODUCER, "if (block >= r.ring_h)", "if (false)", "hidden places reused at once", ""
    ),
    "no wait for hidden rows": Fault(
        PRODUCER,
        "wait_device(r, up_of(r, block)",
        "if (false) wait_device(r, up_of(r, block)",
        "rings wrap",
        "",
    ),
    "a look takes rows for there": Fault(
        PRODUCER,
        "load_acquire_device(ready_of(r, block)) >= BLOCK",
        "true",
        "looks ahead",
        "x_ring",
    ),
    "a look takes hidden rows for there": Fault(
        PRODUCER,
        "load_acquire_device(up_of(r, block)) >= up_columns(r.width)",
        "true",
        "looks ahead",
        "",
    ),
    "a look takes a place for free": Fault(
        PRODUCER,
        "(block < r.ring_h || load",
        "(true || load",
        "hidden places reused at once, looking ahead",
        "",
    ),
    "staging written before it was read": Fault(
        CONSUMER,
        "if (c.lane == 0) tma_wait_read<1>();",
        "",
        "rings wrap",
        "stmatrix writes shared memory",
    ),
    "hidden rows told before they are written": Fault(
        CONSUMER, "    tma_wait<0>();\n", "", "nothing saved", ""
    ),
    "gate and up exchanged": Fault(
        PRODUCER,
        "b = &r.gate, second = &r.up",
        "b = &r.up, second = &r.gate",
        "rings wrap",
        "wrong",
    ),
    "no wait for peers' results": Fault(
        PRODUCER,
        "if (r.ranks > 1)\n        for",
        "if (false)\n        for",
        "two ranks apart, three launches",
        "wrong out",
    ),
    "told before all warps are done": Fault(
        TELLER,
        "barrier_wait(shared_address(&s.finished[at.place]), at.parity);",
        "",
        "rings wrap",
        "",
    ),
    "a task's place free before it was told": Fault(
        "moe/pipeline.cuh", "CONSUMER_WARPS + 1);", "CONSUMER_WARPS);", "rings wrap", ""
    ),
    "padding not cleared": Fault(
        MOVERS, "clear_row(to, r.hidden_size, lane);", ";", "tail of 65", "reads NaN"
    ),
    "no proxy fence of movers": Fault(
        MOVERS, "proxy_fence();", "", "one token", "made no proxy fence"
    ),
    "counters told only with the next tile": Fault(
        CONSUMER, "see_stores_if_idle(c, barrier, c.task.parity);", "", "one token", "deadlock"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(emulator: Emulator, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    csrc = changed_sources(tmp_path, (fault.file, fault.old, fault.new))
    planted = emulation.add_kernels(emulator, tmp_path, csrc, ("forward",))
    chosen = EXAMPLES[fault.example]

    def problems_with(seed: int) -> list[str]:
        knobs = Knobs(**{**vars(chosen.knobs), "seed": seed})
        return problems_of(Example(chosen.launches, knobs), planted)

    check_seen(fault, problems_with)


@pytest.mark.parametrize("ring", ["ring_x", "ring_h"])
def test_too_small_ring_is_a_deadlock(emulator: Emulator, ring: str) -> None:
    shape = Shape((600,), 64, 192, 1, 1)
    fits = {"ring_x": 2, "ring_h": 4}
    assert problems_of(example(shape, **fits), emulator) == []
    fits[ring] -= 1
    found = problems_of(example(shape, **fits), emulator)
    assert found
    assert found[0].startswith("deadlock")


# ---- the headers --------------------------------------------------------------------------------

_FUNCTION = re.compile(
    r"^(template <[\w ,]+>\s)?INLINE ([\w ]+?) (\w+)\(([^)]*(?:\([^)]*\)[^)]*)?)\)\s*{", re.M
)


def functions_of(header: Path) -> set[tuple[str, ...]]:
    """Template, return type, name and types of arguments of every function."""
    found = set()
    for template, returns, name, arguments in _FUNCTION.findall(header.read_text()):
        given = [argument.strip() for argument in arguments.split(",")]
        types = [a if "&" in a else re.sub(r"\b\w+$", "", a).strip() for a in given]
        found.add((template, returns, name, *types))
    return found


def test_both_headers_have_the_same_functions() -> None:
    real = functions_of(emulation.CSRC / "ptx.cuh")
    assert len(real) >= 45
    assert functions_of(emulation.SOURCES / "include" / "ptx.cuh") == real
