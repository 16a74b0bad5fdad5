"""The pass manager: run passes in order, and verify the graph after each pass."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from opgraft.base.text import described
from opgraft.compat.graphs import with_symbols_for_sizes
from opgraft.compilation.graph_pass import ALL_SIZES, GraphPass, PassOutcome, PassReport
from opgraft.compilation.nodes import attribute_of, layout_of
from opgraft.errors import CompilationError, ConfigError
from torch import fx, nn


def run_passes(
    passes: Sequence[GraphPass],
    module: fx.GraphModule,
    model: nn.Module,
    dump: Path | None = None,
    sizes: range = ALL_SIZES,
) -> tuple[PassReport, ...]:
    """Run passes over a graph in place.

    Args:
        passes: in order. A pass that does not apply to ``sizes`` is left out.
        module: the graph.
        model: the model of the graph.
        dump: a folder for texts of the graph, before the first pass and after each pass.
        sizes: the sizes of the batch for this graph.

    Raises:
        CompilationError: a pass raises, or leaves a malformed graph, or a tensor has another shape,
            dtype, device or strides than before. The message names the pass.
        ConfigError: the folder refuses files.
    """
    reports: list[PassReport] = []
    _dump(dump, 0, "captured", module)
    for each in passes:
        try:
            if not each.applies(sizes):
                continue
            report = _run_pass(each, module, model)
        # A pass of a user may raise anything.
        except Exception as error:
            place = f"{type(each).__module__}.{type(each).__qualname__}"
            raise CompilationError(
                f"the pass {each.name} ({place}) breaks the graph of {type(model).__name__}: "
                f"{described(error)}. Next: correct it, or leave it out"
            ) from error
        reports.append(report)
        _dump(dump, len(reports), each.name, module)
    return tuple(reports)


def _run_pass(each: GraphPass, module: fx.GraphModule, model: nn.Module) -> PassReport:
    """Run one pass, and verify the graph.

    Raises:
        ValueError: the graph has other inputs, outputs or tensors than before.
    """
    before = len(module.graph.nodes)
    known = {node: _state(node) for node in module.graph.nodes}
    # A pass of a user may return a plain tuple.
    *found, left = PassOutcome(*each.run(module, model))
    matched, replaced = map(operator.index, found)
    _expect_same_ends(module.graph, known)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    _propagate(module, known)
    digest = each.source_hash()
    nodes = (before, len(module.graph.nodes))
    return PassReport(each.name, digest, matched, replaced, nodes, tuple(left))


def _expect_same_ends(graph: fx.Graph, known: Iterable[fx.Node]) -> None:
    """Check the inputs, their order and the output of a graph.

    Raises:
        ValueError: these are other nodes than before.
    """
    before = [*known]
    for ends in ("placeholder", "output"):
        former = [node for node in before if node.op == ends]
        now = [node for node in graph.nodes if node.op == ends]
        if former != now:
            raise ValueError(f"its {ends} nodes are {now} after it, and were {former} before")


def _state(node: fx.Node) -> tuple[str, Any]:
    """Describe the arguments and the result of a node; for the output, the results of the graph."""
    returned = node.meta.get("val")
    if node.op == "output":
        returned = fx.node.map_arg(node.args, lambda each: each.meta["val"])
    return str((node.args, node.kwargs)), layout_of(returned)


def _propagate(module: fx.GraphModule, known: Mapping[fx.Node, tuple[str, Any]]) -> None:
    """Compute the results of new nodes, and of nodes with new arguments, without values.

    Args:
        module: the graph after a pass.
        known: the nodes before the pass, each with its ``_state``.

    Raises:
        ValueError: a former node, or the graph, returns a tensor of another layout.
    """
    mode = next((node.meta["val"].fake_mode for node in known if node.op == "placeholder"), None)
    fresh: set[fx.Node] = set()
    for node in module.graph.nodes:
        arguments, returned = known.get(node, ("", None))
        if node.op == "get_attr" and node not in known:
            tensor = attribute_of(module, node)
            node.meta["val"] = mode.from_tensor(tensor, static_shapes=True) if mode else tensor
        elif node.op == "call_function":
            has_other_arguments = arguments != str((node.args, node.kwargs))
            if has_other_arguments or fresh.intersection(node.all_input_nodes):
                _compute(node, mode)
        if node not in known:
            fresh.add(node)
            continue
        _, returned_now = _state(node)
        if returned_now != returned:
            raise ValueError(
                f"{node.name} returns {returned_now} after it, and returned {returned} before"
            )


def _compute(node: fx.Node, mode: Any) -> None:
    """Compute the result of a node without values, in a mode of fake tensors if there is one."""
    call: Any = node.target
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with mode or nullcontext(), with_symbols_for_sizes():
        node.meta["val"] = call(*args, **kwargs)


def _dump(folder: Path | None, number: int, name: str, module: fx.GraphModule) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}-{name}.txt").write_text(f"{module.graph}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"graphs cannot be written to the folder {folder}: {error.strerror}"
        ) from error
