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
from opgraft.config.whole import FIELDS, OpgraftConfig, check_known, config_from_fields
from opgraft.errors import ConfigError, close_matches

Layers = tuple[tuple[str, OpgraftConfig], ...]
"""Configs, lowest first, each with the words that name its origin."""


_LARGEST = 1 << 20  # bytes of a file of settings


@dataclass(frozen=True)
class ConfigFile:
    """A file of settings that was read: its path, and a layer per setting whose origin names file and line."""

    path: str
    layers: Layers


def read_file(path: str) -> ConfigFile:
    """Read a file of settings, ``.json`` or ``.toml``: sections are objects or tables, fields stand in them.

    Raises:
        ConfigError: the file cannot be read, is malformed, or holds a setting that nobody knows or a value that a
            setting does not take. The message names the file, and the line where there is one.
    """
    try:
        text = read_regular(path, _LARGEST).decode()
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file {path} is not UTF-8 text: {error}") from error
    except ValueError as error:  # a pipe, a device, too much, or a path with a zero byte
        raise ConfigError(f"the config file {path} cannot be read: {error}") from error
    layers: list[tuple[str, OpgraftConfig]] = []
    seen: set[str] = set()
    for name, value in _fields(_content(path, text)):
        origin = f"{path}, line {_line(text, name)}"
        if name in seen:
            raise ConfigError(
                f"{origin}: {name} stands in the file twice, in its section and outside: take one out"
            )
        seen.add(name)
        try:
            layers.append((origin, _layer(name, value)))
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from error
    return ConfigFile(path, tuple(layers))


def _layer(name: str, value: Any) -> OpgraftConfig:
    sections = subsections(OpgraftConfig)
    if name in sections:
        raise ConfigError(
            f"{name} is {'null' if value is None else repr(value)}, but it is a section: give it fields"
        )
    if isinstance(value, dict) and name not in FIELDS and "." not in name:
        raise ConfigError(f"unknown section {name!r}: {close_matches(name, sections)}")
    check_known(name)
    if value is None:
        raise ConfigError(f"{name} is null: give it a value, or leave it out")
    return config_from_fields({name: value})


def _content(path: str, text: str) -> Mapping[str, Any]:
    """Parse the whole file."""
    try:
        if path.lower().endswith(".toml"):
            content = _parse_toml(text)
        elif path.lower().endswith(".json"):
            content = json.loads(text, object_pairs_hook=without_duplicates)
        else:
            raise ConfigError(
                f"the config file {path} is neither .json nor .toml: name it by what it holds"
            )
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the config file {path} is malformed: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {path} holds no object of settings at its top")
    return content


def _parse_toml(text: str) -> Any:
    if sys.version_info >= (3, 11):  # imported here: a command without a file need not pay for it
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _fields(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting."""
    sections = subsections(OpgraftConfig)
    for name, value in content.items():
        if name in sections and isinstance(value, dict):
            yield from ((f"{name}.{inner}", item) for inner, item in value.items())
        else:
            yield name, value


def _line(text: str, name: str) -> int:
    """Find the line of a setting: that of its field's name, after its section's, outside of comments."""
    position = 0
    for part in name.split("."):
        spelled = rf"""(?m)^[^#\n]*?(?<![\w-])["']?(?P<key>{re.escape(part)})["']?\s*[=:\].]"""
        found = re.compile(spelled).search(text, text.rfind("\n", 0, position) + 1)
        position = found.start("key") if found else position
    return text.count("\n", 0, position) + 1
