"""Files of settings, JSON or TOML."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from opgraft.base.files import read_regular
from opgraft.config.declaration import subsections, without_duplicates
from opgraft.config.plugin_settings import plugin_fields
from opgraft.config.whole import OpgraftConfig, check_known, config_from_fields, known_fields
from opgraft.errors import ConfigError, close_matches

Layers = tuple[tuple[str, OpgraftConfig], ...]
"""Configs, lowest first, each with the origin in words."""

_LARGEST = 1 << 20
"""The largest number of bytes of a file of settings."""


@dataclass(frozen=True)
class ConfigFile:
    """The content of a file of settings.

    Attributes:
        path: the path of the file.
        layers: a layer per setting. The origin names file and line.
    """

    path: str
    layers: Layers


def read_file(path: str) -> ConfigFile:
    """Read a file of settings, ``.json`` or ``.toml``. Sections are objects or tables with fields.

    Raises:
        ConfigError: the file cannot be read or is malformed, or holds an unknown setting or a wrong
            value. The message names the file, and the line if known.
    """
    try:
        text = read_regular(path, _LARGEST).decode()
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file {path} is not UTF-8 text: {error}") from error
    # The path is a pipe or device, or has a null byte, or the file is too large.
    except ValueError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}") from error
    layers: list[tuple[str, OpgraftConfig]] = []
    seen: set[str] = set()
    # A layer for each setting, so that an error and 'opgraft env' name the line.
    for name, value in _fields(_parsed_file(path, text)):
        origin = f"{path}, line {_line(text, name)}"
        if name in seen:
            raise ConfigError(
                f"{origin}: {name} stands in the file twice, in its section and outside: take one "
                "out"
            )
        seen.add(name)
        try:
            layers.append((origin, _layer(name, value)))
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from error
    return ConfigFile(path, tuple(layers))


def _sections() -> set[str]:
    """Return the names of all sections, those of plugins too."""
    return {*subsections(OpgraftConfig), *(name.partition(".")[0] for name in plugin_fields())}


def _layer(name: str, value: Any) -> OpgraftConfig:
    sections = _sections()
    # A table with the name of a section has become fields before.
    if name in sections:
        raise ConfigError(
            f"{name} is {'null' if value is None else repr(value)}, but it is a section: give it "
            "fields"
        )
    if isinstance(value, dict) and name not in known_fields() and "." not in name:
        raise ConfigError(f"unknown section {name!r}: {close_matches(name, sections)}")
    check_known(name)
    if value is None:
        raise ConfigError(f"{name} is null: give it a value, or leave it out")
    return config_from_fields({name: value})


def _parsed_file(path: str, text: str) -> Mapping[str, Any]:
    """Parse the whole file."""
    try:
        if path.lower().endswith(".toml"):
            content = parse_toml(text)
        elif path.lower().endswith(".json"):
            content = json.loads(text, object_pairs_hook=without_duplicates)
        else:
            raise ConfigError(
                f"the config file {path} is neither .json nor .toml: name it by what it holds"
            )
    # Deeply nested JSON exceeds the limit of Python's stack.
    except (ValueError, RecursionError) as error:
        # A ConfigError is a ValueError.
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the config file {path} is malformed: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {path} holds no object of settings at its top")
    return content


def parse_toml(text: str) -> Any:
    """Parse a text in TOML.

    Raises:
        ValueError: the text is malformed.
    """
    # A command without a file need not pay for the import.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _fields(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting."""
    sections = _sections()
    for name, value in content.items():
        if name not in sections or not isinstance(value, dict):
            yield name, value
            continue
        for inner, item in value.items():
            yield f"{name}.{inner}", item


def _line(text: str, name: str) -> int:
    """Return the line of a setting: the line of the field's name after the section's name."""
    # The parsers of the standard library tell no lines.
    position = 0
    for part in name.split("."):
        spelled = rf"""(?m)^[^#\n]*?(?<![\w-])["']?(?P<key>{re.escape(part)})["']?\s*[=:\].]"""
        # The section may stand in the same line, as in {"model": {"seed": 1}}.
        line_start = text.rfind("\n", 0, position) + 1
        found = re.compile(spelled).search(text, line_start)
        if found:
            position = found.start("key")
    return text.count("\n", 0, position) + 1
