"""The names of opgraft that source code uses, by its syntax tree alone: nothing of it is imported or executed."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass

HOST = "opgraft"
HOOKS = "opgraft.plugins.hookspecs"


@dataclass(frozen=True)
class Use:
    """A place where code uses a dotted name of opgraft; ``keywords`` are those of a call there."""

    name: str
    line: int
    keywords: tuple[str, ...] = ()


def uses_in(source: bytes, exported: Mapping[str, Collection[str]]) -> list[Use]:
    """List the uses of opgraft in a module, in the order of its lines.

    Args:
        source: of the module.
        exported: by module of opgraft, the names that ``import *`` takes of it.

    Raises:
        SyntaxError, ValueError, RecursionError: it is no Python that this interpreter reads.
    """
    visitor = Uses(exported)
    visitor.visit(ast.parse(source))
    return sorted(dict.fromkeys(visitor.found), key=lambda use: (use.line, use.name))


class Uses(ast.NodeVisitor):
    """Follows what imports bind, wherever they stand, and instances of it, to the attributes that are taken of them.

    Attributes:
        host: the package whose names are followed.
        bound: the names that imports bind, each with what it stands for.
        starred: those that ``import *`` binds.
        instances: variables that hold an instance of a class of opgraft, each with the class.
        base: of the class whose body is visited, the base of opgraft.
        own: the methods that this class defines.
    """

    host = HOST

    def __init__(self, exported: Mapping[str, Collection[str]]) -> None:
        self.exported = exported
        self.found: list[Use] = []
        self.bound: dict[str, str] = {}
        self.starred: set[str] = set()
        self.instances: dict[str, str] = {}
        self.base: str | None = None
        self.own: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == self.host:
                self.bound[alias.asname or self.host] = alias.name if alias.asname else self.host
                self.found.append(Use(alias.name, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").partition(".")[0] != self.host:
            return
        module = str(node.module)
        for alias in node.names:
            if alias.name == "*":
                names = {name: f"{module}.{name}" for name in self.exported.get(module, ())}
                self.bound |= names
                self.starred |= names.keys()
                self.found.append(Use(module, node.lineno))
            else:
                self.bound[alias.asname or alias.name] = f"{module}.{alias.name}"
                self.found.append(Use(f"{module}.{alias.name}", node.lineno))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.starred and node.id in self.bound:  # of others the import is the use
            self.found.append(Use(self.bound[node.id], node.lineno))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        made = self._dotted(node.value.func) if isinstance(node.value, ast.Call) else None
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._hold(target.id, made)

    def _hold(self, name: str, cls: str | None) -> None:
        """Let a variable stand for an instance of a class of opgraft, or for nothing of ours any more."""
        self.instances.pop(name, None)
        if cls and cls.rpartition(".")[2][:1].isupper():
            self.instances[name] = cls

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
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        overridden = [each for each in functions if not each.name.startswith("_")]
        self.found += [
            Use(f"{base}.{function.name}", function.lineno)
            for base in bases
            for function in overridden
        ]
        outer = self.base, self.own
        self.base, self.own = next(iter(bases), None), {function.name for function in functions}
        self.generic_visit(node)
        self.base, self.own = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if any(self._is_hook(mark) for mark in node.decorator_list):
            self.found.append(Use(f"{HOOKS}.{node.name}", node.lineno))
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
        return self._dotted(annotation) if annotation else None

    def _is_hook(self, mark: ast.expr) -> bool:
        name = self._dotted(mark.func if isinstance(mark, ast.Call) else mark)
        return name is not None and name.rpartition(".")[2] == "hookimpl"

    def _dotted(self, node: ast.expr) -> str | None:
        """Return the dotted name of opgraft that an expression stands for, if it is one."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        name = self._inherited(node, attributes[-1]) if attributes else None
        if isinstance(node, ast.Name) and name is None:
            name = self.bound.get(node.id) or (self.instances.get(node.id) if attributes else None)
        return ".".join([name, *reversed(attributes)]) if name else None

    def _inherited(self, node: ast.expr, attribute: str) -> str | None:
        """Return the base of opgraft from which an attribute of ``self`` or ``super()`` comes, as far as that shows."""
        if isinstance(node, ast.Name):
            return self.base if node.id == "self" and attribute not in self.own else None
        above = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "super"
        )
        return self.base if above else None


def _taken_in(function: ast.FunctionDef) -> set[str]:
    """Return the names that parameters and assignments bind in a function, or in one within it."""
    nodes = [node for part in (function.args, *function.body) for node in ast.walk(part)]
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return parameters | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def keywords_of(signature: str) -> set[str] | None:
    """Return the names that a call may give as keywords, by a signature as listings have it; ``None``: any."""
    if not signature:
        return None
    (function,) = ast.parse(f"def f{signature}: ...").body
    arguments: ast.arguments = function.args  # type: ignore[attr-defined]  # a def is all that there is
    return (
        None if arguments.kwarg else {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}
    )
