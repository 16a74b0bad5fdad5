"""From the states of a sentence's tokens to one vector, by the settings of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def _first(states: Tensor, mask: Tensor) -> Tensor:
    return _picked(states, mask.argmax(1))


def _last(states: Tensor, mask: Tensor) -> Tensor:
    return _picked(states, mask.shape[1] - 1 - mask.flip(1).argmax(1))


def _picked(states: Tensor, positions: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), positions]


def _max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).amax(1)


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask) / mask.sum(1, keepdim=True)


def _mean_by_root(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask) / mask.sum(1, keepdim=True).sqrt()


def _weighted_mean(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask * (
        torch.arange(1, mask.shape[1] + 1, device=mask.device) - mask.argmax(1, keepdim=True)
    )
    return _sum(states, weights) / weights.sum(1, keepdim=True)


def _sum(states: Tensor, weights: Tensor) -> Tensor:
    return (states * weights.unsqueeze(-1)).sum(1)


POOLINGS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "cls": _first,
        "max": _max,
        "mean": _mean,
        "mean_sqrt_len_tokens": _mean_by_root,
        "weightedmean": _weighted_mean,
        "lasttoken": _last,
    }
)
"""By mode: a function of states ``[batch, tokens, size]`` and a mask ``[batch, tokens]``, both float32."""

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def pooled(states: Tensor, mask: Tensor, modes: Sequence[str]) -> Tensor:
    """Pool to one vector per sentence, those of several modes one behind the other.

    Args:
        states: ``[batch, tokens, size]``.
        mask: ``[batch, tokens]``, zero for padding.
        modes: names from ``POOLINGS``.

    Returns:
        float32 ``[batch, len(modes) * size]``.
    """
    return torch.cat([POOLINGS[mode](states.float(), mask.float()) for mode in modes], dim=-1)


def pooling_modes(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modes that the settings of a pooling module name: by ``pooling_mode``, else by flags, else ``mean``.

    Raises:
        ValueError: they name one that is not known, or none.
    """
    stated = settings.get("pooling_mode")
    if stated is None:
        stated = [mode for flag, mode in _FLAGS.items() if settings.get(flag)] or ["mean"]
    modes = [stated] if isinstance(stated, str) else stated
    if (
        not isinstance(modes, list)
        or not modes
        or not all(isinstance(m, str) and m in POOLINGS for m in modes)
    ):
        raise ValueError(f"the pooling mode {stated!r:.80} is none of {', '.join(POOLINGS)}")
    unknown = [
        name
        for name in settings
        if name.startswith("pooling_mode_") and settings[name] and name not in _FLAGS
    ]
    if unknown:
        raise ValueError(f"the pooling setting {unknown[0]!r:.80} is not known")
    return tuple(modes)
