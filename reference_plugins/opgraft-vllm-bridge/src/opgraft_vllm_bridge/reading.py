"""Uses of vLLM by a plugin, found by reading its source: nothing of it is imported or executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opgraft.errors import PluginError, raised_in
from opgraft.files import read_regular
from opgraft.plugins.api_use import Use, Uses
from opgraft.plugins.metadata import specs_of
from opgraft.text import described

_LARGEST = 1 << 22  # bytes of a source file
_MOST = 5000  # files of a plugin
_PLATFORMS = frozenset(
    {"vllm.platforms.Platform", "vllm.platforms.interface.Platform", "vllm.platforms.cpu.CpuPlatform"}
)
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_ABSENT = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@dataclass
class Source:
    """A module of a plugin.

    Attributes:
        name: dotted.
        file: of it.
        uses: names of vLLM that it uses where it is run.
        optional: those whose absence it provides for.
        imports: modules of the plugin's own, or what may be such; ``texts`` may be names of more.
        methods: of its platform classes, by name the line; ``bodies`` are the uses within.
        members: methods and attributes of these classes.
        attributes: names that it takes of anything.
    """

    name: str
    file: Path
    uses: list[Use] = field(default_factory=list)
    optional: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    methods: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, list[Use]] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


def sources_of(*modules: str) -> list[Source]:
    """Read modules of a plugin, and those of its own that they import, wherever in them an import stands.

    Of the modules that are given, those count too that they have dotted names of, as of a platform's class.

    Raises:
        PluginError: a file cannot be read or parsed, or there are more than thousands.
    """
    own = {module.partition(".")[0] for module in modules}
    read: dict[Path, Source] = {}
    waiting, seen = list(modules), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] not in own:
            continue
        seen.add(name)
        for depth, spec in enumerate(specs_of(name), 1):
            file = Path(spec.origin or "")
            if file.suffix == ".py" and file not in read:
                module = ".".join(name.split(".")[:depth])
                found = _read(module, file, spec.submodule_search_locations is not None)
                read[file] = found
                waiting += sorted(found.imports | (found.texts if module in modules else set()))
        if len(read) > _MOST:
            raise PluginError(f"a plugin of vLLM has more than {_MOST:,} files: it cannot be read")
    return list(read.values())


def _read(name: str, file: Path, is_package: bool) -> Source:
    try:
        tree = ast.parse(read_regular(file, _LARGEST), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = raised_in(name, error) or str(file)
        raise PluginError(f"{place} cannot be read: {described(error)}", place) from error
    source = Source(name, file)
    reader = _Reader(source, name if is_package else name.rpartition(".")[0])
    reader.visit(tree)
    source.uses = list(dict.fromkeys(reader.found))
    return source


class _Reader(Uses):
    """Notes what a module uses of vLLM, what it imports of its own, and what is in methods of its platform classes."""

    host = "vllm"

    def __init__(self, source: Source, package: str) -> None:
        super().__init__({})
        self.source = source
        self.package = package

    def visit_Import(self, node: ast.Import) -> None:
        super().visit_Import(node)
        self.source.imports |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        super().visit_ImportFrom(node)
        above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *filter(None, [node.module])])
        self.source.imports |= {module, *(f"{module}.{alias.name}" for alias in node.names)}

    def visit_If(self, node: ast.If) -> None:
        """Take names from imports that only type checkers make, and not the imports themselves."""
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            imports = set(self.source.imports)
            self._aside(node.body)
            self.source.imports = imports
            self._all(node.orelse)
        else:
            self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        """Tell imports whose failure is caught from others."""
        caught = {word for handler in node.handlers for word in _words(handler.type)}
        if caught & _ABSENT:
            self.source.optional |= {use.name for use in self._aside(node.body)}
        else:
            self._all(node.body)
        self._all([*node.handlers, *node.orelse, *node.finalbody])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            self.source.texts.add(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.source.attributes.add(node.attr)
        super().visit_Attribute(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Follow what is taken of settings, too."""
        super().visit_Assign(node)
        value = self._dotted(node.value) if isinstance(node.value, ast.Attribute) else None
        for target in node.targets:
            if value and isinstance(target, ast.Name):
                self.instances[target.id] = value
            elif isinstance(target, ast.Attribute) and (name := self._dotted(target)):
                self.found.append(Use(name, target.lineno))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        base = next(filter(None, map(self._dotted, node.bases)), None)
        self._all([*node.bases, *node.keywords, *node.decorator_list])
        outer, self.base = self.base, base
        if base in _PLATFORMS:
            self.source.members |= {name for name, _ in members_of(node)}
        for statement in node.body:
            if base in _PLATFORMS and isinstance(statement, ast.FunctionDef) and statement.name[:1] != "_":
                self.source.methods[statement.name] = statement.lineno
                self.source.bodies[statement.name] = self._aside([statement])
            else:
                self.visit(statement)
        self.base = outer

    def _inherited(self, node: ast.expr, attribute: str) -> str | None:
        above = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
        return self.base if above else None

    def _all(self, nodes: list[ast.AST] | list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def _aside(self, nodes: list[ast.stmt]) -> list[Use]:
        """Visit statements, and return the uses in them instead of noting these."""
        before, self.found = self.found, []
        self._all(nodes)
        aside, self.found = self.found, before
        return aside


def _words(node: ast.expr | None) -> Iterator[str]:
    """Yield the names of exceptions that a handler catches; one without a type catches all."""
    if node is None:
        yield "BaseException"
    for each in ast.walk(node) if node is not None else ():
        if isinstance(each, ast.Name | ast.Attribute):
            yield each.id if isinstance(each, ast.Name) else each.attr


def members_of(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the methods and attributes that a class defines, each with its annotation, which is mostly empty."""
    for each in cls.body:
        if isinstance(each, ast.FunctionDef):
            yield each.name, ""
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, ast.unparse(each.annotation)
        elif isinstance(each, ast.Assign):
            yield from ((target.id, "") for target in each.targets if isinstance(target, ast.Name))
