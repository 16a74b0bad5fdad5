"""Programs of fixed shapes: a step with equal numbers of tokens per sequence, as one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.engine.runner.input_batch import Inputs
from opgraft.ops.attention.batch import AttentionBatch, LayerPages, attending
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class StepShape:
    """The shape of a step: equal numbers of rows per sequence, and tables of one width.

    Attributes:
        sequences: room of the step.
        tokens: rows of each sequence.
        width: blocks of a sequence's table.
        groups: tables of a sequence, one for each group of layers.
    """

    sequences: int
    tokens: int
    width: int
    groups: int

    def __str__(self) -> str:
        if self.tokens == 1:
            return f"{self.sequences} sequences"
        return f"a prompt of {self.tokens} tokens"

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens

    @property
    def sizes(self) -> list[int]:
        """Return the number of integers of each input.

        Inputs are ids, positions, slots, tables, bounds, lengths and sampled rows.
        """
        ids = positions = self.rows
        slots = self.groups * self.rows
        tables = self.groups * self.sequences * self.width
        lengths = sampled = self.sequences
        bounds = self.sequences + 1
        return [ids, positions, slots, tables, bounds, lengths, sampled]

    def padded(
        self, inputs: Inputs, groups: Sequence[str], scratch: int, block_size: int
    ) -> Tensor:
        """Return the inputs of a step, padded to this shape, as one tensor of int32.

        Rows of padding write to an unused block. They belong to sequences without tokens.

        Args:
            inputs: on the host, with no more sequences and tokens than this shape.
            groups: a layer of each group.
            scratch: the unused block.
            block_size: tokens in a block.
        """
        batch = inputs.batch
        rows = self.rows
        slot = scratch * block_size
        pages = [batch.pages[name] for name in groups]
        slots = [_longer(each.slots, rows, slot) for each in pages]
        tables = [self._table(each.block_table, scratch) for each in pages]
        bounds = batch.query_start_loc
        missing = self.sequences + 1 - len(bounds)
        parts = [
            _longer(inputs.input_ids, rows),
            _longer(inputs.positions, rows),
            *slots,
            *tables,
            torch.cat((bounds, bounds[-1:].expand(missing))),
            _longer(batch.seq_lens, self.sequences),
            _longer(inputs.sampled_rows, self.sequences),
        ]
        return torch.cat([part.flatten().to(torch.int32) for part in parts])

    def empty(self, scratch: int, block_size: int) -> Tensor:
        """Return the inputs of a step without sequences, in the form of ``padded``."""
        parts = [torch.zeros(size, dtype=torch.int32) for size in self.sizes]
        _, _, slots, tables, *_ = parts
        slots += scratch * block_size
        tables += scratch
        return torch.cat(parts)

    def _table(self, table: Tensor, scratch: int) -> Tensor:
        blocks = self.width - table.shape[1]
        sequences = self.sequences - table.shape[0]
        return pad(table, (0, blocks, 0, sequences), value=scratch)


def _longer(values: Tensor, size: int, value: int = 0) -> Tensor:
    return pad(values, (0, size - len(values)), value=value)


class StepModule(nn.Module):
    """A step of one shape as a module, from inputs and caches to tokens and logits.

    Args:
        model: called with token ids and positions.
        groups: for each group, the number of each layer's cache among the caches.
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
            packed: from ``StepShape.padded``.
            *caches: new keys and values are written there.

        Returns:
            Tokens, int64 ``[sequences]``, with -1 if the greatest logit is not finite; and logits
            ``[sequences, vocabulary]``.
        """
        shape = self.shape
        parts = packed.split_with_sizes(shape.sizes)
        ids, positions, slots, tables, bounds, lengths, sampled = parts
        slots = slots.long().view(shape.groups, -1)
        tables = tables.view(shape.groups, shape.sequences, shape.width)
        pages = {}
        for group, slots_of_group, table in zip(self.groups, slots, tables, strict=True):
            for name, place in group.items():
                pages[name] = LayerPages(caches[place], table, slots_of_group)
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
        """Copy the first block of each pair to the second, in all caches.

        Args:
            pairs: ``[copies, 2]``, int64.
            *caches: with the blocks in the first dimension.
        """
        sources, targets = pairs.unbind(1)
        for cache in caches:
            cache.index_copy_(0, targets, cache[sources])


_LOST = "fake tensor in the exported program constant's list"
"""Part of the message of torch about a tensor of the trace that has no node."""


def _exported_program(module: nn.Module, arguments: tuple[Tensor, ...]) -> ExportedProgram:
    with torch.no_grad():
        try:
            return torch.export.export(module, arguments, strict=False)
        except RuntimeError as error:
            # About one of 30 first traces of a process lost the node of a ``torch.arange`` (torch
            # 2.13). No later trace did.
            if _LOST not in str(error):
                raise
        return torch.export.export(module, arguments, strict=False)


def exported(module: nn.Module, inputs: Tensor, caches: Sequence[Tensor]) -> GraphModule:
    """Return a module as a graph for arguments of these shapes.

    The module is called while torch traces. Compilers cannot follow the context with the pages of
    layers, so the graph has the pages built in.
    """
    graph_module: Any = _exported_program(module, (inputs, *caches)).module()
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CacheOperators:
    """Operators that tell a backend about a cache, each with its arguments after the cache.

    Attributes:
        donate: called before the step writes anything, so that the backend may write to the cache
            without a copy.
        place: called at the end; returns the cache at its place among the devices.
    """

    donate: tuple[Any, ...] = ()
    place: tuple[Any, ...] = ()


def compiled(
    program: GraphModule,
    backend: str | Callable[..., Any],
    operators: Sequence[CacheOperators],
    whole: Callable[[int], tuple[Any, ...]],
) -> Any:
    """Compile a graph from ``exported``.

    Args:
        program: called with inputs and caches.
        backend: of ``torch.compile``.
        operators: for each cache.
        whole: called with a number of dimensions. Returns an operator that brings a result to the
            host as a whole, and its arguments after the result; empty if no operator is needed.
    """
    graph = program.graph
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    _call_operators_of_caches(graph, end, operators)
    gathered = {}
    for result in end.all_input_nodes:
        gathering = whole(result.meta["val"].dim())
        if gathering:
            operator, *arguments = gathering
            with graph.inserting_before(end):
                gathered[result] = graph.call_function(operator, (result, *arguments))
    end.args = map_arg(end.args, lambda result: gathered.get(result, result))
    program.recompile()
    # This backend runs the graph as it is. Dynamo would only trace it again, and follows no tensors
    # of a device in Python.
    if backend == "eager":
        return program
    return torch.compile(program, backend=backend, dynamic=False, fullgraph=True)


def _call_operators_of_caches(graph: Graph, end: Node, operators: Sequence[CacheOperators]) -> None:
    """Insert the calls of the operators of each cache at the beginning and the end of a graph."""
    inputs, *caches = (node for node in graph.nodes if node.op == "placeholder")
    last_input = caches[-1] if caches else inputs
    for cache, called in zip(caches, operators, strict=True):
        if called.donate:
            operator, *arguments = called.donate
            with graph.inserting_after(last_input):
                graph.call_function(operator, (cache, *arguments))
        if called.place:
            operator, *arguments = called.place
            with graph.inserting_before(end):
                placed = graph.call_function(operator, (cache, *arguments))
                graph.call_function(torch.ops.aten.copy_.default, (cache, placed))


@PluggableClass.register("step_graph")
class StepGraph(PluggableClass):
    """Calls a compiled program. A device may replace this class to record and replay the program.

    Args:
        program: called with inputs and caches; writes to the caches.
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        self.program = program

    def __call__(self, inputs: Tensor, *caches: Tensor) -> Any:
        """Return the results of the program. No later call changes them.

        Args:
            inputs: other numbers at each call, of one shape.
            *caches: the same tensors at each call.
        """
        return self.program(inputs, *caches)


def peak_bytes(program: GraphModule) -> int:
    """Return the most bytes of results of operators at once. A result lives until its last use.

    Views and results written in place take no bytes.
    """
    last_use = {}
    for node in program.graph.nodes:
        for used in node.all_input_nodes:
            last_use[used] = node
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
    if node.op != "call_function" or schema is None:
        return 0
    # A part of an argument, or the argument itself.
    if any(each.alias_info for each in schema.returns):
        return 0
    made = node.meta.get("val")
    tensors = made if isinstance(made, (tuple, list)) else [made]
    return sum(each.numel() * each.itemsize for each in tensors if isinstance(each, Tensor))
