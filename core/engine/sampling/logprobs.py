"""Log-probabilities of tokens, as the model gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 64
"""Rows of logits whose log-probabilities are in memory at a time: a prompt may have thousands, a vocabulary 200,000."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: plain data that can go to another process.

    Attributes:
        token: the one that was sampled, or stands in the prompt.
        logprob: its own.
        rank: 1 for the likeliest; the number of tokens that are at least as likely.
        top: the likeliest tokens with theirs, descending, as many as were asked for.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Give the log-probabilities of a token of each row, and of the likeliest.

    Args:
        logits: ``[n, vocabulary]``, of any floating dtype; computed in float32.
        tokens: ``[n]``, int64.
        counts: of each row, how many of the likeliest to give; more than the vocabulary has gives all.
    """
    parts = (slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, len(logits), ROWS_AT_ONCE))
    return [
        each for part in parts for each in _token_logprobs(logits[part], tokens[part], counts[part])
    ]


def _token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs >= own).sum(-1).tolist()
    top = logprobs.topk(min(max(counts, default=0), logits.shape[1]))
    values, ids = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprobs(
            token, value, rank, tuple(zip(ids[row][:count], values[row][:count], strict=True))
        )
        for row, (token, value, rank, count) in enumerate(
            zip(tokens.tolist(), own.squeeze(1).tolist(), ranks, counts, strict=True)
        )
    ]


def prompt_logprobs(
    logits: Tensor, prompt: Sequence[int], start: int, count: int
) -> list[TokenLogprobs]:
    """Give the log-probabilities of tokens of a prompt, for one chunk of it.

    Args:
        logits: ``[t, vocabulary]``, computed at the positions ``start`` to before ``start + t`` of the prompt.
        prompt: all of its tokens.
        start: position of the first logits.
        count: how many of the likeliest to give at each.

    Returns:
        Those of the tokens from ``start + 1`` on; the first token of a prompt has none, and the logits at its last
        position belong to the first sampled token.
    """
    following = list(prompt[start + 1 : start + 1 + len(logits)])
    tokens = torch.tensor(following, dtype=torch.int64, device=logits.device)
    return token_logprobs(logits[: len(following)], tokens, [count] * len(following))
