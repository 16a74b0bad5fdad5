"""Pool the states of a sentence's tokens to one vector, as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def _first(states: Tensor, mask: Tensor) -> Tensor:
    # Padding may be at either end. argmax returns the first of equal numbers.
    return _states_at(states, mask.argmax(1))


def _last(states: Tensor, mask: Tensor) -> Tensor:
    places_from_end = mask.flip(1).argmax(1)
    last = mask.shape[1] - 1 - places_from_end
    return _states_at(states, last)


def _states_at(states: Tensor, positions: Tensor) -> Tensor:
    """Return the state ``[batch, size]`` at one position of each sentence."""
    rows = torch.arange(len(states), device=states.device)
    return states[rows, positions]


def _max(states: Tensor, mask: Tensor) -> Tensor:
    is_padding = mask.unsqueeze(-1) == 0
    # Zeros of padding would be above the negative elements of a state.
    return states.masked_fill(is_padding, -torch.inf).amax(1)


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask) / mask.sum(1, keepdim=True)


def _mean_by_root(states: Tensor, mask: Tensor) -> Tensor:
    return _sum(states, mask) / mask.sum(1, keepdim=True).sqrt()


def _weighted_mean(states: Tensor, mask: Tensor) -> Tensor:
    # The first token of a sentence weighs 1, the second 2, and so on.
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    weights = mask * (places - mask.argmax(1, keepdim=True))
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
"""Mode → function of states ``[batch, tokens, size]`` and mask ``[batch, tokens]``, float32."""

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def pooled(states: Tensor, mask: Tensor, modes: Sequence[str]) -> Tensor:
    """Pool states to one vector per sentence. The vectors of several modes are concatenated.

    Args:
        states: ``[batch, tokens, size]``.
        mask: ``[batch, tokens]``, zero for padding.
        modes: names from ``POOLINGS``.

    Returns:
        float32 ``[batch, len(modes) * size]``.
    """
    # In bfloat16, a sum over many tokens would lose digits.
    wide_states = states.float()
    wide_mask = mask.float()
    vectors = [POOLINGS[mode](wide_states, wide_mask) for mode in modes]
    return torch.cat(vectors, dim=-1)


def pooling_modes(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modes in the settings of a pooling module.

    ``pooling_mode`` counts first, then flags such as ``pooling_mode_max_tokens``. Without both, the
    mode is ``mean``.

    Raises:
        ValueError: a mode is not known, or there is none.
    """
    stated = settings.get("pooling_mode")
    if stated is None:
        stated = [mode for flag, mode in _FLAGS.items() if settings.get(flag)] or ["mean"]
    modes = [stated] if isinstance(stated, str) else stated
    is_list = isinstance(modes, list) and bool(modes)
    # An item of JSON may have no hash, so its type comes first.
    if not is_list or not all(isinstance(mode, str) and mode in POOLINGS for mode in modes):
        raise ValueError(f"the pooling mode {stated!r:.80} is none of {', '.join(POOLINGS)}")
    for name, value in settings.items():
        if name.startswith("pooling_mode_") and value and name not in _FLAGS:
            raise ValueError(f"the pooling setting {name!r:.80} is not known")
    return tuple(modes)
