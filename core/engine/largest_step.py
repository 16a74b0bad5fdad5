"""The step that takes the most memory, for measuring it before there are requests."""

from __future__ import annotations

from itertools import count, islice

from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import NewSequence, Scheduled, Step

_PARAMS = SamplingParams(
    temperature=1.0, top_p=0.9, max_tokens=1, seed=0, logprobs=1, prompt_logprobs=1
)
"""Of requests that take the most memory: tokens drawn from a part of the vocabulary, log-probabilities of all."""


def largest_step(
    max_num_seqs: int, max_num_tokens: int, longest: int, block_size: int, kinds: int
) -> Step:
    """Return a step of as many sequences, and as many tokens, as a step may have, each sampling a token.

    The first sequences are as long as they may be, since attention over one takes most then.

    Args:
        max_num_seqs: sequences of a step, at most.
        max_num_tokens: tokens of a step, at most.
        longest: tokens of the longest context.
        block_size: tokens in a block.
        kinds: tables of a sequence.
    """
    free_blocks, left = count(), max_num_tokens
    added, sequences = [], []
    for number in range(min(max_num_seqs, max_num_tokens)):
        others = min(max_num_seqs, max_num_tokens) - number - 1
        length = min(longest, left - others)
        left -= length
        needed = -(-length // block_size)
        blocks = tuple(tuple(islice(free_blocks, needed)) for _ in range(kinds))
        name = f"largest step {number}"
        added.append(
            NewSequence(name, (0,) * length, length, length, _PARAMS, blocks, number, state=number)
        )
        sequences.append(Scheduled(name, 0, length, ((),) * kinds, True))
    return Step((), tuple(added), (), tuple(sequences))
