"""Uses of vLLM by a plugin, found by reading its source: nothing of it is imported or executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opgraft.errors import PluginError, raised_in
from opgraft.hosts import described, read_regular, specs_of

from opgraft_vllm_bridge.uses import Use, Uses

_LARGEST = 1 << 22  # bytes of a source file
_MOST = 5000  # files of a plugin
_PLATFORMS = frozenset(
    {
        "vllm.platforms.Platform",
        "vllm.platforms.interface.Platform",
        "vllm.platforms.cpu.CpuPlatform",
    }
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


def sources_of(*modules: str, apart: Collection[str] = ()) -> list[Source]:
    """Read modules of a plugin, and those of its own that they import, wherever in them an import stands.

    Of a module that is only named in a text, as that of a platform class is by the first module, the members of such
    classes count and nothing else: a worker or an attention backend that a platform names does not run here.

    Args:
        modules: dotted.
        apart: functions of the first module that are left out, unless the rest of it uses them.

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
        for module, file, is_package in _files_of(name):
            if file not in read:
                read[file] = _read(module, file, is_package, apart if module == modules[0] else ())
                waiting += sorted(read[file].imports)
        if len(read) > _MOST:
            raise PluginError(f"a plugin of vLLM has more than {_MOST:,} files: it cannot be read")
    first = [source for source in read.values() if source.name == modules[0]]
    for text in sorted(
        {text for source in first for text in source.texts if text.partition(".")[0] in own}
    ):
        for module, file, is_package in _files_of(text):
            if file not in read:
                read[file] = Source(
                    module, file, members=_read(module, file, is_package, ()).members
                )
    return list(read.values())


def _files_of(name: str) -> Iterator[tuple[str, Path, bool]]:
    """Yield the modules that importing one runs, each with its file, and whether it is a package."""
    for depth, spec in enumerate(specs_of(name), 1):
        file = Path(spec.origin or "")
        if file.suffix == ".py":
            yield (
                ".".join(name.split(".")[:depth]),
                file,
                spec.submodule_search_locations is not None,
            )


def _read(name: str, file: Path, is_package: bool, apart: Collection[str]) -> Source:
    try:
        tree = ast.parse(read_regular(file, _LARGEST), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = raised_in(name, error) or str(file)
        raise PluginError(f"{place} cannot be read: {described(error)}", place) from error
    texts = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    source = Source(name, file, texts={text for text in texts if _DOTTED.fullmatch(text)})
    reader = _Reader(source, name if is_package else name.rpartition(".")[0])
    for statement in _without(tree.body, apart):
        reader.visit(statement)
    source.uses = list(dict.fromkeys(reader.found))
    return source


def _without(statements: list[ast.stmt], apart: Collection[str]) -> list[ast.stmt]:
    """Leave out functions of these names that no other statement uses."""
    functions = [
        each for each in statements if isinstance(each, ast.FunctionDef) and each.name in apart
    ]
    rest = [each for each in statements if each not in functions]
    used = {node.id for each in rest for node in ast.walk(each) if isinstance(node, ast.Name)}
    return [*rest, *(each for each in functions if each.name in used)]


class _Reader(Uses):
    """Notes what a module uses of vLLM, what it imports of its own, and what is in methods of its platform classes."""

    def __init__(self, source: Source, package: str) -> None:
        super().__init__()
        self.source = source
        self.package = package

    def visit_Import(self, node: ast.Import) -> None:
        super().visit_Import(node)
        self.source.imports |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        super().visit_ImportFrom(node)
        above = (
            self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            if node.level
            else []
        )
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

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.source.attributes.add(node.attr)
        super().visit_Attribute(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Follow what is taken of settings, too."""
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
        if base in _PLATFORMS:
            self.source.members |= {name for name, _ in members_of(node)}
        for statement in node.body:
            if (
                base in _PLATFORMS
                and isinstance(statement, ast.FunctionDef)
                and statement.name[:1] != "_"
            ):
                self.source.methods[statement.name] = statement.lineno
                self.source.bodies[statement.name] = self._aside([statement])
            else:
                self.visit(statement)
        self.base = outer

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
