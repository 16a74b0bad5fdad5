"""The sequences that the runner knows, and the tensors that a step of them is computed from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, repeat
from operator import add

import torch
from opgraft.engine.staging import Sender, Staging
from opgraft.engine.step import Blocks, NewSequence, Scheduled, Step
from opgraft.ops.attention.batch import AttentionBatch, LayerPages, LayerStates
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """One step as tensors. On a CPU the next step is written into the same memory.

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
    """Tokens of a sequence, its row in the tables, its state, and the context that its first tokens are rotated for."""

    __slots__ = ("context", "row", "state", "tokens", "widths")

    def __init__(self, row: int, new: NewSequence, groups: int) -> None:
        self.row = row
        self.context = new.context
        self.state = new.state
        self.tokens = array("q", new.tokens)
        self.widths = [0] * groups


class InputBatch:
    """Sequences by request, with their tables of blocks in tensors that are written to when blocks are added.

    Args:
        groups: for each group of layers the cache of each by its prefix.
        max_num_seqs: sequences at once.
        max_num_batched_tokens: tokens of a step, at most.
        max_blocks: blocks of a sequence in a group.
        block_size: tokens in a block.
        device: where the model is; tables and inputs are built on the host.
        fits_context: the model has ropes that depend on the length of the context.
        states: for each layer that keeps states the tensors of those by its prefix.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Tensor]],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        fits_context: bool = False,
        states: Mapping[str, tuple[Tensor, ...]] | None = None,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.fits_context = fits_context
        self.states = states or {}
        self._max_blocks = max_blocks
        self._send = Sender(device).send
        self._tokens = Staging(4 * max_num_batched_tokens + 2 * max_num_seqs, torch.int64)
        self._bounds = Staging(2 * max_num_seqs + 1, torch.int32)
        self._tables = [torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32) for _ in groups]
        self._selected = [torch.empty_like(table).flatten() for table in self._tables]
        self._slots = [torch.empty(max_num_batched_tokens, dtype=torch.int64) for _ in groups]
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
            if scheduled.token is not None:
                self._sequences[scheduled.request_id].tokens.append(scheduled.token)
            if any(scheduled.new_blocks):
                self._extend(self._sequences[scheduled.request_id], scheduled.new_blocks)

    def remove(self, request_id: str) -> None:
        """Forget a sequence."""
        self._rows.append(self._sequences.pop(request_id).row)

    def _add(self, new: NewSequence) -> None:
        sequence = _Sequence(self._rows.pop(), new, len(self.groups))
        self._sequences[new.request_id] = sequence
        self._extend(sequence, new.blocks)

    def _extend(self, sequence: _Sequence, new_blocks: Blocks) -> None:
        for group, blocks in enumerate(new_blocks):
            if blocks:
                width = sequence.widths[group]
                sequence.widths[group] = width + len(blocks)
                self._tables[group][sequence.row, width : width + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def inputs(self, scheduled: Sequence[Scheduled], *, continues: bool = False) -> Inputs:
        """Return the tensors of a step; ``continues`` as of ``AttentionBatch``."""
        names, starts, counts, _, samples, _ = zip(*scheduled, strict=True)
        sequences = [self._sequences[name] for name in names]
        ends, lengths = list(accumulate(counts)), list(map(add, starts, counts))
        sampled = [end - 1 for end in compress(ends, samples)]
        tokens, rows = ends[-1], [each.row for each in sequences]
        ids, positions_of, rows_of = _of_tokens(sequences, starts, counts, rows)
        contexts_of = chain.from_iterable(map(_contexts, sequences, starts, lengths)) if self.fits_context else ()
        host = self._tokens.write([*ids, *positions_of, *sampled, *contexts_of, *rows_of, *rows])
        sizes = [tokens, tokens, len(sampled), tokens * self.fits_context]
        sent, token_rows, table_rows = host.split_with_sizes([sum(sizes), tokens, len(rows)])
        pages = self._pages(sent[tokens : 2 * tokens], token_rows, table_rows, max(lengths))
        input_ids, positions, sampled_rows, contexts = self._send(sent).split_with_sizes(sizes)
        bounds = self._send(self._bounds.write([0, *ends, *lengths]))
        batch = AttentionBatch(
            bounds[: len(rows) + 1],
            bounds[len(rows) + 1 :],
            max(counts),
            max(lengths),
            pages,
            self.block_size,
            context_lens=contexts if self.fits_context else None,
            continues=continues,
            states=self._states([each.state for each in sequences]),
        )
        return Inputs(input_ids, positions, batch, sampled_rows, tuple(compress(names, samples)))

    def _states(self, slots: list[int]) -> dict[str, LayerStates]:
        if not self.states:
            return {}
        sent = self._send(torch.tensor(slots))
        return {name: LayerStates(tensors, sent) for name, tensors in self.states.items()}

    def _pages(self, positions: Tensor, token_rows: Tensor, rows: Tensor, longest: int) -> dict[str, LayerPages]:
        """Return the pages of each layer.

        Args:
            positions: of each token in its sequence.
            token_rows: of each token, the row of its sequence in the tables.
            rows: of each sequence.
            longest: tokens of the longest sequence.
        """
        offsets = positions % self.block_size
        blocks_before = positions.div(self.block_size, rounding_mode="floor")
        places = torch.add(blocks_before, token_rows, alpha=self._max_blocks)
        shape = len(rows), -(-longest // self.block_size)
        pages: dict[str, LayerPages] = {}
        for group, caches in enumerate(self.groups):
            table, slots = self._tables[group], self._slots[group][: len(positions)]
            torch.add(offsets, table.take(places), alpha=self.block_size, out=slots)
            blocks = self._selected[group][: shape[0] * shape[1]].view(shape)
            torch.index_select(table[:, : shape[1]], 0, rows, out=blocks)
            slots, blocks = self._send(slots), self._send(blocks)
            pages.update((name, LayerPages(cache, blocks, slots)) for name, cache in caches.items())
        return pages


def _of_tokens(
    sequences: Sequence[_Sequence], starts: Sequence[int], counts: Sequence[int], rows: Sequence[int]
) -> tuple[Iterable[int], Iterable[int], Iterable[int]]:
    """Return of each token of a step its id, its position and the row of its sequence."""
    if max(counts) == 1:  # none is computed of a prompt
        return [each.tokens[start] for each, start in zip(sequences, starts, strict=True)], starts, rows
    parts = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    ids = [each.tokens[part.start : part.stop] for each, part in zip(sequences, parts, strict=True)]
    return chain.from_iterable(ids), chain.from_iterable(parts), chain.from_iterable(map(repeat, rows, counts))


def _contexts(sequence: _Sequence, start: int, length: int) -> Iterator[int]:
    """Return the length of the context that each token is rotated for: that of its sequence with it, or the first."""
    return map(max, repeat(sequence.context), range(start + 1, length + 1))
