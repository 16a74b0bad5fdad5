"""Static graphs: record code for one size of the batch, and replay the record for smaller calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.compilation.backends import Runner
from opgraft.compilation.nodes import OPERATOR
from opgraft.compilation.splitting import HELD
from opgraft.compilation.writes import is_written
from opgraft.errors import CompilationError
from opgraft.ops.recording import recording
from opgraft.plugins.selection import current_platform
from torch import Tensor, fx

_UNRECORDED = ("data_dependent_output", "cudagraph_unsafe")
"""Tags of operators that cannot be recorded: the host reads a value, or the operator refuses."""


@PluggableClass.register("static_graph")
class StaticGraph(PluggableClass):
    """Code for inputs in the same memory at each call.

    On a platform with a ``graph_class``, the kernels are captured once and launched together. On
    other platforms, the code is called, and the results are copied to the same memory.

    Args:
        run: the code.
        inputs: the tensors for all calls.
        before: a graph that lends its working memory: the two never run at once.

    Attributes:
        inputs: a caller writes to these tensors before ``replay``.
        outputs: the results of the code. Each ``replay`` writes to the tensors among them.
    """

    def __init__(
        self, run: Runner, inputs: Sequence[Tensor], before: StaticGraph | None = None
    ) -> None:
        self.inputs = inputs
        self._run = run
        self._graph: Any = None
        platform = current_platform()
        kind = platform.graph_class
        if kind is None:
            self.outputs: Sequence[Any] = run(*inputs)
            return
        with recording():
            # The first call may compile, or allocate memory, which cannot be recorded.
            run(*inputs)
            graph = kind()
            pool = before._graph.pool() if before is not None else None
            with torch.get_device_module(platform.device_type).graph(graph, pool=pool):
                self.outputs = run(*inputs)
        self._graph = graph

    def replay(self) -> Sequence[Any]:
        """Run the code on the current values of ``inputs``, and return ``outputs``."""
        if self._graph is not None:
            self._graph.replay()
            return self.outputs
        for output, computed in zip(self.outputs, self._run(*self.inputs), strict=True):
            if isinstance(output, Tensor):
                output.copy_(computed)
        return self.outputs


class ReplayedCode:
    """Code with static graphs for some sizes of the batch. A call is padded to the next size.

    Padding holds zeros, or rows of an earlier call. A call with more rows than the largest size
    runs the code itself.

    Args:
        run: the code.
        module: the graph of the code. The placeholders tell the places of the batch's size.
        batch: the name of the size.
        sizes: the sizes, ascending.
    """

    def __init__(
        self, run: Runner, module: fx.GraphModule, batch: str, sizes: Sequence[int]
    ) -> None:
        self.sizes = sizes
        self._run = run
        self._graphs: dict[int, StaticGraph] = {}

        self._given: list[_Extent] = []
        for node in module.graph.nodes:
            if node.op == "placeholder":
                is_held = bool(node.meta.get(HELD))
                self._given.append(_Extent(node.meta["val"], is_held))
        (end,) = (node for node in module.graph.nodes if node.op == "output")
        self._returned: list[_Extent | None] = []
        for each in end.args[0]:
            is_constant = not isinstance(each, fx.Node)
            self._returned.append(None if is_constant else _Extent(each.meta["val"]))
        self._batch = self._place_of(batch)

    def _place_of(self, batch: str) -> tuple[int, int] | None:
        """Return an input and a dimension with the size of the batch; ``None`` without one.

        A graph with another dynamic size has no such place, for only values of tensors tell that
        size.
        """
        for each in (*self._given, *self._returned):
            if each is not None and each.names - {batch}:
                return None
        for place, given in enumerate(self._given):
            if batch in given.plain:
                return place, given.plain[batch]
        return None

    @property
    def recorded(self) -> tuple[int, ...]:
        """The sizes with a static graph by now."""
        return tuple(sorted(self._graphs))

    def __call__(self, *tensors: Tensor) -> Sequence[Any]:
        if self._batch is None:
            return self._run(*tensors)
        place, dim = self._batch
        batch = tensors[place].shape[dim]
        size = next((size for size in self.sizes if size >= batch), None)
        if size is None:
            return self._run(*tensors)
        if size not in self._graphs:
            self._graphs[size] = self._recorded(tensors, size)
        graph = self._graphs[size]
        for each, static, x in zip(self._given, graph.inputs, tensors, strict=True):
            # A tensor of the model is the same at each call.
            if static is not x:
                each.part(static, batch).copy_(x)
        results = []
        for extent, result in zip(self._returned, graph.replay(), strict=True):
            results.append(result if extent is None else extent.part(result, batch))
        return results

    def _recorded(self, tensors: Sequence[Tensor], size: int) -> StaticGraph:
        """Record a static graph for a size of the batch."""
        inputs = [each.enlarged(x, size) for each, x in zip(self._given, tensors, strict=True)]
        first = next(iter(self._graphs.values()), None)
        return StaticGraph(self._run, inputs, first)


class _Extent:
    """The shape of a tensor as terms in the size of the batch.

    Args:
        value: a tensor of the shape, without values.
        held: the tensor is the same at each call.

    Attributes:
        names: the names of all sizes in the shape.
        plain: by name, the dimension of each size that is a dimension unchanged.
        is_shared: a dimension is a rounded part of a size, such as the rows of one rank.
    """

    def __init__(self, value: Tensor, held: bool = False) -> None:
        # An engine without compilation starts faster without this import.
        import sympy

        terms: dict[int, Any] = {}
        # A dynamic size is no number, which mypy does not know.
        shape: Any = value.shape
        for dim, size in enumerate(shape):
            if not isinstance(size, int):
                terms[dim] = sympy.sympify(str(size))
        self.names = {str(symbol) for term in terms.values() for symbol in term.free_symbols}
        self.plain = {str(term): dim for dim, term in terms.items() if term.is_symbol}
        self.is_shared = any(term.has(sympy.floor) for term in terms.values())
        self._held = held
        self._terms = {
            dim: sympy.lambdify([*term.free_symbols], term) for dim, term in terms.items()
        }

    def enlarged(self, x: Tensor, size: int) -> Tensor:
        """Return a tensor of zeros for a larger batch; a held tensor is returned itself."""
        if self._held:
            return x
        shape = [*x.shape]
        for dim, term in self._terms.items():
            shape[dim] = term(size)
        return x.new_zeros(shape)

    def part(self, x: Tensor, batch: int) -> Tensor:
        """Return the rows of a batch in a tensor for a larger batch."""
        for dim, term in self._terms.items():
            x = x.narrow(dim, 0, term(batch))
        return x


def expect_recordable(module: fx.GraphModule) -> None:
    """Check a graph for operators that a static graph cannot record.

    Raises:
        CompilationError: an operator needs the host, or refuses. The message names the operator.
    """
    given = [_Extent(node.meta["val"]) for node in module.graph.nodes if node.op == "placeholder"]
    (end,) = (node for node in module.graph.nodes if node.op == "output")
    returned = [_Extent(node.meta["val"]) for node in end.all_input_nodes]
    if any(each.is_shared for each in (*given, *returned)):
        raise CompilationError(
            "compilation_config.graph_mode is set, and pieces exchange a tensor of which each rank "
            "has a part of the rows, other rows in a recording for a larger batch. Next: set "
            "graph_mode to full or none, or turn the pass sequence_parallelism off by "
            "compilation_config.pass_config"
        )
    for node in module.graph.nodes:
        if node.op == "placeholder" and is_written(node) and not node.meta.get(HELD):
            raise CompilationError(
                "compilation_config.graph_mode is set, and the graph writes to a tensor that it is "
                "given, while a recording has another one for it. Next: set graph_mode to none, or "
                "have the model return the tensor"
            )
        why = _unrecordable(node, {name for each in given for name in each.names})
        if why:
            name = node.target.name().partition(".")[0]
            raise CompilationError(
                f"compilation_config.graph_mode is set, and a static graph cannot record {name}, "
                f"as {why}. Next: add it to compilation_config.splitting_ops under the mode "
                "piecewise, or set graph_mode to none"
            )


def _unrecordable(node: fx.Node, names: Collection[str]) -> str:
    """Return the reason why a call cannot be recorded; empty if it can.

    ``names`` are the sizes of the graph's inputs.
    """
    if not isinstance(node.target, OPERATOR):
        return ""
    value = node.meta.get("val")
    for result in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(result, Tensor) and _Extent(result).names - {*names}:
            return "the size of its result depends on values"
    tag = next((tag.name for tag in node.target.tags if tag.name in _UNRECORDED), None)
    return f"it is tagged {tag}" if tag else ""
