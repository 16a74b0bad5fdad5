"""The sequences that the runner knows, and the tensors that a step of them is computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from opgraft.engine.step import Blocks, NewSequence, Scheduled, Step
from opgraft.ops.attention.batch import AttentionBatch, LayerPages
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """One step as tensors.

    Attributes:
        input_ids: ``[tokens]``, int64.
        positions: ``[tokens]``, int64, of each token in its sequence.
        batch: what attention layers read.
        sampled_rows: tokens whose logits are sampled, int64, in the order of ``sampled``.
        sampled: the ids of their requests.
    """

    input_ids: Tensor
    positions: Tensor
    batch: AttentionBatch
    sampled_rows: Tensor
    sampled: tuple[str, ...]


class _Sequence:
    """Tokens of a sequence, its row in the tables, and the context that its first tokens are rotated for."""

    __slots__ = ("context", "row", "tokens", "widths")

    def __init__(self, row: int, tokens: Sequence[int], context: int, groups: int) -> None:
        self.row = row
        self.context = context
        self.tokens = list(tokens)
        self.widths = [0] * groups


class InputBatch:
    """Sequences by request, with their tables of blocks in tensors that are written to when blocks are added.

    Args:
        groups: for each group of layers the cache of each by its prefix.
        max_num_seqs: sequences at once.
        max_blocks: blocks of a sequence in a group.
        block_size: tokens in a block.
        device: where the model is; the tables are built on the host.
        fits_context: the model has ropes that depend on the length of the context.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Tensor]],
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        fits_context: bool = False,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.device = device
        self.fits_context = fits_context
        self._tables = [torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32) for _ in groups]
        self._sequences: dict[str, _Sequence] = {}
        self._rows = list(range(max_num_seqs))

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def tokens(self, request_id: str) -> Sequence[int]:
        """Return prompt and output so far of a request."""
        return self._sequences[request_id].tokens

    def apply(self, step: Step) -> None:
        """Add and extend sequences as a step says."""
        for new in step.added:
            self._add(new)
        for scheduled in step.sequences:
            if any(scheduled.new_blocks):
                self._extend(self._sequences[scheduled.request_id], scheduled.new_blocks)

    def remove(self, request_id: str) -> None:
        """Forget a sequence."""
        self._rows.append(self._sequences.pop(request_id).row)

    def _add(self, new: NewSequence) -> None:
        sequence = _Sequence(self._rows.pop(), new.tokens, new.context, len(self.groups))
        self._sequences[new.request_id] = sequence
        self._extend(sequence, new.blocks)

    def _extend(self, sequence: _Sequence, new_blocks: Blocks) -> None:
        for group, blocks in enumerate(new_blocks):
            if blocks:
                width = sequence.widths[group]
                sequence.widths[group] = width + len(blocks)
                self._tables[group][sequence.row, width : width + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def append(self, request_id: str, token: int) -> None:
        """Add a sampled token to a sequence."""
        self._sequences[request_id].tokens.append(token)

    def inputs(self, scheduled: Sequence[Scheduled], *, continues: bool = False) -> Inputs:
        """Return the tensors of a step; ``continues`` as of ``AttentionBatch``."""
        sequences = [self._sequences[each.request_id] for each in scheduled]
        starts, counts = [each.start for each in scheduled], [each.count for each in scheduled]
        ids = [t for s, each in zip(sequences, scheduled, strict=True) for t in s.tokens[each.start :][: each.count]]
        ends = list(accumulate(counts))
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        rows, first = torch.tensor([sequence.row for sequence in sequences]), torch.tensor(starts)
        if len(ids) == len(sequences):
            token_rows, positions = rows, first
        else:
            count = torch.tensor(counts)
            token_rows = rows.repeat_interleave(count)
            # a sequence's first token is at position `start` and in row `end - count` of the batch
            positions = torch.arange(len(ids)) + (first + count - torch.tensor(ends)).repeat_interleave(count)
        block, offset = positions // self.block_size, positions % self.block_size
        most = -(-max(lengths) // self.block_size)
        pages: dict[str, LayerPages] = {}
        for table, caches in zip(self._tables, self.groups, strict=True):
            slots = (table[token_rows, block].long() * self.block_size + offset).to(self.device)
            blocks = table[:, :most].index_select(0, rows).to(self.device)
            pages.update((name, LayerPages(cache, blocks, slots)) for name, cache in caches.items())
        batch = AttentionBatch(
            torch.tensor([0, *ends], dtype=torch.int32).to(self.device),
            torch.tensor(lengths, dtype=torch.int32).to(self.device),
            max(counts),
            max(lengths),
            pages,
            self.block_size,
            context_lens=_context_lens(sequences, counts, positions).to(self.device) if self.fits_context else None,
            continues=continues,
        )
        sampled = [(end - 1, each.request_id) for end, each in zip(ends, scheduled, strict=True) if each.samples]
        return Inputs(
            torch.tensor(ids).to(self.device),
            positions.to(self.device),
            batch,
            torch.tensor([row for row, _ in sampled], dtype=torch.int64).to(self.device),
            tuple(request_id for _, request_id in sampled),
        )


def _context_lens(sequences: Sequence[_Sequence], counts: Sequence[int], positions: Tensor) -> Tensor:
    """Return the length of the context that each token is rotated for: that of its sequence with it, or the first."""
    first = torch.tensor([sequence.context for sequence in sequences]).repeat_interleave(torch.tensor(counts))
    return torch.maximum(first, positions + 1)
