"""The batch that a model computes: its sequences and where their keys and values are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from opgraft.errors import LayerError
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
        LayerError: a length or a row is no integer of at least 0, the tuples differ in length, two sequences have one
            row, or ``caches`` is no mapping.
    """

    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    rows: tuple[int, ...]
    caches: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name in ("query_lengths", "context_lengths", "rows"):
            _expect_counts(name, getattr(self, name))
        if not isinstance(self.caches, Mapping):
            raise LayerError(f"caches of a batch is {self.caches!r:.80}, expected a mapping of prefixes to caches")
        counts = len(self.query_lengths), len(self.context_lengths), len(self.rows)
        if len(set(counts)) > 1:
            raise LayerError(
                f"a batch has {counts[0]} query_lengths, {counts[1]} context_lengths and {counts[2]} rows: give one of "
                "each for every sequence"
            )
        if len(set(self.rows)) < len(self.rows):
            raise LayerError(f"rows {self.rows} has a row of the cache twice: give each sequence one of its own")


def _expect_counts(name: str, values: object) -> None:
    if isinstance(values, tuple) and all(type(value) is int and value >= 0 for value in values):
        return
    raise LayerError(f"{name} of a batch is {values!r:.80}, expected a tuple of integers of at least 0")


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
