"""Short texts for a loaded encoder, to compare the results of two ways to compute them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.base.text import described
from torch import Tensor

_LENGTHS = (11, 7)
"""Tokens of each text."""

_STEP = 7919
"""A prime, so that the tokens of the texts lie far apart in the vocabulary."""

_CANDIDATES = 40
"""More tokens than the texts need, as special tokens are left out."""

_SPECIAL = (
    *("pad_token_id", "mask_token_id", "cls_token_id"),
    *("sep_token_id", "bos_token_id", "eos_token_id"),
)
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
_COARSE = 0.05
"""The tolerance of narrower dtypes: each layer's results are rounded to three digits or fewer."""


def trial_texts(config: Any, longest: int, device: torch.device) -> list[Tensor]:
    """Make two texts without a common token. The first has the special tokens of the config.

    Args:
        config: the config of a model of transformers.
        longest: tokens of a text at most.
        device: the device of the ids.
    """
    size = int(config.vocab_size)
    special = []
    for name in _SPECIAL:
        token = getattr(config, name, None)
        is_known = isinstance(token, int) and 0 <= token < size
        if is_known and token not in special:
            special.append(token)
    ordinary = []
    for number in range(1, min(size, _CANDIDATES + 1)):
        token = number * _STEP % size
        if token not in special:
            ordinary.append(token)
    texts = []
    start = 0
    for length in _LENGTHS:
        count = min(length, longest)
        first, *others = ordinary[start : start + count]
        ids = [first, *special, *others][:count]
        texts.append(torch.tensor(ids, device=device))
        start += count
        special = []
    return texts


def fault_of(compute: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor]) -> str:
    """Compute states and compare them with the expected states.

    Args:
        compute: returns the states ``[tokens, size]`` of each text.
        expected: the states of each text as transformers computes them.

    Returns:
        A description of the difference; empty if the difference is rounding.
    """
    try:
        found = compute()
    # The code of the model may raise anything for our mask or positions.
    except Exception as error:
        return f"the model raises {described(error)}"
    worst = max(_difference(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    if worst <= _TOLERANCES.get(expected[0].dtype, _COARSE):
        return ""
    return f"the states of a token differ from transformers' by {worst:.1%}"


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest distance of a token's states from the expected states.

    The distance is relative to the norm of the expected states.
    """
    apart = (found.float() - expected.float()).norm(dim=-1)
    # A state of zeros would be divided by 0.
    tiny = torch.finfo(torch.float32).tiny
    norms = expected.float().norm(dim=-1).clamp_min(tiny)
    # If transformers itself computes NaN, a later check names the model.
    is_known = expected.isfinite().all(dim=-1)
    distances = (apart / norms).masked_fill(~is_known, 0.0)
    return float(distances.nan_to_num(math.inf).max())
