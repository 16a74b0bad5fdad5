"""Lowering: each semantic node becomes the kernel of its op's selected provider, or the native definition inlined."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opgraft.binding.functional import FUNCTIONALS, Functional, binding_of
from opgraft.compilation.nodes import form_of
from opgraft.decision import Candidate, Decision
from opgraft.registry.op_classes import location_of
from opgraft.torch_library import direct_register_custom_op
from torch import Tensor, fx

_KERNELS: dict[tuple[str, Callable[..., Any]], Callable[..., Any]] = {}
"""By form and kernel: the torch op that runs the kernel."""


def lower(module: fx.GraphModule) -> tuple[fx.GraphModule, Counter[str]]:
    """Return a graph without semantic nodes, over the same tensors, and by the name of a form how many it had.

    Of a native definition, compilers see the operators and may fuse them with others. A kernel stays one node, whatever
    it is made of: it may choose by values that a compiler does not have.

    Raises:
        OpgraftError: as constructing the op of a form would.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        form = form_of(node)
        if form is not None:
            node.target = _target(form)
            counts[form.name] += 1
    return fx.GraphModule(module, graph), counts  # which takes over only the tensors that are used


def prepared(counts: Mapping[str, int]) -> tuple[Decision, ...]:
    """Register the kernels of forms as lowering does, and return for each what so many nodes of it have become.

    Raises:
        OpgraftError: as constructing the op of a form would.
    """
    for name in counts:
        _target(FUNCTIONALS[name])
    return tuple(_decision(FUNCTIONALS[name], count) for name, count in counts.items())


def _target(form: Functional[..., Any]) -> Callable[..., Any]:
    kernel = binding_of(form).kernel.winner.functional(form.name)
    return _inlined(form) if kernel is None else _as_op(form, kernel)


def _decision(form: Functional[..., Any], count: int) -> Decision:
    binding = binding_of(form)
    kernel = binding.kernel.winner.functional(form.name)
    chosen = f"{form.name}.native, inlined" if kernel is None else binding.kernel_name
    why = "no provider's kernel comes as this form here" if kernel is None else "the form of the kernel that is bound"
    at = location_of(form.native if kernel is None else kernel)
    candidate = Candidate(chosen, True, why, binding.provider, at)
    nodes = "1 node" if count == 1 else f"{count} nodes"
    kernels, classes = binding.kernel.decision, binding.replacement.decision
    subject = f"lowering of {form.name}"
    return Decision(subject, chosen, f"{nodes}; {why}", (candidate,), kernels.setting, (kernels, classes))


@functools.cache
def _inlined(form: Functional[..., Any]) -> Callable[..., Any]:
    @functools.wraps(form.native)
    def inlined(*args: Any, **kwargs: Any) -> Any:
        return _contiguous(form.native(*args, **kwargs))

    return inlined


def _as_op(form: Functional[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the torch op that runs one kernel of a form, registered when it is first asked for."""
    if (form.name, kernel) not in _KERNELS:

        @functools.wraps(form.native)
        def run(*args: Any, **kwargs: Any) -> Any:
            return _contiguous(kernel(*args, **kwargs))

        # The name says whose it is, the same in every process.
        whose = hashlib.sha256(f"{kernel.__module__}.{kernel.__qualname__}".encode()).hexdigest()[:8]
        name = f"{form.name}_of_{whose}"
        direct_register_custom_op(name, run, form.mutates, form.fake)
        _KERNELS[form.name, kernel] = getattr(torch.ops.opgraft, name).default
    return _KERNELS[form.name, kernel]


def _contiguous(result: Any) -> Any:
    """Return results as the registered op of a form returns them, on whose strides the graph rests."""
    if isinstance(result, Tensor):
        return result.contiguous()
    return tuple(each.contiguous() for each in result) if isinstance(result, Sequence) else result
