"""``RecordedSteps``: whole steps of a model as static graphs, for ``graph_mode`` ``full``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from opgraft.base.text import described
from opgraft.compilation.static_graph import StaticGraph
from opgraft.config import OpgraftConfig
from opgraft.engine.runner.input_batch import Inputs
from opgraft.errors import ConfigError
from opgraft.ops.attention.batch import AttentionBatch, LayerPages, attending
from opgraft.platform import HOST
from opgraft.plugins.selection import current_platform
from torch import Tensor

_NEXT = "Next: set compilation_config.graph_mode to piecewise or none"

_TOLERANCE = 8
"""The largest difference of a replay, in roundings of the largest result."""

_LEAST_TOLERANCE = 5e-3
"""The same by the largest result: kernels may compute float32 with fewer digits."""

_MOST_TRIED = 4
"""Sequences of a trial, at most. A stale recording differs at the first one."""


def records_steps(config: OpgraftConfig) -> bool:
    """Return True if whole steps are to be recorded."""
    return config.compilation_config.graph_mode == "full"


def expect_recorder(config: OpgraftConfig) -> None:
    """Check that whole steps can be recorded here, if settings ask for this.

    Raises:
        ConfigError: the platform has no ``graph_class``, other ranks take part in a step in a way
            that no recording has, or the load of experts is counted.
    """
    if not records_steps(config):
        return
    platform = current_platform()
    name = "compilation_config.graph_mode is full"
    if platform.graph_class is None:
        raise ConfigError(
            f"{name}, and the platform {platform.name} has no graph_class, which records a whole "
            f"step. {_NEXT}"
        )
    parallel = config.parallel
    if parallel.pipeline > 1 or parallel.in_rounds:
        raise ConfigError(
            f"{name}, and a step waits for other ranks, as parallel.pipeline is "
            f"{parallel.pipeline} and parallel.data {parallel.data}. {_NEXT}"
        )
    if parallel.expert_balance_steps is not None:
        raise ConfigError(
            f"{name}, and parallel.expert_balance_steps is {parallel.expert_balance_steps}: a "
            f"recorded step would count its rows of padding as load of experts. {_NEXT}, or leave "
            "out parallel.expert_balance_steps"
        )


def without_recording(config: OpgraftConfig) -> OpgraftConfig:
    """Return a config for the code of a model alone: the steps around are recorded as a whole."""
    given = config.compilation_config
    # None would leave the sizes of the environment or the command line in force.
    compilation = dataclasses.replace(given, graph_mode="none", capture_sizes=())
    return dataclasses.replace(config, compilation_config=compilation)


def numbers_of_sequences(config: OpgraftConfig) -> list[int]:
    """Return the numbers of sequences to record a step for, ascending.

    No number exceeds ``scheduler.max_num_seqs``.
    """
    most = config.scheduler.max_num_seqs
    sizes = config.compilation_config.recorded_sizes
    below = [size for size in sizes if size < most]
    return [*below, most] if sizes[-1] >= most else below


def blocks_of_padding(config: OpgraftConfig) -> int:
    """Return the number of blocks that rows of padding write to, beside those for requests."""
    if not records_steps(config):
        return 0
    return -(-numbers_of_sequences(config)[-1] // config.cache.block_size)


class _Trial(NamedTuple):
    """Sequences that try a recording out: lengths, and for each group the blocks."""

    lengths: list[int]
    tables: list[Tensor]


class RecordedSteps:
    """Static graphs of steps with one token of each sequence, by the number of sequences.

    A step is padded to the next size. A row of padding is a sequence of one token, in blocks that
    the engine does not know.

    Args:
        model: called with token ids and positions, for the current batch.
        groups: for each group of layers, the cache of each layer by prefix.
        sizes: numbers of sequences, ascending.
        longest: tokens of the longest sequence.
        block_size: tokens in a block.
        padding: the first of the blocks for padding. All blocks below are free: recordings are
            tried out with some.
        device: of the model.

    Raises:
        ConfigError: the model cannot be recorded, or a replay computes something else.
    """

    def __init__(
        self,
        model: Callable[[Tensor, Tensor], Tensor],
        groups: Sequence[Mapping[str, Tensor]],
        sizes: Sequence[int],
        longest: int,
        block_size: int,
        padding: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._groups = groups
        self._longest = longest
        self._width = -(-longest // block_size)
        self._block_size = block_size
        self._padding = padding
        self._device = device
        self._graphs: dict[int, StaticGraph] = {}
        self._rows_of_padding: dict[int, list[Tensor]] = {}
        # The largest goes first: the memory of the largest graph serves the others.
        with torch.inference_mode():
            for size in sorted(sizes, reverse=True):
                self._rows_of_padding[size] = self._inputs(size)
                self._record(size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of sequences with a graph, ascending."""
        return tuple(sorted(self._graphs))

    def __call__(self, inputs: Inputs) -> Tensor | None:
        """Return the hidden states of a step; ``None`` for a step without a graph.

        Steps with prompts or drafts have none, because a sequence has several tokens there.
        The next call writes to the same memory.
        """
        batch = inputs.batch
        count = len(batch.seq_lens)
        size = next((size for size in self.sizes if size >= count), None)
        if size is None or batch.max_query_len != 1 or len(inputs.input_ids) != count:
            return None
        given = self._given(inputs)
        graph = self._graphs[size]
        padding = self._rows_of_padding[size]
        for static, unused, x in zip(graph.inputs, padding, given, strict=True):
            static[count:].copy_(unused[count:])
            # The table of a step has the blocks that the step sees, and no more.
            rows = static[:count] if x.dim() == 1 else static[:count, : x.shape[1]]
            rows.copy_(x)
        hidden: Tensor = graph.replay()[0]
        return hidden[:count]

    def _given(self, inputs: Inputs) -> list[Tensor]:
        """Return the tensors of a step in the order of a graph's inputs."""
        batch = inputs.batch
        slots = []
        tables = []
        for group in self._groups:
            # Layers of a group share both.
            name = next(iter(group))
            pages = batch.pages[name]
            slots.append(pages.slots)
            tables.append(pages.block_table)
        return [inputs.input_ids, inputs.positions, batch.seq_lens, *slots, *tables]

    def _inputs(self, size: int) -> list[Tensor]:
        """Return the inputs of a step of padding: ids, positions, lengths, slots and tables."""
        device = self._device
        zeros = torch.zeros(size, dtype=torch.int64)
        ids = zeros.to(device, copy=True)
        positions = zeros.to(device, copy=True)
        lengths = torch.ones(size, dtype=torch.int32)
        lengths = lengths.to(device)
        # No two rows write to one place.
        first = self._padding * self._block_size
        places = torch.arange(first, first + size)
        shape = size, self._width
        table = torch.full(shape, self._padding, dtype=torch.int32)
        slots = []
        tables = []
        for _ in self._groups:
            slots.append(places.to(device, copy=True))
            tables.append(table.to(device, copy=True))
        return [ids, positions, lengths, *slots, *tables]

    def _step(self, size: int) -> Callable[..., list[Tensor]]:
        """Return a function of the inputs of a step. Constants of the step are made once."""
        bounds = torch.arange(size + 1, dtype=torch.int32)
        bounds = bounds.to(self._device)
        longest = self._width * self._block_size

        def step(
            ids: Tensor, positions: Tensor, lengths: Tensor, *of_groups: Tensor
        ) -> list[Tensor]:
            count = len(self._groups)
            pages: dict[str, LayerPages] = {}
            slots = of_groups[:count]
            tables = of_groups[count:]
            for group, places, table in zip(self._groups, slots, tables, strict=True):
                for name, cache in group.items():
                    pages[name] = LayerPages(cache, table, places)
            batch = AttentionBatch(
                bounds, lengths, 1, longest, pages, self._block_size, continues=True
            )
            with attending(batch):
                return [self._model(ids, positions)]

        return step

    def _record(self, size: int) -> None:
        """Record the step of a size, and try the recording out.

        Raises:
            ConfigError: as for the class.
        """
        before = next(iter(self._graphs.values()), None)
        try:
            step = self._step(size)
            inputs = self._inputs(size)
            self._graphs[size] = StaticGraph(step, inputs, before)
            is_right = self._replays_right(size)
        # Kernels and libraries of devices raise errors of all classes.
        except Exception as error:
            raise ConfigError(
                f"compilation_config.graph_mode is full, and a step of {size} sequences cannot be "
                f"recorded: {described(error)}. {_NEXT}"
            ) from error
        if not is_right:
            raise ConfigError(
                f"compilation_config.graph_mode is full, and a recorded step of {size} sequences "
                f"computes something else than the model itself. {_NEXT}"
            )

    def _replays_right(self, size: int) -> bool:
        """Return True if a replay with other inputs computes the same as the model."""
        trial = self._trial(size)
        self._compute_prompts(trial)
        # A stale recording computes with tokens, positions, lengths, slots or tables of its own.
        count = len(trial.lengths)
        ones = [1] * count
        batch = self._batch(ones, trial.lengths, trial.tables)
        ids = torch.tensor(ones).to(self._device)
        lengths = torch.tensor(trial.lengths)
        positions = (lengths - 1).to(self._device)
        inputs = Inputs(ids, positions, batch, ids[:0], ())
        replayed = self(inputs)
        # New tensors: a kernel may keep a plan for the tensors of the recording.
        graph = self._graphs[size]
        given = [each.clone() for each in graph.inputs]
        step = self._step(size)
        (expected,) = step(*given)
        return replayed is not None and results_agree(replayed, expected[:count])

    def _trial(self, size: int) -> _Trial:
        """Return sequences of several lengths. Each fills a block, and begins another one."""
        block_size = self._block_size
        groups = len(self._groups)
        # A small cache has room for one sequence of this length.
        room = max(1, self._padding // groups)
        most = min(self._longest, room * block_size)
        longest = min(most, block_size + _MOST_TRIED)
        width = -(-longest // block_size)
        count = min(size, _MOST_TRIED, room // width)
        count = max(1, count)
        lengths = []
        for row in range(count):
            length = block_size + 1 + row
            lengths.append(min(most, length))
        # Groups share memory, so no block is in two tables.
        blocks = torch.arange(groups * count * width, dtype=torch.int32)
        tables = blocks.view(groups, count, width)
        return _Trial(lengths, list(tables))

    def _compute_prompts(self, trial: _Trial) -> None:
        """Write keys and values of the sequences of a trial to the cache, by the model itself."""
        # The last token is another one than in the trial, so that a replay must write its own.
        for row, length in enumerate(trial.lengths):
            positions = torch.arange(length)
            ids = positions.flip(0) % 2
            tables = [table[row : row + 1] for table in trial.tables]
            batch = self._batch([length], [length], tables)
            with attending(batch):
                self._model(ids.to(self._device), positions.to(self._device))

    def _batch(
        self, counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Tensor]
    ) -> AttentionBatch:
        """Return a batch with a table for each group of layers."""
        pages: dict[str, LayerPages] = {}
        for group, table in zip(self._groups, tables, strict=True):
            batch = AttentionBatch.of_sequences(
                counts, lengths, table, group, block_size=self._block_size, device=self._device
            )
            pages.update(batch.pages)
        return dataclasses.replace(batch, pages=pages)


def results_agree(replayed: Tensor, expected: Tensor) -> bool:
    """Return True if a replay differs by a few roundings of the largest number at most.

    NaN and infinities must be in the same places.
    """
    found = replayed.to(HOST, torch.float32)
    wanted = expected.to(HOST, torch.float32)
    is_finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), is_finite):
        return False
    others = ~is_finite
    if not torch.allclose(found[others], wanted[others], equal_nan=True):
        return False
    found = found[is_finite]
    wanted = wanted[is_finite]
    if not len(wanted):
        return True
    rounding = torch.finfo(expected.dtype).eps
    tolerance = max(_LEAST_TOLERANCE, _TOLERANCE * rounding)
    largest = float(wanted.abs().max())
    return torch.allclose(found, wanted, rtol=0, atol=tolerance * largest)
