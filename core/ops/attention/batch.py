"""The batch that a model computes: its sequences and the pages where their keys and values are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

import torch
from opgraft.errors import LayerError
from torch import Tensor

_NO_CACHES: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class LayerPages:
    """The pages where one attention layer keeps keys and values. Layers of one kind share table and slots.

    Attributes:
        cache: of the shape that the layer's ``kv_cache_shape`` gives; its first dimension is the block.
        block_table: the blocks of each sequence, in the order of its tokens, int32 ``[sequences, most blocks]``.
            Entries that no token of this call sees are not read.
        slots: where the new tokens go, ``block · block_size + offset``, int64 ``[tokens]``.
    """

    cache: Tensor
    block_table: Tensor
    slots: Tensor


@dataclass(frozen=True)
class LayerStates:
    """The states that one layer keeps of sequences. Layers share the slots.

    Attributes:
        tensors: of the shapes that the layer's ``get_state_shape`` gives, behind a first dimension for the slot.
        slots: of each sequence, int64 ``[sequences]``.
    """

    tensors: tuple[Tensor, ...]
    slots: Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one call of a model, whose tokens follow one another without padding.

    Attributes:
        query_start_loc: where the tokens of each sequence begin and end in this call, int32 ``[sequences + 1]``.
        seq_lens: tokens of each sequence so far, with those of this call, int32 ``[sequences]``.
        max_query_len: the most tokens that a sequence has in this call. Like ``max_seq_len`` it is for kernels that
            are launched by it, such as those of flash-attention: to read it off a tensor would wait for the device.
        max_seq_len: the largest of ``seq_lens``, or a bound on it.
        pages: prefix of an attention layer → its pages. None are needed by encoders.
        block_size: tokens of a block.
        max_context_len: tokens that the longest of the sequences may come to have; the model's own limit if not given.
            Ropes that depend on the length of the context rotate for it, from a sequence's first token to its last.
        context_lens: the length of the context that such ropes rotate each token for, in place of ``max_context_len``,
            int64 ``[tokens]``. So sequences of a batch do not depend on each other.
        continues: no sequence is new since the model's last call. What has been checked of the model then may be taken
            for granted.
        states: prefix of a layer that keeps a state of each sequence → its states.

    Raises:
        LayerError: ``query_start_loc`` and ``seq_lens`` are not for as many sequences, or ``pages`` is no mapping.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    pages: Mapping[str, LayerPages]
    block_size: int
    max_context_len: int | None = None
    context_lens: Tensor | None = None
    continues: bool = False
    states: Mapping[str, LayerStates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bounds, lengths = tuple(self.query_start_loc.shape), tuple(self.seq_lens.shape)
        if len(lengths) != 1 or bounds != (lengths[0] + 1,):
            raise LayerError(
                f"a batch has query_start_loc of shape {bounds} and seq_lens of shape {lengths}: give [sequences + 1] "
                "and [sequences]"
            )
        if not isinstance(self.pages, Mapping):
            raise LayerError(
                f"pages of a batch is {self.pages!r:.80}, expected a mapping of prefixes to LayerPages"
            )

    @classmethod
    def of_sequences(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int] | None = None,
        block_table: Tensor | None = None,
        caches: Mapping[str, Tensor] = _NO_CACHES,
        *,
        block_size: int = 16,
        max_context_len: int | None = None,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Make the batch of sequences whose lengths are known on the host, all layers with one table.

        Args:
            query_lens: tokens of each sequence in this call.
            seq_lens: tokens of each so far, with those; the same if not given.
            block_table: blocks of each sequence, integers ``[sequences, most blocks]``; not needed without caches.
            caches: prefix of an attention layer → its cache.
            block_size: tokens of a block.
            max_context_len: as the attribute.
            device: where the tensors go.

        Raises:
            LayerError: a length is no integer of at least 0, the lengths are not of as many sequences, or a sequence is
                longer than its blocks or shorter than its tokens of this call.
        """
        lengths = list(query_lens if seq_lens is None else seq_lens)
        table = (
            torch.zeros(len(lengths), 0, dtype=torch.int32)
            if block_table is None
            else block_table.cpu()
        )
        if not len(query_lens) == len(lengths) == len(table):
            raise LayerError(
                f"a batch has {len(query_lens)} query_lens, {len(lengths)} seq_lens and {len(table)} rows of its block "
                "table: give one of each for every sequence"
            )
        room = table.shape[1] * block_size
        for query, length in zip(query_lens, lengths, strict=True):
            if type(query) is not int or type(length) is not int or not 0 <= query <= length:
                raise LayerError(
                    f"a sequence of {length} tokens has {query} in this call: give 0 to as many"
                )
            if caches and length > room:
                raise LayerError(
                    f"a sequence has {length} tokens, and its blocks room for {room}: give it more blocks"
                )
        slots = (
            _slots(query_lens, lengths, table, block_size)
            if caches
            else torch.zeros(0, dtype=torch.int64)
        )
        table, slots = table.to(device, torch.int32), slots.to(device)
        return cls(
            torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            max(query_lens, default=0),
            max(lengths, default=0),
            {name: LayerPages(cache, table, slots) for name, cache in caches.items()},
            block_size,
            max_context_len,
        )


def _slots(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: Tensor, block_size: int
) -> Tensor:
    """Return where the last ``query_lens`` tokens of each sequence go."""
    slots = [torch.zeros(0, dtype=torch.int64)]
    for query, length, blocks in zip(query_lens, seq_lens, block_table.long(), strict=True):
        positions = torch.arange(length - query, length)
        slots.append(blocks[positions // block_size] * block_size + positions % block_size)
    return torch.cat(slots)


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


def current_boundaries() -> Tensor | None:
    """Return ``query_start_loc`` of the batch that is computed; ``None`` where all tokens are one sequence."""
    batch = current_batch()
    return None if batch is None or len(batch.seq_lens) == 1 else batch.query_start_loc
