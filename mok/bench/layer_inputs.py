"""Random inputs of a shape: normal values, and routing that is Gaussian, skewed or from a file.

Values are random and never zeros (a power-capped card runs zeros 12 % faster) and routing is never
forced to be even. x and the upstream gradient are N(0, 1), weights N(0, 1) / sqrt(fan-in), all
rounded to bf16; router weights are the softmax over the chosen logits, rounded to bf16 so that
every contender gets the same values in the dtype that it takes. torch's generators differ between
devices: the same seed gives the same problem on the same kind of device only.

A routing file is safetensors with `topk_experts` int64 [T, K] and `router_weights` fp32 [T, K];
with several ranks T counts the tokens of all ranks, in rank order. Refuses unused slots (-1), which
peers do not know.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mok.bench.contenders import Inputs
from mok.bench.shapes import Shape
from mok.errors import InputError, RoutingError

SEED = 1234
ROUTINGS = ("gaussian", "skewed")
SKEWED_SHARE = 0.25
"""Share of all tokens that go to expert 0 with skewed routing, or three times its even share."""
_NAMES = {"topk_experts": "I64", "router_weights": "F32"}


def make_inputs(
    shape: Shape,
    routing: str,
    device: torch.device | str,
    *,
    rank: int = 0,
    ranks: int = 1,
    group: dist.ProcessGroup | None = None,
    seed: int = SEED,
) -> Inputs:
    """This rank's inputs. routing: "gaussian", "skewed" or the path of a routing file.

    Raises InputError when the experts cannot be shared out or the file does not fit the shape, and
    RoutingError when its ids or weights cannot be used.
    """
    _share_out(shape, ranks)
    generator = torch.Generator(device).manual_seed(seed + rank)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        value = torch.randn(*size, dtype=torch.bfloat16, device=device, generator=generator)
        return value if scale == 1.0 else value.mul_(scale)

    local = shape.E // ranks
    x = normal(shape.T, shape.H)
    w_gate_up = normal(local, 2 * shape.I, shape.H, scale=shape.H**-0.5)
    w_down = normal(local, shape.H, shape.I, scale=shape.I**-0.5)
    if routing in ROUTINGS:
        logits = torch.randn(shape.T, shape.E, device=device, generator=generator)
        if routing == "skewed":
            logits = _skew(logits, shape, generator)
        values, experts = logits.topk(shape.K, dim=1)
        weights = values.softmax(1)
        if routing == "skewed":
            # The shifted logit would take all the weight: router weights stay those of a softmax
            # over values of order one.
            weights = values.clamp(-4.0, 4.0).softmax(1)
    else:
        experts, weights = read_routing(Path(routing), shape, ranks)
        rows = slice(rank * shape.T, (rank + 1) * shape.T)
        experts, weights = experts[rows].to(device), weights[rows].to(device)
    return Inputs(
        x=x,
        w_gate_up=w_gate_up,
        w_down=w_down,
        topk_experts=experts.contiguous(),
        router_weights=weights.bfloat16().float().contiguous(),
        d_out=normal(shape.T, shape.H),
        group=group,
    )


def check_routing(shape: Shape, routing: str, ranks: int) -> None:
    """Raises what `make_inputs` would raise for these arguments, without making inputs."""
    _share_out(shape, ranks)
    if routing not in ROUTINGS:
        read_routing(Path(routing), shape, ranks)


def _share_out(shape: Shape, ranks: int) -> None:
    if shape.E % ranks:
        raise InputError(
            f"shape {shape.name} has E = {shape.E} experts on {ranks} ranks; allowed: a multiple "
            "of the number of ranks. Choose another shape or number of ranks."
        )


def skewed_share(shape: Shape) -> float:
    """Share of tokens that choose expert 0: a quarter, or three times the even share, at most 1."""
    return min(1.0, max(SKEWED_SHARE, 3 * shape.K / shape.E))


def _skew(logits: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """Expert 0 first for a random set of tokens of the wanted size, and last for the others."""
    chosen = round(skewed_share(shape) * shape.T)
    order = torch.randperm(shape.T, device=logits.device, generator=generator)
    logits = logits.clone()
    logits[order[:chosen], 0] = 100.0
    logits[order[chosen:], 0] = -100.0
    return logits


def read_routing(path: Path, shape: Shape, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """(topk_experts int64 [T ranks, K], router_weights fp32 [T ranks, K]) from a file, checked."""
    size = (shape.T * ranks, shape.K)
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")  # a pipe would keep the reader waiting
        with safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in _NAMES if name in file.keys()}  # noqa: SIM118
            names = sorted(file.keys())
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"routing file {path}: {error}; allowed: a safetensors file with topk_experts int64 "
            f"and router_weights fp32 of shape {size}, or one of {', '.join(ROUTINGS)}. Check the "
            "path."
        ) from error
    for name in _NAMES:
        dtype = torch.int64 if name == "topk_experts" else torch.float32
        if name not in tensors:
            raise InputError(
                f"routing file {path} holds {', '.join(names) or 'nothing'}; allowed: topk_experts "
                f"and router_weights. Save {name} under that name."
            )
        given = tensors[name]
        if given.dtype != dtype or tuple(given.shape) != size:
            raise InputError(
                f"routing file {path}: {name} is {given.dtype} {tuple(given.shape)}; allowed: "
                f"{dtype} {size} for shape {shape.name} on {ranks} rank(s). Convert it, or give "
                "the shape that it was recorded with (--tokens changes T alone)."
            )
    experts, weights = tensors["topk_experts"], tensors["router_weights"]
    _check_values(path, experts, weights, shape)
    return experts, weights


def _check_values(path: Path, experts: Tensor, weights: Tensor, shape: Shape) -> None:
    outside = (experts < 0) | (experts >= shape.E)
    if bool(outside.any()):
        token, slot = (int(i) for i in outside.nonzero()[0])
        raise RoutingError(
            f"routing file {path}: topk_experts[{token}, {slot}] = {int(experts[token, slot])}; "
            f"allowed: 0 .. {shape.E - 1}. Unused slots (-1) cannot be timed against peers."
        )
    ordered = experts.sort(1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if bool(repeated.any()):
        token = int(repeated.nonzero()[0])
        raise RoutingError(
            f"routing file {path}: token {token} has experts {experts[token].tolist()}; allowed: "
            "each expert once in a token. Record the router's top-k, not samples."
        )
    if not bool(weights.isfinite().all()):
        token, slot = (int(i) for i in (~weights.isfinite()).nonzero()[0])
        raise RoutingError(
            f"routing file {path}: router_weights[{token}, {slot}] = {float(weights[token, slot])};"
            " allowed: finite values. Record them again."
        )


def load_spread(inputs: Inputs, num_experts: int) -> float:
    """Rows of the busiest expert over the mean, of this rank's tokens: 1 is even."""
    counts = torch.bincount(inputs.topk_experts.flatten(), minlength=num_experts)
    return float(counts.max()) / (inputs.topk_experts.numel() / num_experts)
