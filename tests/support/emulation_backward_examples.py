"""Examples of the emulated backward, by what each is about.

They exist apart from their test because planted faults are shown by the same ones. All are small:
each takes a fraction of a second. Refuses nothing.
"""

from __future__ import annotations

from emulation import Knobs
from emulation_backward import EVERYTHING, BackKnobs
from emulation_backward_cases import BackExample, Pass
from emulation_cases import Shape

from mok.hopper.gradient_records import (
    WANT_DOWN,
    WANT_GATE,
    WANT_SHARED_DOWN,
    WANT_SHARED_UP,
    WANT_UP,
)
from mok.hopper.layout import Segments

ONE, TWO = Segments(1, 1), Segments(1, 2)


def example(
    *passes: Pass,
    segments: Segments = TWO,
    uncut: int | None = None,
    tight: bool = False,
    ring: int | None = None,
    **knobs: object,
) -> BackExample:
    """Segments hold in both directions."""
    run = Knobs(segments=segments, **knobs)  # type: ignore[arg-type]
    return BackExample(passes, BackKnobs(run, segments, uncut, tight, ring))


def tokens(shape: Shape, *counts: int) -> Shape:
    """The same layer with other numbers of tokens."""
    return Shape(**{**vars(shape), "tokens": counts})


WRAPS = Shape((400,), 128, 192, 3, 2, "skewed")
LONG = Shape((500,), 64, 64, 2, 1, "one-expert")
PAIR = Shape((70, 130), 128, 128, 2, 2, "skewed", shared=64)
FOUR = Shape((65, 0, 1, 40), 64, 64, 1, 2, "unused-slots")
BOTH = Shape((150,), 128, 64, 2, 2, shared=192, clamped=True)
WIDE = Shape((90,), 64, 320, 2, 2)
EMPTY = Shape((90,), 128, 64, 6, 2, "empty-experts", shared=64)

EXAMPLES = {
    "one token": example(Pass(Shape((1,), 64, 64, 1, 1))),
    "tail of 64": example(Pass(Shape((64,), 192, 64, 1, 1)), ctas=2, seed=1),
    "tail of 65": example(Pass(Shape((65,), 192, 64, 1, 1)), ctas=2, seed=2),
    "padding of 63 holds NaN": example(Pass(Shape((65,), 64, 128, 1, 1), given=True), seed=22),
    "full block and one": example(Pass(Shape((129,), 64, 128, 1, 1)), ctas=2, seed=3),
    "two column tiles": example(Pass(WIDE), ctas=2, seed=4),
    "clipped columns": example(Pass(Shape((50,), 320, 192, 3, 2)), ctas=3, seed=5),
    "four slots": example(Pass(Shape((60,), 128, 64, 5, 4, "unused-slots")), ctas=7, seed=6),
    "empty experts": example(Pass(Shape((90,), 128, 64, 6, 2, "empty-experts")), seed=7),
    "clamp and shared": example(Pass(BOTH), ctas=2, seed=8),
    "all again": example(Pass(BOTH, None), ctas=2, seed=9),
    "some again": example(Pass(WRAPS, 3), ctas=2, seed=10, tight=True),
    "ring wraps": example(Pass(WRAPS), segments=ONE, tight=True, ctas=3, seed=11),
    "an expert over the ring's end": example(
        Pass(Shape((400,), 64, 64, 3, 2)), segments=Segments(1, 3), uncut=3, ring=7, seed=23
    ),
    "parts of an expert": example(
        Pass(LONG, 1), segments=ONE, uncut=1, tight=True, ctas=3, seed=12
    ),
    "parts of two experts": example(
        Pass(Shape((300,), 64, 64, 2, 2), None), uncut=2, tight=True, ctas=2, seed=13
    ),
    "added to main gradients": example(
        Pass(WRAPS, 2, main=EVERYTHING), segments=ONE, uncut=1, ctas=2, seed=14
    ),
    "fp32 gradients": example(
        Pass(BOTH, wide=True),
        Pass(BOTH, wide=True, main=WANT_GATE | WANT_SHARED_DOWN),
        Pass(tokens(BOTH, 1), 0, wide=True, main=WANT_UP | WANT_DOWN | WANT_SHARED_UP),
        ctas=2,
        seed=24,
    ),
    "fp32 gradients beyond a tile": example(
        Pass(Shape((50,), 320, 192, 3, 2), wide=True, main=WANT_DOWN), ctas=3, seed=25
    ),
    "fp32 gradients of empty experts": example(
        Pass(EMPTY, wide=True),
        Pass(EMPTY, wide=True, main=WANT_GATE),
        Pass(EMPTY, wide=True, main=EVERYTHING),
        ctas=2,
        seed=26,
    ),
    "fp32 gradients of parts": example(
        Pass(LONG, 1, wide=True),
        Pass(LONG, 1, wide=True, main=WANT_UP),
        segments=ONE,
        uncut=1,
        tight=True,
        ctas=3,
        seed=27,
    ),
    "fp32 gradients without tokens": example(
        Pass(tokens(PAIR, 0, 200), wide=True, main=WANT_SHARED_UP),
        Pass(tokens(PAIR, 0, 0), wide=True, main=WANT_UP),
        seed=28,
    ),
    "some gradients only": example(
        Pass(BOTH, wants=WANT_UP | WANT_SHARED_UP, main=WANT_UP),
        Pass(BOTH, 0, wants=WANT_DOWN),
        Pass(BOTH, wants=0),
        Pass(BOTH, 1, wants=WANT_GATE, wide=True),
        ctas=2,
        seed=15,
    ),
    "one CTA of seven resident": example(
        Pass(WRAPS, 4), segments=ONE, uncut=1, tight=True, ctas=7, seed=16, resident=1
    ),
    "two passes": example(Pass(WRAPS), Pass(tokens(WRAPS, 30), 0), segments=ONE, ctas=2, seed=17),
    "group of two, three passes": example(
        Pass(PAIR),
        Pass(tokens(PAIR, 0, 200), 1),
        Pass(tokens(PAIR, 128, 1), None),
        segments=ONE,
        tight=True,
        seed=18,
    ),
    "two ranks apart, three passes": example(
        Pass(PAIR, 2),
        Pass(tokens(PAIR, 3, 0), main=EVERYTHING),
        Pass(PAIR),
        segments=ONE,
        uncut=1,
        tight=True,
        seed=19,
        together=False,
    ),
    "group of four": example(Pass(FOUR), seed=20),
    "four ranks apart": example(
        Pass(FOUR, 0), Pass(tokens(FOUR, 1, 2, 0, 90)), seed=21, together=False
    ),
}
