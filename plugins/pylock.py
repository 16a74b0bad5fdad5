"""The lockfiles of installers, ``pylock.toml`` (PEP 751), with a section of opgraft's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from opgraft.config.files import parse_toml

_SECTION = "[tool.opgraft]"
_LINE = re.compile(r"^\[tool\.opgraft\]\s*$", re.M)


def is_pylock(path: str) -> bool:
    """Return True if the name of a file is one of a ``pylock.toml``."""
    return path.endswith(".toml")


def read_pylock(text: str) -> tuple[Any, dict[str, set[str]]]:
    """Return the section of opgraft, and the versions of each package by normalized name.

    Raises:
        ValueError: the text is no ``pylock.toml``, or has no such section.
    """
    # Few lockfiles are of this kind, and the import takes long.
    from packaging.pylock import Pylock, PylockValidationError

    tables = parse_toml(text)
    try:
        locked = Pylock.from_dict(tables)
    except PylockValidationError as error:
        raise ValueError(f"it is no pylock.toml: {error}") from error
    section = (locked.tool or {}).get("opgraft")
    if section is None:
        raise ValueError(f"it has no section {_SECTION}")
    versions: dict[str, set[str]] = {}
    for package in locked.packages:
        # A package from a folder may have no version.
        if package.version is not None:
            versions.setdefault(package.name, set()).add(str(package.version))
    return section, versions


def with_section(text: str, section: Mapping[str, Any]) -> str:
    """Return the text of a ``pylock.toml`` with a new section of opgraft at its end.

    Args:
        text: of the file, with a section or without.
        section: texts, and lists of tables that have texts, flags, lists and tables of texts.

    Raises:
        ValueError: the text is malformed, or has something below the section.
    """
    above = _LINE.split(text, maxsplit=1)[0].rstrip()
    lines = [above, "", _SECTION]
    for key, value in section.items():
        if isinstance(value, str) or not value:
            lines.append(f"{key} = {_toml(value)}")
            continue
        for table in value:
            lines += ["", f"[[tool.opgraft.{key}]]"]
            lines += [f"{name} = {_toml(entry)}" for name, entry in table.items()]
    newline = "\r\n" if "\r\n" in text else "\n"
    made = newline.join([*lines, ""])
    # The line may stand in a text of many lines, or tables may follow the section.
    after, before = parse_toml(made), parse_toml(text)
    others = before.get("tool", {}).get("opgraft", {}).keys() - section.keys()
    if others or _without_section(after) != _without_section(before):
        raise ValueError(f"it has something below {_SECTION}: move that to the end")
    return made


def _without_section(tables: Mapping[str, Any]) -> dict[str, Any]:
    tools = {name: table for name, table in tables.get("tool", {}).items() if name != "opgraft"}
    return {**tables, "tool": tools}


def _toml(value: Any) -> str:
    """Return a text, a flag, a list of texts or a table of these in TOML."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{name} = {_toml(entry)}" for name, entry in value.items())
        return f"{{ {pairs} }}"
    # JSON spells all others alike, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
