"""Cutting a vocabulary for ranks: the model's own ids and added ones, each padded and cut by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from opgraft.errors import LayerError
from opgraft.ops.linear.sharding import divide
from torch import Tensor

DEFAULT_VOCAB_PADDING_SIZE = 64


def pad_vocab_size(vocab_size: int, pad_to: int = DEFAULT_VOCAB_PADDING_SIZE) -> int:
    """Round a size up to a multiple."""
    return -(-vocab_size // pad_to) * pad_to


@dataclass(frozen=True)
class VocabParallelEmbeddingShardIndices:
    """The ids that a rank has rows for: its part of the model's own, and its part of added ones.

    The rows lie in this order: own ids, padding of those, added ids, padding of those. The ranges with ``padded`` in
    their name count padding as if it were ids.
    """

    padded_org_vocab_start_index: int
    padded_org_vocab_end_index: int
    padded_added_vocab_start_index: int
    padded_added_vocab_end_index: int
    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int

    @property
    def num_org_elements(self) -> int:
        """The number of the model's own ids."""
        return self.org_vocab_end_index - self.org_vocab_start_index

    @property
    def num_added_elements(self) -> int:
        """The number of added ids."""
        return self.added_vocab_end_index - self.added_vocab_start_index

    @property
    def num_org_elements_padded(self) -> int:
        """The number of rows for the model's own ids."""
        return self.padded_org_vocab_end_index - self.padded_org_vocab_start_index

    @property
    def num_added_elements_padded(self) -> int:
        """The number of rows for added ids."""
        return self.padded_added_vocab_end_index - self.padded_added_vocab_start_index

    @property
    def num_org_vocab_padding(self) -> int:
        """The number of rows between own and added ids that are for none."""
        return self.num_org_elements_padded - self.num_org_elements

    @property
    def num_added_vocab_padding(self) -> int:
        """The number of rows after the added ids that are for none."""
        return self.num_added_elements_padded - self.num_added_elements

    @property
    def num_elements_padded(self) -> int:
        """The number of rows."""
        return self.num_org_elements_padded + self.num_added_elements_padded


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary that ranks share.

    Attributes:
        size: number of ids, with added ones.
        org_size: number of the model's own ids.
        padding: multiple to which each of the two parts is padded.
        ranks: that share it.

    Raises:
        LayerError: there are more ranks than ids of the model, or they do not divide the padded parts.
    """

    size: int
    org_size: int
    padding: int
    ranks: int
    prefix: str

    def __post_init__(self) -> None:
        what = f"embedding {self.prefix!r}"
        if self.org_size < self.ranks:
            raise LayerError(
                f"{what}: a vocabulary of {self.org_size} cannot be shared by {self.ranks} tensor-parallel ranks, of "
                "which each must have an id: choose fewer ranks"
            )
        if self.size < self.org_size:
            raise LayerError(
                f"{what}: num_embeddings is {self.size}, fewer than the {self.org_size} of org_num_embeddings, which "
                "it includes"
            )
        for padded in (self.org_padded, self.padded - self.org_padded):
            divide(
                padded,
                self.ranks,
                f"{what}: its size padded to multiples of padding_size={self.padding}",
            )

    @property
    def org_padded(self) -> int:
        """The number of rows for the model's own ids, of all ranks."""
        return pad_vocab_size(self.org_size, self.padding)

    @property
    def padded(self) -> int:
        """The number of rows of all ranks."""
        return pad_vocab_size(self.org_padded + self.size - self.org_size, self.padding)

    def shard(self, rank: int) -> VocabParallelEmbeddingShardIndices:
        """Return the ids of a rank."""
        org, added = self.org_padded // self.ranks, (self.padded - self.org_padded) // self.ranks
        starts = (rank * org, self.org_size + rank * added)
        ends = (starts[0] + org, starts[1] + added)
        return VocabParallelEmbeddingShardIndices(
            starts[0],
            ends[0],
            starts[1],
            ends[1],
            min(starts[0], self.org_size),
            min(ends[0], self.org_size),
            min(starts[1], self.size),
            min(ends[1], self.size),
        )

    def full_mapping(self) -> list[int]:
        """List, for each id and then for padding, its column among the logits of all ranks."""
        own: list[int] = []
        added: list[int] = []
        padding: list[int] = []
        start = 0
        for rank in range(self.ranks):
            shard = self.shard(rank)
            rows = iter(range(start, start + shard.num_elements_padded))
            for count, kind in (
                (shard.num_org_elements, own),
                (shard.num_org_vocab_padding, padding),
                (shard.num_added_elements, added),
                (shard.num_added_vocab_padding, padding),
            ):
                kind += [next(rows) for _ in range(count)]
            start += shard.num_elements_padded
        return own + added + padding


def get_masked_input_and_mask(
    input_: Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[Tensor, Tensor]:
    """Turn ids into rows of a rank's weight.

    Returns:
        The rows, 0 for ids that the rank has no row for, and where that is so.
    """
    org = (input_ >= org_vocab_start_index) & (input_ < org_vocab_end_index)
    added = (input_ >= added_vocab_start_index) & (input_ < added_vocab_end_index)
    shift = (
        org_vocab_end_index
        - org_vocab_start_index
        + num_org_vocab_padding
        - added_vocab_start_index
    )
    rows = torch.where(org, input_ - org_vocab_start_index, torch.where(added, input_ + shift, 0))
    return rows, ~(org | added)
