"""Cut a vocabulary for ranks: own ids of the model and added ids are padded and cut separately."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from opgraft.errors import LayerError
from opgraft.ops.linear.sharding import divide
from torch import Tensor

DEFAULT_VOCAB_PADDING_SIZE = 64


def pad_vocab_size(vocab_size: int, pad_to: int = DEFAULT_VOCAB_PADDING_SIZE) -> int:
    """Round a size up to a multiple of ``pad_to``."""
    return -(-vocab_size // pad_to) * pad_to


@dataclass(frozen=True)
class VocabParallelEmbeddingShardIndices:
    """The ids of one rank: a part of the model's own ids, and a part of the added ids.

    The order of rows is: own ids, padding, added ids, padding. The ranges named ``padded`` count
    rows of padding, too.
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
        """The number of rows of padding behind own ids."""
        return self.num_org_elements_padded - self.num_org_elements

    @property
    def num_added_vocab_padding(self) -> int:
        """The number of rows of padding behind added ids."""
        return self.num_added_elements_padded - self.num_added_elements

    @property
    def num_elements_padded(self) -> int:
        """The number of rows."""
        return self.num_org_elements_padded + self.num_added_elements_padded


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of all ranks.

    Attributes:
        size: number of ids, with added ones.
        org_size: number of the model's own ids.
        padding: own and added ids are each padded to a multiple of this number.
        ranks: the number of ranks.
        prefix: the embedding's name in the checkpoint, for messages.

    Raises:
        LayerError: there are more ranks than own ids, or the ranks do not divide a padded part.
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
                f"{what}: a vocabulary of {self.org_size} cannot be shared by {self.ranks} "
                "tensor-parallel ranks, of which each must have an id: choose fewer ranks"
            )
        if self.size < self.org_size:
            raise LayerError(
                f"{what}: num_embeddings is {self.size}, fewer than the {self.org_size} of "
                "org_num_embeddings, which it includes"
            )

        padded_size = f"{what}: its size padded to multiples of padding_size={self.padding}"
        divide(self.org_padded, self.ranks, padded_size)
        divide(self.padded - self.org_padded, self.ranks, padded_size)

    @property
    def org_padded(self) -> int:
        """The number of rows for the model's own ids, of all ranks."""
        return pad_vocab_size(self.org_size, self.padding)

    @property
    def padded(self) -> int:
        """The number of rows of all ranks."""
        # Rows of added ids start behind the padding of own ids.
        added = self.size - self.org_size
        return pad_vocab_size(self.org_padded + added, self.padding)

    def shard(self, rank: int) -> VocabParallelEmbeddingShardIndices:
        """Return the ids of a rank."""
        org_rows = self.org_padded // self.ranks
        added_rows = (self.padded - self.org_padded) // self.ranks
        org_start = rank * org_rows
        org_end = org_start + org_rows
        added_start = self.org_size + rank * added_rows
        added_end = added_start + added_rows

        return VocabParallelEmbeddingShardIndices(
            padded_org_vocab_start_index=org_start,
            padded_org_vocab_end_index=org_end,
            padded_added_vocab_start_index=added_start,
            padded_added_vocab_end_index=added_end,
            org_vocab_start_index=min(org_start, self.org_size),
            org_vocab_end_index=min(org_end, self.org_size),
            added_vocab_start_index=min(added_start, self.size),
            added_vocab_end_index=min(added_end, self.size),
        )

    def full_mapping(self) -> list[int]:
        """Return the columns in the logits of all ranks: of each id, then of padding."""
        own: list[int] = []
        added: list[int] = []
        padding: list[int] = []
        column = 0
        for rank in range(self.ranks):
            shard = self.shard(rank)
            # The order of rows of a rank.
            parts = (
                (own, shard.num_org_elements),
                (padding, shard.num_org_vocab_padding),
                (added, shard.num_added_elements),
                (padding, shard.num_added_vocab_padding),
            )
            for columns, count in parts:
                columns.extend(range(column, column + count))
                column += count
        return own + added + padding


def get_masked_input_and_mask(
    input_: Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[Tensor, Tensor]:
    """Return the rows of ids in a rank's weight, and a mask of the ids without a row.

    The row of such an id is 0.
    """
    is_org = (input_ >= org_vocab_start_index) & (input_ < org_vocab_end_index)
    is_added = (input_ >= added_vocab_start_index) & (input_ < added_vocab_end_index)
    org_rows = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    added_row = input_ + (org_rows - added_vocab_start_index)
    org_row = input_ - org_vocab_start_index

    # Row 0 stands in for ids without a row, so that a look-up stays within the weight.
    rows = torch.where(is_org, org_row, torch.where(is_added, added_row, 0))
    return rows, ~(is_org | is_added)
