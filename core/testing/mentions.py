"""Names that code of plugins uses, as its source shows. Nothing of the source is run."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

_OURS = frozenset({"opgraft", "torch"})
_MOST_FILES = 2000
"""Files of a package that are read; a larger package counts as one that uses every name."""

_REGISTRATION = "register_oot"

_LOOKUPS = {"getattr": 1, "getattr_static": 1, "attrgetter": 0, "methodcaller": 0}
"""Functions that find a method by name, with the position of the name among the arguments."""

_LISTS = frozenset({"__dict__", "__getattribute__", "dir", "eval", "exec", "getmembers", "vars"})
"""Names in code that may reach every method of a class."""

_LOOKS = frozenset({"dir", "getattr", "getattr_static", "getmembers", "vars"})
"""Names of functions that look into their first argument."""

_PARTS = re.compile(r"forward(_(?!\w)|$)")
"""The end of a text to which code adds a dispatch key: ``getattr(self, f"forward_{key}")``."""


def may_call(cls: type, name: str) -> bool:
    """Return False if all sources show that nothing calls a plugin's method ``forward_<key>``.

    A decorator, a metaclass or ``__init_subclass__`` of the plugin may keep the method. The plugin
    may compose the name or list the methods, and any module may use the name. Return True if a
    source is missing.
    """
    owner = next(base for base in cls.__mro__ if name in vars(base))
    if _is_replaced(vars(owner)[name], name):
        return True
    of_plugin = [base for base in cls.__mro__ if not _is_known(base.__module__)]
    if any(map(_has_hooks, of_plugin)):
        return True
    packages = {base.__module__.partition(".")[0] for base in of_plugin}
    files: set[Path] = set()
    for package in packages:
        files.update(_files_of(package))
    # A session and a compiled module have no source.
    if any(_file_of(base.__module__) not in files for base in of_plugin):
        return True
    for file in files:
        tree = _tree_of(file)
        if tree is None or _uses(tree, name, _may_be_part) or _looks_up(tree, packages):
            return True
    decorated = {name: owner, **{base.__name__: base for base in of_plugin}}
    if any(_is_decorated(*each) for each in decorated.items()):
        return True
    return _is_used(name, _loaded_files())


def may_call_constructor(cls: type) -> bool:
    """Return False if a constructor neither calls another ``__init__`` nor code of a plugin.

    A function, a class or a method of the plugin may call the constructor of the base.
    """
    constructor = vars(cls)["__init__"]
    # A decorator may call the constructor of the base.
    if _is_replaced(constructor, "__init__"):
        return True
    names = set(_names_of_code(constructor.__code__))
    if not names.isdisjoint(("__init__", *_LOOKUPS, *_LISTS)):
        return True
    if _imports_others(constructor.__code__) or {*constructor.__code__.co_freevars} - {"__class__"}:
        return True
    named = [constructor.__globals__[name] for name in names & constructor.__globals__.keys()]
    homes = [_home_of(value) for value in named]
    homes += [base.__module__ for base in cls.__mro__ if not names.isdisjoint(vars(base))]
    return not all(map(_is_known, homes))


def _imports_others(code: CodeType) -> bool:
    """Return True if a function imports a module of a plugin."""
    imports = [each for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
    return not all(_is_known(str(each.argval)) for each in imports)


def _home_of(value: object) -> str:
    """Return the module of a function or a class; of other objects, that of the type."""
    if isinstance(value, ModuleType):
        return value.__name__
    is_definition = isinstance(value, (FunctionType, BuiltinFunctionType, type))
    return str((value if is_definition else type(value)).__module__ or "builtins")


def _names_of_code(code: CodeType) -> Iterator[str]:
    """Yield the names and texts in a function, and in the functions within."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_of_code(constant)


def _is_replaced(method: Any, name: str) -> bool:
    """Return True if a decorator has put another object in place of a method."""
    with suppress(ValueError):  # of functions that wrap each other
        method = inspect.unwrap(method)
    return not isinstance(method, FunctionType) or method.__code__.co_name != name


def may_construct(cls: type, target: type) -> bool:
    """Return False if all sources show that nothing constructs the target of a replacement.

    Args:
        cls: the replacement. Modules of its package count that are not loaded, too.
        target: the class that it replaces.
    """
    own = _files_of(cls.__module__.partition(".")[0])
    # A session and a compiled module have no source.
    return not own or _is_used(target.__name__, {*own, *_loaded_files()}, _constructs)


def _is_used(
    name: str, files: Iterable[Path], uses: Callable[[ast.Module, str], bool] | None = None
) -> bool:
    """Return True if a file uses the name of a method or class; by default any mention counts."""
    uses = uses or _uses
    for file in files:
        # Most files lack the name: to parse all of them would take seconds.
        if name.encode() not in _bytes_of(file):
            continue
        tree = _tree_of(file)
        if tree is None or uses(tree, name):
            return True
    return False


def _loaded_files() -> set[Path]:
    """Return the sources of all loaded modules; those of opgraft, torch and Python itself aside."""
    files = set()
    for module in list(sys.modules):
        file = None if _is_known(module) else _file_of(module)
        if file is not None:
            files.add(file)
    return files


def _constructs(tree: ast.Module, name: str) -> bool:
    """Return True if a module uses a class, other than to derive from, import or register."""
    names = {name}
    ignored = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias) and node.name == name:
            names.add(node.asname or name)
            ignored.add(id(node))
        for left_out in _not_constructing(node):
            ignored.update(map(id, ast.walk(left_out)))
    for node in _code(tree):
        if id(node) in ignored:
            continue
        if not names.isdisjoint(_names_in(node)):
            return True
    return False


def _not_constructing(node: ast.AST) -> Sequence[ast.AST]:
    """Return the bases of a class, or a registration itself."""
    if isinstance(node, ast.ClassDef):
        return node.bases
    named = node.func if isinstance(node, ast.Call) else node
    return [node] if _last_name(named) == _REGISTRATION else []


def _has_hooks(cls: type) -> bool:
    """Return True if a class may look at methods when the class, or a derived one, is made."""
    ours = type(cls).__module__.partition(".")[0] in {*_OURS, "builtins", "abc"}
    return not ours or "__init_subclass__" in vars(cls)


def _is_known(module: str) -> bool:
    package = module.partition(".")[0]
    return package in _OURS or package in sys.stdlib_module_names


def _file_of(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file and file.endswith(".py") else None


def _files_of(package: str) -> list[Path]:
    """Return the sources of a module or package, loaded or not; none if there are too many."""
    file = _file_of(package)
    if file is None or file.name != "__init__.py":
        return [file] if file else []
    found = sorted(file.parent.rglob("*.py"))
    return found if len(found) <= _MOST_FILES else []


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _tree_of(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _uses(tree: ast.Module, name: str, is_part: Callable[[str], bool] | None = None) -> bool:
    """Return True if code uses a name; definitions and documentation do not count."""
    for node in _code(tree):
        if name in _names_in(node):
            return True
        if is_part is not None and any(map(is_part, _texts_in(node))):
            return True
    return False


def _code(tree: ast.Module) -> list[ast.AST]:
    """List the nodes of a module without documentation: texts that are statements."""
    nodes = list(ast.walk(tree))
    documentation = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documentation.add(id(node.value))
    return [node for node in nodes if id(node) not in documentation]


def _looks_up(tree: ast.Module, packages: Collection[str]) -> bool:
    """Return True if code may reach a method whose name the code does not have as a whole.

    A look into a module of other packages, such as ``getattr(torch, name)``, reaches no method of
    the plugin.
    """
    nodes = list(ast.walk(tree))
    modules = _modules_of_others(nodes, packages)
    plain = set()
    for node in nodes:
        if isinstance(node, ast.Call) and (_has_text(node) or _asks_one_of(modules, node)):
            plain.add(id(node.func))
    for node in nodes:
        name = _last_name(node)
        if isinstance(node, ast.alias) and node.asname:
            name = node.name
        if name in (*_LISTS, *_LOOKUPS) and id(node) not in plain:
            return True
    return False


def _modules_of_others(nodes: Iterable[ast.AST], packages: Collection[str]) -> set[str]:
    """Return the names of imported modules, except those of the plugin and of opgraft."""
    found = set()
    for node in nodes:
        # "from a import b" may bring anything, and not only a module.
        if not isinstance(node, ast.Import):
            continue
        for alias in node.names:
            package = alias.name.partition(".")[0]
            if package not in packages and package != "opgraft":
                found.add(alias.asname or package)
    return found


def _asks_one_of(modules: Collection[str], call: ast.Call) -> bool:
    """Return True if a call looks into a module: ``vars(torch)``, ``getattr(torch.ops, name)``."""
    if _last_name(call.func) not in _LOOKS or not call.args:
        return False
    return _first_name(call.args[0]) in modules


def _has_text(call: ast.Call) -> bool:
    """Return True if a call of a lookup gives the name as a text."""
    position = _LOOKUPS.get(_last_name(call.func))
    if position is None or position >= len(call.args):
        return False
    name = call.args[position]
    return any(_texts_in(name))


def _names_in(node: ast.AST) -> Iterator[str]:
    # Names, attributes and keyword arguments have these fields.
    for field in ("id", "attr", "arg"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value
    if isinstance(node, ast.alias):
        yield node.name
    for text in _texts_in(node):
        yield from re.findall(r"\w+", text)


def _texts_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _may_be_part(text: str) -> bool:
    return _PARTS.search(text) is not None


def _is_decorated(name: str, cls: type) -> bool:
    """Return True if a class, or its method of that name, has a foreign decorator."""
    module = sys.modules[cls.__module__]
    tree = _tree_of(Path(str(module.__file__)))
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name != name:
            continue
        for decorator in node.decorator_list:
            first = _first_name(decorator)
            found = vars(module).get(first, getattr(builtins, first, None))
            # Modules have a name only: that of ``@opgraft.inference_only`` is opgraft.
            home = getattr(found, "__module__", None) or getattr(found, "__name__", None)
            package = str(home).partition(".")[0]
            if package not in (*_OURS, "builtins"):
                return True
    return False


def _first_name(node: ast.expr) -> str:
    """Return ``a`` for ``a``, ``a.b`` and ``a.b(c)``."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _last_name(node: ast.AST) -> str:
    """Return ``b`` for ``b`` and ``a.b``."""
    return str(getattr(node, "attr", getattr(node, "id", "")))
