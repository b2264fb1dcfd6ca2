"""`MoKConfig`: the knobs of the layer, none of which may change a bit of the result.

Names and defaults are those that users of Mixture-of-Kittens know, and `num_sms`. The portable
backend reads `minibatch_size` (how many rows of an expert one worker takes at a time), the Hopper
backend `minibatch_size` and `num_sms`; the others are carried, checked and ignored. A knob that
could change bits (a tile height, a split along K) is refused a place in this class.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok.errors import InputError

MINIBATCH_UNIT = 128
"""Borders of minibatches lie at multiples of this many rows, counted inside an expert."""


@dataclass(frozen=True)
class MoKConfig:
    """Performance knobs. Results are bit-identical for every valid value of every field.

    fwd_num_comm_sms, bwd_num_comm_sms: SMs that only communicate (Hopper backend).
    minibatch_size: rows per unit of overlap; a positive multiple of 128. The Hopper backend chooses
        its own unless another value than the default is given, and takes at least 1024.
    macrobatch_size: rows whose activations are alive at once (Hopper backend); a positive multiple
        of 128, at least minibatch_size.
    schedule_capacity_multiplier: share of the worst-case number of received rows to reserve.
    all_gather_top_experts_chunk_bytes: piece of the exchange of expert ids; a multiple of 16.
    num_sms: multiprocessors that the Hopper backend's launch may take; 0 for all.
    Raises InputError when a value is outside of what is said here.
    """

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    schedule_capacity_multiplier: float = 0.5
    all_gather_top_experts_chunk_bytes: int = 2048
    num_sms: int = 0

    def __post_init__(self) -> None:
        for name in ("fwd_num_comm_sms", "bwd_num_comm_sms", "num_sms"):
            _require(self, name, getattr(self, name) >= 0, "a number of SMs, 0 or more")
        for name in ("minibatch_size", "macrobatch_size"):
            size = getattr(self, name)
            _require(
                self,
                name,
                isinstance(size, int) and size > 0 and size % MINIBATCH_UNIT == 0,
                f"a positive multiple of {MINIBATCH_UNIT}, so that no minibatch splits a tile",
            )
        _require(
            self,
            "macrobatch_size",
            self.macrobatch_size >= self.minibatch_size,
            f"at least minibatch_size ({self.minibatch_size})",
        )
        _require(
            self,
            "schedule_capacity_multiplier",
            0.0 < self.schedule_capacity_multiplier <= 1.0,
            "a share in (0, 1]",
        )
        chunk = self.all_gather_top_experts_chunk_bytes
        _require(
            self,
            "all_gather_top_experts_chunk_bytes",
            chunk > 0 and chunk % 16 == 0,
            "a positive multiple of 16",
        )


def _require(config: MoKConfig, name: str, ok: bool, allowed: str) -> None:
    if not ok:
        raise InputError(
            f"MoKConfig.{name} = {getattr(config, name)!r}; allowed: {allowed}. "
            "Leave it out to get the default."
        )
