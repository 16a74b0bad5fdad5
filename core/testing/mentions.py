"""Names that code of plugins uses, as its source shows. Nothing of the source is run."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

_OURS = frozenset({"opgraft", "torch"})
_MOST_FILES = 2000
"""Files of a package that are read; a larger package counts as one that uses every name."""

_PARTS = re.compile(r"forward(_(?!\w)|$)")
"""The end of a text to which code adds a dispatch key: ``getattr(self, f"forward_{key}")``."""


def may_call(cls: type, name: str) -> bool:
    """Return False if all sources show that nothing calls a plugin's method ``forward_<key>``.

    A decorator, a metaclass or ``__init_subclass__`` of the plugin may keep the method. The plugin
    may compose the name, and any module may use the name. Return True if a source is missing.
    """
    owner = next(base for base in cls.__mro__ if name in vars(base))
    method = inspect.unwrap(vars(owner)[name])
    # Another name is that of a function which a decorator has put in place of the method.
    if not isinstance(method, FunctionType) or method.__code__.co_name != name:
        return True
    of_plugin = [base for base in cls.__mro__ if not _is_known(base.__module__)]
    if any(map(_has_hooks, of_plugin)):
        return True
    packages = {base.__module__.partition(".")[0] for base in of_plugin}
    files = {file for package in packages for file in _files_of(package)}
    # A session and a compiled module have no source.
    if any(_file_of(base.__module__) not in files for base in of_plugin):
        return True
    for file in files:
        tree = _tree_of(file)
        if tree is None or _uses(tree, name, _may_be_part):
            return True
    decorated = {name: owner, **{base.__name__: base for base in of_plugin}}
    return any(_is_decorated(*each) for each in decorated.items()) or is_used(name)


def is_used(name: str, uses: Callable[[ast.Module, str], bool] | None = None) -> bool:
    """Return True if a loaded module uses a name; opgraft, torch and Python itself aside.

    Args:
        name: of a method or class.
        uses: returns True if a module uses the name; by default any mention counts.
    """
    uses = uses or _uses
    for module in list(sys.modules):
        file = None if _is_known(module) else _file_of(module)
        # Most files lack the name: to parse all of them would take seconds.
        if file is None or name.encode() not in _bytes_of(file):
            continue
        tree = _tree_of(file)
        if tree is None or uses(tree, name):
            return True
    return False


def constructs(tree: ast.Module, name: str) -> bool:
    """Return True if a module calls a class by name."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(_last_name(call.func) == name for call in calls)


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
    nodes = list(ast.walk(tree))
    statements = [node.value for node in nodes if isinstance(node, ast.Expr)]
    # A text that is a statement is documentation.
    documentation = {id(value) for value in statements if isinstance(value, ast.Constant)}
    code = [node for node in nodes if id(node) not in documentation]
    if any(name in _names_in(node) for node in code):
        return True
    texts = (text for node in code for text in _texts_in(node))
    return is_part is not None and any(map(is_part, texts))


def _names_in(node: ast.AST) -> Iterator[str]:
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
            found = vars(module).get(_first_name(decorator))
            # Modules have a name only: that of ``@opgraft.inference_only`` is opgraft.
            home = getattr(found, "__module__", None) or getattr(found, "__name__", None)
            package = str(home).partition(".")[0]
            if package not in _OURS:
                return True
    return False


def _first_name(node: ast.expr) -> str:
    """Return ``a`` for ``a``, ``a.b`` and ``a.b(c)``."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _last_name(node: ast.expr) -> str:
    """Return ``b`` for ``b`` and ``a.b``."""
    return str(getattr(node, "attr", getattr(node, "id", "")))
