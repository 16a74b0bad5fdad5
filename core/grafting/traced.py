"""The computation of a module on tensors of given shapes, as an expression.

Symbolic tracing cannot follow a forward that takes the shape of its input apart. ``make_fx`` can:
the forward runs on tensors of every number of dimensions and dtype that models have, and the trace
consists of torch's own operations. A candidate op is traced with the same
tensors. A forward that looks at anything else, such as a size, is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import torch
from opgraft.grafting.expressions import METHODS, Expression, NotExpressible, product_form
from opgraft.grafting.questions import NoQuestions
from opgraft.grafting.side_effects import changed_attribute, detached, side_effect_of
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

Shape = tuple[int, ...]
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

_SETTING = (int, float, str, type(None))
_OWN = vars(nn.Module()).keys() - {"training"}

USUAL = (2, 3)
"""Shape of an input before the last dimension. Every module takes this shape."""

SHAPES = (USUAL, (), (6,), (1, 1), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6))
"""Shapes of one to six dimensions, as a forward may count dimensions.

torch drops dimensions of one element, so one shape has such dimensions.
"""

DTYPES = (torch.float16, torch.bfloat16, torch.float64)
"""Dtypes beside float32 on which a forward might branch."""

_FEW = 4


def traced_module(
    module: nn.Module, parameters: tuple[str, ...], *arguments: Shape
) -> Expression | None:
    """Return the expression of a forward for arguments of the given shapes.

    The arguments are ``"argument 0"`` and so on; the parameters have their names. If the forward
    asks for a dtype, all ``DTYPES`` are tried, too.

    Returns:
        The expression, the same in training and for every dtype. ``None`` if there is no such
        expression, or if the forward does more than compute.
    """
    if side_effect_of(module):
        return None

    shapes = {name: module.get_parameter(name).shape for name in parameters}
    questions = NoQuestions()
    trials = [(training, torch.float32) for training in (False, True)]
    first: Expression = None

    for training, dtype in trials:
        twin = detached(module)  # the forward may set attributes
        twin.__dict__["training"] = training
        before = detached(twin)
        call = functools.partial(_watched_call, questions, twin)
        try:
            expression = traced_function(call, shapes, *arguments, dtype=dtype)
        except Exception:  # code of the model's author may raise anything
            return None
        first = expression if first is None else first
        if changed_attribute(twin, before) or expression != first:
            return None
        if questions.dtype_asked and len(trials) == 2:
            trials += product((False, True), DTYPES)

    return first


def kind_of(module: nn.Module) -> Hashable:
    """Return a key that is equal for modules whose forwards differ in numbers of tensors only.

    For modules without children. The key is valid as long as the module and the attributes live.
    """
    settings = [
        (name, type(value), value if isinstance(value, _SETTING) else id(value))
        for name, value in vars(module).items()
        if name not in _OWN
    ]
    tensors = [
        (name, None if tensor is None else _kind_of_tensor(tensor))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    return type(module), *settings, *tensors, *module._modules.items()


def _kind_of_tensor(tensor: Tensor) -> Hashable:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device


def once_per_kind(
    recognise: Callable[[nn.Module], Result], kind_of: Callable[[nn.Module], Hashable] = kind_of
) -> Callable[[nn.Module], Result]:
    """Ask a recogniser once for modules of a kind. For use in one walk over a model."""
    known: dict[Hashable, Result] = {}

    def recognised(module: nn.Module) -> Result:
        kind = kind_of(module)
        if kind not in known:
            known[kind] = recognise(module)
        return known[kind]

    return recognised


def once_per_function(recognise: Callable[[Function], Result]) -> Callable[[Function], Result]:
    """Ask a recogniser once for each function, as long as the function lives.

    The answer depends on the function only, and on no selection or activation, so ``reset`` keeps
    the answers.
    """
    known: weakref.WeakKeyDictionary[Function, Result] = weakref.WeakKeyDictionary()

    @functools.wraps(recognise)
    def recognised(function: Function) -> Result:
        if function not in known:
            known[function] = recognise(function)
        return known[function]

    return recognised


def refuses(module: nn.Module, parameters: tuple[str, ...], *arguments: Shape) -> bool:
    """Return True if a forward raises on arguments of these shapes.

    An op may take more shapes than the module. A forward that takes few rows takes many rows too,
    so this call has few.
    """
    zeros = {name: torch.zeros(module.get_parameter(name).shape) for name in parameters}
    inputs = []

    for *rows, size in arguments:
        few = [min(count, _FEW) for count in rows]
        inputs.append(torch.zeros(*few, size))

    try:
        with torch.no_grad():
            _call(detached(module), zeros, *inputs)
    except Exception:  # code of the model's author may raise anything
        return True

    return False


def traced_function(
    function: Callable[..., Tensor],
    shapes: Mapping[str, Shape],
    *arguments: Shape,
    dtype: torch.dtype = torch.float32,
) -> Expression:
    """Return the expression of a function of a mapping of parameters, and of arguments.

    Args:
        function: to trace.
        shapes: of the parameters, by name.
        *arguments: the shapes of the arguments.
        dtype: of all tensors.

    Raises:
        NotExpressible: the function uses other operations, or returns no tensor.
    """
    names = [*shapes]
    names += [f"argument {number}" for number in range(len(arguments))]
    graph = _graph_of(function, shapes, arguments, dtype)
    inputs = graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Expression] = {}

    for seed, name in zip(inputs, names, strict=True):
        # The users of a seed are the tensors that tracing has made of it.
        values.update(dict.fromkeys((seed, *seed.users), name))

    for node in graph.nodes:
        if node.op == "output":
            result: Any = node.args[0]
            return tuple(result.meta["val"].shape), values[result]
        if node not in values:
            values[node] = _expression_of_node(node, values, dtype)

    raise NotExpressible("it returns nothing")


def _graph_of(
    function: Callable[..., Tensor],
    shapes: Mapping[str, Shape],
    arguments: Sequence[Shape],
    dtype: torch.dtype,
) -> fx.Graph:
    """Trace a function. The graph has an empty input, the seed, for each tensor."""
    sizes = (*shapes.values(), *arguments)

    def of_seeds(*seeds: Tensor) -> Tensor:
        # Tensors that are made while tracing take no memory, whatever their size.
        tensors = [seed.new_empty(shape) for seed, shape in zip(seeds, sizes, strict=True)]
        parameters = dict(zip(shapes, tensors, strict=False))
        return function(parameters, *tensors[len(shapes) :])

    seeds = [torch.empty(0, dtype=dtype) for _ in sizes]
    traced = make_fx(of_seeds, tracing_mode="fake")(*seeds)
    return traced.graph


def _call(module: nn.Module, parameters: Mapping[str, Tensor], *arguments: Tensor) -> Tensor:
    out: Tensor = functional_call(module, dict(parameters), arguments)
    return out


def _watched_call(
    questions: NoQuestions, module: nn.Module, parameters: Mapping[str, Tensor], *arguments: Tensor
) -> Tensor:
    with questions:
        return _call(module, parameters, *arguments)


def _expression_of_node(
    node: fx.Node, values: dict[fx.Node, Expression], dtype: torch.dtype
) -> Expression:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    args: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if name in _VIEWS:
        return _value_of_view(node, args[0])

    # As in ``expressions``, casts to float32 and back do nothing.
    casts = name == "_to_copy" and kwargs.keys() == {"dtype"}
    if casts and kwargs["dtype"] in (torch.float32, dtype):
        return args[0]
    if name in _MATRICES:
        return _MATRICES[name](*args, **kwargs)
    if name not in METHODS:
        raise NotExpressible(f"it uses {name}")

    return METHODS[name](*args, **kwargs)


def _value_of_view(node: fx.Node, viewed: Expression) -> Expression:
    source: Any = node.args[0]
    former = source.meta["val"].shape
    shape = node.meta["val"].shape
    squeezed = node.target.overloadpacket.__name__ == "squeeze"  # type: ignore[union-attr]
    # Means are taken over the last dimension, so a squeeze of any other one changes nothing.
    if squeezed and shape[-1:] == former[-1:]:
        return viewed
    return _view(viewed, _grouped(former), _grouped(shape))


def _grouped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without dimensions of one element, but with the last two dimensions.

    The last two dimensions may be groups, and the elements of a group.
    """
    return (*(size for size in shape[:-2] if size != 1), *shape[-2:])


def _view(a: Expression, former: tuple[int, ...], shape: tuple[int, ...]) -> Expression:
    """Return the expression of a view.

    If an expression is a product of a view and factors that groups have in common, then a view back
    undoes the former view.
    """
    if shape == former:
        return a
    if len(shape) > len(former) or a[0] not in ("view", "product"):
        return ("view", shape, a)

    factors = [(a, 1)] if a[0] == "view" else a[2]
    views = [base for base, exponent in factors if exponent == 1 and base[0] == "view"]
    if not views:
        return ("view", shape, a)

    # Take the views out of the product, and put the viewed expressions in.
    inverses = [METHODS["pow"](view, -1) for view in views]
    rest = METHODS["mul"](a, product_form(*inverses))
    viewed = [view[2] for view in views]
    return product_form(rest, *viewed)


def _transposed(a: Expression) -> Expression:
    return a[1] if a[0] == "t" else ("t", a)


_VIEWS = ("view", "_unsafe_view", "squeeze")
_MATRICES: Mapping[str, Callable[..., Expression]] = {
    "t": _transposed,
    "addmm": lambda bias, a, b: ("addmm", bias, a, b),
}
