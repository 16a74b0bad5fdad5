"""``vllm.utils.math_utils``."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Divide, and round up."""
    return -(a // -b)


def round_up(x: int, y: int) -> int:
    """Round up to a multiple of ``y``."""
    return cdiv(x, y) * y


def round_down(x: int, y: int) -> int:
    """Round down to a multiple of ``y``."""
    return x // y * y


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is not less, 1 at least."""
    return 1 << max(n - 1, 0).bit_length()


def prev_power_of_2(n: int) -> int:
    """Return the largest power of 2 that is not more; 0 where there is none."""
    return 1 << (n.bit_length() - 1) if n > 0 else 0
