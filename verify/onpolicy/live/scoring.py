"""Log-probabilities of the sampled tokens in a layout, and what the modules gave on the way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from verify.onpolicy.live.calling import Convention, call, logprob
from verify.onpolicy.live.capturing import Capture, Seen
from verify.onpolicy.live.layouts import Layout
from verify.onpolicy.live.sequences import NOWHERE, Sampled, placed


@dataclass(frozen=True, eq=False)
class Scored:
    """values: float32 [R] of each sample's response. seen: None where nothing was captured."""

    layout: str
    values: tuple[NDArray[np.float32], ...]
    seen: Seen | None


def score(
    model: nn.Module,
    how: Convention,
    layout: Layout,
    samples: Sequence[Sampled],
    *,
    capture: bool = True,
    mend: bool = False,
) -> Scored:
    """Runs the passes of a layout. Nothing is drawn, and no gradient is kept. mend: see Capture."""
    values = [np.full(len(one.response), np.nan, dtype=np.float32) for one in samples]
    collected = Capture(model, mend=mend) if capture else None
    with torch.no_grad(), collected.listening() if collected else nullcontext():
        for run in layout.runs:
            cache: Any = None
            for one in run:
                if collected is not None:
                    collected.begin(one.places)
                logits, cache = call(model, how, one, cache, keep=layout.cached)
                for row, column in (one.places != NOWHERE).nonzero().tolist():
                    number, position = placed(int(one.places[row, column]))
                    sample = samples[number]
                    at = position + 1 - len(sample.prompt)
                    if at >= 0:
                        values[number][at] = logprob(logits[row, column], sample.response[at])
    return Scored(layout.name, tuple(values), collected.taken() if collected else None)
