"""Short texts that a loaded encoder computes in two ways, and the difference between the ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.base.text import described
from torch import Tensor

_LENGTHS = (11, 7)
_STEP = 7919
"""A prime, so that the tokens of the texts lie far apart in the vocabulary."""
_SPECIAL = ("mask_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}
_COARSE = 0.05
"""The tolerance of narrower dtypes, which round each layer's results to three digits or fewer."""


def trial_texts(config: Any, longest: int, device: torch.device) -> list[Tensor]:
    """Make two texts without a token in common, the first with the special tokens that the config names.

    Args:
        config: of a model of transformers.
        longest: tokens that a text has at most.
        device: where the ids go.
    """
    size, padding = int(config.vocab_size), getattr(config, "pad_token_id", None)
    named = (getattr(config, name, None) for name in _SPECIAL)
    special = [each for each in named if isinstance(each, int) and 0 <= each < size]
    plain = (number * _STEP % size for number in range(1, size))
    ordinary = [each for each, _ in zip(plain, range(40), strict=False)]
    ordinary = [each for each in ordinary if each not in special and each != padding]
    texts, start = [], 0
    for number, length in enumerate(_LENGTHS):
        count = min(length, longest)
        first = [each for each in special if each != padding] if number == 0 else []
        ids = [ordinary[start], *first, *ordinary[start + 1 : start + count]][:count]
        texts.append(torch.tensor(ids, device=device))
        start += count
    return texts


def fault_of(compute: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor]) -> str:
    """Compute states and say how they differ from those that are expected; empty if within rounding.

    Args:
        compute: returns the states ``[tokens, size]`` of each text.
        expected: the same, computed as transformers does.
    """
    try:
        found = compute()
    except (
        Exception
    ) as error:  # whatever the code of the model raises for a mask or positions of ours
        return f"the model raises {described(error)}"
    worst = max(_difference(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    if worst <= _TOLERANCES.get(expected[0].dtype, _COARSE):
        return ""
    return f"the states of a token differ from transformers' by {worst:.1%}"


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest distance of a token's states from the expected ones, relative to these."""
    apart = (found.float() - expected.float()).norm(dim=-1)
    norms = expected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    known = expected.isfinite().all(dim=-1)  # a model that computes NaN itself is named later
    distances = (apart / norms).masked_fill(~known, 0.0)
    return float(distances.nan_to_num(math.inf).max())
