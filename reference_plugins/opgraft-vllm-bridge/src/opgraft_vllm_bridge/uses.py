"""The names of vLLM that source code uses, by its syntax tree alone: nothing of it is imported or executed."""

from __future__ import annotations

import ast
from dataclasses import dataclass

_VLLM = "vllm"


@dataclass(frozen=True)
class Use:
    """A place where code uses a dotted name of vLLM."""

    name: str
    line: int


class Uses(ast.NodeVisitor):
    """Follows what imports bind, wherever they stand, and instances of it, to the attributes that are taken of them.

    Attributes:
        found: the uses, in the order in which they are met.
        bound: the names that imports bind, each with what it stands for.
        instances: variables that hold an instance of a class of vLLM, each with the class.
        base: of the class whose body is visited, the base of vLLM.
    """

    def __init__(self) -> None:
        self.found: list[Use] = []
        self.bound: dict[str, str] = {}
        self.instances: dict[str, str] = {}
        self.base: str | None = None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == _VLLM:
                self.bound[alias.asname or _VLLM] = alias.name if alias.asname else _VLLM
                self.found.append(Use(alias.name, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").partition(".")[0] != _VLLM:
            return
        module = str(node.module)
        for alias in node.names:
            name = module if alias.name == "*" else f"{module}.{alias.name}"
            self.found.append(Use(name, node.lineno))
            if alias.name != "*":
                self.bound[alias.asname or alias.name] = name

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        made = self.dotted(node.value.func) if isinstance(node.value, ast.Call) else None
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._hold(target.id, made)

    def _hold(self, name: str, cls: str | None) -> None:
        """Let a variable stand for an instance of a class of vLLM, or for nothing of it any more."""
        self.instances.pop(name, None)
        if cls and cls.rpartition(".")[2][:1].isupper():
            self.instances[name] = cls

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name:
            self.found.append(Use(name, node.lineno))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.dotted(node.func)
        if name:
            self.found.append(Use(name, node.lineno))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, held, taken = self.bound, self.instances, _taken_in(node)
        annotated = {each.arg: self._annotated(each.annotation) for each in node.args.args}
        self.bound = {name: value for name, value in outer.items() if name not in taken}
        self.instances = {name: value for name, value in held.items() if name not in taken}
        for name, cls in annotated.items():
            self._hold(name, cls)
        self.generic_visit(node)
        self.bound = {**self.bound, **outer}  # an import may bind a global name
        self.instances = held

    def _annotated(self, annotation: ast.expr | None) -> str | None:
        """Return the class that an annotation names, one in quotes too."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except (SyntaxError, ValueError):
                return None
        return self.dotted(annotation) if annotation else None

    def dotted(self, node: ast.expr) -> str | None:
        """Return the dotted name of vLLM that an expression stands for, if it is one."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        name = self.base if attributes and _is_super(node) else None
        if isinstance(node, ast.Name):
            name = self.bound.get(node.id) or (self.instances.get(node.id) if attributes else None)
        return ".".join([name, *reversed(attributes)]) if name else None


def _is_super(node: ast.expr) -> bool:
    """Return True for ``super()``, whose attributes come from the base of vLLM."""
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Name) and function.id == "super"


def _taken_in(function: ast.FunctionDef) -> set[str]:
    """Return the names that parameters and assignments bind in a function, or in one within it."""
    nodes = [node for part in (function.args, *function.body) for node in ast.walk(part)]
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return parameters | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
