"""The batch of one call of a model: its sequences, and the pages of their keys and values."""

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

__all__ = ["AttentionBatch", "LayerPages", "LayerStates", "attending", "current_batch"]

_NO_CACHES: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class LayerPages:
    """The pages of one attention layer. Layers of one kind share the table and the slots.

    Attributes:
        cache: the keys and values, in the shape of the layer's ``kv_cache_shape``; the first
            dimension is the block.
        block_table: the blocks of each sequence, in the order of its tokens, int32
            ``[sequences, most blocks]``. Entries beyond the view of every token are not read.
        slots: the places of the new tokens, ``block · block_size + offset``, int64 ``[tokens]``.
    """

    cache: Tensor
    block_table: Tensor
    slots: Tensor


@dataclass(frozen=True)
class LayerStates:
    """The states of sequences in one layer. Layers share the slots.

    Attributes:
        tensors: in the shapes of the layer's ``get_state_shape``, behind a dimension for the slot.
        slots: the slot of each sequence, int64 ``[sequences]``.
    """

    tensors: tuple[Tensor, ...]
    slots: Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one call of a model. Their tokens follow one another without padding.

    Attributes:
        query_start_loc: the bounds of each sequence among the tokens of this call, int32
            ``[sequences + 1]``.
        seq_lens: tokens of each sequence so far, with the tokens of this call, int32
            ``[sequences]``.
        max_query_len: the most tokens of a sequence in this call. Kernels like flash-attention are
            launched by this number and ``max_seq_len``: to read a tensor would wait for the device.
        max_seq_len: the largest of ``seq_lens``, or a bound on it.
        pages: prefix of an attention layer → its pages. Encoders need none.
        block_size: tokens of a block.
        max_context_len: the most tokens that a sequence may come to have; the model's own limit by
            default. Ropes that depend on the length of the context rotate for this length, from a
            sequence's first token to its last.
        context_lens: the length of the context for the rope of each token, in place of
            ``max_context_len``, int64 ``[tokens]``. Then sequences do not depend on each other.
        continues: no sequence is new since the model's last call. Checks of the model that passed
            then need no repetition.
        states: prefix of a layer with a state for each sequence → its states.

    Raises:
        LayerError: ``query_start_loc`` and ``seq_lens`` are not for equally many sequences, or
            ``pages`` is no mapping.
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
        bounds = tuple(self.query_start_loc.shape)
        lengths = tuple(self.seq_lens.shape)
        if len(lengths) != 1 or bounds != (lengths[0] + 1,):
            raise LayerError(
                f"a batch has query_start_loc of shape {bounds} and seq_lens of shape {lengths}: "
                "give [sequences + 1] and [sequences]"
            )
        if not isinstance(self.pages, Mapping):
            raise LayerError(
                f"pages of a batch is {self.pages!r:.80}, expected a mapping of prefixes to "
                "LayerPages"
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
        """Make the batch of sequences with lengths known on the host; all layers share one table.

        Args:
            query_lens: tokens of each sequence in this call.
            seq_lens: tokens of each sequence so far, this call included; by default
                ``query_lens``.
            block_table: blocks of each sequence, integers ``[sequences, most blocks]``; not needed
                without caches.
            caches: prefix of an attention layer → its cache.
            block_size: tokens of a block.
            max_context_len: as the attribute.
            device: the device of the tensors.

        Raises:
            LayerError: a length is no integer of at least 0, the arguments are not for equally many
                sequences, or a sequence is longer than its blocks or shorter than its tokens in
                this call.
        """
        lengths = list(query_lens if seq_lens is None else seq_lens)
        table = torch.zeros(len(lengths), 0, dtype=torch.int32)

        # Slots are computed on the host, so a step waits for no device.
        if block_table is not None:
            table = block_table.cpu()
        _expect_lengths(query_lens, lengths, table, block_size if caches else None)
        slots = torch.zeros(0, dtype=torch.int64)
        if caches:
            slots = _slots_of_new_tokens(query_lens, lengths, table, block_size)
        table = table.to(device, torch.int32)
        slots = slots.to(device)

        return cls(
            torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            max(query_lens, default=0),
            max(lengths, default=0),
            {name: LayerPages(cache, table, slots) for name, cache in caches.items()},
            block_size,
            max_context_len,
        )


def _expect_lengths(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: Tensor, block_size: int | None
) -> None:
    """Raise ``LayerError`` unless the lengths fit each other and the rows of the table.

    Without caches, ``block_size`` is ``None``: then sequences need no blocks.
    """
    if not len(query_lens) == len(seq_lens) == len(block_table):
        raise LayerError(
            f"a batch has {len(query_lens)} query_lens, {len(seq_lens)} seq_lens and "
            f"{len(block_table)} rows of its block table: give one of each for every sequence"
        )

    room = None if block_size is None else block_table.shape[1] * block_size
    for query, length in zip(query_lens, seq_lens, strict=True):
        # bool is an int, too, so isinstance would let it pass.
        if type(query) is not int or type(length) is not int or not 0 <= query <= length:
            raise LayerError(
                f"a sequence of {length} tokens has {query} in this call: give 0 to as many"
            )
        if room is not None and length > room:
            raise LayerError(
                f"a sequence has {length} tokens, and its blocks room for {room}: give it more "
                "blocks"
            )


def _slots_of_new_tokens(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: Tensor, block_size: int
) -> Tensor:
    """Return the slots of the last ``query_lens`` tokens of each sequence, int64 ``[tokens]``."""
    slots = [torch.zeros(0, dtype=torch.int64)]
    for query, length, blocks in zip(query_lens, seq_lens, block_table.long(), strict=True):
        positions = torch.arange(length - query, length)
        offsets = positions % block_size
        slots.append(blocks[positions // block_size] * block_size + offsets)
    return torch.cat(slots)


_CURRENT: ContextVar[AttentionBatch | None] = ContextVar("opgraft_attention_batch", default=None)


@contextmanager
def attending(batch: AttentionBatch) -> Iterator[None]:
    """Within the block, let the attention layers of a called model attend over ``batch``."""
    token = _CURRENT.set(batch)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_batch() -> AttentionBatch | None:
    """Return the batch of ``attending``; ``None`` outside of such a block."""
    return _CURRENT.get()


def current_boundaries() -> Tensor | None:
    """Return ``query_start_loc`` of the current batch; ``None`` if all tokens are one sequence."""
    batch = current_batch()
    if batch is None or len(batch.seq_lens) == 1:
        return None
    return batch.query_start_loc
