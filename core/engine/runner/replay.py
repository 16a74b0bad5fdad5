"""Steps that compute sequences once more, in a cache of their own, to find the wrong kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import NewSequence, ScheduledPart, Step

_PARAMS = SamplingParams()
"""Settings of sequences without sampling."""


def blocks_of(sequences: Sequence[Sequence[int]], block_size: int, groups: int) -> int:
    """Return the number of blocks for the sequences."""
    return groups * sum(_blocks(len(tokens), block_size) for tokens in sequences)


def steps_again(
    sequences: Sequence[Sequence[int]],
    adapters: Sequence[int],
    block_size: int,
    groups: int,
    most_tokens: int,
) -> Iterator[Step]:
    """Yield steps for sequences as prompts, then for the last token of each as part of an answer.

    Kernels may compute prompts in one way and single tokens in another. Each step asks for the
    logits of the last tokens.

    Args:
        sequences: token ids of each.
        adapters: the number of each sequence's adapter.
        block_size: tokens in a block.
        groups: of layers; a sequence has a table for each.
        most_tokens: tokens of a step, at most.
    """
    added = tuple(_added(sequences, adapters, block_size, groups))
    yield Step((), added, (), ())
    for parts in _prompts(sequences, most_tokens):
        yield Step((), (), (), _scheduled(parts, groups))

    # The last tokens are in the cache already: computing them again writes the same.
    ends = []
    for number, tokens in enumerate(sequences):
        ends.append((number, len(tokens) - 1, 1))
    for first in range(0, len(ends), most_tokens):
        part = ends[first : first + most_tokens]
        yield Step((), (), (), _scheduled(part, groups))


def _added(
    sequences: Sequence[Sequence[int]], adapters: Sequence[int], block_size: int, groups: int
) -> Iterator[NewSequence]:
    # Nothing is shared: each sequence takes the next unused numbers.
    free_blocks = count()
    for number, (tokens, adapter) in enumerate(zip(sequences, adapters, strict=True)):
        length = len(tokens)
        needed = _blocks(length, block_size)
        tables = []
        for _ in range(groups):
            table = islice(free_blocks, needed)
            tables.append(tuple(table))

        yield NewSequence(
            _name(number),
            tuple(tokens),
            length,
            length,
            _PARAMS,
            tuple(tables),
            arrival=number,
            state=number,
            lora=adapter,
        )


def _prompts(
    sequences: Sequence[Sequence[int]], most_tokens: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the parts of prompts in each step.

    A part is the number of the sequence, the position of the first token, and the number of tokens.
    """
    parts: list[tuple[int, int, int]] = []
    room = most_tokens
    for number, tokens in enumerate(sequences):
        start = 0
        while start < len(tokens):
            taken = min(len(tokens) - start, room)
            parts.append((number, start, taken))
            start += taken
            room -= taken
            if not room:
                yield parts
                parts = []
                room = most_tokens
    if parts:
        yield parts


def _scheduled(parts: Sequence[tuple[int, int, int]], groups: int) -> tuple[ScheduledPart, ...]:
    no_blocks: tuple[tuple[int, ...], ...] = ((),) * groups
    return tuple(
        ScheduledPart(_name(number), start, taken, no_blocks, True)
        for number, start, taken in parts
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _name(number: int) -> str:
    return f"sequence {number}"
