"""The sandbox that chat templates run in: jinja2's, with limits on time and sizes.

A template comes with a checkpoint and is code: the sandbox keeps it from Python's internals. The limits make an endless
loop and huge text an error of one request. Counted are the turns of loops, the calls of macros and the characters that
are written, be it to the output or to a variable. Weighed is all that calls, filters, operators and literals take and
make; what a method of a text or a filter can make of it by far more than it takes is refused before it is made, and
filters that take long by far more than their text is long are not there.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace, pass_context, pass_environment
from jinja2.visitor import NodeTransformer
from opgraft.serving.template_budget import BUDGET, expect_product, expect_room

MOST_POWER = 64
"""The highest exponent."""

_MADE = "opgraft_made"
_STEP = "opgraft_step"
_WEIGHED = "opgraft_weighed"
_WRITTEN = "opgraft_written"
_NUMBER = re.compile("[0-9]{1,9}")
_SLOW = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters whose time grows faster than what they take."""
_SPACED = frozenset({"expandtabs", "indent", "tojson"})
"""Methods and filters that put as many spaces at many places as a number says."""
_GROWING = frozenset({"indent", "replace", "tojson"})
"""Filters that put what they take at many places."""


@pass_context  # so that it is not called once for all while a template is compiled
def _step(context: Context, characters: int) -> str:
    """Take a step, which writes so many characters that the template has as they are."""
    budget = BUDGET.get()
    budget.step()
    budget.write(characters)
    return ""


@pass_context
def _written(context: Context, value: object) -> str:
    budget = BUDGET.get()
    budget.weigh(value)
    text = str(value)
    budget.write(len(text))
    return text


@pass_context
def _made(context: Context, value: Any) -> Any:
    return BUDGET.get().made(value)


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    BUDGET.get().weigh(value)
    return value


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or a test so that what it takes and makes has a limit."""
    skipped = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)  # jinja2's own marks on it included
    def checked(*args: Any, **kwargs: Any) -> Any:
        value, *others = [*args[skipped:], *kwargs.values()]
        budget = BUDGET.get()
        budget.weigh(value)
        _check_call(name, value if name in _GROWING else None, others)
        return budget.made(function(*args, **kwargs))

    return checked


def _check_call(name: str, text: object, others: Iterable[Any]) -> None:
    """Refuse a call that takes too much, and one of a text that may make a huge one of it."""
    budget = BUDGET.get()
    others = list(others)
    weight = budget.take(others)
    if name in _SPACED:
        weight += sum(abs(value) for value in others if isinstance(value, int))
    if text is not None:
        expect_product(budget.weigh(text), weight)


class _Limits(NodeTransformer):
    """Puts a step into the body of each loop and macro, counts what is written, and checks what no function does."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  # the visitor's naming
        return self._stepping(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._stepping(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._stepping(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        plain = (nodes.TemplateData,)
        node.nodes = [
            part if isinstance(part, plain) else _filtered(part, _WRITTEN) for part in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_filtered(part, _WEIGHED) for part in node.nodes]
        return _filtered(node, _MADE)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _WEIGHED)
        return node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _WEIGHED)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return _filtered(self.generic_visit(node), _MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return _filtered(self.generic_visit(node), _MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _MADE) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _MADE)
        return node

    def _stepping(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        plain = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        step = nodes.Output([_filtered(nodes.Const(plain), _STEP)], lineno=node.lineno)
        node.body.insert(0, step)
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=getattr(node, "lineno", 1))


class _Generation(Extension):
    """The tag ``{% generation %}``, by which training finds what a model has said; it shows its content."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Names(Namespace):
    """``namespace()`` without names that begin with an underscore, as those of Python's internals do."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that self may be a name, as in jinja2's
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # not what it holds, which may hold it
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace takes no name that begins with an underscore, such as {name!r:.80}"
        )


class _Formatter(SandboxedFormatter):
    """Formats one field after the other within the limits."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        budget = BUDGET.get()
        expect_room(budget.weigh(value) + _widest(format_spec))
        return budget.made(super().format_field(value, format_spec))


class _EscapingFormatter(_Formatter, SandboxedEscapeFormatter):
    """Escapes the values of fields too."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the limits and with the functions that transformers gives to templates."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        self.filters.update(tojson=_to_json, join=_join, sum=_sum, format=_format)
        for slow in _SLOW:
            del self.filters[slow]
        self.filters = {name: _checked(name, function) for name, function in self.filters.items()}
        tests: dict[str, Any] = self.tests  # which jinja2 types too narrowly
        self.tests = {name: _checked(name, test) for name, test in tests.items()}
        self.filters.update({_MADE: _made, _STEP: _step, _WEIGHED: _weighed, _WRITTEN: _written})
        del self.globals["lipsum"]  # random text of any length
        self.globals.update(raise_exception=_raise, strftime_now=_now, namespace=_Names)

    def compiled(self, source: str) -> Any:
        """Return the template of ``source``, with the limits in it.

        Raises:
            jinja2.TemplateSyntaxError: it is no template.
        """
        tree = _Limits().visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse methods that are as slow as the filters of their names are, beside those that jinja2 refuses."""
        return attr not in _SLOW and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replace ``format`` and ``format_map`` of a text by one that keeps to the limits."""
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        kind: type[str] = type(text)
        formatter = (
            _EscapingFormatter(self, escape=text.escape)
            if hasattr(text, "__html__")
            else _Formatter(self)
        )

        def formatted(*args: Any, **kwargs: Any) -> str:
            fields = args[0] if value.__name__ == "format_map" else kwargs
            return kind(formatter.vformat(text, args if fields is kwargs else (), fields))

        return formatted

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function for a template, within the limits."""
        text = getattr(function, "__self__", None)
        if isinstance(text, str | bytes):
            args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            _check_call(function.__name__, text, [*args, *kwargs.values()])
        else:
            _check_call("", None, [*args, *kwargs.values()])
        return BUDGET.get().made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator for a template, within the limits."""
        budget = BUDGET.get()
        weights = budget.weigh(left), budget.weigh(right)
        if operator == "*":
            for times, weight in zip((right, left), weights, strict=True):
                if isinstance(times, int):
                    expect_room(times * (weight - 1))  # nothing for numbers
        elif operator == "**" and abs(right) > MOST_POWER:
            raise TemplateRuntimeError(
                f"it raises a number to the power {right:.3g}, at most {MOST_POWER} is taken"
            )
        elif operator == "%" and isinstance(left, str | bytes):
            _check_percent(left, right)
        return budget.made(super().call_binop(context, operator, left, right))


def _widest(format_spec: str) -> int:
    """Return the largest number in a format, or one that is too large where it has more digits."""
    return max(map(int, _NUMBER.findall(format_spec)), default=0)


def _check_percent(text: str | bytes, values: Any) -> None:
    """Refuse formats that may make a huge text."""
    text = str(text)
    fields = text.count("%")
    widest = _widest(text)
    if "*" in text:  # a value may be a width
        widest += sum(
            abs(value)
            for value in (values if isinstance(values, tuple) else ())
            if isinstance(value, int)
        )
    expect_product(fields, BUDGET.get().weigh(values) + widest)


def _format(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Format by percent signs."""
    if args and kwargs:
        raise TemplateRuntimeError(
            "format takes values by their places or by their names, not both"
        )
    text = value if isinstance(value, str) else str(value)
    _check_percent(text, kwargs or args)
    return text % (kwargs or args)


@pass_environment
def _join(environment: Environment, value: Any, d: object = "", attribute: Any = None) -> str:
    """Join as jinja2 does, whose names of arguments these are."""
    parts = list(
        value if attribute is None else map(make_attrgetter(environment, attribute), value)
    )
    between = str(d)
    expect_product(BUDGET.get().weigh(parts), len(between))
    return between.join(map(str, parts))


@pass_environment
def _sum(environment: Environment, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Add one after the other."""
    parts = (
        iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    )
    made = BUDGET.get().made
    return functools.reduce(lambda total, part: made(total + part), parts, start)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; jinja2's own filter escapes what HTML needs escaped."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    return "".join(
        map(BUDGET.get().made, encoder.iterencode(value))
    )  # spaces of deep lists are counted on the way


def _raise(message: str) -> None:
    raise TemplateRuntimeError(message)


def _now(format: str) -> str:  # the name that templates use
    expect_product(len(format), 256)  # a width in it makes at most so many times its length
    return datetime.now().strftime(format)
