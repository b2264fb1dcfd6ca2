"""Where the rows that the Hopper forward saves lie, and how the portable backward reads them.

It exists because the kernel pads every expert's rows to blocks of 128, and the portable backward
reads them without padding, in the same canonical order. Pure index arithmetic from row counts.

Legend: R rows of all local experts, I width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mok.hopper.layout import BLOCK, ceil_div
from mok.portable import SavedRows


def padded_count(rows_E: Sequence[int]) -> int:
    """Rows of all experts, each padded to a multiple of 128."""
    return sum(ceil_div(rows, BLOCK) * BLOCK for rows in rows_E)


def padded_rows(rows_E: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [R]: the padded row of each canonical row. rows_E: rows of each local expert."""
    pieces: list[torch.Tensor] = []
    start = 0
    for rows in rows_E:
        if rows:
            pieces.append(torch.arange(start, start + rows, dtype=torch.int64))
        start += ceil_div(rows, BLOCK) * BLOCK
    if not pieces:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat(pieces).to(device)


def without_padding(gate: torch.Tensor, up: torch.Tensor, rows_E: Sequence[int]) -> SavedRows:
    """g and u in canonical order, [R, I] each; all rows must have been saved."""
    rows = padded_rows(rows_E, gate.device)
    return SavedRows(gate.index_select(0, rows), up.index_select(0, rows))
