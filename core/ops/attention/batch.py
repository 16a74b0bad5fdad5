"""The batch that a model computes: its sequences and where their keys and values are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one call of a model, whose tokens follow one another.

    Attributes:
        query_lengths: tokens of each sequence in this call.
        context_lengths: tokens of each sequence that are in the cache already.
        rows: the row of the cache that each sequence has.
        caches: name of an attention layer → its cache, of the shape that its ``kv_cache_shape`` gives.

    Raises:
        ValueError: the tuples differ in length, or two sequences have one row.
    """

    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    rows: tuple[int, ...]
    caches: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        counts = len(self.query_lengths), len(self.context_lengths), len(self.rows)
        if len(set(counts)) > 1:
            raise ValueError(
                f"a batch has {counts[0]} query_lengths, {counts[1]} context_lengths and {counts[2]} rows: give one of "
                "each for every sequence"
            )
        if len(set(self.rows)) < len(self.rows):
            raise ValueError(f"rows {self.rows} has a row of the cache twice: give each sequence one of its own")


_CURRENT: ContextVar[AttentionBatch | None] = ContextVar("opgraft_attention_batch", default=None)


@contextmanager
def attending(batch: AttentionBatch) -> Iterator[None]:
    """Have the attention layers of a model that is called within the block attend over ``batch``."""
    token = _CURRENT.set(batch)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_batch() -> AttentionBatch | None:
    """Return the batch that is computed; ``None`` where nobody has set one."""
    return _CURRENT.get()
