"""The computation of a module on tensors of given shapes, as an expression.

Some forwards take the shape of their input apart, which symbolic tracing cannot follow. So ``make_fx`` traces them with
tensors of every number of dimensions and dtype that models have, down to torch's own operations, and an op that they
may be is traced with the same. A forward that looks at anything else, such as a size, is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping
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
Found = TypeVar("Found")
Function = TypeVar("Function", bound=Callable[..., Any])

_SETTING = (int, float, str, type(None))
_OWN = vars(nn.Module()).keys() - {"training"}

USUAL = (2, 3)
"""Shape of an input before its last dimension, which every module takes."""

SHAPES = (USUAL, (), (6,), (1, 1), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6))
"""Shapes of one to six dimensions, which a forward may count, and with dimensions of one element, which torch drops."""

DTYPES = (torch.float16, torch.bfloat16, torch.float64)
"""Dtypes beside float32 on which a forward might branch."""

_FEW = 4


def traced_module(
    module: nn.Module, parameters: tuple[str, ...], *arguments: Shape
) -> Expression | None:
    """Return the expression of a forward; ``None`` if it has none, another one in training, or does more than compute.

    The arguments, of the given shapes, are ``"argument 0"`` and so on; the parameters have their names. The expression
    is the same in all ``DTYPES`` and in float32; the others are tried if the forward asks for a dtype.
    """
    found: list[Expression] = []
    if side_effect_of(module):
        return None
    shapes = {name: module.get_parameter(name).shape for name in parameters}
    questions = NoQuestions()
    trials = [(training, torch.float32) for training in (False, True)]
    for training, dtype in trials:
        twin = detached(module)  # what tracing sets on the module stays off the model
        twin.__dict__["training"] = training
        before = detached(twin)
        call = functools.partial(_watched_call, questions, twin)
        try:
            found.append(traced_function(call, shapes, *arguments, dtype=dtype))
        except Exception:  # that it has no expression, or whatever code of the model's author raises when it is traced
            return None
        if changed_attribute(twin, before) or found[-1] != found[0]:
            return None
        if questions.dtype_asked and len(trials) == 2:
            trials += product((False, True), DTYPES)
    return found[0]


def kind_of(module: nn.Module) -> Hashable:
    """Describe all that the result of a forward without children may depend on, save for numbers in tensors.

    For as long as the module and its attributes live.
    """
    settings = [
        (k, type(v), v if isinstance(v, _SETTING) else id(v))
        for k, v in vars(module).items()
        if k not in _OWN
    ]
    tensors = [
        (
            name,
            None if tensor is None else (type(tensor), tensor.shape, tensor.dtype, tensor.device),
        )
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    return type(module), *settings, *tensors, *module._modules.items()


def once_per_kind(
    recognise: Callable[[nn.Module], Found], kind_of: Callable[[nn.Module], Hashable] = kind_of
) -> Callable[[nn.Module], Found]:
    """Make a recogniser that is asked once for modules of a kind. For use in one walk over a model."""
    found: dict[Hashable, Found] = {}

    def recognised(module: nn.Module) -> Found:
        kind = kind_of(module)
        if kind not in found:
            found[kind] = recognise(module)
        return found[kind]

    return recognised


def once_per_function(recognise: Callable[[Function], Found]) -> Callable[[Function], Found]:
    """Make a recogniser that is asked once for each function, as long as that lives: what it computes does not change.

    Nothing that is selected or activated has a part in it, so that nothing resets it.
    """
    found: weakref.WeakKeyDictionary[Function, Found] = weakref.WeakKeyDictionary()

    @functools.wraps(recognise)
    def recognised(function: Function) -> Found:
        if function not in found:
            found[function] = recognise(function)
        return found[function]

    return recognised


def refuses(module: nn.Module, parameters: tuple[str, ...], *arguments: Shape) -> bool:
    """Return whether a forward raises on such arguments, of which an op may take more than the module.

    A forward that takes few rows takes many too, so it is not run on many.
    """
    zeros = {name: torch.zeros(module.get_parameter(name).shape) for name in parameters}
    try:
        with torch.no_grad():
            _call(
                detached(module),
                zeros,
                *(torch.zeros(*(min(n, _FEW) for n in rows), n) for *rows, n in arguments),
            )
    except Exception:  # whatever code of the model's author raises
        return True
    return False


def traced_function(
    function: Callable[..., Tensor],
    shapes: Mapping[str, Shape],
    *arguments: Shape,
    dtype: torch.dtype = torch.float32,
) -> Expression:
    """Return the expression of a function of named parameters, given as a mapping, and of arguments, all of a dtype.

    Raises:
        NotExpressible: it uses other operations, or returns no tensor.
    """
    names = [*shapes, *(f"argument {i}" for i in range(len(arguments)))]

    def of_seeds(*seeds: Tensor) -> Tensor:
        # Made while it is traced, tensors of any size take no memory.
        tensors = [
            seed.new_empty(shape)
            for seed, shape in zip(seeds, (*shapes.values(), *arguments), strict=True)
        ]
        return function(dict(zip(shapes, tensors, strict=False)), *tensors[len(shapes) :])

    graph = make_fx(of_seeds, tracing_mode="fake")(
        *(torch.empty(0, dtype=dtype) for _ in names)
    ).graph
    values: dict[fx.Node, Expression] = {}
    for seed, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        values.update(dict.fromkeys((seed, *seed.users), name))
    for node in graph.nodes:
        if node.op == "output":
            result: Any = node.args[0]
            return tuple(result.meta["val"].shape), values[result]
        if node not in values:
            values[node] = _value(node, values, dtype)
    raise NotExpressible("it returns nothing")


def _call(module: nn.Module, parameters: Mapping[str, Tensor], *arguments: Tensor) -> Tensor:
    out: Tensor = functional_call(module, dict(parameters), arguments)
    return out


def _watched_call(
    questions: NoQuestions, module: nn.Module, parameters: Mapping[str, Tensor], *arguments: Tensor
) -> Tensor:
    with questions:
        return _call(module, parameters, *arguments)


def _value(node: fx.Node, values: dict[fx.Node, Expression], dtype: torch.dtype) -> Expression:
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    args: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if name in _VIEWS:
        source: Any = node.args[0]
        former, shape = source.meta["val"].shape, node.meta["val"].shape
        if name == "squeeze" and shape[-1:] == former[-1:]:  # over which means are taken
            return args[0]
        return _view(args[0], _grouped(former), _grouped(shape))
    if (
        name == "_to_copy"
        and kwargs.keys() == {"dtype"}
        and kwargs["dtype"] in (torch.float32, dtype)
    ):
        return args[0]  # as in ``expressions``, casts to float32 and back do nothing
    if name in _MATRICES:
        return _MATRICES[name](*args, **kwargs)
    if name not in METHODS:
        raise NotExpressible(f"it uses {name}")
    return METHODS[name](*args, **kwargs)


def _grouped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of one element, but for the last two, which may be groups and their elements."""
    return (*(size for size in shape[:-2] if size != 1), *shape[-2:])


def _view(a: Expression, former: tuple[int, ...], shape: tuple[int, ...]) -> Expression:
    """View an expression. On a product of elements and what groups have in common, a view back undoes others."""
    if shape == former:
        return a
    if len(shape) > len(former) or a[0] not in ("view", "product"):
        return ("view", shape, a)
    factors = (
        [a]
        if a[0] == "view"
        else [base for base, exponent in a[2] if exponent == 1 and base[0] == "view"]
    )
    if not factors:
        return ("view", shape, a)
    rest = METHODS["mul"](a, product_form(*(METHODS["pow"](factor, -1) for factor in factors)))
    return product_form(rest, *(factor[2] for factor in factors))


def _transposed(a: Expression) -> Expression:
    return a[1] if a[0] == "t" else ("t", a)


_VIEWS = ("view", "_unsafe_view", "squeeze")
_MATRICES: Mapping[str, Callable[..., Expression]] = {
    "t": _transposed,
    "addmm": lambda bias, a, b: ("addmm", bias, a, b),
}
