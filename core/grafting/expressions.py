"""The computation of a leaf module, as a normal form that can be compared.

``torch.fx`` traces the module; the graph becomes one expression over its input ``"x"`` and its parameters ``"weight"``
and ``"bias"``, in which the order of factors and terms, the spelling (``square``, ``pow``, ``x * x``) and casts to
float32 and back no longer matter. Two modules with equal expressions compute the same in float32, up to rounding.

Expressions: a float; ``"x"``, ``"weight"`` or ``"bias"``; ``("product", coefficient, ((base, exponent), ...))``;
``("sum", constant, (term, ...))``; ``(function name, argument)``; ``("child", name, argument)`` for what a child makes
of an argument; ``("rows", size, argument)`` for what takes rows of that size only.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from opgraft.grafting.side_effects import changed_attribute, detached, side_effect_of
from torch import fx, nn

Expression = Any

_DTYPE = "dtype of a tensor"
_SYMBOLS = ("x", "weight", "bias")


class NotExpressible(Exception):  # noqa: N818  # a verdict, caught by the recogniser
    """The computation of a module has no expression; the message says why."""


def expression_of(module: nn.Module) -> Expression:
    """Return the expression of a leaf module's forward, the same in training and in evaluation.

    Raises:
        NotExpressible: it has another signature, depends on values or on the mode, or uses other operations.
    """
    in_eval, in_training = (_expression(_in_mode(module, training)) for training in (False, True))
    if in_eval != in_training:
        raise NotExpressible("it computes something else in training mode")
    width = in_eval[1] if isinstance(in_eval, tuple) and in_eval[0] == "rows" else None
    if result_dtype(module, torch.bfloat16, torch.bfloat16, width) != torch.bfloat16:
        raise NotExpressible("it returns another dtype than its input's")
    return in_eval


def composition_of(module: nn.Module) -> Expression:
    """Return the expression of a forward that combines calls of its children, the same in training and in evaluation.

    Its first argument is ``"x"``, the others have their own names. Children are not looked into, and casts are not
    taken for nothing, as they may change what a child gets.

    Raises:
        NotExpressible: it depends on values or on the mode, or does more than call, add, multiply and activate.
    """
    in_eval, in_training = (_composition(_in_mode(module, training)) for training in (False, True))
    if in_eval != in_training:
        raise NotExpressible("it computes something else in training mode")
    return in_eval


@functools.cache
def activation_form(form: Callable[[torch.Tensor], torch.Tensor]) -> Expression:
    """Return the expression of a function of ``x``."""
    return _expression(lambda x: form(x))  # fx cannot read the arguments of a builtin


@functools.cache
def norm_form(form: Callable[..., torch.Tensor], eps: float) -> Expression:
    """Return the expression of a function of ``x``, ``weight``, ``bias`` and ``eps``, with that ``eps``."""
    return _expression(lambda x, weight, bias: form(x, weight, bias, eps))


def child_form(name: str, argument: Expression) -> Expression:
    """Return the expression that the child of that name makes of the argument."""
    return ("child", name, argument)


def product_form(*factors: Expression) -> Expression:
    """Return the product of expressions."""
    return functools.reduce(_mul, factors)


def sum_form(*terms: Expression) -> Expression:
    """Return the sum of expressions."""
    return functools.reduce(_add, terms)


def activated_form(argument: Expression) -> dict[str, Expression]:
    """Return an expression under each activation that an epilogue may have, by the name of the activation."""
    return {"silu": _silu(argument), "gelu": _gelu(argument), "gelu_tanh": _gelu(argument, "tanh")}


def constants_of(expression: Expression) -> Iterator[float]:
    """Yield every number in an expression, with repetitions."""
    if isinstance(expression, float):
        yield expression
    elif isinstance(expression, tuple):
        for part in expression:
            yield from constants_of(part)


def _in_mode(module: nn.Module, training: bool) -> nn.Module:
    twin = detached(module)  # what tracing sets on the module stays off the model
    twin.__dict__["training"] = training
    return twin


def result_dtype(
    module: nn.Module, dtype: torch.dtype, weight_dtype: torch.dtype, width: int | None = None
) -> torch.dtype | None:
    """Return the dtype of the result for input and parameters of these dtypes; ``None`` if it has another shape.

    The input's rows have the size ``width``, or that of the first parameter.
    """
    shapes = [parameter.shape for parameter in module.parameters()]
    width = width or (shapes[0][-1] if shapes else 8)
    x = torch.empty(2, 3, width, dtype=dtype, device="meta")
    weights = {
        name: torch.empty(p.shape, dtype=weight_dtype, device="meta")
        for name, p in module.named_parameters()
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of dtypes that differ
        out = torch.func.functional_call(_in_mode(module, False), weights, (x,))
    return out.dtype if isinstance(out, torch.Tensor) and out.shape == x.shape else None


def _expression(root: nn.Module | Callable[..., Any]) -> Expression:
    graph = _graph(_TestsOfDtypes(root), root)
    inputs = graph.find_nodes(op="placeholder")
    if isinstance(root, nn.Module) and (len(inputs) != 1 or inputs[0].target.startswith("*")):
        raise NotExpressible(f"its forward takes {len(inputs)} arguments")
    return _result(graph)


class _TestsOfDtypes(fx.Tracer):
    """Decides what a forward asks of the dtype of its parameters, as norms do before they cast."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self._parameters = dict(root.named_parameters()) if isinstance(root, nn.Module) else {}

    def to_bool(self, obj: fx.Proxy) -> bool:
        target, args = obj.node.target, obj.node.args
        if target not in (operator.eq, operator.ne) or len(args) != 2:
            return super().to_bool(obj)
        asked, dtype = sorted(args, key=lambda part: isinstance(part, torch.dtype))
        if (
            not isinstance(dtype, torch.dtype)
            or not isinstance(asked, fx.Node)
            or asked.args[1:] != ("dtype",)
        ):
            return super().to_bool(obj)
        parameter = self._parameters.get(str(asked.args[0]))
        if parameter is None:
            return super().to_bool(obj)
        obj.node.graph.erase_node(obj.node)
        return bool(target(parameter.dtype, dtype))


class _ChildrenAreLeaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _composition(module: nn.Module) -> Expression:
    graph = _graph(_ChildrenAreLeaves(), module)
    for node in graph.nodes:
        if node.target in _CASTS or node.target is getattr:
            raise NotExpressible("it casts between its children")
    return _result(graph)


def _graph(tracer: fx.Tracer, root: nn.Module | Callable[..., Any]) -> fx.Graph:
    before = detached(root) if isinstance(root, nn.Module) else None
    effect = side_effect_of(before) if before is not None else ""
    if effect:
        raise NotExpressible(effect)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = tracer.trace(root)
    if isinstance(root, nn.Module) and before is not None and changed_attribute(root, before):
        raise NotExpressible(f"its forward changes {changed_attribute(root, before)}")
    return graph


def _result(graph: fx.Graph) -> Expression:
    inputs = graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Expression] = {}
    for node in graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        values[node] = _value(node, values, "x" if node is inputs[0] else str(node.target))
    raise NotExpressible("it returns nothing")


def _value(node: fx.Node, values: dict[fx.Node, Expression], symbol: str) -> Expression:
    if node.op in ("placeholder", "get_attr"):
        return symbol
    if node.op == "call_module":
        (argument,) = node.args if len(node.args) == 1 and not node.kwargs else (None,)
        if not isinstance(argument, fx.Node):
            raise NotExpressible(f"it calls {symbol} with more than one argument")
        return child_form(symbol, values[argument])
    rule = METHODS.get(symbol) if node.op == "call_method" else _FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    if rule is None:
        raise NotExpressible(f"it uses {getattr(node.target, '__name__', node.target)}")
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    return rule(*args, **kwargs)


def _rounded(constant: float) -> float:
    return float(f"{constant:.9g}")  # as many digits as tell float32 numbers apart


def _factors(e: Expression) -> list[tuple[Expression, float]]:
    if isinstance(e, (int, float)):
        return [(float(e), 1)]
    if e[0] == "product":
        return [(e[1], 1), *e[2]]
    return [(e, 1)]


def _product(*factors: tuple[Expression, float]) -> Expression:
    coefficient = 1.0
    exponents: Counter[Expression] = Counter()
    for base, exponent in factors:
        if isinstance(base, float):
            coefficient *= base**exponent
        else:
            exponents[base] += exponent  # type: ignore[assignment]  # halves, from square roots
    # By text, as floats, strings and tuples have no order among them.
    rest = tuple(sorted(((base, float(n)) for base, n in exponents.items() if n), key=repr))
    coefficient = _rounded(coefficient)
    if not rest:
        return coefficient
    if coefficient == 1 and len(rest) == 1 and rest[0][1] == 1:
        return rest[0][0]
    return ("product", coefficient, rest)


def _mul(a: Expression, other: Expression) -> Expression:
    return _product(*_factors(a), *_factors(other))


def _pow(a: Expression, exponent: float) -> Expression:
    """Raise ``a`` to a constant power. Fractional powers of products stay as they are: √(x²) is not x."""
    if not isinstance(exponent, (int, float)):
        raise NotExpressible("it raises to a power that is no constant")
    factors = _factors(a)
    whole = float(exponent).is_integer() or len(factors) == 1
    return (
        _product(*((base, n * exponent) for base, n in factors))
        if whole
        else _product((a, exponent))
    )


def _div(a: Expression, other: Expression) -> Expression:
    return _mul(a, _pow(other, -1))


def _add(a: Expression, other: Expression) -> Expression:
    constant, terms = 0.0, []
    for e in (a, other):
        if isinstance(e, (int, float)):
            constant += e
        elif e[0] == "sum":
            constant += e[1]
            terms += e[2]
        else:
            terms.append(e)
    if not terms:
        return constant
    constant = _rounded(constant)
    return (
        terms[0]
        if len(terms) == 1 and not constant
        else ("sum", constant, tuple(sorted(terms, key=repr)))
    )


def _sub(a: Expression, other: Expression) -> Expression:
    return _add(a, _mul(-1.0, other))


def _mean(a: Expression, dim: Any, keepdim: bool = False) -> Expression:
    if dim not in (-1, (-1,), [-1]) or not keepdim:
        raise NotExpressible(f"it takes the mean over {dim}, keepdim={keepdim}")
    return ("mean", a)


def _var(
    a: Expression,
    dim: Any,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: int | None = None,
) -> Expression:
    if (correction if correction is not None else unbiased) != 0:
        raise NotExpressible("it takes the unbiased variance")
    return _mean(_pow(_sub(a, _mean(a, dim, keepdim)), 2), dim, keepdim)


def _layer_norm(
    input: Expression,
    normalized_shape: Any,
    weight: Expression = None,
    bias: Expression = None,
    eps: float = 1e-5,
) -> Expression:
    if len(normalized_shape) != 1:
        raise NotExpressible(f"it normalises over {len(normalized_shape)} dimensions")
    centred = _sub(input, ("mean", input))
    normed = _mul(centred, _pow(_add(("mean", _pow(centred, 2)), eps), -0.5))
    normed = normed if weight is None else _mul(normed, weight)
    normed = normed if bias is None else _add(normed, bias)
    return (
        normed if weight is not None or bias is not None else ("rows", normalized_shape[0], normed)
    )


def _to(a: Expression, dtype: Any = None, other: Any = None) -> Expression:
    """Drop casts to float32 and to the dtype of the input or weight: in float32 they do nothing."""
    target = dtype if other is None else _DTYPE
    if target not in (torch.float32, _DTYPE, *_SYMBOLS):
        raise NotExpressible(f"it casts to {target}")
    return a


def _gelu(input: Expression, approximate: str = "none") -> Expression:
    return ("gelu" if approximate == "none" else f"gelu {approximate}", input)


def _silu(input: Expression, inplace: bool = False) -> Expression:
    if inplace:
        raise NotExpressible("it changes its input in place")
    return _mul(input, ("sigmoid", input))


def _relu(input: Expression, inplace: bool = False) -> Expression:
    if inplace:
        raise NotExpressible("it changes its input in place")
    return ("relu", input)


def _getattr(a: Expression, name: str) -> Expression:
    if name != "dtype":
        raise NotExpressible(f"it reads .{name} of a tensor")
    return _DTYPE


def _function(name: str) -> Callable[[Expression], Expression]:
    return lambda input: (name, input)


_RULES: list[tuple[Callable[..., Expression], tuple[str, ...], tuple[Callable[..., Any], ...]]] = [
    # rule, names as a tensor method, functions
    (_add, ("add",), (operator.add, torch.add)),
    (_sub, ("sub", "subtract"), (operator.sub, torch.sub, torch.subtract)),
    (lambda a: _mul(-1.0, a), ("neg",), (operator.neg, torch.neg)),
    (_mul, ("mul", "multiply"), (operator.mul, torch.mul, torch.multiply)),
    (_div, ("div", "true_divide"), (operator.truediv, torch.div, torch.true_divide)),
    (_pow, ("pow",), (operator.pow, torch.pow)),
    (lambda a: _pow(a, 2), ("square",), (torch.square,)),
    (lambda a: _pow(a, 0.5), ("sqrt",), (torch.sqrt,)),
    (lambda a: _pow(a, -0.5), ("rsqrt",), (torch.rsqrt,)),
    (lambda a: _pow(a, -1), ("reciprocal",), (torch.reciprocal,)),
    (_mean, ("mean",), (torch.mean,)),
    (_var, ("var",), (torch.var,)),
    (_layer_norm, (), (F.layer_norm,)),
    (_to, ("to",), ()),
    (_to, ("type_as",), ()),
    (lambda a: a, ("float",), ()),
    (_getattr, (), (getattr,)),
    (_gelu, (), (F.gelu,)),
    (_silu, ("silu",), (F.silu,)),
    (_relu, ("relu",), (F.relu, torch.relu)),
    *(
        (_function(name), (name,), (getattr(torch, name), *more))
        for name, more in (
            ("tanh", (F.tanh,)),
            ("sigmoid", (F.sigmoid,)),
            ("erf", (torch.special.erf,)),
        )
    ),
]
_CASTS = ("to", "type_as", "float")
METHODS = {name: rule for rule, names, _ in _RULES for name in names}
"""The rule for each method of tensors, which have the names of torch's own operations."""

_FUNCTIONS = {function: rule for rule, _, functions in _RULES for function in functions}
