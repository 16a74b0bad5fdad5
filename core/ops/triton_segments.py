"""Blocks of rows in segments, for Triton programs: tokens by sequence, or by expert.

The host knows the numbers of rows and of segments, but not the bounds of the segments. The host
launches enough programs for any bounds, and each program finds its segment: nobody waits for a
length.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_of_segment(index, bounds, segments, size):
    """Return the segment of a block, its first row, and the end of the segment.

    Segment ``i`` has the rows from ``bounds[i]`` on, and the blocks from number
    ``bounds[i] // size + i`` on. The last block of a segment may be empty, so there are
    ``rows // size + segments`` blocks in all.
    """
    low = index * 0
    high = low + segments
    # Bisection: the first block of `low` is at or before this block, that of `high` behind.
    while high - low > 1:
        middle = (low + high) // 2
        first_block = tl.load(bounds + middle) // size + middle
        is_before = first_block <= index
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)

    start = tl.load(bounds + low)
    end = tl.load(bounds + low + 1)
    blocks_before = index - start // size - low
    return low, start + blocks_before * size, end


def blocks_at_most(rows: int, segments: int, size: int) -> int:
    """Return the most blocks of ``size`` rows, for any bounds of the segments."""
    return rows // size + segments
