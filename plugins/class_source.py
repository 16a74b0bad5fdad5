"""Faults of a platform's class in the source. Nothing runs, so torch stays out."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opgraft.base.files import read_regular
from opgraft.base.text import described
from opgraft.errors import ChildError, PluginError, close_matches
from opgraft.platform import DISPATCH_KEYS, Platform
from opgraft.plugins.discovery import PLATFORM_GROUP, Offer
from opgraft.plugins.kept_properties import PROPERTIES, checked
from opgraft.plugins.metadata import specs_of
from opgraft.plugins.probing import TIME_LIMIT, ProbeFailed, spec_of
from opgraft.registry.decision import Provider
from opgraft.registry.watching import told_when_late

_LARGEST = 1 << 22  # bytes of a source file
_DEEPEST = 20  # classes above each other
_CHILD = "from opgraft.plugins.class_source import answer; answer(reply_to, *sys.argv[3:])"
_ROOT = (Platform.__module__, Platform.__qualname__)
_ABSTRACT = frozenset({"abstractmethod", "abc.abstractmethod"})
_PROPERTIES = frozenset({"property", "cached_property", "functools.cached_property"})
# Fmt: skip.
_DYNAMIC = frozenset(
    {
        "globals",
        "locals",
        "vars",
        "exec",
        "eval",
        "setattr",
        "delattr",
        "modules",
        "__dict__",
        "__setattr__",
        "__delattr__",
        "update_abstractmethods",
        "__abstractmethods__",
    }
)
"""Names in code that may bind names, or change classes, without a statement that says so."""

_HARMLESS = frozenset({"opgraft", "torch", "numpy"})
"""Packages whose import makes no module of another name."""

_OWN_SCOPE = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMED = (
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.MatchAs,
    ast.MatchStar,
    ast.ExceptHandler,
)
_Binding = ast.ClassDef | tuple[str, str] | None
"""A class, an import as module and name, or ``None`` if only running the source tells."""

_STORED = "self."
"""The beginning of the key, among members, of an attribute that code of the module sets."""

_CONSTRUCTION = ("__init__", "__getattribute__")
"""Methods of a class that may give its instances other values than the class has."""

_UNKNOWN = object()
"""Stands for the value of a property that only running the source tells."""

_IMPLIED = ("oot", "native")
"""The keys that each dispatch chain has, whether a platform lists them or not."""

_Members = Mapping[str, ast.stmt | None]
"""By name, the statement that defines a member; ``None`` if only running the source tells."""


@dataclass(frozen=True)
class SourceFindings:
    """Findings from the source of a platform's class.

    Attributes:
        fault: the fault of the class, ``None`` if the source shows none.
        unknown: what only a process with torch can tell; empty for built-in platforms, which are
            tested.
    """

    fault: str | None = None
    unknown: str = ""


class _EndOfReading(Exception):  # noqa: N818  # an outcome, never one that users catch
    """Nothing more of the source needs to be read."""

    def __init__(self, found: SourceFindings) -> None:
        super().__init__(found)
        self.found = found


def _unknown(why: str) -> _EndOfReading:
    return _EndOfReading(SourceFindings(unknown=f"its class ({why}) and its settings"))


_NO_PLATFORM = SourceFindings("its class does not derive from opgraft.Platform")


def verify(offer: Offer, time_limit: float = TIME_LIMIT) -> SourceFindings:
    """Look at the source of a platform's class in a child process."""
    if offer.built_in:
        return SourceFindings()
    if offer.bridge is not None:
        return SourceFindings(unknown="its class and its settings")
    child = importlib.import_module("opgraft.machine.child")
    what = f"the class of platform {offer.name!r} of {offer.provider}"
    try:
        with told_when_late(what, offer.provider, time_limit):
            reply = child.ask_child(_CHILD, (offer.name, offer.value), None, time_limit)
        return SourceFindings(reply["fault"], str(reply["unknown"]))
    except (ChildError, KeyError, TypeError) as error:
        return SourceFindings(unknown=f"its class and its settings ({error})")


def answer(reply_to: int, name: str, value: str) -> None:
    """Look at the class on the child's side."""
    offer = Offer(PLATFORM_GROUP, name, value, Provider(name))
    try:
        found = look(offer)
    except (ProbeFailed, PluginError) as error:
        found = SourceFindings(unknown=f"its class and its settings ({error})")
    with open(reply_to, "w", encoding="utf-8") as pipe:
        json.dump({"fault": found.fault, "unknown": found.unknown}, pipe)
    os._exit(0)  # threads of the module may go on for ever


def look(offer: Offer) -> SourceFindings:
    """Look at the class in this process. The module of the offer is imported."""
    path = spec_of(offer).platform_class
    if not isinstance(path, str):
        return SourceFindings(unknown="its class, which a function returns, and its settings")
    module, _, name = path.partition(":")
    if not module or not name.isidentifier():
        return SourceFindings(f"its class is given as {path!r}, expected 'package.module:Class'")
    try:
        source = _Source.read(module)
        if source is None:
            return SourceFindings(f"there is no module {module!r}, which its class {path!r} is in")
        if not source.has(name):
            near = close_matches(name, source.bound)
            return SourceFindings(f"{source.file} has no class {name!r}: {near}")
        fault = _fault_of(_chain(source, name), offer)
    except _EndOfReading as settled:
        return settled.found
    return SourceFindings(fault, "the import of its module, its constructor and its settings")


@dataclass
class _Source:
    """A module, parsed.

    Attributes:
        name: dotted.
        file: the path.
        bound: the names in statements, with values.
        open: True if further names may be bound.
        stored: attributes, of any object, that the code sets or deletes.
    """

    name: str
    file: Path
    bound: dict[str, _Binding] = field(default_factory=dict)
    open: bool = False
    stored: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, module: str) -> _Source | None:
        """Parse a module; ``None`` if there is none of that name.

        Raises:
            _EndOfReading: the module has no source, a malformed one, or cannot be imported.
        """
        specs = list(specs_of(module))
        if len(specs) < len(module.split(".")):
            return None
        file = Path(specs[-1].origin or "")
        if file.suffix != ".py":
            raise _unknown(f"{module} has no source")
        try:
            tree = ast.parse(read_regular(file, _LARGEST))
        except SyntaxError as error:
            place = f"{file}:{error.lineno or 1}"
            raise _EndOfReading(
                SourceFindings(f"{place} is no Python: {described(error)}")
            ) from error
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise _unknown(f"{file} cannot be read: {type(error).__name__}") from error
        fault = _fault_of_import(tree, module)
        if fault is not None:
            raise _EndOfReading(SourceFindings(f"{file}:{fault}"))
        source = cls(module, file)
        is_package = specs[-1].submodule_search_locations is not None
        source._bind(tree.body, module if is_package else module.rpartition(".")[0])
        source._forget_changed(tree)
        if _has_late_import(tree.body):
            source.stored.update(PROPERTIES)
        return source

    def has(self, name: str) -> bool:
        """Return True if the module binds a name.

        Raises:
            _EndOfReading: the source does not tell.
        """
        if name not in self.bound and self.open:
            raise _unknown(f"{self.file} makes names as it runs")
        return name in self.bound

    def _bind(self, statements: Sequence[ast.stmt], package: str) -> None:
        always = set(map(id, statements))
        for node in _scope(statements):
            for name, binding in _bindings_of(node, package):
                # After a star, a statement under a condition may bind the name anew, or not.
                sure = id(node) in always or not self.open
                self._set(name, binding if sure else None)
            if isinstance(node, ast.ImportFrom) and _has_star(node):
                self.open = True
                # The star may bind each name that stands above it anew.
                self.bound = dict.fromkeys(self.bound)
        self.open |= "__getattr__" in self.bound

    def _set(self, name: str, binding: _Binding) -> None:
        """Bind a name. Of several bindings, which need not all run, none is the one for sure."""
        self.bound[name] = binding if self.bound.get(name, binding) == binding else None

    def _forget_changed(self, tree: ast.Module) -> None:
        """Forget the meaning of names that code of the module may bind or change later."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                self.bound.update(dict.fromkeys(node.names))
            elif _is_dynamic(node):
                self.open = True
                self.bound = dict.fromkeys(self.bound)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self.stored.add(node.attr)
                self._forget(node.value)
            elif isinstance(node, ast.Call):
                for argument in [*node.args, *node.keywords]:
                    self._forget(argument)  # the call may change the value
            elif isinstance(node, ast.Assign):
                self._forget(node.value)  # and so may a call, by the other name

    def _forget(self, value: ast.AST) -> None:
        """Forget the meaning of the names in a value."""
        for node in ast.walk(value):
            if isinstance(node, ast.Name) and node.id in self.bound:
                self.bound[node.id] = None


def _fault_of_import(tree: ast.Module, module: str) -> str | None:
    """Return the line and the fault of a statement that ends the import of a module in any case.

    Statements under a condition may not run, so they do not count. Neither do imports behind code
    that may make a module, or add a folder to ``sys.path``.
    """
    above = module.rpartition(".")[0]
    # The package above has not run here.
    may_be_made = bool(above) and above not in sys.modules
    for statement in tree.body:
        if isinstance(statement, ast.Raise):
            return f"{statement.lineno} raises as the module is imported"
        for imported in _imports_of(statement):
            package = imported.partition(".")[0]
            is_there = package in sys.modules or bool(list(specs_of(package)))
            if not may_be_made and not is_there:
                return f"{statement.lineno} imports {package}, which is not installed"
        may_be_made = may_be_made or _runs_code_of_others(statement)
    return None


def _runs_code_of_others(statement: ast.stmt) -> bool:
    """Return True if a statement may run code outside of the standard library, torch and opgraft."""
    return _imports_others(statement) or any(map(_may_make_a_module, ast.walk(statement)))


def _imports_others(node: ast.AST) -> bool:
    """Return True for an import outside of the standard library, torch and opgraft."""
    if isinstance(node, ast.ImportFrom) and node.level:
        return True
    packages = {imported.partition(".")[0] for imported in _imports_of(node)}
    return bool(packages - _HARMLESS - sys.stdlib_module_names)


def _may_make_a_module(node: ast.AST) -> bool:
    is_entry = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    return is_entry or isinstance(node, ast.Call)


def _imports_of(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports by absolute names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _has_late_import(statements: Sequence[ast.stmt]) -> bool:
    """Return True if a module imports others behind a class. The others may change the class."""
    is_behind_class = False
    for node in _scope(statements):
        is_behind_class = is_behind_class or isinstance(node, ast.ClassDef)
        if is_behind_class and _imports_others(node):
            return True
    return False


def _bindings_of(node: ast.AST, package: str) -> Iterator[tuple[str, _Binding]]:
    """Yield the names that a node itself binds, each with its binding.

    Args:
        node: of the module's scope.
        package: the package of the module, for relative imports.
    """
    if isinstance(node, ast.ImportFrom):
        module = _module_of(node, package)
        for alias in node.names:
            yield _name_of(alias), (module, alias.name)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            name = _name_of(alias)
            yield name, (alias.name if alias.asname else name, "")
    else:
        for name in _names_of(node):
            yield name, node if isinstance(node, ast.ClassDef) else None


def _module_of(statement: ast.ImportFrom, package: str) -> str:
    parts = package.split(".")
    above = parts[: len(parts) - statement.level + 1] if statement.level else []
    named = [statement.module] if statement.module else []
    return ".".join([*above, *named])


def _has_star(statement: ast.ImportFrom) -> bool:
    return any(alias.name == "*" for alias in statement.names)


def _scope(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of statements in order; those within functions and classes aside."""
    left: list[ast.AST] = [*reversed(statements)]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, _OWN_SCOPE):
            left += reversed(list(ast.iter_child_nodes(node)))


def _is_dynamic(node: ast.AST) -> bool:
    name = getattr(node, "id", getattr(node, "attr", None))
    return isinstance(node, ast.Name | ast.Attribute) and name in _DYNAMIC


def _name_of(alias: ast.alias) -> str:
    """Return the name of an import."""
    return alias.asname or alias.name.partition(".")[0]


def _names_of(node: ast.AST) -> list[str]:
    """Return the names that a node itself binds or deletes, nodes below it aside."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [_name_of(alias) for alias in node.names]
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.MatchMapping):
        return [node.rest] if node.rest else []
    if not isinstance(node, _NAMED):
        return []
    name = getattr(node, "name", None)
    return [name] if name else []


def _chain(source: _Source, name: str, depth: int = 0) -> list[_Members]:
    """Return the members of a class and of its bases below ``Platform``, most derived first.

    Raises:
        _EndOfReading: the source does not tell.
    """
    if depth > _DEEPEST:
        raise _unknown(f"{name} has too many bases")
    bound = source.bound[name] if source.has(name) else None
    if isinstance(bound, tuple):
        return _imported(*bound, depth)
    if not isinstance(bound, ast.ClassDef) or bound.decorator_list or bound.keywords:
        raise _unknown(f"{source.file} makes {name} as it runs")
    if (source.name, name) == _ROOT:
        return []
    if not bound.bases:
        raise _EndOfReading(_NO_PLATFORM)
    if len(bound.bases) != 1:
        raise _unknown(f"{name} has {len(bound.bases)} bases")
    stored = {_STORED + attribute: None for attribute in source.stored}
    return [{**stored, **_members(bound)}, *_base(source, bound.bases[0], depth)]


def _members(cls: ast.ClassDef) -> _Members:
    """Return the members in the body of a class.

    Raises:
        _EndOfReading: the source does not tell.
    """
    members: dict[str, ast.stmt | None] = {}
    for statement in cls.body:
        if _has_blocks(statement) or isinstance(statement, ast.Delete):
            raise _unknown(f"{cls.name} has methods under a condition")
        for node in _scope([statement]):
            for name in _names_of(node):
                plain = _is_plain(statement, name)
                members[name] = statement if plain else None
    if "__init_subclass__" in members:
        raise _unknown(f"{cls.name} changes the classes below it")
    if "__new__" in members:
        raise _unknown(f"{cls.name} makes its objects as it runs")
    return members


def _has_blocks(statement: ast.stmt) -> bool:
    """Return True if a statement runs blocks of its own, perhaps."""
    if isinstance(statement, _OWN_SCOPE):
        return False
    return any(hasattr(statement, name) for name in ("body", "cases"))


def _is_plain(statement: ast.stmt, name: str) -> bool:
    """Return True if the statement is ``name = value``, a method or a class."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    else:
        return isinstance(statement, _OWN_SCOPE)
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _base(source: _Source, base: ast.expr, depth: int) -> list[_Members]:
    """Return the chain of a base, which is a name or an attribute of an imported module."""
    if isinstance(base, ast.Name):
        if not source.open and base.id not in source.bound and hasattr(builtins, base.id):
            raise _EndOfReading(_NO_PLATFORM)
        return _chain(source, base.id, depth + 1)
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        bound = source.bound.get(base.value.id)
        if isinstance(bound, tuple) and not bound[1]:
            return _imported(bound[0], base.attr, depth)
    raise _unknown(f"the base {ast.unparse(base)} is made as {source.file} runs")


def _imported(module: str, name: str, depth: int) -> list[_Members]:
    if (module, name) in (_ROOT, ("opgraft", _ROOT[1])):
        return []
    source = _Source.read(module) if name else None
    if source is None:
        raise _unknown(f"{module} is not there")
    return _chain(source, name, depth + 1)


def _fault_of(chain: list[_Members], offer: Offer) -> str | None:
    """Name the first fault of a class, by the definitions of it and of the classes above it."""
    names = sorted(Platform.__abstractmethods__)
    abstract = [name for name in names if _is_abstract(chain, name)]
    if abstract:
        return f"its class is abstract: it does not define {', '.join(abstract)}"
    for each in PROPERTIES:
        fault = _fault_of_property(chain, each)
        if fault is not None:
            return fault
    name = _value(chain, "name")
    if name not in (_UNKNOWN, offer.name):
        return f"it calls itself {name!r}, its entry point is {offer.name!r}"
    keys = _value(chain, "dispatch_chain")
    return None if keys is _UNKNOWN else _fault_of_chain(tuple(keys))


def _fault_of_property(chain: list[_Members], name: str) -> str | None:
    """Name the fault of a property whose value the source shows."""
    definition = _definition(chain, name)
    if isinstance(definition, ast.FunctionDef) and not definition.decorator_list:
        return f"its {name} is a method: write @property above it"
    value = _value(chain, name)
    if value is _UNKNOWN:
        return None
    try:
        checked(name, value)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _fault_of_chain(keys: tuple[str, ...]) -> str | None:
    """Name the first key of a dispatch chain that no platform may have, or has twice."""
    for key in keys:
        if key not in DISPATCH_KEYS:
            return f"its dispatch chain has {key!r}: each key must be one of {DISPATCH_KEYS}"
        if keys.count(key) > 1 and key not in _IMPLIED:
            return f"its dispatch chain has {key!r} twice: each key may stand once"
    return None


def _definition(chain: list[_Members], name: str) -> ast.stmt | None:
    return next((members[name] for members in chain if name in members), None)


def _is_abstract(chain: list[_Members], name: str) -> bool:
    if not any(name in members for members in chain):
        return True
    return bool(_ABSTRACT & _decorators(_definition(chain, name)))


def _decorators(statement: ast.stmt | None) -> set[str]:
    decorators = getattr(statement, "decorator_list", [])
    return {ast.unparse(each) for each in decorators}


def _value(chain: list[_Members], name: str) -> Any:
    """Return the constant of an instance, ``_UNKNOWN`` if the source shows none."""
    changing = {_STORED + name, *_CONSTRUCTION}
    if any(not changing.isdisjoint(members) for members in chain):
        return _UNKNOWN
    return _constant(_definition(chain, name))


def _constant(statement: ast.stmt | None) -> Any:
    """Return the constant of an assignment or a property; ``_UNKNOWN`` for anything else."""
    value = getattr(statement, "value", None)
    body = getattr(statement, "body", [])
    if not _decorators(statement) <= _PROPERTIES:
        return _UNKNOWN
    if body and isinstance(body[-1], ast.Return) and len(body) == 1 + _has_docstring(body):
        value = body[-1].value
    try:
        return ast.literal_eval(value) if isinstance(value, ast.expr) else _UNKNOWN
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN


def _has_docstring(body: list[ast.stmt]) -> bool:
    first = body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
