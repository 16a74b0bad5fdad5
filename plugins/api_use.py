"""The names of opgraft that source code uses, by its syntax tree alone: nothing of it is imported or executed."""

from __future__ import annotations

import ast
from dataclasses import dataclass

HOST = "opgraft"
HOOKS = "opgraft.plugins.hookspecs"


@dataclass(frozen=True)
class Use:
    """A place where code uses a dotted name of opgraft; ``keywords`` are those of a call there."""

    name: str
    line: int
    keywords: tuple[str, ...] = ()


def uses_in(source: bytes) -> list[Use]:
    """List the uses of opgraft in a module, in the order of its lines.

    Raises:
        SyntaxError, ValueError, RecursionError: it is no Python that this interpreter reads.
    """
    visitor = _Uses()
    visitor.visit(ast.parse(source))
    return sorted(dict.fromkeys(visitor.found), key=lambda use: (use.line, use.name))


class _Uses(ast.NodeVisitor):
    """Follows what imports bind, wherever they stand, to the attributes that are taken of it."""

    def __init__(self) -> None:
        self.found: list[Use] = []
        self.bound: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == HOST:
                self.bound[alias.asname or HOST] = alias.name if alias.asname else HOST
                self.found.append(Use(alias.name, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and (node.module or "").partition(".")[0] == HOST:
            for alias in node.names:
                name = str(node.module) if alias.name == "*" else f"{node.module}.{alias.name}"
                self.bound[alias.asname or alias.name] = name
                self.found.append(Use(name, node.lineno))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._dotted(node)
        if name:
            self.found.append(Use(name, node.lineno))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._dotted(node.func)
        if name:
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            self.found.append(Use(name, node.lineno, keywords))
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [name for name in map(self._dotted, node.bases) if name]
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
        self.found += [Use(f"{base}.{function.name}", function.lineno) for base in bases for function in functions]
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if any(self._is_hook(mark) for mark in node.decorator_list):
            self.found.append(Use(f"{HOOKS}.{node.name}", node.lineno))
        outer, taken = self.bound, _taken_in(node)
        self.bound = {name: value for name, value in outer.items() if name not in taken}
        self.generic_visit(node)
        self.bound = {**self.bound, **outer}  # an import may bind a global name

    def _is_hook(self, mark: ast.expr) -> bool:
        name = self._dotted(mark.func if isinstance(mark, ast.Call) else mark)
        return name is not None and name.rpartition(".")[2] == "hookimpl"

    def _dotted(self, node: ast.expr) -> str | None:
        """Return the dotted name of opgraft that an expression stands for, if it is one."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        bound = self.bound.get(node.id) if isinstance(node, ast.Name) else None
        return ".".join([bound, *reversed(attributes)]) if bound else None


def _taken_in(function: ast.FunctionDef) -> set[str]:
    """Return the names that parameters and assignments bind in a function, or in one within it."""
    nodes = [node for part in (function.args, *function.body) for node in ast.walk(part)]
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return parameters | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def keywords_of(signature: str) -> set[str] | None:
    """Return the names that a call may give as keywords, by a signature as listings have it; ``None``: any."""
    if not signature:
        return None
    (function,) = ast.parse(f"def f{signature}: ...").body
    arguments: ast.arguments = function.args  # type: ignore[attr-defined]  # a def is all that there is
    return None if arguments.kwarg else {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}
