"""Guarded imports: a plugin provides for their failure, for example by ``except ImportError``."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator
from types import FrameType

_ABSENT = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def is_guarded(frame: FrameType) -> bool:
    """Return True if a frame executes a guarded import."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    return frame.f_lineno in guarded_lines("".join(lines))


@functools.lru_cache(maxsize=256)
def guarded_lines(source: str) -> frozenset[int]:
    """Return the line numbers of guarded imports in source code."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(_guarded(tree))


def _guarded(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        guards = False
        if isinstance(node, ast.Try):
            guards = any(_catches(handler) for handler in node.handlers)
        elif isinstance(node, ast.With):
            guards = any(_suppresses(item.context_expr) for item in node.items)
        if guards:
            yield from _lines_of_imports(node.body)  # type: ignore[attr-defined]  # of both


def _catches(handler: ast.ExceptHandler) -> bool:
    """Return True if a handler catches a failed import and does not raise again."""
    last = handler.body[-1]
    return bool(_ABSENT & set(words_in(handler.type))) and not isinstance(last, ast.Raise)


def _suppresses(expression: ast.expr) -> bool:
    """Return True for ``suppress(ImportError)`` and its like."""
    if not isinstance(expression, ast.Call) or "suppress" not in set(words_in(expression.func)):
        return False
    return any(_ABSENT & set(words_in(argument)) for argument in expression.args)


def words_in(node: ast.expr | None) -> Iterator[str]:
    """Yield the names in an expression, such as the classes of a handler.

    ``except:`` has no expression, and catches the same as ``except BaseException:``.
    """
    if node is None:
        yield "BaseException"
        return
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _lines_of_imports(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines of imports in statements, without imports in functions defined there."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            yield from _lines_of_imports(ast.iter_child_nodes(node))
