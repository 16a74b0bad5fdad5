"""Uses of vLLM in the source of a plugin. The source is read, not imported."""

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
"""The most bytes of a source file."""

MOST = 5000
"""The most files of a package."""


@dataclass
class Source:
    """A module of a plugin.

    Attributes:
        name: the dotted name.
        file: the source file.
        uses: the names of vLLM in the source, without those of guarded imports.
    """

    name: str
    file: Path
    uses: list[Use] = field(default_factory=list)


def modules_of(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules of a package, each with its file.

    Raises:
        PluginError: the package has more than MOST files.
    """
    specs = list(specs_of(package))
    folders = specs[-1].submodule_search_locations if specs else None
    count = 0
    for folder in folders or ():
        for file in sorted(Path(folder).rglob("*.py")):
            count += 1
            if count > MOST:
                raise PluginError(f"the plugin {package} has more than {MOST:,} files")
            parts = file.relative_to(folder).with_suffix("").parts
            if not all(part.isidentifier() for part in parts):
                continue
            if parts[-1] == "__init__":
                parts = parts[:-1]
            yield ".".join((package, *parts)), file


def read_module(name: str, file: Path) -> Source:
    """Return a module with its uses of vLLM.

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
    """Finds uses in a module. It knows imports for type checkers, and variables for attributes."""

    def visit_If(self, node: ast.If) -> None:
        """Learn names from imports for type checkers. Such imports are no uses: they never run."""
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._aside(node.body)
            self._all(node.orelse)
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Remember variables such as ``parallel = settings.parallel_config``."""
        super().visit_Assign(node)
        value = None
        if isinstance(node.value, ast.Attribute):
            value = self.dotted(node.value)
        for target in node.targets:
            if value and isinstance(target, ast.Name):
                self.instances[target.id] = value
            elif isinstance(target, ast.Attribute):
                name = self.dotted(target)
                if name:
                    self.found.append(Use(name, target.lineno))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Remember the first base of vLLM while the body is visited, for ``super()``."""
        bases = [self.dotted(base) for base in node.bases]
        self._all([*node.bases, *node.keywords, *node.decorator_list])
        outer = self.base
        self.base = next(filter(None, bases), None)
        self._all(node.body)
        self.base = outer

    def _all(self, nodes: list[ast.AST] | list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def _aside(self, nodes: list[ast.stmt]) -> None:
        """Visit statements, and forget the uses in them."""
        before = self.found
        self.found = []
        self._all(nodes)
        self.found = before


def members_of(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the methods and attributes of a class, each with its annotation or ""."""
    for each in cls.body:
        if isinstance(each, ast.FunctionDef):
            yield each.name, ""
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, ast.unparse(each.annotation)
        elif isinstance(each, ast.Assign):
            yield from ((target.id, "") for target in each.targets if isinstance(target, ast.Name))
