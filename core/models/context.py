"""The context that a model was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXTENDING = ("linear", "dynamic", "yarn")
"""Ropes whose factor tells how many times longer the context is than the one that the model was first trained for."""


def trained_context(config: Any) -> int | None:
    """Return the positions that a model was made for, those that its ropes are scaled to included.

    Configs mostly say the longer context in ``max_position_embeddings``; older ones with linear, dynamic or YaRN
    scaling leave it at the shorter one.

    Args:
        config: of the language model.

    Returns:
        Tokens; ``None`` where the config does not bound them.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if type(longest) is not int:
        return None
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = [each for each in given.values() if isinstance(each, Mapping)] or [given]
    return max(longest, *(_extended(rope, longest) for rope in ropes))


def _extended(rope: Mapping[str, Any], longest: int) -> int:
    factor = rope.get("factor")
    if rope.get("rope_type", rope.get("type")) not in _EXTENDING or not isinstance(
        factor, int | float
    ):
        return 0
    trained = rope.get("original_max_position_embeddings")
    return int((trained if isinstance(trained, int) else longest) * factor)
