"""memory on a GPU: recycled blocks full of a pattern or of NaNs, and tensors at other addresses.

What torch.empty returns is a block that some tensor had before. Here every free block of torch's
caching allocator is filled and freed again, so that whatever the case allocates holds the pattern
until the case writes it. And all free blocks are held, so that the case's tensors lie elsewhere.
Both take no memory from the driver beyond what the case itself needs, and change no algorithm, as
torch's deterministic fill does. Both reach what torch's current stream gets; for a case that takes
memory for streams of its own they are not in effect. What fresh allocations hold is looked at
right before an execution, and not at the call itself: the copies of the inputs, which come between,
take some of the filled blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from verify.captures import flatten
from verify.conditions.availability import available, unless_own_streams
from verify.conditions.watching import cuda_devices, tensors_of, watched
from verify.sessions import Effect, Session, perform

FILLS = (0xFE, 0x80)  # huge negative and tiny negative, as on a CPU
NAN = 0xFF
SHIFTED = "cuda shifted"
GRANULE = 512  # bytes: torch's allocator gives multiples
SMALL_LIMIT = 2**20  # bytes: greater requests come from other segments
SEGMENT = 2 * 2**20  # bytes: what segments are aligned to
SMALL = [GRANULE * 2**k for k in range(12)]
Prepared = Effect | Callable[[], Effect]


def run(session: Session, runs: int, devices: Sequence[torch.device]) -> None:
    """Executions with every fill and with shifted tensors, in turn, at least `runs`."""
    kinds = [*(f"cuda fill=0x{fill:02x}" for fill in FILLS), "cuda recycled-nan", SHIFTED]
    fills = dict(zip(kinds, (*FILLS, NAN), strict=False))
    before: list[int] = []
    for index in range(max(runs, len(kinds))):
        kind = kinds[index % len(kinds)]
        lain: list[int] = []
        seen = watched(session, before=partial(_given, lain), after=partial(_returned, lain))
        held: list[torch.Tensor] = []
        fill = fills.get(kind)
        make = partial(_prepared, session, fill, devices, held, before, lain)
        # refused by an allocator that cannot tell what it holds, such as cudaMallocAsync
        prepared = available(session, "memory", make, (RuntimeError,))
        if prepared is None:
            return
        requested = {"addresses": "other"} if fill is None else {"fill": f"0x{fill:02x}"}
        effect = partial(_effect, session, prepared)
        perform(seen, "memory", kind, run=index, requested=requested, effective=effect)
        if held:
            held.clear()
            for device in devices:  # gives back what was needed only because the rest was held
                with torch.cuda.device(device):
                    torch.cuda.empty_cache()
        before = lain if kind in fills else before


def _prepared(
    session: Session,
    fill: int | None,
    devices: Sequence[torch.device],
    held: list[torch.Tensor],
    before: Sequence[int],
    lain: Sequence[int],
) -> Prepared:
    if fill is None:
        return _shift(session, devices, held, before, lain)
    return _fill(session, fill, devices)


def _effect(session: Session, prepared: Prepared) -> Effect:
    told = prepared() if callable(prepared) else prepared
    return unless_own_streams(session, told)


def _fill(session: Session, fill: int, devices: Sequence[torch.device]) -> Effect:
    """Fills what is free; what fresh allocations then hold."""
    sizes = sizes_of(session)
    for device in devices:
        fill_free_memory(device, fill, sizes[device])
    effect = filled_effect([_share_filled(one, fill, sizes[one]) for one in devices])
    for device in devices:  # looking has left its own results in some blocks
        fill_free_memory(device, fill)
    return effect


def _shift(
    session: Session,
    devices: Sequence[torch.device],
    held: list[torch.Tensor],
    before: Sequence[int],
    lain: Sequence[int],
) -> Callable[[], Effect]:
    """Holds what is free, in `held`. Where tensors were `before` and lie now tells the effect; for
    a case that shows no tensor on a GPU it is told by what fresh allocations get."""
    sizes = sizes_of(session)
    free = [at for device in devices for at in _probe(device, sizes[device])]
    for device in devices:
        held += hold_free_memory(device)
    taken = [at for device in devices for at in _probe(device, sizes[device])]
    return lambda: shifted_effect(before or free, lain or taken)


def sizes_of(session: Session) -> dict[torch.device, list[int]]:
    """By device, sizes in bytes of the case's own tensors, and small ones as temporaries have.

    On a device where none of them lies, those of all: the case moves them there.
    """
    tensors = [tensor for tensor in tensors_of(session) if tensor.layout == torch.strided]
    found: dict[torch.device, list[int]] = {}
    for device in cuda_devices(session):
        own = [tensor for tensor in tensors if tensor.device == device] or tensors
        found[device] = [*(rounded(tensor.nbytes) for tensor in own), *SMALL]
    return found


def rounded(size: int) -> int:
    """Bytes that the allocator takes for so many."""
    return max(1, -(-size // GRANULE)) * GRANULE


def free_blocks(snapshot: Iterable[Any], device: int, stream: int) -> list[int]:
    """Sizes that take exactly the free blocks of a stream, from torch.cuda.memory_snapshot().

    A block of a segment for small requests is taken in pieces, since one request for more than
    SMALL_LIMIT would look elsewhere. The greatest come first, as long as they are whole.
    """
    sizes: list[int] = []
    for segment in snapshot:
        pool = tuple(segment.get("segment_pool_id", (0, 0)))
        if segment["device"] != device or segment["stream"] != stream or pool != (0, 0):
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            size = block["size"]
            if segment["segment_type"] == "small":
                whole, rest = divmod(size, SMALL_LIMIT)
                sizes += [SMALL_LIMIT] * whole + ([rest] if rest else [])
            elif size > SMALL_LIMIT:
                sizes.append(size)
    return sorted(sizes, reverse=True)


def within(sizes: Sequence[int], limit: int) -> list[int]:
    """The first of these sizes whose sum stays within a limit, without those that are too great."""
    chosen, total = [], 0
    for size in sizes:
        if total + size <= limit:
            chosen.append(size)
            total += size
    return chosen


def hold_free_memory(device: torch.device) -> list[torch.Tensor]:
    """Free blocks of the current stream's, and an odd one in front of what comes next.

    No more than half of what the driver has left, since the case will need as much again.
    """
    with torch.cuda.device(device):
        left, _ = torch.cuda.mem_get_info(device)
        sizes = within(_free_here(device), left // 2)
        odd = (GRANULE, SMALL_LIMIT + GRANULE)
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in (*sizes, *odd)]


def _free_here(device: torch.device) -> list[int]:
    stream = torch.cuda.current_stream(device).cuda_stream
    return free_blocks(torch.cuda.memory_snapshot(), device.index or 0, stream)


def _probe(device: torch.device, sizes: Sequence[int]) -> list[int]:
    """Where fresh allocations of these sizes lie now."""
    fresh = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes[: -len(SMALL)]]
    return [one.data_ptr() for one in fresh]


def fill_free_memory(device: torch.device, fill: int, sizes: Sequence[int] = ()) -> None:
    """Fills every free block of the current stream's with a byte, after freeing blocks of `sizes`.

    Sizes for which the driver has no memory left are passed over.
    """
    with torch.cuda.device(device):
        free, _ = torch.cuda.mem_get_info(device)
        if sum(sizes) < free // 2:
            made = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            del made
        held = [torch.empty(n, dtype=torch.uint8, device=device) for n in _free_here(device)]
        for one in held:
            one.fill_(fill)


def _share_filled(device: torch.device, fill: int, sizes: Sequence[int]) -> tuple[int, int]:
    """How many fresh allocations of these sizes hold the pattern throughout, and of how many."""
    with torch.cuda.device(device):
        fresh = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        return sum(bool((one == fill).all()) for one in fresh[: len(sizes)]), len(fresh)


def filled_effect(shares: Sequence[tuple[int, int]]) -> Effect:
    """In effect where at least nine of ten fresh allocations held the pattern."""
    filled, total = sum(f for f, _ in shares), sum(t for _, t in shares)
    return {"filled_allocations": filled, "of": total}, total > 0 and 10 * filled >= 9 * total


def shifted_effect(before: Sequence[int], now: Sequence[int]) -> Effect:
    """Addresses of the same tensors in another execution and in this one.

    In effect where at least nine of ten lie elsewhere.
    """
    pairs = list(zip(before, now, strict=False))
    moved = sum(a != b for a, b in pairs)
    aligned = sum(a % SEGMENT != b % SEGMENT for a, b in pairs)
    told = {"moved": moved, "other_offset": aligned, "of": len(pairs)}
    return told, moved > 0 and 10 * moved >= 9 * len(pairs) and len(before) == len(now)


def _given(lain: list[int], arguments: dict[str, Any]) -> None:
    lain += _addresses(arguments)


def _returned(lain: list[int], returned: Any) -> None:
    lain += _addresses(flatten(returned)[0])


def _addresses(values: dict[str, Any]) -> list[int]:
    return [
        value.data_ptr()
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.is_cuda and value.numel()
    ]
