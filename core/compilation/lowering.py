"""Lowering: each semantic node becomes the kernel of its op's selected provider, or the native definition inlined."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from opgraft.binding.form_choice import FormChoice, choice_of
from opgraft.binding.functional import FUNCTIONALS, Functional, binding_of
from opgraft.compilation.nodes import form_of
from opgraft.ops.attention.node import op_of_node
from opgraft.registry.decision import Candidate, Decision
from opgraft.registry.op_classes import location_of
from opgraft.torch_library import direct_register_custom_op
from torch import Tensor, fx

_KERNELS: dict[tuple[str, Callable[..., Any]], Callable[..., Any]] = {}
"""By form and kernel: the torch op that runs the kernel."""


def lower(module: fx.GraphModule) -> tuple[fx.GraphModule, Counter[str]]:
    """Return a graph without semantic nodes, over the same tensors, and by the name of a form how many it had.

    Of a native definition, compilers see the operators and may fuse them with others. A kernel stays one node, whatever
    it is made of, as it may choose by values that a compiler does not have; unless it says what compilers may trace.

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
    return fx.GraphModule(module, graph), counts  # which takes over only the tensors that are used


class Lowering(NamedTuple):
    """The nodes of one form, and what they became.

    Attributes:
        runs: what the form runs.
        nodes: how many there were.
    """

    runs: FormChoice
    nodes: int

    @property
    def form(self) -> Functional[..., Any]:
        """The form that the nodes call."""
        return self.runs.form

    @property
    def chosen(self) -> str:
        """The kernel."""
        return f"{self.runs.kernel_name}{', inlined' if self.runs.is_native else ''}"

    @property
    def decision(self) -> Decision:
        """The choice, with its reasons."""
        kernel, binding = self._kernel, self.runs.binding
        why = (
            "the form of the kernel that is bound"
            if kernel
            else "no provider's kernel comes as this form here"
        )
        candidate = Candidate(
            self.chosen, True, why, self.runs.provider, location_of(kernel or self.form.native)
        )
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        kernels, classes = binding.kernel.decision, binding.replacement.decision
        subject = f"lowering of {self.form.name}"
        return Decision(
            subject,
            self.chosen,
            f"{nodes}; {why}",
            (candidate,),
            kernels.setting,
            (kernels, classes),
        )

    @property
    def _kernel(self) -> Callable[..., Any] | None:
        return self.runs.binding.kernel.winner.functional(self.form.name)


def lowerings_of(counts: Mapping[str, int]) -> tuple[Lowering, ...]:
    """Return for each form what so many nodes of it have become; the ops that run kernels are registered.

    Raises:
        OpgraftError: as constructing the op of a form would.
    """
    if counts.keys() - FUNCTIONALS:
        import opgraft.functional  # noqa: F401  # registers those that models seldom have
    for name in counts:
        _target(FUNCTIONALS[name])
    return tuple(Lowering(choice_of(FUNCTIONALS[name]), count) for name, count in counts.items())


def _target(form: Functional[..., Any]) -> Callable[..., Any]:
    winner = binding_of(form).kernel.winner
    kernel = winner.functional(form.name)
    traced = form.native if kernel is None else winner.compiled(form.name)
    return _as_op(form, kernel) if traced is None else _inlined(traced)  # type: ignore[arg-type]  # one of them is there


@functools.cache
def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inlined(*args: Any, **kwargs: Any) -> Any:
        return _contiguous(function(*args, **kwargs))

    return inlined


def _as_op(form: Functional[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the torch op that runs one kernel of a form, registered when it is first asked for."""
    if (form.name, kernel) not in _KERNELS:

        @functools.wraps(form.native)
        def run(*args: Any, **kwargs: Any) -> Any:
            return _contiguous(kernel(*args, **kwargs))

        # The name says whose it is, the same in every process.
        whose = hashlib.sha256(f"{kernel.__module__}.{kernel.__qualname__}".encode()).hexdigest()[
            :8
        ]
        name = f"{form.name}_of_{whose}"
        direct_register_custom_op(name, run, form.mutates, form.fake)
        _KERNELS[form.name, kernel] = getattr(torch.ops.opgraft, name).default
    return _KERNELS[form.name, kernel]


def _contiguous(result: Any) -> Any:
    """Return results as the registered op of a form returns them, on whose strides the graph rests."""
    if isinstance(result, Tensor):
        return result.contiguous()
    return tuple(each.contiguous() for each in result) if isinstance(result, Sequence) else result
