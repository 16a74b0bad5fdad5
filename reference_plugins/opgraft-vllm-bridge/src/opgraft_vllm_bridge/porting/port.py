"""Turn the source of a vLLM plugin into that of an opgraft plugin, file by file.

None of the plugin's code runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import libcst as cst
from opgraft.errors import InputError
from opgraft.plugins.bridges import Ported, Uncovered

from opgraft_vllm_bridge.porting.entry_points import (
    GENERAL,
    PLATFORMS,
    EntryPoints,
    left_in_setup,
    left_in_toml,
    moved_setup,
    moved_toml,
    needs_vllm,
    read_setup,
    read_toml,
    requirement,
)
from opgraft_vllm_bridge.porting.hooks import device_module, guide, plugin_module
from opgraft_vllm_bridge.porting.rewriting import RewrittenFile, rewrite
from opgraft_vllm_bridge.porting.source import Source

GUIDE = "PORTING.md"
_ENTRY = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
_OPTION = re.compile(r"^[\w.-]+\s*=(?!=)\s*")
"""The name of an option in ``setup.cfg``, up to its value."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def port(source: Source) -> Ported:
    """Return the ported plugin.

    Raises:
        InputError: a file cannot be parsed, there are no entry points of vLLM, or they name no file
            of the plugin.
    """
    trees = {}
    for path, content in source.files.items():
        if path.endswith(".py"):
            trees[path] = _parsed(path, content)
    where, document, points = _entry_points(source, trees)
    name = next(iter({**points.platforms, **points.general}))
    platform = next(iter(points.platforms), name)
    made = Ported(name, GUIDE, dict(source.files))
    groups = _groups(source, trees, points, made)
    for path, tree in trees.items():
        # A setup.py with entry points: vLLM's groups are replaced below, not marked.
        moved = path == where
        rewritten = _rewritten(tree, path, platform, (PLATFORMS, GENERAL) if moved else ())
        made.uncovered += rewritten.uncovered
        code = moved_setup(rewritten.code, groups) if moved else rewritten.code
        # A comment of the port may have a character that the file's encoding lacks.
        made.files[path] = code.encode(tree.encoding, errors="backslashreplace")
    if where == "pyproject.toml":
        made.files[where] = moved_toml(document, groups).encode()
    made.uncovered += _requirements(source, document, where)
    if GUIDE in made.files:
        raise InputError(f"{source.root} has a {GUIDE}, which the port writes: rename it")
    made.files[GUIDE] = guide(name, groups, made.uncovered).encode()
    return made


def _parsed(path: str, content: bytes) -> cst.Module:
    try:
        # Unlike libcst, this names the line of a fault, and refuses absurdly deep nesting.
        ast.parse(content, path)
        return cst.parse_module(content)
    except SyntaxError as error:
        raise InputError(
            f"{path}:{error.lineno}: cannot be parsed ({error.msg}): mend it, or remove it"
        ) from error
    except (ValueError, RecursionError, MemoryError, cst.ParserSyntaxError) as error:
        raise InputError(
            f"{path}: cannot be parsed ({type(error).__name__}): mend it, or remove it"
        ) from error


def _rewritten(tree: cst.Module, path: str, platform: str, moved: Collection[str]) -> RewrittenFile:
    try:
        return rewrite(tree, path, platform, moved)
    except RecursionError as error:
        raise InputError(
            f"{path}: an expression is nested too deeply to be ported: divide it"
        ) from error


def _entry_points(source: Source, trees: Mapping[str, cst.Module]) -> tuple[str, Any, EntryPoints]:
    """Return the file with the entry points, the document of ``pyproject.toml``, and the points."""
    document = None
    if "pyproject.toml" in source.files:
        document, points = read_toml("pyproject.toml", source.files["pyproject.toml"])
        if points:
            return "pyproject.toml", document, points
    points = read_setup(trees["setup.py"]) if "setup.py" in trees else None
    if points is None:
        raise InputError(
            f"{source.root} has no entry points of vLLM in pyproject.toml or setup.py: a device "
            "plugin offers some in the groups vllm.platform_plugins and vllm.general_plugins"
        )
    return "setup.py", document, points


def _groups(
    source: Source, trees: Mapping[str, cst.Module], points: EntryPoints, made: Ported
) -> dict[str, dict[str, str]]:
    """Add the modules of opgraft's entry points to the port, and return group → name → target."""
    groups: dict[str, dict[str, str]] = {}
    for name, target in points.platforms.items():
        module, function = _target(name, target)
        package, folder = _package(source, module)
        file = source.module(module) or ""
        classes = sorted(set(_returned(trees[file], function)))
        if len(classes) != 1:
            advice = (
                "its function returns no path, or several, that can be read: write a PlatformSpec "
                "by hand"
            )
            made.uncovered.append(Uncovered(file, 1, f"vllm.platform_plugins {name}", advice))
            continue
        _add_file(made, f"{folder}opgraft_device.py", device_module(module, function, classes[0]))
        groups["opgraft.platforms"] = {name: f"{package}.opgraft_device:SPEC"}
    functions = [_target(name, target) for name, target in points.general.items()]
    packages = [_package(source, module) for module, _ in functions]
    if functions:
        package, folder = packages[0]
        text = plugin_module(functions, scoped=bool(points.platforms))
        _add_file(made, f"{folder}opgraft_plugin.py", text)
        groups["opgraft.plugins"] = {next(iter(points.general)): f"{package}.opgraft_plugin"}
    return groups


def _target(name: str, target: str) -> tuple[str, str]:
    """Return the module and the function of an entry point."""
    found = _ENTRY.fullmatch(target.strip())
    if not found:
        raise InputError(f"the entry point {name!r} is {target!r}: expected module:function")
    return found[1], found[2]


def _package(source: Source, module: str) -> tuple[str, str]:
    """Return the top package of a module, and the path of its folder with a slash at the end."""
    if source.module(module) is None:
        raise InputError(
            f"an entry point names the module {module!r}, of which {source.root} has no file"
        )
    top = module.partition(".")[0]
    path = source.module(top)
    if path is None or not path.endswith("/__init__.py"):
        raise InputError(
            f"an entry point names {module!r}, whose top is no package: make it a folder with "
            "__init__.py"
        )
    return top, path.removesuffix("__init__.py")


def _returned(tree: cst.Module, function: str) -> Iterator[str]:
    """Yield the classes that a function names by dotted paths, as ``module:Class``."""
    for statement in ast.walk(ast.parse(tree.code)):
        if not isinstance(statement, ast.FunctionDef) or statement.name != function:
            continue
        for node in ast.walk(statement):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and _DOTTED.fullmatch(text):
                module, _, name = text.rpartition(".")
                yield f"{module}:{name}"


def _requirements(source: Source, document: Any, where: str) -> Iterator[Uncovered]:
    """Yield the remaining requirements of vLLM, and lists that opgraft could not be added to."""
    left: dict[str, Iterable[tuple[int, str]]] = {}
    for path, content in source.files.items():
        if path == "pyproject.toml":
            left[path] = left_in_toml(document, content, where == path)
        elif path == "setup.py":
            left[path] = left_in_setup(content, where == path)
        elif path == "setup.cfg" or re.fullmatch(r"(.*/)?[\w-]*requirements[\w-]*\.txt", path):
            left[path] = _left_in_lines(content)
    for path, found in left.items():
        for number, text in sorted(found):
            if needs_vllm(text):
                name = "the requirement of vllm"
                advice = "remove it; opgraft is what the port needs"
            else:
                name = text
                advice = (
                    f"no list that is written out: add {requirement()} where it is made, and leave "
                    "vllm out"
                )
            yield Uncovered(path, number, name, advice)


def _left_in_lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield the requirements of vLLM in a file with one requirement per line."""
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        text = _OPTION.sub("", line)
        if needs_vllm(text):
            yield number, text


def _add_file(made: Ported, path: str, text: str) -> None:
    """Add a file to the port.

    Raises:
        InputError: the plugin has a file of this path.
    """
    if path in made.files:
        raise InputError(f"the plugin has a file {path}, which the port writes: rename it")
    made.files[path] = text.encode()
