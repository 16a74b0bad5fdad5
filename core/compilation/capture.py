"""Capture: trace a model into one graph for any size of the batch, with semantic nodes."""

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
from opgraft.compilation.inputs import ExpectedInput, Signature
from opgraft.compilation.writes import is_written, mark_written
from opgraft.errors import CompilationError, ConfigError
from opgraft.ops.linear.modules import Linear
from opgraft.registry.decision import Candidate, Decision
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

BATCH = "batch"
"""The name of the dynamic size, unless ``dynamic_shapes`` names others."""


class CapturedGraph(NamedTuple):
    """A graph over the parameters of a model.

    Attributes:
        module: the graph. The placeholders are the tensors among the inputs; the outputs are flat,
            without constants.
        signature: the inputs and results of the graph.
        decision: the choice of the way to the graph.
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
"""The ways to a graph in order of preference: the name, strict export or not, a description."""


def capture(model: nn.Module, example: Example, ways: Sequence[Way] = WAYS) -> CapturedGraph:
    """Capture a model, by ``torch.export`` or, if that fails, by Dynamo.

    Args:
        model: in evaluation mode.
        example: the arguments of a call.
        ways: the ways to try, in order.

    Raises:
        CompilationError: all ways fail; the message has the reason of each.
    """
    with _arguments_by_name(model, example.kwargs):
        shapes = _dynamic_shapes(model, example)
        return _captured(model, example, ways, shapes)


@contextmanager
def _arguments_by_name(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, name the arguments of ``**kwargs`` in the signature of a model.

    Export gives dynamic sizes only to named arguments.
    """
    forward = model.forward
    own = "forward" in vars(model)
    call = inspect.signature(forward)
    known = [each for each in call.parameters.values() if each.kind is not each.VAR_KEYWORD]
    further = []
    for name in kwargs:
        if name not in call.parameters:
            further.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
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
        # Models and compilers may raise anything.
        except Exception as error:
            failed.append((name, described(error)))
            continue
        decision = _decision(model, name, why, failed)
        return _over_parameters(model, program, decision)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failed)
    raise CompilationError(
        f"{type(model).__name__} cannot be captured as one graph. {reasons}. Next: change what the "
        "message names, such as a branch on values of tensors, or run the model without "
        "opgraft.compile"
    )


def _linear_in_graph(
    self: Linear, input: Tensor, residual: Tensor | None = None, *, functional: Any = NATIVE
) -> Tensor:
    """Compute a linear map by the form, or by the operator over a packed weight."""
    given: dict[str, Any] = {
        "activation": self.activation,
        "residual": residual,
        "kernel": functional.linear,
    }
    return self.quant_method.apply(self, input, self.bias, **given)


_NATIVES: Mapping[type, Callable[..., Any]] = {Linear: _linear_in_graph}


def _decision(model: nn.Module, name: str, why: str, failed: Sequence[tuple[str, str]]) -> Decision:
    rejected = tuple(Candidate(way, False, f"failed: {reason}") for way, reason in failed)
    tried = {name, *dict(failed)}
    rest = tuple(Candidate(way, False, "not needed") for way, _, _ in WAYS if way not in tried)
    reason = f"{', '.join(dict(failed))} cannot capture it" if failed else why
    candidates = (Candidate(name, True, why), *rejected, *rest)
    return Decision(f"capture of {type(model).__name__}", name, reason, candidates)


def _dynamic_shapes(model: nn.Module, example: Example) -> Any:
    """Return the dynamic sizes for ``torch.export``: one entry for each argument.

    Raises:
        CompilationError: the example has a batch of one, which compilers take for a constant; or
            the example does not fit the model.
        ConfigError: the settings give bounds to the sizes, and the dynamic size has no name, or
            narrower bounds.
    """
    shapes = example.dynamic_shapes
    sizes = example.sizes
    if shapes is not None:
        return _bounded(shapes, sizes) if sizes else shapes
    batch = _within(Dim(BATCH), sizes) if sizes else Dim(BATCH)
    call = inspect.signature(model.forward)
    try:
        arguments = call.bind(*example.args, **example.kwargs).arguments
    except TypeError as error:
        name = type(model).__name__
        if not example.args and not example.kwargs:
            raise CompilationError(
                f"args= is missing: {name}.forward is captured by an example of a call. Give what "
                "the model is called with as a tuple, as in opgraft.compile(model, args=(x,)), and "
                f"keyword arguments as kwargs={{...}} ({error})"
            ) from error
        raise CompilationError(
            f"the example is no call of {name}.forward: {error}: give by args, a tuple, and kwargs "
            "what the model is called with"
        ) from error
    return tuple(_of_batch(value, batch) for value in arguments.values())


def _bounded(shapes: Any, sizes: range) -> Any:
    """Return dynamic sizes, nested as they are, with bounds."""
    if isinstance(shapes, Mapping):
        return {name: _bounded(each, sizes) for name, each in shapes.items()}
    if isinstance(shapes, (tuple, list)):
        return type(shapes)(_bounded(each, sizes) for each in shapes)
    if shapes is None or isinstance(shapes, int):
        return shapes
    return _within(shapes, sizes)


def _within(dim: Any, sizes: range) -> Any:
    """Return a dynamic size with bounds.

    Raises:
        ConfigError: the size has no name, or narrower bounds.
    """
    low: Any = getattr(dim, "min", None)
    high: Any = getattr(dim, "max", None)
    is_bounded = isinstance(dim, Dim) and low is not None and high is not None
    if not is_bounded or sizes[0] < low or sizes[-1] > high:
        raise ConfigError(
            f"compilation_config.compile_ranges has {sizes[0]}-{sizes[-1]}, and dynamic_shapes say "
            f"{dim} of the size: name it there, by torch.export.Dim, and leave the range within "
            "its bounds"
        )
    return Dim(dim.__name__, min=sizes[0], max=sizes[-1])


def _of_batch(value: Any, batch: Any) -> Any:
    """Return the dynamic sizes of an argument: the first dimension of each tensor inside."""
    if isinstance(value, Mapping):
        return {name: _of_batch(each, batch) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_of_batch(each, batch) for each in value)
    if not isinstance(value, Tensor) or not value.dim():
        return None
    if value.shape[0] < 2:
        raise CompilationError(
            f"an example input has the shape {tuple(value.shape)}, and compilers take a batch of "
            "one for a constant: give examples of two rows or more, or say by dynamic_shapes which "
            "sizes are dynamic"
        )
    return {0: batch}


def _over_parameters(
    model: nn.Module, program: ExportedProgram, decision: Decision
) -> CapturedGraph:
    """Return the graph of a program over the model's own parameters and buffers.

    An exported program takes parameters and buffers as inputs. The graph holds them as attributes.
    """
    tensors, constants, names = _inputs_of(program)
    graph, held = _graph_over_parameters(model, program, names)
    results = _take_constants(graph)
    mark_written(graph)
    module = fx.GraphModule(held, graph)
    spec = program.call_spec
    signature = Signature(
        tensors,
        constants,
        spec.in_spec,
        spec.out_spec,
        _expected_of(module),
        _bounds(program),
        results,
    )
    return CapturedGraph(module, signature, decision)


def _inputs_of(program: ExportedProgram) -> tuple[tuple[int, ...], dict[int, Any], set[str]]:
    """Return the inputs of a call among all inputs of a program.

    Returns:
        The places of tensors, the constants by place, and the names of the tensors' nodes.

    Raises:
        CompilationError: an input is neither a tensor nor a constant.
    """
    specs = program.graph_signature.input_specs
    given = [spec.arg for spec in specs if spec.kind is InputKind.USER_INPUT]
    tensors = []
    constants = {}
    names = set()
    for place, argument in enumerate(given):
        if isinstance(argument, TensorArgument):
            tensors.append(place)
            names.add(argument.name)
        elif isinstance(argument, ConstantArgument):
            constants[place] = argument.value
        else:
            raise CompilationError(
                "an input of the model is neither a tensor nor a constant: give it as one of these"
            )
    return tuple(tensors), constants, names


def _graph_over_parameters(
    model: nn.Module, program: ExportedProgram, names: set[str]
) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Copy the graph of a program. Only inputs with one of the names stay inputs.

    Returns:
        The graph, and the tensors in the place of the other inputs, by attribute.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    held: dict[str, Tensor] = {}
    targets = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    # The inputs of the call come first: backends expect all placeholders before other nodes.
    for node in placeholders:
        if node.name in names:
            copies[node] = graph.node_copy(node)
    for node in placeholders:
        if node.name not in names and node.users:
            target = targets[node.name]
            held[target] = _tensor_of_target(model, program, target)
            copies[node] = graph.get_attr(target)
            copies[node].meta = dict(node.meta)
    for node in program.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph, held


def _expected_of(module: fx.GraphModule) -> tuple[ExpectedInput, ...]:
    """Return a description of each input of a graph."""
    found = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        value: Tensor = node.meta["val"]
        sizes = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        found.append(ExpectedInput(node.name, value.dtype, value.device, sizes, is_written(node)))
    return tuple(found)


def _take_constants(graph: fx.Graph) -> dict[int, Any]:
    """Take constants, such as texts, out of the results of a graph, and return them by place.

    Backends return constants as tensors, or not at all.
    """
    (end,) = (node for node in graph.nodes if node.op == "output")
    flat = end.args[0]
    end.args = (tuple(each for each in flat if isinstance(each, fx.Node)),)
    return {place: each for place, each in enumerate(flat) if not isinstance(each, fx.Node)}


def _bounds(program: ExportedProgram) -> dict[str, tuple[int, int]]:
    """Return the smallest and largest value of dynamic sizes with bounds, by name."""
    found = {}
    for size, allowed in program.range_constraints.items():
        # Export starts at 2, as it takes 1 for a constant. The code serves 1 as well.
        low = 1 if allowed.lower <= 2 else int(allowed.lower)
        high = min(allowed.upper, sys.maxsize)
        if (low, high) != (1, sys.maxsize):
            found[str(size)] = (low, int(high))
    return found


def _tensor_of_target(model: nn.Module, program: ExportedProgram, target: str) -> Tensor:
    """Return a tensor of the model, or a tensor that the program made of a constant in code."""
    path, _, name = target.rpartition(".")
    try:
        found = getattr(model.get_submodule(path), name)
    except AttributeError:
        found = program.constants[target]
    return cast(Tensor, found)
