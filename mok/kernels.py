"""The catalogue: every kernel variant that exists, so that one command can compile them all.

A variant is a source with the macros that specialise it. `mok build` compiles each one and fails on
a spill; a test holds that no source is missing here and none is listed that does not exist. Data
only: nothing is compiled, loaded or imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One compilation.

    source: path relative to csrc. entries: the `extern "C"` kernels that it must hold, all of them.
    macros: name and value pairs. needs: the only architectures that it compiles for, such as
    ("sm_90a",); empty means any. dynamic_shared: the most bytes that a launch asks for, for the
    table. planted: why this one may spill or warn, only for faults that are planted on purpose and
    for builds that log what they do.
    """

    source: str
    entries: tuple[str, ...]
    macros: tuple[tuple[str, int | str], ...] = ()
    needs: tuple[str, ...] = ()
    dynamic_shared: int = 0
    planted: str = ""

    @property
    def name(self) -> str:
        """The source with its macros, as tables and messages name it."""
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.macros)])


def _each(
    source: str,
    entries: tuple[str, ...],
    macro: str,
    values: range,
    needs: tuple[str, ...] = (),
    shared: int = 0,
) -> tuple[Variant, ...]:
    """One variant for each value of one macro, all with the same kernels."""
    return tuple(Variant(source, entries, ((macro, value),), needs, shared) for value in values)


_FAULTS = "conditions/faults"

CATALOGUE: tuple[Variant, ...] = (
    Variant("digest/digest.cu", ("digest",), dynamic_shared=67584),
    *_each("conditions/busy.cu", ("busy",), "WORK", range(3)),
    *_each("conditions/hold.cu", ("hold",), "HAMMER", range(2)),
    Variant("conditions/probe.cu", ("chase", "delay", "locate", "stamp")),
    Variant("moe/enter.cu", ("enter",), needs=("sm_90a",)),
    Variant("moe/enter_backward.cu", ("enter_backward",), needs=("sm_90a",)),
    *_each("moe/forward.cu", ("forward",), "GROUP", range(2), ("sm_90a",), 230400),
    *_each("moe/backward.cu", ("backward",), "GROUP", range(2), ("sm_90a",), 230400),
    *(
        Variant(
            f"moe/{entry}.cu",
            (entry,),
            (("GROUP", group), ("LOG", 1)),
            ("sm_90a",),
            230400,
            planted="a build that logs its tickets; never timed",
        )
        for entry in ("forward", "backward")
        for group in range(2)
    ),
    Variant("moe/schedule.cu", ("count", "place", "publish", "scan"), needs=("sm_90a",)),
    # FAULT 0 is the clean twin. The faults are wrong on purpose, not slow: they may not spill.
    Variant(f"{_FAULTS}/column_sums.cu", ("planted_column_parts",), (("FAULT", 1),)),
    Variant(
        f"{_FAULTS}/column_sums.cu",
        ("planted_column_parts", "planted_column_tree"),
        (("FAULT", 0),),
    ),
    *_each(f"{_FAULTS}/epoch.cu", ("planted_last_block",), "FAULT", range(2)),
    *_each(
        f"{_FAULTS}/grid_sums.cu", ("planted_grid_fold", "planted_grid_parts"), "FAULT", range(2)
    ),
    *_each(f"{_FAULTS}/handover.cu", ("planted_handover",), "FAULT", range(2)),
    *_each(f"{_FAULTS}/padding.cu", ("planted_column_fold", "planted_pack"), "FAULT", range(2)),
    *_each(f"{_FAULTS}/split_k.cu", ("planted_split_k",), "FAULT", range(2)),
    *_each(f"{_FAULTS}/tail.cu", ("planted_tiles",), "FAULT", range(2)),
    Variant(f"{_FAULTS}/two_streams.cu", ("planted_increment", "planted_slow_double")),
)


def needed_architectures(source: str, macros: Mapping[str, int | str]) -> tuple[str, ...]:
    """The only architectures for which this variant may be compiled; empty means any.

    Macros that the catalogue does not list count as the source's, if its variants agree.
    """
    listed = [variant for variant in CATALOGUE if variant.source == source]
    exact = [one.needs for one in listed if dict(one.macros) == dict(macros)]
    needs = set(exact or [one.needs for one in listed])
    return needs.pop() if len(needs) == 1 else ()
