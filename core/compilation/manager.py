"""The pass manager: runs passes in order, and verifies the graph after each."""

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
        passes: in order. Those that do not apply to ``sizes`` are left out.
        module: the graph.
        model: which it was captured from.
        dump: a folder for the graph before the first pass and after each, as files of text.
        sizes: of the batch, for which the graph is.

    Raises:
        CompilationError: a pass raises, or leaves a graph that is not well formed, or in which a tensor has another
            shape, dtype, device or strides than before. The message names the pass.
        ConfigError: the folder cannot be written to.
    """
    reports: list[PassReport] = []
    _dump(dump, 0, "captured", module)
    for each in passes:
        before = len(module.graph.nodes)
        known = {node: _state(node) for node in module.graph.nodes}
        try:
            if not each.applies(sizes):
                continue
            *found, left = PassOutcome(*each.run(module, model))
            matched, replaced = map(operator.index, found)
            _expect_same_ends(module.graph, known)
            module.graph.eliminate_dead_code()
            module.graph.lint()
            module.recompile()
            _propagate(module, known)
            digest = each.source_hash()
        except Exception as error:  # whatever a pass raises
            raise CompilationError(
                f"the pass {each.name} ({type(each).__module__}.{type(each).__qualname__}) breaks the graph of "
                f"{type(model).__name__}: {described(error)}. Next: correct it, or leave it out"
            ) from error
        reports.append(
            PassReport(
                each.name, digest, matched, replaced, (before, len(module.graph.nodes)), tuple(left)
            )
        )
        _dump(dump, len(reports), each.name, module)
    return tuple(reports)


def _expect_same_ends(graph: fx.Graph, known: Iterable[fx.Node]) -> None:
    """Refuse a graph that takes other inputs than before, or in another order, or has not one output."""
    for ends in ("placeholder", "output"):
        before, after = (
            [node for node in nodes if node.op == ends] for nodes in (known, graph.nodes)
        )
        if before != after:
            raise ValueError(f"its {ends} nodes are {after} after it, and were {before} before")


def _state(node: fx.Node) -> tuple[str, Any]:
    """Describe the arguments of a node, and what it returns; of the output, what is returned from the graph."""
    returned = (
        fx.node.map_arg(node.args, lambda each: each.meta["val"])
        if node.op == "output"
        else node.meta.get("val")
    )
    return str((node.args, node.kwargs)), layout_of(returned)


def _propagate(module: fx.GraphModule, known: Mapping[fx.Node, tuple[str, Any]]) -> None:
    """Compute, on tensors without values, what new nodes return, and those whose arguments are others than before.

    Raises:
        ValueError: a node that was there before, or the graph, returns something else.
    """
    mode = next((node.meta["val"].fake_mode for node in known if node.op == "placeholder"), None)
    fresh: set[fx.Node] = set()
    for node in module.graph.nodes:
        arguments, returned = known.get(node, ("", None))
        if node.op == "get_attr" and node not in known:
            tensor = attribute_of(module, node)
            node.meta["val"] = mode.from_tensor(tensor, static_shapes=True) if mode else tensor
        elif node.op == "call_function" and (
            arguments != str((node.args, node.kwargs)) or fresh & {*node.all_input_nodes}
        ):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            with mode or nullcontext(), with_symbols_for_sizes():
                node.meta["val"] = node.target(*args, **kwargs)
        if node not in known:
            fresh.add(node)
        elif _state(node)[1] != returned:
            raise ValueError(
                f"{node.name} returns {_state(node)[1]} after it, and returned {returned} before"
            )


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
