"""The tensors of a step: the right numbers, by few operations, in memory that is there already."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
import torch
from opgraft.engine.runner import staging
from opgraft.engine.runner.input_batch import InputBatch, Inputs
from opgraft.engine.runner.staging import Sender, Staging
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.step import NewSequence, ScheduledPart, Step
from torch.utils._python_dispatch import TorchDispatchMode

SIZE, ROWS, TOKENS, BLOCKS = 4, 8, 64, 40


class Operations(TorchDispatchMode):
    """Counts the operations of torch that are called."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def batch_of(
    lengths: list[int], *, groups: int = 2, tokens: int = TOKENS, device: str = "cpu", **given: Any
) -> Any:
    """A batch with sequences of some lengths whose blocks are in no order."""
    caches = [{f"{group}.{layer}": torch.empty(0) for layer in range(3)} for group in range(groups)]
    blocks = max(BLOCKS, -(-max(lengths) // SIZE))
    batch = InputBatch(
        caches, max(ROWS, len(lengths)), tokens, blocks, SIZE, torch.device(device), **given
    )
    draw = random.Random(sum(lengths))  # noqa: S311
    for number, length in enumerate(lengths):
        ids = [draw.randrange(99) for _ in range(length)]
        tables = tuple(
            tuple(draw.sample(range(10 * blocks), -(-length // SIZE))) for _ in range(groups)
        )
        new = NewSequence(str(number), tuple(ids), length, length, SamplingParams(), tables, number)
        batch.apply(Step((), (new,), (), ()))
    return batch


def expect_right(batch: InputBatch, inputs: Inputs, scheduled: list[ScheduledPart]) -> None:
    """See that the tensors of a step are those that a loop over tokens makes."""
    ids, positions, rows, bounds, lengths = [], [], [], [0], []
    slots: list[list[int]] = [[] for _ in batch.groups]
    for each in scheduled:
        sequence = batch._sequences[each.request_id]
        for position in range(each.start, each.start + each.count):
            ids.append(sequence.tokens[position])
            positions.append(position)
            for group, table in enumerate(batch._tables):
                slots[group].append(
                    int(table[sequence.row, position // SIZE]) * SIZE + position % SIZE
                )
        bounds.append(len(ids))
        lengths.append(each.start + each.count)
        rows += [len(ids) - 1] * each.samples
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.sampled_rows.tolist() == rows
    assert inputs.sampling == tuple(each.request_id for each in scheduled if each.samples)
    assert inputs.batch.query_start_loc.tolist() == bounds
    assert inputs.batch.seq_lens.tolist() == lengths
    for group, table in enumerate(batch._tables):
        for name in batch.groups[group]:
            pages = inputs.batch.pages[name]
            assert pages.slots.tolist() == slots[group]
            chosen = table[[batch._sequences[each.request_id].row for each in scheduled]]
            assert pages.block_table.tolist() == chosen[:, : -(-max(lengths) // SIZE)].tolist()


def test_decodes_and_chunks() -> None:
    """Steps of single tokens, of chunks and of both have the numbers that a loop over tokens makes, in any order."""
    draw = random.Random(1)  # noqa: S311
    lengths = [draw.randrange(1, 100) for _ in range(ROWS)]
    batch = batch_of(lengths)
    for number in range(60):
        scheduled = []
        for name in draw.sample(range(ROWS), draw.randrange(1, ROWS + 1)):
            start = draw.randrange(lengths[name])
            most = 1 if number % 3 == 0 else min(lengths[name] - start, TOKENS // ROWS)
            scheduled.append(
                ScheduledPart(
                    str(name), start, draw.randint(1, most), ((), ()), draw.random() < 0.6
                )
            )
        expect_right(batch, batch.inputs(scheduled), scheduled)


def test_contexts_that_tokens_are_rotated_for() -> None:
    """Tokens of a prompt are rotated for its length, later ones for the length that the sequence has with them."""
    batch = batch_of([6, 3], has_context_ropes=True)
    scheduled = (
        ScheduledPart("0", 1, 3, ((), ()), False),
        ScheduledPart("1", 3, 1, ((), ()), True, 7),
    )
    batch.apply(Step((), (), (), scheduled))
    inputs = batch.inputs(scheduled)
    assert inputs.input_ids[-1] == 7
    assert inputs.batch.context_lens.tolist() == [6, 6, 6, 4]  # type: ignore[union-attr]
    assert (
        batch_of([6]).inputs([ScheduledPart("0", 0, 1, ((), ()), True)]).batch.context_lens is None
    )


def test_rows_of_drafts_come_last() -> None:
    """A row of each sequence, then the drafted ones; the next step drops the tokens that were not accepted."""
    batch = batch_of([10, 6, 9])
    scheduled = [
        ScheduledPart("0", 4, 3, ((), ()), True, 7, (8, 9)),
        ScheduledPart("1", 2, 4, ((), ()), True),
        ScheduledPart("2", 3, 2, ((), ()), True, 5, (6,)),
    ]
    batch.apply(Step((), (), (), tuple(scheduled)))
    inputs = batch.inputs(scheduled)
    assert inputs.input_ids.tolist() == [7, 8, 9, *batch.tokens("1")[2:], 5, 6]
    assert inputs.sampled_rows.tolist() == [0, 6, 7, 1, 2, 8]
    assert inputs.sampling == ("0", "1", "2")
    assert inputs.drafts == {"0": (0, (8, 9)), "2": (2, (6,))}
    # Of the first draft one token was accepted, of the second none.
    accepted = [
        ScheduledPart("0", 6, 1, ((), ()), True, 3),
        ScheduledPart("2", 4, 1, ((), ()), True, 4),
    ]
    batch.apply(Step((), (), (), tuple(accepted)))
    assert list(batch.tokens("0")[4:]) == [7, 8, 3]
    assert list(batch.tokens("2")[3:]) == [5, 4]
    expect_right(batch, batch.inputs(accepted), accepted)


def decodes(count: int, length: int) -> list[ScheduledPart]:
    return [ScheduledPart(str(number), length - 1, 1, ((), ()), True) for number in range(count)]


def test_operations_do_not_grow_with_the_batch() -> None:
    """A step of 64 sequences, and a chunk of a prompt, take as many operations as a step of one, and not many."""
    counted = []
    for count in (1, 64):
        batch = batch_of([40] * count)
        for scheduled in (decodes(count, 40), [ScheduledPart("0", 3, 30, ((), ()), False)]):
            with Operations() as operations:
                batch.inputs(scheduled)
            counted.append(operations.count)
    assert counted == counted[:1] * 4
    assert counted[0] <= 30  # most of them views
    for start, expected in (
        (4, 0),
        (5, 0),
    ):  # of the shape of the step before, whose views are there
        with Operations() as operations:
            batch.inputs([ScheduledPart("0", start, 30, ((), ()), False)])
        assert operations.count == expected


def test_steps_are_written_to_the_same_memory() -> None:
    """The second step's tensors are where the first one's were."""
    batch = batch_of([40] * 4)
    found = []
    for start in (0, 20):
        scheduled = [ScheduledPart(str(number), start, 5, ((), ()), True) for number in range(4)]
        inputs = batch.inputs(scheduled)
        expect_right(batch, inputs, scheduled)
        pages = inputs.batch.pages["1.0"]
        tensors = (
            inputs.input_ids,
            inputs.positions,
            inputs.batch.seq_lens,
            pages.slots,
            pages.block_table,
        )
        found.append([tensor.data_ptr() for tensor in tensors])
    assert found[0] == found[1]


def test_a_chunk_does_not_copy_the_rest_of_its_prompt() -> None:
    """A chunk at the beginning of a prompt of 200,000 tokens takes memory for the chunk alone."""
    batch = batch_of([200_000], groups=1)
    scheduled = [ScheduledPart("0", 0, 8, ((),), False)]
    batch.inputs(scheduled)
    tracemalloc.start()
    batch.inputs(scheduled)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_384


def test_writing_more_than_there_is_room_for() -> None:
    """The memory of a step never grows, as tensors look at it."""
    memory = Staging(3, torch.int32)
    memory.write([1, 2, 3])
    assert memory.tensor.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="memoryview assignment"):
        memory.write([1, 2, 3, 4])


@pytest.mark.parametrize("pinned", [True, False])
def test_on_a_device(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything arrives on the device, in as few copies as there are tables, from pinned memory where there is such.

    The device has no memory at all, and pinned memory is ordinary memory that is noted.
    """
    noted: list[torch.Tensor] = []
    sent = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        noted.append(tensor.clone())
        return noted[-1]

    def send(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        sent.append((self, options))
        return torch.empty_like(self, device=args[0])

    monkeypatch.setattr(staging, "_has_pinned_memory", lambda: pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", send)
    batch = batch_of([40] * 4, device="meta", has_context_ropes=True)
    inputs = batch.inputs(decodes(4, 40))
    pages = inputs.batch.pages["0.1"]
    arrived = (
        inputs.input_ids,
        inputs.positions,
        inputs.sampled_rows,
        inputs.batch.seq_lens,
        pages.slots,
    )
    assert all(
        tensor.is_meta
        for tensor in (*arrived, inputs.batch.query_start_loc, inputs.batch.context_lens)
    )
    assert len(sent) == 2 + len(batch.groups)
    assert len(noted) == len(sent) * pinned
    for tensor, options in sent:
        assert options.get("non_blocking", False) == any(tensor is each for each in noted)


def test_without_an_accelerator_nothing_is_pinned() -> None:
    """On the host a tensor stays what it is; the probe of a machine without an accelerator raises nothing."""
    tensor = torch.arange(3)
    assert Sender(torch.device("cpu")).send(tensor) is tensor
    assert staging._has_pinned_memory() == torch.accelerator.is_available()
