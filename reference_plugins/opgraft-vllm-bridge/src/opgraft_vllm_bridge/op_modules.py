"""Modules of a plugin that register ops. In vLLM the worker of the plugin imports them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from opgraft.errors import raised_in
from opgraft.plugins.bridges import Offer, described, discover, report_fault, specs_of

from opgraft_vllm_bridge.reading import LARGEST, modules_of

_REGISTERS = "register_oot"
_GENERAL = "vllm.general_plugins"


def import_op_modules(offer: Offer, packages: Iterable[str]) -> None:
    """Import the modules of a plugin's packages that register ops.

    Modules that a function of ``vllm.general_plugins`` imports are left to the function. If a
    module raises, the failure is reported, and the other modules are imported.
    """
    found: set[str] = set()
    for package in packages:
        found.update(op_modules(package))
    left_to_functions = set(_imported_by_functions(offer))
    for module in sorted(found - left_to_functions):
        import_alone(module, offer)


def import_alone(module: str, offer: Offer) -> bool:
    """Import a module of a plugin, and return True. If the module raises, report the failure."""
    try:
        importlib.import_module(module)
    except Exception as error:
        place = raised_in(offer.package, error)
        message = (
            f"the vLLM plugin {offer.provider} goes without its module {module}: {described(error)}"
        )
        report_fault(message, offer.provider, place)
        return False
    return True


def op_modules(package: str) -> Iterator[str]:
    """Yield the modules of a package that register ops when imported. Their source is read only."""
    for module, file in modules_of(package):
        try:
            content = file.read_bytes()
            if len(content) > LARGEST or _REGISTERS.encode() not in content:
                continue
            tree = ast.parse(content)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if any(_registers(statement) for statement in tree.body):
            yield module


def _registers(statement: ast.stmt) -> bool:
    """Return True if a statement registers an op when the module is imported."""
    if isinstance(statement, ast.ClassDef):
        return any(_names_registration(each) for each in statement.decorator_list)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    if isinstance(statement, ast.If | ast.Try | ast.For | ast.With):
        inner = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)]
        return any(_registers(each) for each in inner)
    return _names_registration(statement)


def _names_registration(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Attribute) and each.attr == _REGISTERS for each in ast.walk(node)
    )


def _imported_by_functions(offer: Offer) -> Iterator[str]:
    """Yield the modules that the modules of the distribution's general plugins import."""
    for other in discover().offers:
        if other.provider != offer.provider or other.stands_in != _GENERAL:
            continue
        *_, spec = specs_of(other.module)
        file = Path(spec.origin or "")
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        # Relative imports count from the package of a module, and a package is its own.
        package = other.module.split(".")
        if spec.submodule_search_locations is None:
            package.pop()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from _imported_from(node, package)


def _imported_from(node: ast.ImportFrom, package: list[str]) -> Iterator[str]:
    """Yield the module of a statement, and each of its names, which may be a module as well."""
    above: list[str] = []
    if node.level:
        above = package[: len(package) - node.level + 1]
    module = ".".join([*above, *filter(None, [node.module])])
    yield module
    for alias in node.names:
        yield f"{module}.{alias.name}"
