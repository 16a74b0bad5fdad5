"""The names of vLLM in source code, found in the syntax tree. The code is not imported."""

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
    """Finds uses of vLLM: imports, and attributes of imported names and of instances.

    Attributes:
        found: the uses, in the order of the source.
        bound: name in the source → the dotted name of vLLM that an import gave it.
        instances: variable → the class of vLLM of its value.
        base: the base of vLLM of the class whose body is visited, or None.
    """

    def __init__(self) -> None:
        self.found: list[Use] = []
        self.bound: dict[str, str] = {}
        self.instances: dict[str, str] = {}
        self.base: str | None = None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] != _VLLM:
                continue
            self.found.append(Use(alias.name, node.lineno))
            if alias.asname:
                self.bound[alias.asname] = alias.name
            else:
                # "import vllm.config" binds "vllm" only.
                self.bound[_VLLM] = _VLLM

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
        """Note that a variable holds an instance of a class of vLLM, or something else."""
        self.instances.pop(name, None)
        # A function's name begins in lower case, and the class of its result is unknown.
        is_class = cls is not None and cls.rpartition(".")[2][:1].isupper()
        if cls is not None and is_class:
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
        """Visit a function: parameters and local variables hide outer names of the same name."""
        annotated = {each.arg: self._annotated(each.annotation) for each in node.args.args}
        outer_bound = self.bound
        outer_instances = self.instances
        local = _taken_in(node)
        self.bound = {name: value for name, value in outer_bound.items() if name not in local}
        self.instances = {
            name: value for name, value in outer_instances.items() if name not in local
        }
        for name, cls in annotated.items():
            self._hold(name, cls)
        self.generic_visit(node)
        # An import in a function may bind a global name.
        self.bound = {**self.bound, **outer_bound}
        self.instances = outer_instances

    def _annotated(self, annotation: ast.expr | None) -> str | None:
        """Return the name of vLLM in an annotation, with or without quotes, or None."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except (SyntaxError, ValueError):
                return None
        return self.dotted(annotation) if annotation else None

    def dotted(self, node: ast.expr) -> str | None:
        """Return the dotted name of vLLM that an expression stands for, or None.

        After ``from vllm import config``, the expression ``config.VllmConfig`` stands for
        ``vllm.config.VllmConfig``.
        """
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        name = self._start(node, has_attributes=bool(attributes))
        if not name:
            return None
        return ".".join([name, *attributes])

    def _start(self, node: ast.expr, *, has_attributes: bool) -> str | None:
        """Return the name of vLLM for the expression before the first dot, or None."""
        if has_attributes and _is_super(node):
            return self.base
        if not isinstance(node, ast.Name):
            return None
        bound = self.bound.get(node.id)
        if bound or not has_attributes:
            return bound
        return self.instances.get(node.id)


def _is_super(node: ast.expr) -> bool:
    """Return True for ``super()``. Its attributes are those of the base."""
    if not isinstance(node, ast.Call):
        return False
    return isinstance(node.func, ast.Name) and node.func.id == "super"


def _taken_in(function: ast.FunctionDef) -> set[str]:
    """Return the names of parameters and local variables, also of functions inside."""
    names = set()
    for part in (function.args, *function.body):
        for node in ast.walk(part):
            if isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names
