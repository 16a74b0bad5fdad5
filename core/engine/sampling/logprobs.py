"""Log-probabilities of tokens under the model, before any setting of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 64
"""Rows of log-probabilities in memory at a time.

A prompt may have thousands of rows, and a vocabulary 200,000 tokens.
"""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, as plain data for another process.

    Attributes:
        token: sampled, or of the prompt.
        logprob: log-probability of the token.
        rank: 1 for the likeliest token; the number of tokens at least as likely as this one.
        top: the likeliest tokens with their log-probabilities, descending.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of a token of each row, and of the likeliest tokens.

    Args:
        logits: ``[n, vocabulary]``, of any floating dtype; computed in float32.
        tokens: ``[n]``, int64.
        counts: for each row, the number of likeliest tokens; a number above the vocabulary's size
            gives all.
    """
    found = []
    for begin in range(0, len(logits), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        found += _token_logprobs(logits[part], tokens[part], counts[part])
    return found


def _token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = (logprobs >= own).sum(-1)
    # As lists, because reading single numbers of a tensor takes much longer.
    rows = zip(
        tokens.tolist(),
        own.squeeze(1).tolist(),
        ranks.tolist(),
        _likeliest(logprobs, counts),
        strict=True,
    )
    return [TokenLogprobs(*row) for row in rows]


def _likeliest(logprobs: Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """Return the likeliest tokens of each row, with their log-probabilities."""
    found: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    # Among equal values, torch chooses by the count: a row's answer must not depend on others.
    for count in set(counts):
        rows = [row for row, own in enumerate(counts) if own == count]
        part = logprobs if len(rows) == len(counts) else logprobs[rows]
        top = part.topk(min(count, logprobs.shape[1]))
        all_ids = top.indices.tolist()
        all_values = top.values.tolist()
        for row, ids, values in zip(rows, all_ids, all_values, strict=True):
            found[row] = tuple(zip(ids, values, strict=True))
    return found


def prompt_logprobs(
    logits: Tensor, prompt: Sequence[int], start: int, count: int
) -> list[TokenLogprobs]:
    """Return the log-probabilities of the tokens of one chunk of a prompt.

    Args:
        logits: ``[t, vocabulary]``, of the positions ``start`` to before ``start + t``.
        prompt: all tokens of the prompt.
        start: position of the first logits.
        count: number of likeliest tokens at each position.

    Returns:
        Log-probabilities of the tokens from ``start + 1`` on. The first token of a prompt has none,
        and the logits of the last position belong to the first sampled token.
    """
    first = start + 1
    following = list(prompt[first : first + len(logits)])
    tokens = torch.tensor(following, dtype=torch.int64, device=logits.device)
    number = len(following)
    counts = [count] * number
    return token_logprobs(logits[:number], tokens, counts)
