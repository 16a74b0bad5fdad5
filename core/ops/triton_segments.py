"""Rows of several segments one after another, of which Triton programs take blocks: tokens by sequence, or by expert.

The host knows how many rows there are and how many segments, but not where they begin and end. It launches as many
programs as those could need at most, and each finds its segment by itself, so that nobody waits for a length.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_of_segment(index, bounds, segments, size):
    """Find a block's segment, its first row and the end of the segment, by bisection.

    Segment ``i`` has the rows from ``bounds[i]`` on, and the blocks from number ``bounds[i] // size + i`` on. Its last
    one may have no row, so that there are ``rows // size + segments`` of them in all.
    """
    low, high = index * 0, index * 0 + segments
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(bounds + middle) // size + middle <= index
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    start, end = tl.load(bounds + low), tl.load(bounds + low + 1)
    return low, start + (index - start // size - low) * size, end


def blocks_at_most(rows: int, segments: int, size: int) -> int:
    """Return how many blocks of ``size`` that many rows of that many segments have, wherever those end."""
    return rows // size + segments
