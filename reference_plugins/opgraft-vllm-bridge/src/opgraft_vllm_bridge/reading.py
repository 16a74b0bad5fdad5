"""Uses of vLLM by a plugin, found by reading its source: nothing of it is imported or executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opgraft.errors import PluginError, raised_in
from opgraft.plugins.bridges import described, read_regular, specs_of

from opgraft_vllm_bridge.guards import guarded_lines
from opgraft_vllm_bridge.uses import Use, Uses

LARGEST = 1 << 22
"""Bytes of a source file."""

MOST = 5000
"""Files of a plugin."""


@dataclass
class Source:
    """A module of a plugin.

    Attributes:
        name: dotted.
        file: of it.
        uses: names of vLLM that it uses, but for those whose absence it provides for.
    """

    name: str
    file: Path
    uses: list[Use] = field(default_factory=list)


def modules_of(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules of a package, each with its file.

    Raises:
        PluginError: there are more than thousands.
    """
    specs = list(specs_of(package))
    count = 0
    for folder in (specs[-1].submodule_search_locations or ()) if specs else ():
        for file in sorted(Path(folder).rglob("*.py")):
            count += 1
            if count > MOST:
                raise PluginError(f"the plugin {package} has more than {MOST:,} files")
            parts = file.relative_to(folder).with_suffix("").parts
            if all(part.isidentifier() for part in parts):
                names = parts[:-1] if parts[-1] == "__init__" else parts
                yield ".".join((package, *names)), file


def read_module(name: str, file: Path) -> Source:
    """Return what a module uses of vLLM.

    Raises:
        PluginError: the file cannot be read or parsed.
    """
    try:
        content = read_regular(file, LARGEST)
        tree = ast.parse(content, str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = raised_in(name, error) or str(file)
        raise PluginError(f"{place} cannot be read: {described(error)}", place) from error
    guarded = guarded_lines(content.decode(errors="replace"))
    reader = _Reader()
    reader.visit(tree)
    uses = [use for use in dict.fromkeys(reader.found) if use.line not in guarded]
    return Source(name, file, uses)


class _Reader(Uses):
    """Leaves out imports for type checkers, and follows what is taken of settings."""

    def visit_If(self, node: ast.If) -> None:
        """Take names from imports that only type checkers make, and not the imports themselves."""
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._aside(node.body)
            self._all(node.orelse)
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        super().visit_Assign(node)
        value = self.dotted(node.value) if isinstance(node.value, ast.Attribute) else None
        for target in node.targets:
            if value and isinstance(target, ast.Name):
                self.instances[target.id] = value
            elif isinstance(target, ast.Attribute) and (name := self.dotted(target)):
                self.found.append(Use(name, target.lineno))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        base = next(filter(None, map(self.dotted, node.bases)), None)
        self._all([*node.bases, *node.keywords, *node.decorator_list])
        outer, self.base = self.base, base
        self._all(node.body)
        self.base = outer

    def _all(self, nodes: list[ast.AST] | list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def _aside(self, nodes: list[ast.stmt]) -> None:
        """Visit statements, and forget the uses in them."""
        before, self.found = self.found, []
        self._all(nodes)
        self.found = before


def members_of(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the methods and attributes that a class defines, each with its annotation, which is mostly empty."""
    for each in cls.body:
        if isinstance(each, ast.FunctionDef):
            yield each.name, ""
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, ast.unparse(each.annotation)
        elif isinstance(each, ast.Assign):
            yield from ((target.id, "") for target in each.targets if isinstance(target, ast.Name))
