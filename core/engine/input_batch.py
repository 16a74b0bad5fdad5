"""The sequences that the runner knows, and the tensors that a step of them is computed from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, repeat
from operator import add
from typing import NamedTuple

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


class _Shape(NamedTuple):
    """The sizes of a step's tensors.

    Attributes:
        tokens: of the step.
        sequences: of the step.
        sampled: tokens that are sampled after.
        width: blocks of the longest sequence.
    """

    tokens: int
    sequences: int
    sampled: int
    width: int


@dataclass(frozen=True)
class _Memory:
    """What the host writes of steps of one shape, as parts of memory that is there already.

    Attributes:
        shape: of the steps.
        sent: token ids, positions, sampled rows and contexts one after another, for the device.
        bounds: ``query_start_loc`` and ``seq_lens`` one after the other, for the device.
        positions: of each token in its sequence.
        token_rows: of each token, the row of its sequence in the tables.
        rows: of each sequence.
        slots, tables: of each group, for the device.
    """

    shape: _Shape
    sent: Tensor
    bounds: Tensor
    positions: Tensor
    token_rows: Tensor
    rows: Tensor
    slots: Sequence[Tensor]
    tables: Sequence[Tensor]


@dataclass(frozen=True)
class _Arrived:
    """The parts of ``_Memory`` on the device, as ``Inputs`` and ``AttentionBatch`` have them."""

    input_ids: Tensor
    positions: Tensor
    sampled_rows: Tensor
    contexts: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    pages: Mapping[str, LayerPages]


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
        self._sender = Sender(device)
        self._tokens = Staging(4 * max_num_batched_tokens + 2 * max_num_seqs, torch.int64)
        self._bounds = Staging(2 * max_num_seqs + 1, torch.int32)
        self._tables = [torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32) for _ in groups]
        self._selected = [torch.empty_like(table).flatten() for table in self._tables]
        self._slots = [torch.empty(max_num_batched_tokens, dtype=torch.int64) for _ in groups]
        self._sequences: dict[str, _Sequence] = {}
        self._rows = list(range(max_num_seqs))
        self._memory: _Memory | None = None
        self._arrived: _Arrived | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def tokens(self, request_id: str) -> Sequence[int]:
        """Return prompt and output so far of a request."""
        return self._sequences[request_id].tokens

    def apply(self, step: Step) -> None:
        """Add and extend sequences as a step says."""
        extended = []
        for new in step.added:
            sequence = _Sequence(self._rows.pop(), new, len(self.groups))
            self._sequences[new.request_id] = sequence
            extended.append((sequence, new.blocks))
        for request_id, _, _, new_blocks, _, token in step.sequences:
            if token is not None:
                self._sequences[request_id].tokens.append(token)
            if any(new_blocks):
                extended.append((self._sequences[request_id], new_blocks))
        if extended:
            self._extend(extended)

    def remove(self, request_id: str) -> None:
        """Forget a sequence."""
        self._rows.append(self._sequences.pop(request_id).row)

    def _extend(self, extended: Sequence[tuple[_Sequence, Blocks]]) -> None:
        """Write new blocks of sequences to the tables, those of a table at once."""
        for group, table in enumerate(self._tables):
            places, written = array("q"), array("i")
            for sequence, new_blocks in extended:
                first = sequence.row * self._max_blocks + sequence.widths[group]
                places.extend(range(first, first + len(new_blocks[group])))
                written.extend(new_blocks[group])
                sequence.widths[group] += len(new_blocks[group])
            if written:
                table.put_(torch.frombuffer(places, dtype=torch.int64), torch.frombuffer(written, dtype=torch.int32))

    def inputs(self, scheduled: Sequence[Scheduled], *, continues: bool = False) -> Inputs:
        """Return the tensors of a step; ``continues`` as of ``AttentionBatch``."""
        names, starts, counts, _, samples, _ = zip(*scheduled, strict=True)
        sequences = [self._sequences[name] for name in names]
        ends, lengths = list(accumulate(counts)), list(map(add, starts, counts))
        sampled = [end - 1 for end in compress(ends, samples)]
        tokens, rows = ends[-1], [each.row for each in sequences]
        ids, positions_of, rows_of = _of_tokens(sequences, starts, counts, rows)
        contexts_of = chain.from_iterable(map(_contexts, sequences, starts, lengths)) if self.fits_context else ()
        self._tokens.write([*ids, *positions_of, *sampled, *contexts_of, *rows_of, *rows])
        self._bounds.write([0, *ends, *lengths])
        arrived = self._arrive(_Shape(tokens, len(rows), len(sampled), -(-max(lengths) // self.block_size)))
        batch = AttentionBatch(
            arrived.query_start_loc,
            arrived.seq_lens,
            max(counts),
            max(lengths),
            arrived.pages,
            self.block_size,
            context_lens=arrived.contexts if self.fits_context else None,
            continues=continues,
            states=self._states([each.state for each in sequences]),
        )
        sampling = tuple(compress(names, samples))
        return Inputs(arrived.input_ids, arrived.positions, batch, arrived.sampled_rows, sampling)

    def _states(self, slots: list[int]) -> dict[str, LayerStates]:
        if not self.states:
            return {}
        sent = self._sender.send(torch.tensor(slots))
        return {name: LayerStates(tensors, sent) for name, tensors in self.states.items()}

    def _arrive(self, shape: _Shape) -> _Arrived:
        """Complete the memory of a step, and return it as the model reads it.

        Where the model is on the host, that is the same for one step as for the next of its shape.
        """
        memory, arrived = self._memory, self._arrived
        if memory is None or memory.shape != shape:
            memory, arrived = self._cut(shape), None
        offsets = memory.positions % self.block_size
        blocks_before = memory.positions.div(self.block_size, rounding_mode="floor")
        places = torch.add(blocks_before, memory.token_rows, alpha=self._max_blocks)
        for table, slots, selected in zip(self._tables, memory.slots, memory.tables, strict=True):
            torch.add(offsets, table.take(places), alpha=self.block_size, out=slots)
            torch.index_select(table[:, : shape.width], 0, memory.rows, out=selected)
        if arrived is None or not self._sender.stays:
            arrived = self._sent(memory)
        self._memory, self._arrived = memory, arrived
        return arrived

    def _cut(self, shape: _Shape) -> _Memory:
        tokens, sequences, sampled, width = shape
        size = 2 * tokens + sampled + tokens * self.fits_context
        sent, token_rows, rows = self._tokens.tensor[: size + tokens + sequences].split_with_sizes(
            [size, tokens, sequences]
        )
        tables = [table[: sequences * width].view(sequences, width) for table in self._selected]
        slots = [each[:tokens] for each in self._slots]
        bounds = self._bounds.tensor[: 2 * sequences + 1]
        return _Memory(shape, sent, bounds, sent[tokens : 2 * tokens], token_rows, rows, slots, tables)

    def _sent(self, memory: _Memory) -> _Arrived:
        tokens, sequences, sampled, _ = memory.shape
        sizes = [tokens, tokens, sampled, tokens * self.fits_context]
        ids, positions, rows, contexts = self._sender.send(memory.sent).split_with_sizes(sizes)
        bounds = self._sender.send(memory.bounds)
        pages: dict[str, LayerPages] = {}
        for caches, slots, tables in zip(self.groups, memory.slots, memory.tables, strict=True):
            its_slots, its_tables = self._sender.send(slots), self._sender.send(tables)
            pages.update((name, LayerPages(cache, its_tables, its_slots)) for name, cache in caches.items())
        return _Arrived(ids, positions, rows, contexts, bounds[: sequences + 1], bounds[sequences + 1 :], pages)


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
