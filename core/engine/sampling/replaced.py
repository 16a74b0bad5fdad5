"""Checks of the answer of a replaced sampler, so that no error blames the next op."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.blame import fault_of_class
from opgraft.engine.sampling.batch import SamplingBatch
from opgraft.engine.sampling.sampler import SampledTokens, Sampler
from torch import Tensor


def sampled_by(sampler: Sampler, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    """Return the tokens that a sampler chooses.

    Args:
        sampler: opgraft's, or one of a plugin in its place.
        logits: ``[n, vocabulary]``.
        batch: with a request for each row.

    Raises:
        PluginError: the sampler of a plugin returns something else than ``n`` tokens of the
            vocabulary.
    """
    sampled: SampledTokens = sampler(logits, batch)
    if type(sampler) is not Sampler:
        fault = _fault_of(sampled, *logits.shape)
        if fault:
            raise fault_of_class(type(sampler), fault)
    return sampled


def _fault_of(sampled: Any, number: int, vocabulary: int) -> str:
    if not isinstance(sampled, SampledTokens):
        return f"returned a {type(sampled).__name__}, expected opgraft's SampledTokens"
    tokens: Any = sampled.tokens
    if not isinstance(tokens, Tensor):
        return f"returned tokens as a {type(tokens).__name__}, expected a tensor [{number}]"
    is_whole = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    if not is_whole or tokens.shape != (number,):
        form = f"{tokens.dtype} {list(tokens.shape)}"
        return f"returned tokens as {form}, expected torch.int64 [{number}]"
    # A failed row has the token -1.
    least = -1 if sampled.errors else 0
    wrong = tokens[(tokens < least) | (tokens >= vocabulary)]
    if len(wrong):
        return f"returned the token {int(wrong[0])}, which no vocabulary of {vocabulary:,} has"
    return ""
