"""The sandbox that chat templates run in: jinja2's, with limits on time and sizes.

A template comes with a checkpoint and is code: the sandbox keeps it from Python's internals. The limits make an endless
loop and huge text an error of one request. Counted are the turns of loops, the calls of macros and the characters that
are written, be it to the output or to a variable; checked are the sizes of what calls, filters and operators take and
return. Not bounded is what a single call does in between: ``replace`` or ``join`` of long texts, a width written in a
format of ``format``, and the text of lists that hold each other many times over.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

MOST_CHARACTERS = 1 << 24
"""Written for a chat, and in any text or list on the way there; a million tokens have about a third of it."""
MOST_STEPS = 1_000_000
"""Turns of loops and calls of macros."""
MOST_SECONDS = 10.0
MOST_POWER = 64
"""The highest exponent."""

_SIZED = "opgraft_sized"
_STEP = "opgraft_step"
_WRITTEN = "opgraft_written"
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|\d{6})")


@dataclass
class _Budget:
    """The time, the steps and the characters that a rendering has left."""

    deadline: float
    steps: int = MOST_STEPS
    characters: int = MOST_CHARACTERS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateRuntimeError(f"it takes more than {MOST_STEPS} steps: a loop in it may have no end")
        if time.monotonic() > self.deadline:
            raise TemplateRuntimeError(f"it takes longer than {MOST_SECONDS:g} seconds")

    def write(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise TemplateRuntimeError(f"it writes more than {MOST_CHARACTERS} characters")


_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")


@contextmanager
def limited() -> Iterator[None]:
    """Give the templates that are rendered within the block one budget. Without it they cannot be rendered."""
    token = _BUDGET.set(_Budget(time.monotonic() + MOST_SECONDS))
    try:
        yield
    finally:
        _BUDGET.reset(token)


@pass_context  # so that it is not called once for all while a template is compiled
def _step(context: Context, characters: int) -> str:
    """Take a step, which writes so many characters that the template has as they are."""
    budget = _BUDGET.get()
    budget.step()
    budget.write(characters)
    return ""


@pass_context
def _written(context: Context, value: object) -> str:
    text = str(value)
    _BUDGET.get().write(len(text))
    return text


def _sized(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict) and len(value) > MOST_CHARACTERS:
        raise TemplateRuntimeError(f"it makes a text or a list that is longer than {MOST_CHARACTERS}")
    return value


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that numbers that it takes, and texts and lists that it returns, have a limit."""

    @functools.wraps(function)  # jinja2's own marks on it included
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return _sized(function(*args, **kwargs))

    return checked


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse numbers that may be a width or a count."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MOST_CHARACTERS:
            raise TemplateRuntimeError(
                f"it calls a function with the number {value:.3g}, at most {MOST_CHARACTERS} is taken"
            )


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
        node.nodes = [part if isinstance(part, plain) else _filtered(part, _WRITTEN) for part in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        return _filtered(self.generic_visit(node), _SIZED)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _SIZED)
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


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, such as {name!r:.80}")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the limits and with the functions that transformers gives to templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension])
        self.filters["tojson"] = _to_json
        self.filters.update({name: _checked(function) for name, function in self.filters.items()})
        self.filters.update({_SIZED: _sized, _STEP: _step, _WRITTEN: _written})
        del self.globals["lipsum"]  # random text of any length
        self.globals.update(raise_exception=_raise, strftime_now=_now, namespace=_Names)

    def compiled(self, source: str) -> Any:
        """Return the template of ``source``, with the limits in it.

        Raises:
            jinja2.TemplateSyntaxError: it is no template.
        """
        tree = _Limits().visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function for a template, within the limits."""
        _check_numbers(args, kwargs)
        return _sized(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator for a template, within the limits."""
        if operator == "*":
            lengths = [len(value) if isinstance(value, str | list | tuple) else value for value in (left, right)]
            if lengths != [left, right] and all(isinstance(length, int) for length in lengths):
                _check_numbers((lengths[0] * lengths[1],), {})
        elif operator == "**":
            if abs(right) > MOST_POWER:
                raise TemplateRuntimeError(
                    f"it raises a number to the power {right:.3g}, at most {MOST_POWER} is taken"
                )
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateRuntimeError(f"it fills a text to a width of a million or of no known limit: {left!r:.80}")
        return _sized(super().call_binop(context, operator, left, right))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON; jinja2's own filter escapes what HTML needs escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateRuntimeError(message)


def _now(format: str) -> str:  # the name that templates use
    return datetime.now().strftime(format)
