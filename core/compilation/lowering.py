"""Lowering: put the bound kernel, or the native definition, in the place of each semantic node."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from opgraft.binding.form_choice import FormChoice, choice_of
from opgraft.binding.functional import FUNCTIONALS, Functional, binding_of
from opgraft.binding.torch_library import direct_register_custom_op
from opgraft.compilation.nodes import form_of
from opgraft.ops.attention.node import op_of_node
from opgraft.registry.decision import Candidate, Decision
from opgraft.registry.op_classes import location_of
from torch import Tensor, fx

_KERNELS: dict[tuple[str, Callable[..., Any]], Callable[..., Any]] = {}
"""By form and kernel: the torch op that runs the kernel."""


def lower(module: fx.GraphModule) -> tuple[fx.GraphModule, Counter[str]]:
    """Return a graph without semantic nodes, over the same tensors.

    A native definition is inlined: compilers see the operators, and may fuse them. A kernel stays
    one node, as the kernel may decide by values that a compiler does not have. A kernel with a
    ``compiled`` function is inlined by that function.

    Returns:
        The graph, and the number of former semantic nodes by the name of the form.

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
        if form is None:
            node.target = op_of_node(node) or node.target
        else:
            node.target = _target(form)
            counts[form.name] += 1
    # The new module takes over only the tensors in use.
    return fx.GraphModule(module, graph), counts


class Lowering(NamedTuple):
    """The lowering of one form.

    Attributes:
        runs: the choice of the code for the form.
        nodes: the number of nodes.
    """

    runs: FormChoice
    nodes: int

    @property
    def form(self) -> Functional[..., Any]:
        """The form of the nodes."""
        return self.runs.form

    @property
    def chosen(self) -> str:
        """The name of the kernel in the place of the nodes."""
        inlined = ", inlined" if self.runs.is_native else ""
        return f"{self.runs.kernel_name}{inlined}"

    @property
    def decision(self) -> Decision:
        """The record of the choice."""
        kernel = self._kernel
        binding = self.runs.binding
        why = "no provider's kernel comes as this form here"
        if kernel:
            why = "the form of the kernel that is bound"
        place = location_of(kernel or self.form.native)
        candidate = Candidate(self.chosen, True, why, self.runs.provider, place)
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        reason = f"{nodes}; {why}"
        kernels = binding.kernel.decision
        parts = (kernels, binding.replacement.decision)
        subject = f"lowering of {self.form.name}"
        return Decision(subject, self.chosen, reason, (candidate,), kernels.setting, parts)

    @property
    def _kernel(self) -> Callable[..., Any] | None:
        return self.runs.binding.kernel.winner.functional(self.form.name)


def lowerings_of(counts: Mapping[str, int]) -> tuple[Lowering, ...]:
    """Return the record of each form, and register the torch ops for kernels.

    Args:
        counts: the number of nodes by the name of the form.

    Raises:
        OpgraftError: as constructing the op of a form would.
    """
    # Registers the forms that models seldom have.
    if counts.keys() - FUNCTIONALS:
        import opgraft.functional  # noqa: F401
    for name in counts:
        _target(FUNCTIONALS[name])
    return tuple(Lowering(choice_of(FUNCTIONALS[name]), count) for name, count in counts.items())


def _target(form: Functional[..., Any]) -> Callable[..., Any]:
    """Return the function in the place of the nodes of a form."""
    winner = binding_of(form).kernel.winner
    kernel = winner.functional(form.name)
    if kernel is None:
        return _inlined(form.native)
    traced = winner.traced(form.name)
    return _as_op(form, kernel) if traced is None else _inlined(traced)


@functools.cache
def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inlined(*args: Any, **kwargs: Any) -> Any:
        return _contiguous(function(*args, **kwargs))

    return inlined


def _as_op(form: Functional[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the torch op that runs one kernel of a form, and register the op at the first use."""
    known = _KERNELS.get((form.name, kernel))
    if known is not None:
        return known

    @functools.wraps(form.native)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _contiguous(kernel(*args, **kwargs))

    # The name is the same in every process, so a package of the cache finds the op.
    digest = hashlib.sha256(f"{kernel.__module__}.{kernel.__qualname__}".encode()).hexdigest()
    name = f"{form.name}_of_{digest[:8]}"
    direct_register_custom_op(name, run, form.mutates, form.fake)
    made: Callable[..., Any] = getattr(torch.ops.opgraft, name).default
    _KERNELS[form.name, kernel] = made
    return made


def _contiguous(result: Any) -> Any:
    """Return results with the strides of the registered op's results: the graph rests on these."""
    if isinstance(result, Tensor):
        return result.contiguous()
    if isinstance(result, Sequence):
        return tuple(each.contiguous() for each in result)
    return result
