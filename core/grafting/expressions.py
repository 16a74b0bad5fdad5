"""The computation of a leaf module, as a normal form for comparisons.

``torch.fx`` traces the module. The graph becomes one expression over the input ``"x"`` and the
parameters ``"weight"`` and ``"bias"``. The order of factors and terms, the spelling (``square``,
``pow``, ``x * x``) and casts to float32 and back do not matter in an expression. Two modules with
equal expressions compute the same in float32, up to rounding.

An expression is one of

- a float, or ``"x"``, ``"weight"`` or ``"bias"``;
- ``("product", coefficient, ((base, exponent), ...))``;
- ``("sum", constant, (term, ...))``;
- ``(function name, argument)``;
- ``("child", name, argument)``, the result of a child;
- ``("rows", size, argument)``, an expression over rows of that size only.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import MappingProxyType
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
        NotExpressible: the forward has another signature, depends on values or on the mode, or uses
            other operations.
    """
    in_eval = _expression(_in_mode(module, training=False))
    if in_eval != _expression(_in_mode(module, training=True)):
        raise NotExpressible("it computes something else in training mode")
    # A norm without parameters refuses other widths.
    takes_one_width = isinstance(in_eval, tuple) and in_eval[0] == "rows"
    width = in_eval[1] if takes_one_width else None
    if result_dtype(module, torch.bfloat16, torch.bfloat16, width) != torch.bfloat16:
        raise NotExpressible("it returns another dtype than its input's")
    return in_eval


def composition_of(module: nn.Module) -> Expression:
    """Return the expression of a forward over calls of children.

    The expression is the same in training and in evaluation. The first argument is ``"x"``, other
    arguments have their own names. Children are not traced. Casts are refused, because a cast may
    change the input of a child.

    Raises:
        NotExpressible: the forward depends on values or on the mode, or does more than call, add,
            multiply and activate.
    """
    in_eval = _composition(_in_mode(module, training=False))
    if in_eval != _composition(_in_mode(module, training=True)):
        raise NotExpressible("it computes something else in training mode")
    return in_eval


@functools.cache
def activation_form(form: Callable[[torch.Tensor], torch.Tensor]) -> Expression:
    """Return the expression of a function of ``x``."""
    return _expression(lambda x: form(x))  # fx cannot read the arguments of a builtin


@functools.cache
def norm_form(form: Callable[..., torch.Tensor], eps: float) -> Expression:
    """Return the expression of a function of ``x``, ``weight``, ``bias`` and a fixed ``eps``."""
    return _expression(lambda x, weight, bias: form(x, weight, bias, eps))


def child_form(name: str, argument: Expression) -> Expression:
    """Return the expression of a child's result for an argument."""
    return ("child", name, argument)


def product_form(*factors: Expression) -> Expression:
    """Return the product of expressions."""
    return functools.reduce(_mul, factors)


def sum_form(*terms: Expression) -> Expression:
    """Return the sum of expressions."""
    return functools.reduce(_sum_of, terms)


def activated_form(argument: Expression) -> dict[str, Expression]:
    """Map the name of each activation of an epilogue to the activation of an expression."""
    return {"silu": _silu(argument), "gelu": _gelu(argument), "gelu_tanh": _gelu(argument, "tanh")}


def constants_of(expression: Expression) -> Iterator[float]:
    """Yield every number in an expression, with repetitions."""
    if isinstance(expression, float):
        yield expression
    elif isinstance(expression, tuple):
        for part in expression:
            yield from constants_of(part)


def _in_mode(module: nn.Module, training: bool) -> nn.Module:
    twin = detached(module)  # tracing may set attributes
    twin.__dict__["training"] = training
    return twin


def result_dtype(
    module: nn.Module, dtype: torch.dtype, weight_dtype: torch.dtype, width: int | None = None
) -> torch.dtype | None:
    """Return the dtype of the result for input and parameters of these dtypes.

    Args:
        module: to call.
        dtype: of the input.
        weight_dtype: of the parameters.
        width: elements of a row; those of the first parameter if not given.

    Returns:
        The dtype; ``None`` if the result has another shape than the input.
    """
    shapes = [parameter.shape for parameter in module.parameters()]
    width = width or (shapes[0][-1] if shapes else 8)
    x = torch.empty(2, 3, width, dtype=dtype, device="meta")
    weights = {}

    for name, parameter in module.named_parameters():
        weights[name] = torch.empty(parameter.shape, dtype=weight_dtype, device="meta")

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of dtypes that differ
        out = torch.func.functional_call(_in_mode(module, False), weights, (x,))

    if not isinstance(out, torch.Tensor) or out.shape != x.shape:
        return None

    return out.dtype


def _expression(root: nn.Module | Callable[..., Any]) -> Expression:
    graph = _graph(_TestsOfDtypes(root), root)
    inputs = graph.find_nodes(op="placeholder")
    if isinstance(root, nn.Module) and (len(inputs) != 1 or inputs[0].target.startswith("*")):
        raise NotExpressible(f"its forward takes {len(inputs)} arguments")
    return _result(graph)


class _TestsOfDtypes(fx.Tracer):
    """Answers comparisons with the dtype of a parameter, which norms make before a cast."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self._parameters = dict(root.named_parameters()) if isinstance(root, nn.Module) else {}

    def to_bool(self, obj: fx.Proxy) -> bool:
        answer = self._answer(obj.node)
        if answer is None:
            return super().to_bool(obj)
        # The comparison is no part of the computation.
        obj.node.graph.erase_node(obj.node)
        return answer

    def _answer(self, comparison: fx.Node) -> bool | None:
        compare = comparison.target
        if compare not in (operator.eq, operator.ne) or len(comparison.args) != 2:
            return None

        # A dtype may stand on either side.
        is_dtype = [isinstance(side, torch.dtype) for side in comparison.args]
        if sum(is_dtype) != 1:
            return None

        dtype = comparison.args[is_dtype.index(True)]
        asked = comparison.args[is_dtype.index(False)]
        if not isinstance(asked, fx.Node) or asked.args[1:] != ("dtype",):
            return None

        parameter = self._parameters.get(str(asked.args[0]))
        if parameter is None:
            return None

        return bool(compare(parameter.dtype, dtype))


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
    if not isinstance(root, nn.Module):
        return _traced(tracer, root)

    before = detached(root)
    effect = side_effect_of(before)
    if effect:
        raise NotExpressible(effect)

    graph = _traced(tracer, root)
    changed = changed_attribute(root, before)
    if changed:
        raise NotExpressible(f"its forward changes {changed}")

    return graph


def _traced(tracer: fx.Tracer, root: nn.Module | Callable[..., Any]) -> fx.Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tracer.trace(root)


def _result(graph: fx.Graph) -> Expression:
    inputs = graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Expression] = {}
    for node in graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        values[node] = _expression_of_node(
            node, values, "x" if node is inputs[0] else str(node.target)
        )
    raise NotExpressible("it returns nothing")


def _expression_of_node(
    node: fx.Node, values: dict[fx.Node, Expression], symbol: str
) -> Expression:
    if node.op in ("placeholder", "get_attr"):
        return symbol
    if node.op == "call_module":
        argument = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(argument, fx.Node):
            raise NotExpressible(f"it calls {symbol} with more than one argument")
        return child_form(symbol, values[argument])

    target: Any = node.target
    rule = METHODS.get(symbol) if node.op == "call_method" else _FUNCTIONS.get(target)
    if rule is None:
        raise NotExpressible(f"it uses {getattr(node.target, '__name__', node.target)}")

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    return rule(*args, **kwargs)


def _rounded(constant: float) -> float:
    return float(f"{constant:.9g}")  # nine digits tell float32 numbers apart


def _factors(e: Expression) -> list[tuple[Expression, float]]:
    if isinstance(e, int | float):
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

    powers = [(base, float(exponent)) for base, exponent in exponents.items() if exponent]
    coefficient = _rounded(coefficient)
    if not powers:
        return coefficient
    if coefficient == 1 and len(powers) == 1 and powers[0][1] == 1:
        return powers[0][0]

    # By text, because floats, strings and tuples have no common order.
    return ("product", coefficient, tuple(sorted(powers, key=repr)))


def _mul(a: Expression, other: Expression) -> Expression:
    return _product(*_factors(a), *_factors(other))


def _pow(a: Expression, exponent: float) -> Expression:
    """Raise ``a`` to a constant power. A fractional power of a product stays: √(x²) is not x."""
    if not isinstance(exponent, int | float):
        raise NotExpressible("it raises to a power that is no constant")
    factors = _factors(a)
    if not float(exponent).is_integer() and len(factors) > 1:
        return _product((a, exponent))
    return _product(*((base, n * exponent) for base, n in factors))


def _div(a: Expression, other: Expression) -> Expression:
    return _mul(a, _pow(other, -1))


def _sum_of(a: Expression, other: Expression) -> Expression:
    constant = 0.0
    terms: list[Expression] = []

    for e in (a, other):
        if isinstance(e, int | float):
            constant += e
        elif e[0] == "sum":
            constant += e[1]
            terms += e[2]
        else:
            terms.append(e)

    if not terms:
        return constant

    constant = _rounded(constant)
    if len(terms) == 1 and not constant:
        return terms[0]

    return ("sum", constant, tuple(sorted(terms, key=repr)))


def _sub(a: Expression, other: Expression) -> Expression:
    return _sum_of(a, _mul(-1.0, other))


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
    if (unbiased if correction is None else correction) != 0:
        raise NotExpressible("it takes the unbiased variance")
    centred = _sub(a, _mean(a, dim, keepdim))
    return _mean(_pow(centred, 2), dim, keepdim)


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
    variance = ("mean", _pow(centred, 2))
    normed = _mul(centred, _pow(_sum_of(variance, eps), -0.5))
    if weight is None and bias is None:
        # No parameter fixes the size of a row.
        return ("rows", normalized_shape[0], normed)

    if weight is not None:
        normed = _mul(normed, weight)

    return normed if bias is None else _sum_of(normed, bias)


def _to(a: Expression, dtype: Any = None, other: Any = None) -> Expression:
    """Drop casts to float32 and to the dtype of the input or weight: no-ops in float32."""
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
    (_sum_of, ("add",), (operator.add, torch.add)),
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
METHODS = MappingProxyType({name: rule for rule, names, _ in _RULES for name in names})
"""The rule for each method of tensors, by the name of torch's operation."""

_FUNCTIONS = {function: rule for rule, _, functions in _RULES for function in functions}
