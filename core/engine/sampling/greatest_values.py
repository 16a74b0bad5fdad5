"""Rows of a vocabulary read block by block, which finds their greatest values many times sooner than one pass does."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Tokens of a block. The maximum of a block is one vectorised pass; the position of it is looked for in one block."""

FEW = 4
"""Rows for which one pass is sooner done all the same: weights have driven out of the caches what further ops need."""


def blocks_of(rows: Tensor, padding: float = float("-inf")) -> Tensor:
    """View ``[n, vocabulary]`` as ``[n, blocks, BLOCK]``; where the last block is not full, a copy has ``padding``."""
    missing = -rows.shape[1] % BLOCK
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing), value=padding)
    # A view where the last dimension is dense.
    blocks: Tensor = rows.reshape(len(rows), rows.shape[1] // BLOCK, BLOCK)
    return blocks


def row_maximum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest value of each row and the first position that holds it, as ``max(dim=-1)`` does.

    Args:
        rows: ``[n, vocabulary]``.

    Returns:
        Values ``[n]``, NaN for a row that has one, and positions ``[n]``, int64.
    """
    if len(rows) <= FEW:
        greatest = rows.max(-1)
        return greatest.values, greatest.indices
    blocks = blocks_of(rows)
    block = blocks.amax(-1).argmax(-1)
    chosen = blocks[torch.arange(len(rows), device=rows.device), block]
    # Not max(-1), which wakes all threads for any size.
    return chosen.amax(-1), block * BLOCK + chosen.argmax(-1)


def likeliest(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return at least the ``size`` greatest values of each row, descending, and their positions.

    Every position that is left out holds no more than the last value given. ``-inf`` may stand at a position beyond
    the row.
    """
    if size >= rows.shape[1]:
        values, positions = rows.sort(dim=-1, descending=True, stable=True)
        return values, positions
    blocks = blocks_of(rows)
    if size * 2 > blocks.shape[1]:
        values, positions = rows.topk(size)
        return values, positions
    # No other block holds a value above theirs.
    best = blocks.amax(-1).topk(size, sorted=False).indices
    inside = blocks.gather(1, best.unsqueeze(-1).expand(-1, -1, BLOCK)).flatten(1)
    values, at = inside.topk(size)
    return values, best.gather(1, at // BLOCK) * BLOCK + at % BLOCK
