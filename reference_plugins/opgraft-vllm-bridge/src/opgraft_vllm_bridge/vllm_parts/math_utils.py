"""Rounding of integers: ``vllm.utils.math_utils``."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(a // -b)


def round_up(x: int, y: int) -> int:
    """Return ``x``, rounded up to a multiple of ``y``."""
    return cdiv(x, y) * y


def round_down(x: int, y: int) -> int:
    """Return ``x``, rounded down to a multiple of ``y``."""
    return x // y * y


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 from ``n`` on, such as 8 for 5. For ``n`` below 1, return 1."""
    bits = max(n - 1, 0).bit_length()
    return 1 << bits


def prev_power_of_2(n: int) -> int:
    """Return the largest power of 2 up to ``n``, such as 4 for 5. For ``n`` below 1, return 0."""
    if n < 1:
        return 0
    return 1 << (n.bit_length() - 1)
