"""Replace the collectives of a graph by those of torch, which compilers of devices know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opgraft.compat.collectives import functional_all_gather, functional_all_reduce
from opgraft.distributed.collectives import communicator_of
from torch.fx import GraphModule, Node


def with_torch_collectives(program: GraphModule) -> GraphModule:
    """Return a graph with sums and gatherings of ranks as operators of torch.

    Elsewhere a graph names the kind of a group, and the communicator of a plugin may serve it. The
    operators of torch name a process group, and need no communicator.

    Args:
        program: changed in place.
    """
    replacements: dict[Any, Callable[..., Node]] = {
        torch.ops.opgraft.all_reduce.default: _all_reduce,
        torch.ops.opgraft.all_gather.default: _all_gather,
    }
    graph = program.graph
    for node in list(graph.nodes):
        replace = replacements.get(node.target)
        if replace is None:
            continue
        with graph.inserting_before(node):
            result = replace(*node.args)
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    program.recompile()
    return program


def _all_reduce(x: Node, kind: str) -> Node:
    operator, wait = functional_all_reduce()
    summed = _add_call(operator, x, "sum", _group_name(kind))
    return _add_call(wait, summed)


def _all_gather(x: Node, dim: int, world_size: int, kind: str) -> Node:
    operator, wait = functional_all_gather()
    contiguous = _add_call(torch.ops.aten.contiguous.default, x)
    gathered = _add_call(operator, contiguous, world_size, _group_name(kind))
    rows = _add_call(wait, gathered)
    if dim in (0, -x.meta["val"].dim()):
        return rows
    # The operator puts parts along the first dimension only.
    parts = _add_call(torch.ops.aten.chunk.default, rows, world_size)
    return _add_call(torch.ops.aten.cat.default, parts, dim)


def _add_call(operator: Any, argument: Node, *others: Any) -> Node:
    return argument.graph.call_function(operator, (argument, *others))


def _group_name(kind: str) -> str:
    communicator = communicator_of(kind)
    return str(communicator.process_group.group_name)
