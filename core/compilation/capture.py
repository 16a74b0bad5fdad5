"""Capture: a model as one graph for any size of the batch, whose ops are semantic nodes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from opgraft.base.text import described
from opgraft.binding.derivation import NATIVE
from opgraft.binding.semantic import semantic
from opgraft.compilation.example import Example
from opgraft.compilation.inputs import Expected, Signature
from opgraft.compilation.writes import is_written, mark_written
from opgraft.errors import CompilationError, ConfigError
from opgraft.ops.linear.modules import Linear
from opgraft.registry.decision import Candidate, Decision
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

BATCH = "batch"
"""The name of the size that is dynamic where nothing else is asked for."""


class CapturedGraph(NamedTuple):
    """A graph over the parameters of a model.

    Attributes:
        module: the graph; its placeholders are the tensors among the inputs, its outputs are flat, without constants.
        signature: how it is called.
        decision: who captured it, and why.
    """

    module: fx.GraphModule
    signature: Signature
    decision: Decision


Way = tuple[str, bool, str]

DYNAMO: Way = ("Dynamo", True, "it reads the model's bytecode: torch.export, strict")
WAYS: tuple[Way, ...] = (
    (
        "torch.export",
        False,
        "it runs the model's Python on tensors without values, the fastest way to a graph",
    ),
    DYNAMO,
)
"""The ways to a graph in the order in which they are tried: name, whether export is strict, what it does."""


def capture(model: nn.Module, example: Example, ways: Sequence[Way] = WAYS) -> CapturedGraph:
    """Capture ``model``, by ``torch.export`` or, where that cannot, by Dynamo, as far as these are among ``ways``.

    Raises:
        CompilationError: none can; the message has the reasons of each.
    """
    with _arguments_by_name(model, example.kwargs):
        return _captured(model, example, ways, _dynamic_shapes(model, example))


@contextmanager
def _arguments_by_name(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Have the signature of a model name what it takes by ``**kwargs``: export gives no sizes to what that has not."""
    forward, own = model.forward, "forward" in vars(model)
    call = inspect.signature(forward)
    known = [each for each in call.parameters.values() if each.kind is not each.VAR_KEYWORD]
    further = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        for name in kwargs
        if name not in call.parameters
    ]
    if not further or len(known) == len(call.parameters):
        yield
        return

    @functools.wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    vars(named)["__signature__"] = call.replace(parameters=[*known, *further])
    vars(model)["forward"] = named
    try:
        yield
    finally:
        del vars(model)["forward"]
        if own:
            vars(model)["forward"] = forward


def _captured(
    model: nn.Module, example: Example, ways: Sequence[Way], shapes: Any
) -> CapturedGraph:
    failed: list[tuple[str, str]] = []
    for name, strict, why in ways:
        try:
            with torch.no_grad(), semantic(model, _NATIVES):
                program = torch.export.export(
                    model, example.args, dict(example.kwargs), dynamic_shapes=shapes, strict=strict
                )
        except Exception as error:  # whatever code of models and compilers raises
            failed.append((name, described(error)))
            continue
        return _over_parameters(model, program, _decision(model, name, why, failed))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failed)
    raise CompilationError(
        f"{type(model).__name__} cannot be captured as one graph. {reasons}. Next: change what the message names, such "
        "as a branch on values of tensors, or run the model without opgraft.compile"
    )


def _linear(
    self: Linear, input: Tensor, residual: Tensor | None = None, *, functional: Any = NATIVE
) -> Tensor:
    """Map by the form, or by the operator over a weight that is packed."""
    given: dict[str, Any] = {
        "activation": self.activation,
        "residual": residual,
        "kernel": functional.linear,
    }
    return self.quant_method.apply(self, input, self.bias, **given)


_NATIVES: Mapping[type, Callable[..., Any]] = {Linear: _linear}


def _decision(model: nn.Module, name: str, why: str, failed: Sequence[tuple[str, str]]) -> Decision:
    rejected = tuple(Candidate(way, False, f"failed: {reason}") for way, reason in failed)
    tried = {name, *dict(failed)}
    rest = tuple(Candidate(way, False, "not needed") for way, _, _ in WAYS if way not in tried)
    reason = f"{', '.join(dict(failed))} cannot capture it" if failed else why
    return Decision(
        f"capture of {type(model).__name__}",
        name,
        reason,
        (Candidate(name, True, why), *rejected, *rest),
    )


def _dynamic_shapes(model: nn.Module, example: Example) -> Any:
    """Return the dynamic sizes as ``torch.export`` takes them, one entry for each argument.

    Raises:
        CompilationError: a batch of one, which compilers take for a constant; or the example does not fit the model.
        ConfigError: the sizes are to be within bounds, and the dynamic size has no name, or others.
    """
    if example.dynamic_shapes is not None:
        return (
            _bounded(example.dynamic_shapes, example.sizes)
            if example.sizes
            else example.dynamic_shapes
        )
    batch = _within(Dim(BATCH), example.sizes) if example.sizes else Dim(BATCH)
    try:
        arguments = inspect.signature(model.forward).bind(*example.args, **example.kwargs).arguments
    except TypeError as error:
        name = type(model).__name__
        if not example.args and not example.kwargs:
            raise CompilationError(
                f"args= is missing: {name}.forward is captured by an example of a call. Give what the "
                "model is called with as a tuple, as in opgraft.compile(model, args=(x,)), and "
                f"keyword arguments as kwargs={{...}} ({error})"
            ) from error
        raise CompilationError(
            f"the example is no call of {name}.forward: {error}: give by args, a tuple, and kwargs "
            "what the model is called with"
        ) from error
    return tuple(_of_batch(value, batch) for value in arguments.values())


def _bounded(shapes: Any, sizes: range) -> Any:
    """Give bounds to dynamic sizes, as deep as they are nested."""
    if isinstance(shapes, Mapping):
        return {name: _bounded(each, sizes) for name, each in shapes.items()}
    if isinstance(shapes, (tuple, list)):
        return type(shapes)(_bounded(each, sizes) for each in shapes)
    return shapes if shapes is None or isinstance(shapes, int) else _within(shapes, sizes)


def _within(dim: Any, sizes: range) -> Any:
    """Give bounds to a dynamic size.

    Raises:
        ConfigError: it has no name, or bounds that leave out some of the sizes.
    """
    low, high = getattr(dim, "min", None), getattr(dim, "max", None)
    if (
        low is None
        or high is None
        or not isinstance(dim, Dim)
        or sizes[0] < low
        or sizes[-1] > high
    ):
        raise ConfigError(
            f"compilation_config.compile_ranges has {sizes[0]}-{sizes[-1]}, and dynamic_shapes say {dim} of the size: "
            "name it there, by torch.export.Dim, and leave the range within its bounds"
        )
    return Dim(dim.__name__, min=sizes[0], max=sizes[-1])


def _of_batch(value: Any, batch: Any) -> Any:
    """Say of an argument, as deep as it is nested, that the first dimension of each tensor is the batch."""
    if isinstance(value, Mapping):
        return {name: _of_batch(each, batch) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_of_batch(each, batch) for each in value)
    if not isinstance(value, Tensor) or not value.dim():
        return None
    if value.shape[0] < 2:
        raise CompilationError(
            f"an example input has the shape {tuple(value.shape)}, and compilers take a batch of one for a constant: "
            "give examples of two rows or more, or say by dynamic_shapes which sizes are dynamic"
        )
    return {0: batch}


def _over_parameters(
    model: nn.Module, program: ExportedProgram, decision: Decision
) -> CapturedGraph:
    """Turn those inputs of a program that are parameters or buffers into attributes: the model's own tensors."""
    graph, copies = fx.Graph(), {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    nodes = list(program.graph.nodes)
    given = [spec for spec in specs.values() if spec.kind is InputKind.USER_INPUT]
    tensors = [place for place, spec in enumerate(given) if isinstance(spec.arg, TensorArgument)]
    constants = {
        place: spec.arg.value
        for place, spec in enumerate(given)
        if isinstance(spec.arg, ConstantArgument)
    }
    if len(tensors) + len(constants) < len(given):
        raise CompilationError(
            "an input of the model is neither a tensor nor a constant: give it as one of these"
        )
    held: dict[str, Tensor] = {}
    names = {given[place].arg.name for place in tensors}
    for node in (node for node in nodes if node.op == "placeholder" and node.name in names):
        copies[node] = graph.node_copy(node)
    for node in (
        node for node in nodes if node.op == "placeholder" and node.name not in names and node.users
    ):
        target = str(specs[node.name].target)
        held[target] = _held(model, program, target)
        copies[node] = graph.get_attr(target)
        copies[node].meta = dict(node.meta)
    for node in (node for node in nodes if node.op != "placeholder"):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = _without_constants(graph)
    mark_written(graph)
    spec = program.call_spec
    module = fx.GraphModule(held, graph)
    bounds = _bounds(program)
    signature = Signature(
        tuple(tensors),
        constants,
        spec.in_spec,
        spec.out_spec,
        _expected_of(module),
        bounds,
        results,
    )
    return CapturedGraph(module, signature, decision)


def _expected_of(module: fx.GraphModule) -> tuple[Expected, ...]:
    """Return the tensors that a graph takes."""
    found = []
    for node in (node for node in module.graph.nodes if node.op == "placeholder"):
        value: Tensor = node.meta["val"]
        sizes = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        found.append(Expected(node.name, value.dtype, value.device, sizes, is_written(node)))
    return tuple(found)


def _without_constants(graph: fx.Graph) -> dict[int, Any]:
    """Take what is no node, as a text, out of the results of a graph, which backends return as tensors or not at all.

    Returns it by its place among the results.
    """
    (end,) = (node for node in graph.nodes if node.op == "output")
    flat = end.args[0]
    end.args = (tuple(each for each in flat if isinstance(each, fx.Node)),)
    return {place: each for place, each in enumerate(flat) if not isinstance(each, fx.Node)}


def _bounds(program: ExportedProgram) -> dict[str, tuple[int, int]]:
    """Return the bounds of the dynamic sizes of a program that have some, by name; from 2 on is from 1 on."""
    found = {}
    for size, allowed in program.range_constraints.items():
        low = 1 if allowed.lower <= 2 else int(allowed.lower)
        high = min(allowed.upper, sys.maxsize)
        if (low, high) != (1, sys.maxsize):
            found[str(size)] = (low, int(high))
    return found


def _held(model: nn.Module, program: ExportedProgram, target: str) -> Tensor:
    """Return a tensor of the model, or one that the program made of a constant in its code."""
    path, _, name = target.rpartition(".")
    try:
        found = getattr(model.get_submodule(path), name)
    except AttributeError:
        found = program.constants[target]
    return cast(Tensor, found)
