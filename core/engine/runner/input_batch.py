"""The sequences that the runner knows, and the tensors that a step of them is computed from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, repeat
from operator import add
from typing import NamedTuple

import torch
from opgraft.engine.runner.staging import Sender, Staging
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
    """Tokens and blocks of a sequence, its row in the tables, its state, and the context of its first tokens' rotation.

    Attributes:
        blocks: of each group of layers.
    """

    __slots__ = ("blocks", "context", "row", "state", "tokens")

    def __init__(self, row: int, new: NewSequence, groups: int) -> None:
        self.row = row
        self.context = new.context
        self.state = new.state
        self.tokens = array("q", new.tokens)
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(groups))


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
    """Memory that the host writes steps of one shape to, as parts of what is there already.

    Attributes:
        shape: of the steps.
        sent: token ids, positions, sampled rows, contexts and slots of each group one after
            another, for the device.
        bounds: ``query_start_loc`` and ``seq_lens`` one after the other, for the device.
        rows: of each sequence in the tables.
        tables: of each group, for the device.
    """

    shape: _Shape
    sent: Tensor
    bounds: Tensor
    rows: Tensor
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
        self._tokens = Staging(
            (3 + len(groups)) * max_num_batched_tokens + 2 * max_num_seqs, torch.int64
        )
        self._bounds = Staging(2 * max_num_seqs + 1, torch.int32)
        self._tables = [torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32) for _ in groups]
        self._selected = [torch.empty_like(table).flatten() for table in self._tables]
        self._selected_for: tuple[str, ...] = ()
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
        """Append blocks to sequences, and write them to the tables, those of a table at once."""
        self._selected_for = ()
        for group, table in enumerate(self._tables):
            places, written = array("q"), array("i")
            for sequence, new_blocks in extended:
                first = sequence.row * self._max_blocks + len(sequence.blocks[group])
                places.extend(range(first, first + len(new_blocks[group])))
                written.extend(new_blocks[group])
                sequence.blocks[group].extend(new_blocks[group])
            if written:
                table.put_(
                    torch.frombuffer(places, dtype=torch.int64),
                    torch.frombuffer(written, dtype=torch.int32),
                )

    def inputs(self, scheduled: Sequence[Scheduled], *, continues: bool = False) -> Inputs:
        """Return the tensors of a step; ``continues`` as of ``AttentionBatch``."""
        names, starts, counts, _, samples, _ = zip(*scheduled, strict=True)
        sequences = [self._sequences[name] for name in names]
        ends, lengths = list(accumulate(counts)), list(map(add, starts, counts))
        sampled = [end - 1 for end in compress(ends, samples)]
        ids, positions, slots = _of_tokens(sequences, starts, counts, self.block_size)
        contexts = (
            chain.from_iterable(map(_contexts, sequences, starts, lengths))
            if self.fits_context
            else ()
        )
        rows = [each.row for each in sequences]
        self._tokens.write(
            [*ids, *positions, *sampled, *contexts, *chain.from_iterable(slots), *rows]
        )
        self._bounds.write([0, *ends, *lengths])
        arrived = self._arrive(
            names, _Shape(ends[-1], len(rows), len(sampled), -(-max(lengths) // self.block_size))
        )
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

    def _arrive(self, names: tuple[str, ...], shape: _Shape) -> _Arrived:
        """Return what was written for a step, with the tables of its sequences, as the model reads it.

        Where the model is on the host, that is the same for one step as for the next of its shape.
        """
        memory, arrived = self._memory, self._arrived
        if memory is None or memory.shape != shape:
            memory, arrived, self._selected_for = self._cut(shape), None, ()
        if names != self._selected_for:
            for table, selected in zip(self._tables, memory.tables, strict=True):
                torch.index_select(table[:, : shape.width], 0, memory.rows, out=selected)
            self._selected_for = names
        if arrived is None or not self._sender.stays:
            arrived = self._sent(memory)
        self._memory, self._arrived = memory, arrived
        return arrived

    def _sizes(self, shape: _Shape) -> list[int]:
        """Return the sizes of what is sent: ids, positions, sampled rows, contexts, slots of each group."""
        tokens = shape.tokens
        return [
            tokens,
            tokens,
            shape.sampled,
            tokens * self.fits_context,
            *[tokens] * len(self.groups),
        ]

    def _cut(self, shape: _Shape) -> _Memory:
        size, sequences, width = sum(self._sizes(shape)), shape.sequences, shape.width
        sent, rows = self._tokens.tensor[: size + sequences].split_with_sizes([size, sequences])
        bounds = self._bounds.tensor[: 2 * sequences + 1]
        tables = [table[: sequences * width].view(sequences, width) for table in self._selected]
        return _Memory(shape, sent, bounds, rows, tables)

    def _sent(self, memory: _Memory) -> _Arrived:
        sequences, send = memory.shape.sequences, self._sender.send
        ids, positions, sampled, contexts, *slots = send(memory.sent).split_with_sizes(
            self._sizes(memory.shape)
        )
        bounds, pages = send(memory.bounds), dict[str, LayerPages]()
        for caches, its_slots, table in zip(
            self.groups, slots, map(send, memory.tables), strict=True
        ):
            pages.update(
                (name, LayerPages(cache, table, its_slots)) for name, cache in caches.items()
            )
        return _Arrived(
            ids,
            positions,
            sampled,
            contexts,
            bounds[: sequences + 1],
            bounds[sequences + 1 :],
            pages,
        )


def _of_tokens(
    sequences: Sequence[_Sequence], starts: Sequence[int], counts: Sequence[int], block_size: int
) -> tuple[Iterable[int], Iterable[int], list[Iterable[int]]]:
    """Return of each token of a step its id and its position, and for each group of layers its slot."""
    groups = range(len(sequences[0].blocks))
    if max(counts) == 1:  # none is computed of a prompt
        ids = [each.tokens[start] for each, start in zip(sequences, starts, strict=True)]
        places = [
            (each.blocks, *divmod(start, block_size))
            for each, start in zip(sequences, starts, strict=True)
        ]
        return (
            ids,
            starts,
            [
                [blocks[i][block] * block_size + offset for blocks, block, offset in places]
                for i in groups
            ],
        )
    parts = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    ids_of = [
        each.tokens[part.start : part.stop] for each, part in zip(sequences, parts, strict=True)
    ]
    return (
        chain.from_iterable(ids_of),
        chain.from_iterable(parts),
        [chain.from_iterable(_slots(sequences, parts, group, block_size)) for group in groups],
    )


def _slots(
    sequences: Sequence[_Sequence], parts: Sequence[range], group: int, block_size: int
) -> Iterator[range]:
    """Yield the slots of parts of sequences, block by block."""
    for sequence, part in zip(sequences, parts, strict=True):
        blocks = sequence.blocks[group]
        for begin in range(part.start - part.start % block_size, part.stop, block_size):
            shift = blocks[begin // block_size] * block_size - begin
            yield range(max(begin, part.start) + shift, min(begin + block_size, part.stop) + shift)


def _contexts(sequence: _Sequence, start: int, length: int) -> Iterator[int]:
    """Return the length of the context that each token is rotated for: that of its sequence with it, or the first."""
    return map(max, repeat(sequence.context), range(start + 1, length + 1))
