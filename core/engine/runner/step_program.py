"""Programs of fixed shapes: a step of so many sequences with so many tokens each, compiled as one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.engine.runner.input_batch import Inputs
from opgraft.ops.attention.batch import AttentionBatch, LayerPages, attending
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.functional import pad


@dataclass(frozen=True)
class StepShape:
    """The shape of a step: as many rows for each sequence, and tables of one width.

    Attributes:
        sequences: that the step has room for.
        tokens: rows of each sequence.
        width: blocks of a sequence's table.
        groups: tables of a sequence, one for each group of layers.
    """

    sequences: int
    tokens: int
    width: int
    groups: int

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences"
            if self.tokens == 1
            else f"a prompt of {self.tokens} tokens"
        )

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens

    @property
    def sizes(self) -> list[int]:
        """Return the integers of each input: ids, positions, slots, tables, bounds, lengths, sampled rows."""
        slots, tables = self.groups * self.rows, self.groups * self.sequences * self.width
        return [
            self.rows,
            self.rows,
            slots,
            tables,
            self.sequences + 1,
            self.sequences,
            self.sequences,
        ]

    def padded(
        self, inputs: Inputs, groups: Sequence[str], scratch: int, block_size: int
    ) -> Tensor:
        """Return the inputs of a step, padded to this shape, as one tensor of int32.

        Rows of padding write to a block that no sequence has, and are of sequences without tokens.

        Args:
            inputs: on the host, of at most as many sequences and tokens.
            groups: a layer of each group.
            scratch: that block.
            block_size: tokens in a block.
        """
        batch, rows, slot = inputs.batch, self.rows, scratch * block_size
        pages = [batch.pages[name] for name in groups]
        bounds = batch.query_start_loc
        parts = [
            _longer(inputs.input_ids, rows),
            _longer(inputs.positions, rows),
            *(_longer(each.slots, rows, slot) for each in pages),
            *(self._table(each.block_table, scratch) for each in pages),
            torch.cat((bounds, bounds[-1:].expand(self.sequences + 1 - len(bounds)))),
            _longer(batch.seq_lens, self.sequences),
            _longer(inputs.sampled_rows, self.sequences),
        ]
        return torch.cat([part.flatten().to(torch.int32) for part in parts])

    def empty(self, scratch: int, block_size: int) -> Tensor:
        """Return the inputs of a step without sequences, as ``padded`` would."""
        parts = [torch.zeros(size, dtype=torch.int32) for size in self.sizes]
        parts[2] += scratch * block_size
        parts[3] += scratch
        return torch.cat(parts)

    def _table(self, table: Tensor, scratch: int) -> Tensor:
        missing = self.width - table.shape[1], self.sequences - table.shape[0]
        return pad(table, (0, missing[0], 0, missing[1]), value=scratch)


def _longer(values: Tensor, size: int, value: int = 0) -> Tensor:
    return pad(values, (0, size - len(values)), value=value)


class StepModule(nn.Module):
    """A step of one shape as a module, from inputs and caches to tokens and logits.

    Args:
        model: called with token ids and positions.
        groups: the layers of each group, and for each the place of its cache among the caches.
        shape: of the step.
        block_size: tokens in a block.
    """

    def __init__(
        self, model: Any, groups: Sequence[Mapping[str, int]], shape: StepShape, block_size: int
    ) -> None:
        super().__init__()
        self.model = model
        self.groups = groups
        self.shape = shape
        self.block_size = block_size

    def forward(self, packed: Tensor, *caches: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token of each sequence and the logits.

        Args:
            packed: as ``StepShape.padded`` makes it.
            *caches: in which new keys and values are written.

        Returns:
            Tokens, int64 ``[sequences]``, -1 where the greatest logit is no finite number, and
            ``[sequences, vocabulary]``.
        """
        shape = self.shape
        ids, positions, slots, tables, bounds, lengths, sampled = packed.split_with_sizes(
            shape.sizes
        )
        by_group = zip(
            self.groups,
            slots.long().view(shape.groups, -1),
            tables.view(shape.groups, shape.sequences, shape.width),
            strict=True,
        )
        pages = {
            name: LayerPages(caches[place], table, places)
            for group, places, table in by_group
            for name, place in group.items()
        }
        batch = AttentionBatch(
            bounds,
            lengths,
            shape.tokens,
            shape.width * self.block_size,
            pages,
            self.block_size,
            continues=True,
        )
        with attending(batch):
            hidden = self.model(ids.long(), positions.long())
        logits = self.model.compute_logits(hidden[sampled.long()])
        best, tokens = logits.float().max(-1)
        return tokens.where(best.isfinite(), -1), logits


class CopyModule(nn.Module):
    """Copies of blocks as a module."""

    def forward(self, pairs: Tensor, *caches: Tensor) -> None:
        """Copy the first block of each of ``pairs``, int64 ``[copies, 2]``, to the second in all caches."""
        sources, targets = pairs.unbind(1)
        for cache in caches:
            cache.index_copy_(0, targets, cache[sources])


def exported(module: nn.Module, inputs: Tensor, caches: Sequence[Tensor]) -> GraphModule:
    """Return a module as a graph for arguments of these shapes.

    Its Python is called once: the context that layers look their pages up in is nothing that a
    compiler follows.
    """
    with torch.no_grad():
        graph_module: Any = torch.export.export(module, (inputs, *caches), strict=False).module()
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CacheOperators:
    """Operators by which a backend learns what becomes of a cache, each with its arguments behind the cache.

    Attributes:
        donate: called before anything is written, so that the backend need not copy the cache to
            write to it.
        place: called after that; what it returns is the cache where it is to be among the devices.
    """

    donate: tuple[Any, ...] = ()
    place: tuple[Any, ...] = ()


def compiled(
    program: GraphModule,
    backend: str | Callable[..., Any],
    operators: Sequence[CacheOperators],
    whole: Callable[[int], tuple[Any, ...]],
) -> Any:
    """Compile what ``exported`` returns.

    Args:
        program: its first argument are the inputs, the others caches.
        backend: of ``torch.compile``.
        operators: for each cache.
        whole: gives for a number of dimensions an operator, and its arguments behind a result, that
            brings the whole of it to where the host reads; nothing where it is there.
    """
    graph = program.graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    for cache, called in zip(given[1:], operators, strict=True):
        if called.donate:
            with graph.inserting_after(given[-1]):
                graph.call_function(called.donate[0], (cache, *called.donate[1:]))
        if called.place:
            with graph.inserting_before(end):
                placed = graph.call_function(called.place[0], (cache, *called.place[1:]))
                graph.call_function(torch.ops.aten.copy_.default, (cache, placed))
    gathered = {}
    for result in end.all_input_nodes:
        if operator := whole(result.meta["val"].dim()):
            with graph.inserting_before(end):
                gathered[result] = graph.call_function(operator[0], (result, *operator[1:]))
    end.args = map_arg(end.args, lambda result: gathered.get(result, result))
    program.recompile()
    return torch.compile(program, backend=backend, dynamic=False, fullgraph=True)


@PluggableClass.register("step_graph")
class StepGraph(PluggableClass):
    """A compiled program as a step calls it: this one calls it. A device may bring one that records and replays it.

    Args:
        program: called with inputs and caches, to which it writes.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        self.program = program

    def __call__(self, inputs: Tensor, *caches: Tensor) -> Any:
        """Return what the program does, which no later call changes.

        Args:
            inputs: other numbers at each call, of one shape.
            *caches: the same tensors at each call.
        """
        return self.program(inputs, *caches)


def peak_bytes(program: GraphModule) -> int:
    """Return the most bytes that results of operators take at once, each kept until its last use.

    What an operator returns of its arguments, as views and what is written in place are, takes
    none.
    """
    last_use = {used: node for node in program.graph.nodes for used in node.all_input_nodes}
    ends: dict[Node, list[Node]] = {}
    for used, node in last_use.items():
        ends.setdefault(node, []).append(used)
    live = peak = 0
    for node in program.graph.nodes:
        live += _bytes_made(node)
        peak = max(peak, live)
        live -= sum(map(_bytes_made, ends.get(node, ())))
    return peak


def _bytes_made(node: Node) -> int:
    schema = getattr(node.target, "_schema", None)
    if (
        node.op != "call_function"
        or schema is None
        or any(each.alias_info for each in schema.returns)
    ):
        return 0
    made = node.meta.get("val")
    tensors = made if isinstance(made, (tuple, list)) else [made]
    return sum(each.numel() * each.itemsize for each in tensors if isinstance(each, Tensor))
