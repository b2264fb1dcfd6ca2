"""What can be wrong with a resumed run: a closed list, each with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SHOWN = 4  # names in one finding


class Kind(StrEnum):
    """What was found. A closed list: it is part of the JSON document."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    OPTIMIZER = "optimizer"
    SETTINGS = "settings"
    GENERATORS = "generators"
    DRAWS = "draws"
    DATA = "data"
    STEPS = "steps"


REMEDIES = {
    Kind.PARAMETERS: "save and load model.state_dict(), in the dtype that it has",
    Kind.BUFFERS: "save and load all buffers in the dtype that they have; a buffer made with "
    "persistent=False is in no state_dict",
    Kind.OPTIMIZER: "save and load optimizer.state_dict()",
    Kind.SETTINGS: "save and load scheduler.state_dict(), and make the scheduler before the "
    "optimizer's state is loaded",
    Kind.GENERATORS: "save and restore the generators (torch.get_rng_state, torch.cuda's, numpy's, "
    "random's), behind everything else that is restored",
    Kind.DRAWS: "restore the generators behind what skips batches or validates, or give that a "
    "generator of its own (torch.random.fork_rng)",
    Kind.DATA: "save where the data are: epoch (set_epoch), permutation or its seed, and position",
    Kind.STEPS: "save the number of steps that were made, and count from there",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    step: of the whole run, the first at which it shows. names: events in words, at most SHOWN of
    `count`. what: the end of the sentence.
    """

    kind: Kind
    rank: int
    step: int
    names: tuple[str, ...]
    count: int
    what: str

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind]
