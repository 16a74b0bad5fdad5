"""A small op to replace."""

from __future__ import annotations

from support.scale import fast_scale, scale

__all__ = ["fast_scale", "scale"]
