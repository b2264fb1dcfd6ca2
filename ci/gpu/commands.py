"""What ci/gpu.sh runs: the commands of each part, and which of them may run beside others.

What measures time or joules, or waits for a rare race, runs alone. All the rest asks whether bits
are equal, and whoever else uses the GPU must not change them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytests  # all four beside this file
from options import USUAL
from side_by_side import grown
from steps import ROOT, Part, Step

# what compute-sanitizer prints, with exit code 1, on a device or a driver that it does not know
NO_SANITIZER = ("Device not supported", "Unable to find injection library")
GROUP_TESTS = 360.0  # seconds, grown with the ranks: a test that kills a rank takes about 20
STARTING = 10.0  # seconds that ranks take to meet before a benchmark's limit begins, each doubling
LAYER_LIMIT = 230.0  # seconds after which the benchmark of peers begins nothing more
RANKS_LIMIT = 180.0  # likewise of several ranks, grown with them
FORWARD_LIMIT = 190.0  # likewise of the forward alone, where the benchmark of peers follows
FORWARD_SHARE = 0.45  # of the time that is left there
FORWARD_SECONDS = 210.0  # of that part, and more where nothing follows
LAST_STEP = 15.0  # seconds that a step may take which had begun before the limit
FORWARD_LAST = 35.0  # likewise where a peer tunes a shape's kernels first


@dataclass(frozen=True)
class Place:
    """What the commands need to know: interpreter, folder for their files, ranks, and the seconds
    that are left of the whole run; chosen: the parts that run."""

    python: str
    raw: Path
    ranks: int = 1
    root: Path = ROOT
    left: float = math.inf
    chosen: Sequence[str] = USUAL

    def verify(self, name: str, *words: str, good: Sequence[int] = (0,)) -> Step:
        """A run of `verify`, whose result document is kept."""
        report = self.raw / name
        command = [self.python, "-m", "verify", "run", *words, "--report", str(report)]
        return Step(name, command, str(report / "result.json"), good)

    def mok(self, name: str, *words: str) -> Step:
        """A benchmark of `mok` that prints its document."""
        code = "import sys; from mok.cli import main; sys.exit(main())"
        return Step(name, [self.python, "-c", code, *words, "--json"], "-", unavailable=(3,))


def parts(place: Place) -> list[Part]:
    """All parts, in the order in which they are told. The longest steps of each stand first.

    The benchmark quotes what peers have left, so that its commands are known only then. What
    several ranks do together gets more time the more they are.
    """
    several = place.ranks > 1
    return [
        Part("tests", grown(GROUP_TESTS, place.ranks), pytests.of_a_group(place), alone=True)
        if several
        else Part("tests", 160, pytests.of_one_gpu(place)),
        Part(
            "digest", 60, [place.mok("digest", "bench", "digest", "--device", "cuda")], alone=True
        ),
        Part(
            "faults",
            100,
            [_script(place, "faults")],
            alone=True,
        ),
        Part("verify", grown(190, place.ranks), _layer(place)),
        Part("degrees", 120, [_script(place, "degrees")]),
        Part("backward-degrees", 150, [_script(place, "backward_degrees")]),
        Part(
            "training",
            grown(200, place.ranks),
            [_script(place, "training", "--ranks", str(place.ranks))],
        ),
        Part("peers", grown(180, place.ranks), _peers(place)),
        Part("forward", _seconds(place, "forward"), _direction(place, "forward"), alone=True),
        Part("backward", _seconds(place, "backward"), _direction(place, "backward"), alone=True),
        Part("bench", grown(300, place.ranks), _bench(place)),
        Part("sanitize", 170, _sanitize(place)),
        Part("endurance", 300, [_script(place, "endurance")], alone=True),
        Part("backward-endurance", 300, [_script(place, "backward_endurance")], alone=True),
        Part("recording", 120, [_script(place, "recording")], alone=True),
    ]


def _script(place: Place, name: str, *words: str) -> Step:
    """A script of this folder that leaves a document; exit code 3: it cannot run here."""
    document = str(place.raw / f"{name}.json")
    command = [place.python, f"ci/gpu/{name}.py", "--json", document, *words]
    return Step(name, command, document, unavailable=(3,))


HOPPER = "ci/gpu/hopper_cases.py::hopper/"
OF_LAYER = "repeat,process,memory,history,contention,stream,batch,schedule,reference"
OF_FORWARD = "repeat,process,memory,history,contention,stream,sms,graph,batch,schedule"
OF_RANKS = "repeat,process,memory,history,contention,stream,batch,schedule,ep,rank"
OF_BOTH = "repeat,process,memory,history,contention,stream,sms,graph,schedule"
OF_BOTH_RANKS = "repeat,process,memory,history,contention,stream,schedule,ep,rank"


def _layer(place: Place) -> list[Step]:
    """The bundled layer on the GPU: with every promise, on ranks of their own GPUs or sharing one.

    The built-in cases run the portable backend, for their widths; those of HOPPER the kernels in
    both directions, which never share a GPU. One rank alone has no degree and no other rank to
    compare with, so that the claims `ep` and `rank` come from four ranks that share the GPU, and of
    the kernels from ranks of their own GPUs.
    """
    if place.ranks > 1:
        many = ("--ranks", str(place.ranks), "--device", "cuda")
        return [
            place.verify("layer", "moe", *many),
            place.verify("float64", "moe/float64-*", *many),
            place.verify(
                *("hopper", f"{HOPPER}layer", f"{HOPPER}clamped", f"{HOPPER}exact-*", *many)
            ),
            place.verify(
                *("hopper-backward", f"{HOPPER}backward", *many, "--claims", OF_BOTH_RANKS)
            ),
            place.verify("hopper-forward", f"{HOPPER}forward", *many, "--claims", OF_RANKS),
        ]
    one = ("--ranks", "1", "--device", "cuda")
    claims = "repeat,process,memory,threads,history,contention,batch,schedule,reference"
    return [
        place.verify("hopper-degrees", f"{HOPPER}degrees", *one),
        place.verify("hopper-backward-degrees", f"{HOPPER}backward-degrees", *one),
        place.verify("layer", "verify.builtin.moe:moe", *one, "--claims", claims),
        place.verify("shared", "moe", "--device", "cuda"),
        place.verify("float64", "moe/float64-*", *one),
        place.verify("exact", "moe/exact-*", *one, "--claims", "repeat,exact"),
        place.verify("hopper-forward", f"{HOPPER}forward", *one, "--claims", OF_FORWARD),
        place.verify("hopper", f"{HOPPER}layer", *one, "--claims", OF_LAYER),
        place.verify("hopper-backward", f"{HOPPER}backward", *one, "--claims", OF_BOTH),
        place.verify("hopper-clamped", f"{HOPPER}clamped", *one, "--claims", "repeat,reference"),
        place.verify("hopper-exact", f"{HOPPER}exact-*", *one, "--claims", "repeat,exact"),
    ]


PEER_CASES = (
    "liger/small",
    "sonicmoe/small",
    "huggingface/small",
    "torch/small",
    "deepgemm/small",
    "sonicmoe/tiles",
    "sonicmoe/qwen3-30b",
)
"""Every peer's small case before any peer's second one: when the time is up, the last have not run.
The longest of the small ones come first."""


def _peers(place: Place) -> list[Step]:
    """A peer that is not deterministic is a finding, not a failure; so is one that is missing."""
    words = ["--device", "cuda", "--runs", "20"]
    if place.ranks > 1:
        words += ["--ranks", str(place.ranks)]
        return [place.verify("peers", "ci/gpu/peer_rank_cases.py", *words, good=(0, 1, 3))]
    return [
        place.verify(
            f"peers-{name.replace('/', '-')}",
            f"ci/gpu/peer_cases.py::peers/{name}",
            *words,
            good=(0, 1, 3),
        )
        for name in PEER_CASES
    ]


DIRECTION_PEERS = ("sonicmoe", "torch")
"""What a direction is held against: the fastest peer, and the pipeline that everybody has."""
LATER = {"forward": ("backward", "bench"), "backward": ("bench",)}
"""By direction, what is timed after it and needs a share of the time."""


def _followed(place: Place, direction: str) -> bool:
    return any(name in place.chosen for name in LATER[direction])


def _seconds(place: Place, direction: str) -> float:
    """All that is left unless something that is timed later needs its share."""
    least = grown(FORWARD_SECONDS, place.ranks)
    if _followed(place, direction) or not math.isfinite(place.left):
        return least
    return max(least, place.left)


def _starting(place: Place) -> float:
    """Seconds that ranks take before they time anything."""
    return STARTING * math.log2(place.ranks)


def _direction(place: Place, direction: str) -> list[Step]:
    """One direction, ours against two peers at all six shapes: in a rotation, and in loops.

    Both protocols of a shape before the next shape: a run that is cut short has the first ones
    whole. The backward of ours is timed with main gradients too.
    """
    words = ["--ranks", str(place.ranks), "--direction", direction, "--no-accuracy", "--by-shape"]
    ours = ("mok", "mok-main") if direction == "backward" else ("mok",)
    if place.ranks == 1:
        words += [word for name in (*ours, *DIRECTION_PEERS) for word in _contender(name)]
    limit = min(FORWARD_LIMIT, FORWARD_SHARE * place.left - LAST_STEP - _starting(place))
    if not _followed(place, direction):
        limit = min(place.left, _seconds(place, direction)) - FORWARD_LAST - _starting(place)
    limit = max(30.0, limit)
    return [_timed(place, direction, [*words, "--limit", f"{limit:.0f}"])]


def _bench(place: Place) -> list[Step]:
    """Errors of all on the small shape; then, alone, ours and the peers on all six shapes, for as
    long as there is time.

    Documents are files that grow, so that a run that is cut short keeps what it had.
    """
    findings = []
    for found in sorted(place.raw.glob("peers*/result.json")):
        findings += ["--determinism", str(found)]
    many = ["--ranks", str(place.ranks)]
    seconds = max(30.0, place.left - LAST_STEP - _starting(place))
    if place.ranks > 1:
        limit = min(grown(RANKS_LIMIT, place.ranks), seconds)
        return [_timed(place, "layer", [*many, "--limit", f"{limit:.0f}", *findings])]
    names = ("mok", "torch", "huggingface", "liger", "sonicmoe")
    words = [*many, *(word for name in names for word in _contender(name))]
    errors = ["--shape", "small", "--rounds", "0", "--seconds", "0"]
    limit = min(LAYER_LIMIT, seconds)
    return [
        _warm(place),
        replace(_timed(place, "accuracy", [*words, *errors]), alone=False),
        _timed(
            place,
            "layer",
            [*words, "--limit", f"{limit:.0f}", "--gemms", "--no-accuracy", *findings],
        ),
    ]


def _warm(place: Place) -> Step:
    """Compiles what peers' tuners try, beside parts that time nothing: it saves half a minute a
    shape."""
    words = ["-m", "mok.bench.peers.warming", "--workers", "4", "--peers", "liger,sonicmoe"]
    return Step("warm", [place.python, *words])


def _contender(name: str) -> tuple[str, str]:
    return "--contender", name


def _timed(place: Place, name: str, words: Sequence[str]) -> Step:
    out = place.raw / f"bench-{name}"
    step = place.mok(name, "bench", "layer", "--device", "cuda", *words, "--out", str(out))
    # what QuACK's tuner has on disk was chosen while others had the GPU as well
    command = ["env", "QUACK_FORCE_CACHE_UPDATE=1", *step.command]
    return replace(step, command=command, document=str(out / "layer.json"), alone=True)


NO_EVIDENCE = (("racecheck", "sanitize_forward"), ("racecheck", "sanitize_backward"))
"""racecheck watches shared memory, but neither the copies and products that write and read it there
nor anything between CTAs: its silence would say nothing of either direction."""


def _sanitize(place: Place) -> list[Step]:
    scripts = sorted((place.root / "ci" / "gpu").glob("sanitize_*.py"))
    return [
        Step(
            f"{tool} {script.stem}",
            [
                *("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer"),
                *("--tool", tool, "--error-exitcode", "9"),
                # cuda-core asks the driver for functions and parameters until it says no
                *(("--report-api-errors", "no") if tool == "memcheck" else ()),
                *(place.python, str(script.relative_to(place.root))),
            ],
            unavailable=(127,),  # there is no such program
            unsupported=NO_SANITIZER,
            needs="ERROR SUMMARY: 0 errors" if tool != "racecheck" else "RACECHECK SUMMARY: 0",
        )
        for tool in ("memcheck", "racecheck", "initcheck")
        for script in scripts
        if (tool, script.stem) not in NO_EVIDENCE
    ]
