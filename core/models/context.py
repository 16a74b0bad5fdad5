"""The longest context that a model was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EXTENDING = ("linear", "dynamic", "yarn")
"""Ropes with a factor that multiplies the context of the first training."""


def trained_context(config: Any) -> int | None:
    """Return the longest context of a model, with the extension by scaled ropes.

    Most configs have the extended context in ``max_position_embeddings``. Older configs with
    linear, dynamic or YaRN scaling have the context before the extension.

    Args:
        config: the config of the language model.

    Returns:
        Tokens; ``None`` if the config has no bound.
    """
    # State-space models have no such setting.
    longest = getattr(config, "max_position_embeddings", None)
    if type(longest) is not int:
        return None
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Each kind of layers may have a rope: {"full_attention": {...}, "sliding_attention": {...}}.
    ropes = [each for each in given.values() if isinstance(each, Mapping)] or [given]
    return max(longest, *(_extended_context(rope, longest) for rope in ropes))


def _extended_context(rope: Mapping[str, Any], longest: int) -> int:
    """Return the context of a rope that extends it; 0 for another rope."""
    kind = rope.get("rope_type", rope.get("type"))
    factor = rope.get("factor")
    if kind not in _EXTENDING or not isinstance(factor, int | float):
        return 0
    trained = rope.get("original_max_position_embeddings")
    if not isinstance(trained, int):
        trained = longest
    return int(trained * factor)
