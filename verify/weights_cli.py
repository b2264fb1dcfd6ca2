"""`verify weights A B`: are these the same weights?"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import click

from verify.terminal import TEXT_OR_JSON, emit, epilog, progress

_PAUSE = 1.0  # seconds between two lines of progress


@click.command(
    epilog=epilog(
        "verify weights trainer/checkpoint-300 sampler.json",
        "verify weights trainer.safetensors exported/ --rename 'model.*=*'",
        "verify weights dcp/step-300 exported/ --rename 'model.*=*' --ignore 'optim.*'",
    )
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="What A calls OLD is NEW in B; * stands for any text. The first that fits counts.",
)
@click.option(
    "--rename-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Further renames, one OLD=NEW a line.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Leave such names out, on both sides; A's also by what --rename makes of them.",
)
@click.option(
    "--no-fuse",
    is_flag=True,
    help="Compare by name only, also experts that one side stores fused and the other one by one.",
)
@TEXT_OR_JSON
def weights(
    a: Path,
    b: Path,
    renames: tuple[str, ...],
    rename_file: Path | None,
    ignore: tuple[str, ...],
    no_fuse: bool,
    form: str,
) -> int:
    """Compare the weights of A and B, parameter by parameter, bit for bit.

    Each is a safetensors file or folder, a folder of torch.distributed.checkpoint, a file of
    torch.save, or digests that verify.save_weights_digests wrote in a running process. Sharding
    does not matter, nor whether experts are stored fused or one by one. Exit code 0 says equal, 1
    different, 3 that nothing could be compared, or only a part.
    """
    from verify.checkpoints import reporting
    from verify.checkpoints.comparing import compare_checkpoints
    from verify.checkpoints.matching import read_rules
    from verify.checkpoints.opening import opened

    rules = [*renames, *(read_rules(rename_file) if rename_file else ())]
    with opened(a) as left, opened(b) as right:
        found = compare_checkpoints(
            left,
            right,
            renames=rules,
            ignore=ignore,
            fuse=not no_fuse,
            progress=_paced(progress()),
        )
    record = reporting.to_json(found)
    emit(json.dumps(record, indent=1) if form == "json" else reporting.text(found))
    return reporting.exit_code(found)


def _paced(say: Callable[[str], None]) -> Callable[[str], None]:
    """At most a line a second, and none of a comparison that is done by then."""
    last = time.monotonic()

    def told(message: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _PAUSE:
            last = time.monotonic()
            say(message)

    return told
