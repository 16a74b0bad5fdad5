"""The runner's sequences, and the input tensors of a step.

``InputBatch.apply`` follows the changes of a ``Step``: new sequences, tokens and blocks.
``InputBatch.inputs`` then makes the tensors of the step.

For example, a step with a prompt of 3 tokens and the sixth token of another sequence has the
positions ``[0, 1, 2, 5]``, and the ``query_start_loc`` ``[0, 3, 4]``.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, repeat
from operator import add
from typing import NamedTuple

import torch
from opgraft.engine.runner.staging import Sender, Staging
from opgraft.engine.step import Blocks, NewSequence, ScheduledPart, Step
from opgraft.ops.attention.batch import AttentionBatch, LayerPages, LayerStates
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """One step as tensors. On a CPU, the next step overwrites the same memory.

    Attributes:
        input_ids: ``[tokens]``, int64.
        positions: ``[tokens]``, int64, of each token in its sequence.
        batch: for attention layers.
        sampled_rows: int64, rows of the tokens to sample after, in the order of ``sampling``; then
            the rows of drafted tokens.
        sampling: ids of the requests to sample for.
        drafts: of these requests, if they have one.
    """

    input_ids: Tensor
    positions: Tensor
    batch: AttentionBatch
    sampled_rows: Tensor
    sampling: tuple[str, ...]
    drafts: Mapping[str, Draft] = dataclasses.field(default_factory=dict)


class Draft(NamedTuple):
    """The draft of a sequence in one step.

    Attributes:
        row: of its first token, among the rows of drafted tokens.
        tokens: drafted ones.
    """

    row: int
    tokens: tuple[int, ...]


class _Sequence:
    """A sequence of the runner.

    Attributes:
        blocks: of each group of layers.
        context: as ``Request.context``, for the rotation of the first tokens.
        lora: number of the adapter; 0 without one.
        row: in the tables of blocks.
        state: slot of the sequence, if layers keep states.
        tokens: prompt and outputs so far.
    """

    __slots__ = ("blocks", "context", "lora", "row", "state", "tokens")

    def __init__(self, row: int, new: NewSequence, groups: int) -> None:
        self.row = row
        self.context = new.context
        self.state = new.state
        self.lora = new.lora
        self.tokens = array("q", new.tokens)
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(groups))


class _Shape(NamedTuple):
    """The sizes of a step's tensors.

    Attributes:
        tokens: of the step.
        sequences: of the step.
        sampling: rows to sample from.
        width: blocks of the longest sequence.
    """

    tokens: int
    sequences: int
    sampling: int
    width: int


@dataclass(frozen=True)
class _HostViews:
    """Views of the memory of ``InputBatch`` for steps of one shape.

    Attributes:
        shape: of the steps.
        sent: the part of ``InputBatch._tokens`` for the device.
        bounds: ``InputBatch._bounds``, for the device.
        rows: of each sequence in the tables; the part of ``InputBatch._tokens`` that stays.
        tables: of each group, for the device.
    """

    shape: _Shape
    sent: Tensor
    bounds: Tensor
    rows: Tensor
    tables: Sequence[Tensor]


@dataclass(frozen=True)
class _DeviceViews:
    """The parts of ``_HostViews`` on the device, named as in ``Inputs`` and ``AttentionBatch``."""

    input_ids: Tensor
    positions: Tensor
    sampled_rows: Tensor
    contexts: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    pages: Mapping[str, LayerPages]


class InputBatch:
    """Sequences by request, with tables of blocks. A table changes only when blocks are added.

    Args:
        groups: for each group of layers, the cache of each layer by prefix.
        max_num_seqs: sequences at once.
        max_num_batched_tokens: tokens of a step, at most.
        max_blocks: blocks of a sequence in a group.
        block_size: tokens in a block.
        device: of the model; tables and inputs are built on the host.
        has_context_ropes: the model has ropes that depend on the length of the context.
        states: for each layer with states, their tensors by prefix.
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
        has_context_ropes: bool = False,
        states: Mapping[str, tuple[Tensor, ...]] | None = None,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.has_context_ropes = has_context_ropes
        self.states = states or {}
        self._max_blocks = max_blocks
        self._sender = Sender(device)
        # The integers of a step, in two flat tensors: a few large copies to a device take less time
        # than many small ones. ``_tokens`` has these parts, one after another:
        #   ids [tokens], positions [tokens], sampled rows [sampling], contexts [tokens] or none,
        #   slots [tokens] of each group, and rows of the tables [sequences].
        # ``inputs`` writes them. ``_sizes`` has the sizes of all but the last, and
        # ``_device_views`` cuts these apart. The rows of the tables stay on the host.
        # ``_bounds``: query_start_loc [sequences + 1] and seq_lens [sequences].
        of_tokens = (4 + len(groups)) * max_num_batched_tokens
        self._tokens = Staging(of_tokens + max_num_seqs, torch.int64)
        self._bounds = Staging(2 * max_num_seqs + 1, torch.int32)
        self._tables = [torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32) for _ in groups]
        self._selected = [torch.empty_like(table).flatten() for table in self._tables]
        self._selected_for: tuple[str, ...] = ()
        self._sequences: dict[str, _Sequence] = {}
        self._rows = list(range(max_num_seqs))
        self._on_host: _HostViews | None = None
        self._on_device: _DeviceViews | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def tokens(self, request_id: str) -> Sequence[int]:
        """Return prompt and output so far of a request."""
        return self._sequences[request_id].tokens

    def lora(self, request_id: str) -> int:
        """Return the number of the adapter of a request; 0 without one."""
        return self._sequences[request_id].lora

    def apply(self, step: Step) -> None:
        """Add new sequences of a step, and append its tokens and blocks to known ones."""
        extended = []
        for new in step.added:
            sequence = _Sequence(self._rows.pop(), new, len(self.groups))
            self._sequences[new.request_id] = sequence
            extended.append((sequence, new.blocks))
        for request_id, start, _count, new_blocks, _samples, token, draft in step.sequences:
            if token is not None:
                tokens = self._sequences[request_id].tokens
                # The rest of a draft that was not accepted.
                if len(tokens) > start:
                    del tokens[start:]
                tokens.append(token)
                if draft:
                    tokens.extend(draft)
            if any(new_blocks):
                extended.append((self._sequences[request_id], new_blocks))
        if extended:
            self._extend(extended)

    def remove(self, request_id: str) -> None:
        """Forget a sequence."""
        removed = self._sequences.pop(request_id)
        self._rows.append(removed.row)

    def _extend(self, extended: Sequence[tuple[_Sequence, Blocks]]) -> None:
        """Append blocks to sequences, and write them to the tables."""
        self._selected_for = ()
        for group, table in enumerate(self._tables):
            places = array("q")
            written = array("i")
            for sequence, new_blocks in extended:
                added = new_blocks[group]
                first = sequence.row * self._max_blocks + len(sequence.blocks[group])
                places.extend(range(first, first + len(added)))
                written.extend(added)
                sequence.blocks[group].extend(added)
            # One call of torch for all sequences.
            if written:
                table.put_(
                    torch.frombuffer(places, dtype=torch.int64),
                    torch.frombuffer(written, dtype=torch.int32),
                )

    def inputs(self, scheduled: Sequence[ScheduledPart], *, continues: bool = False) -> Inputs:
        """Return the tensors of a step; ``continues`` as of ``AttentionBatch``."""
        columns = zip(*scheduled, strict=True)
        request_ids, starts, counts, _blocks, samples, _tokens, drafted = columns
        sequences = [self._sequences[request_id] for request_id in request_ids]
        ends = list(accumulate(counts))
        lengths = list(map(add, starts, counts))
        longest = max(lengths)
        # A token is sampled after the last row of a sequence.
        sampled = [end - 1 for end in compress(ends, samples)]
        sampling = tuple(compress(request_ids, samples))
        drafts: dict[str, Draft] = {}
        if any(drafted):
            sampled, drafts = _with_drafts(sampling, sampled, list(compress(drafted, samples)))
        self._tokens.write(self._numbers(sequences, starts, counts, lengths, sampled))
        self._bounds.write([0, *ends, *lengths])
        most_blocks = -(-longest // self.block_size)
        shape = _Shape(ends[-1], len(sequences), len(sampled), most_blocks)
        views = self._views(request_ids, shape)
        batch = self._attention_batch(views, max(counts), longest, sequences, continues)
        return Inputs(views.input_ids, views.positions, batch, views.sampled_rows, sampling, drafts)

    def _numbers(
        self,
        sequences: Sequence[_Sequence],
        starts: Sequence[int],
        counts: Sequence[int],
        lengths: Sequence[int],
        sampled: Sequence[int],
    ) -> list[int]:
        ids, positions, slots = _of_tokens(sequences, starts, counts, self.block_size)
        contexts: Iterable[int] = ()
        if self.has_context_ropes:
            contexts = chain.from_iterable(map(_contexts, sequences, starts, lengths))
        rows = [each.row for each in sequences]
        # In the order of ``_tokens``. One list of Python's numbers takes less time than torch.
        return [*ids, *positions, *sampled, *contexts, *chain.from_iterable(slots), *rows]

    def _attention_batch(
        self,
        views: _DeviceViews,
        most: int,
        longest: int,
        sequences: Sequence[_Sequence],
        continues: bool,
    ) -> AttentionBatch:
        return AttentionBatch(
            views.query_start_loc,
            views.seq_lens,
            most,
            longest,
            views.pages,
            self.block_size,
            context_lens=views.contexts if self.has_context_ropes else None,
            continues=continues,
            states=self._states(sequences) if self.states else {},
        )

    def _states(self, sequences: Sequence[_Sequence]) -> dict[str, LayerStates]:
        slots = torch.tensor([each.state for each in sequences])
        sent = self._sender.send(slots)
        return {name: LayerStates(tensors, sent) for name, tensors in self.states.items()}

    def _views(self, request_ids: tuple[str, ...], shape: _Shape) -> _DeviceViews:
        """Return the written integers and the tables of a step as tensors on the model's device.

        If the device is the host, the tensors are views of the written memory. A step of the same
        shape as the one before then needs no new tensors.

        Args:
            request_ids: of the step.
            shape: of the step.
        """
        on_host = self._on_host
        on_device = self._on_device
        if on_host is None or on_host.shape != shape:
            on_host = self._host_views(shape)
            on_device = None
            self._selected_for = ()
        if request_ids != self._selected_for:
            for table, selected in zip(self._tables, on_host.tables, strict=True):
                torch.index_select(table[:, : shape.width], 0, on_host.rows, out=selected)
            self._selected_for = request_ids
        if on_device is None or not self._sender.stays:
            on_device = self._device_views(on_host)
        self._on_host = on_host
        self._on_device = on_device
        return on_device

    def _sizes(self, shape: _Shape) -> list[int]:
        """Return the sizes of the parts of ``_HostViews.sent``, in their order."""
        tokens = shape.tokens
        contexts = tokens if self.has_context_ropes else 0
        slots = [tokens] * len(self.groups)
        return [tokens, tokens, shape.sampling, contexts, *slots]

    def _host_views(self, shape: _Shape) -> _HostViews:
        """Return the parts of the host's memory for steps of a shape."""
        size = sum(self._sizes(shape))
        sequences = shape.sequences
        width = shape.width
        sent, rows = self._tokens.tensor[: size + sequences].split_with_sizes([size, sequences])
        bounds = self._bounds.tensor[: 2 * sequences + 1]
        tables = [table[: sequences * width].view(sequences, width) for table in self._selected]
        return _HostViews(shape, sent, bounds, rows, tables)

    def _device_views(self, on_host: _HostViews) -> _DeviceViews:
        """Send the integers and tables of a step to the device, and return them."""
        sequences = on_host.shape.sequences
        send = self._sender.send
        parts = send(on_host.sent).split_with_sizes(self._sizes(on_host.shape))
        ids, positions, sampled, contexts, *slots = parts
        bounds = send(on_host.bounds)
        tables = [send(table) for table in on_host.tables]
        pages: dict[str, LayerPages] = {}
        for caches, slots_of_group, table in zip(self.groups, slots, tables, strict=True):
            for name, cache in caches.items():
                pages[name] = LayerPages(cache, table, slots_of_group)
        return _DeviceViews(
            ids,
            positions,
            sampled,
            contexts,
            bounds[: sequences + 1],
            bounds[sequences + 1 :],
            pages,
        )


def _with_drafts(
    sampling: Sequence[str], last_rows: Sequence[int], drafted: Sequence[tuple[int, ...]]
) -> tuple[list[int], dict[str, Draft]]:
    """Return the rows to sample from, those of drafted tokens last, and the drafts.

    For example, sequences with the last rows 0, 3 and 4 and drafts of 0, 2 and 0 tokens have the
    rows ``[0, 1, 4]``, then ``[2, 3]``.

    Args:
        sampling: ids of the sequences.
        last_rows: of each sequence.
        drafted: tokens of each sequence.
    """
    rows = []
    rows_of_drafts: list[int] = []
    drafts: dict[str, Draft] = {}
    for request_id, last, draft in zip(sampling, last_rows, drafted, strict=True):
        first = last - len(draft)
        rows.append(first)
        if draft:
            drafts[request_id] = Draft(len(rows_of_drafts), draft)
            rows_of_drafts += range(first + 1, last + 1)
    return [*rows, *rows_of_drafts], drafts


def _of_tokens(
    sequences: Sequence[_Sequence], starts: Sequence[int], counts: Sequence[int], block_size: int
) -> tuple[Iterable[int], Iterable[int], list[Iterable[int]]]:
    """Return the ids and positions of the tokens of a step, and slots for each group of layers."""
    groups = range(len(sequences[0].blocks))
    if max(counts) == 1:
        return _of_single_tokens(sequences, starts, block_size)
    parts = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    ids = [each.tokens[part.start : part.stop] for each, part in zip(sequences, parts, strict=True)]
    slots: list[Iterable[int]] = []
    for group in groups:
        slots.append(chain.from_iterable(_slots(sequences, parts, group, block_size)))
    return chain.from_iterable(ids), chain.from_iterable(parts), slots


def _of_single_tokens(
    sequences: Sequence[_Sequence], starts: Sequence[int], block_size: int
) -> tuple[Iterable[int], Iterable[int], list[Iterable[int]]]:
    """Return the same for a step with one token of each sequence, the most frequent one."""
    # Comprehensions: appending in a loop takes longer, and every step comes through here.
    ids = [each.tokens[start] for each, start in zip(sequences, starts, strict=True)]
    places = [
        (each.blocks, *divmod(start, block_size))
        for each, start in zip(sequences, starts, strict=True)
    ]
    slots: list[Iterable[int]] = []
    for group in range(len(sequences[0].blocks)):
        slots.append(
            [blocks[group][block] * block_size + offset for blocks, block, offset in places]
        )
    return ids, starts, slots


def _slots(
    sequences: Sequence[_Sequence], parts: Sequence[range], group: int, block_size: int
) -> Iterator[range]:
    """Yield the slots of parts of sequences, block by block."""
    for sequence, part in zip(sequences, parts, strict=True):
        blocks = sequence.blocks[group]
        first = part.start - part.start % block_size
        for begin in range(first, part.stop, block_size):
            # Slots of a block are one behind the other, so a range stands for all of them.
            shift = blocks[begin // block_size] * block_size - begin
            yield range(max(begin, part.start) + shift, min(begin + block_size, part.stop) + shift)


def _contexts(sequence: _Sequence, start: int, length: int) -> Iterator[int]:
    """Return for each token the length of the context for its rotation.

    This is the length of the sequence up to the token, at least the context of the first tokens.
    """
    return map(max, repeat(sequence.context), range(start + 1, length + 1))
