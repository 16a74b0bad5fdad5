"""Settings of plugins, which a distribution declares as data.

An entry point of the group ``opgraft.settings`` names a section and a package. The file
``settings.toml`` in the package has a table for each setting. No code of the plugin runs, so that
the command line and the environment know the settings before the plugin is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from opgraft.base import upward
from opgraft.base.text import printable
from opgraft.config.declaration import KINDS, Bounds, Field
from opgraft.errors import ConfigError, close_matches

SETTINGS_GROUP = "opgraft.settings"
"""The group of entry points. The name is the section, the value is the package with the file."""

SETTINGS_FILE = "settings.toml"
"""The file in the package."""

_TYPES = (
    *("str", "bool", "int", "float"),
    *("Sequence[str]", "Sequence[int]", "Mapping[str, str]", "Mapping[str, bool]"),
)
_KEYS = ("type", "help", "default", "unset", "choices", "minimum", "above", "maximum")
_LIMITS = ("minimum", "above", "maximum")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MOST = 200
"""Settings of a section at most. A distribution has one section, and help lists all settings."""


def plugin_fields() -> Mapping[str, Field]:
    """Return the settings of installed plugins by dotted name. No plugin is imported."""
    # The plugin host reads the installed distributions, and imports this package.
    return MappingProxyType(upward.declared_settings())


def declared_fields(
    section: str,
    tables: Mapping[str, Any],
    provider: str,
    taken: Mapping[str, Field],
    variables: Collection[str],
) -> dict[str, Field]:
    """Return the settings of a section by dotted name.

    Args:
        section: the name of the section, the first part of each dotted name.
        tables: setting → keys of the declaration, such as ``{"streams": {"type": "int", …}}``.
        provider: the distribution.
        taken: the settings of opgraft and of other distributions.
        variables: the environment variables of opgraft.

    Raises:
        ConfigError: a name is taken or malformed, or a declaration has a wrong key or value.
    """
    _expect_free(section, taken)
    if len(tables) > _MOST:
        raise ConfigError(f"it declares {len(tables)} settings: declare {_MOST} at most")
    # Two names such as a.b_c and a_b.c would have one variable. Some variables are no settings.
    readers = dict.fromkeys(variables, "opgraft")
    for name, field in taken.items():
        readers[field.variable] = name
    fields = {}
    for attribute, table in tables.items():
        name = f"{section}.{attribute}"
        _expect_name(attribute, f"the setting {name!a}")
        field = _field(name, table, provider)
        rival = readers.setdefault(field.variable, name)
        if rival != name:
            raise ConfigError(
                f"{name} and {rival} would share the variable {field.variable}: rename one"
            )
        fields[name] = field
    return fields


def _expect_free(section: str, taken: Mapping[str, Field]) -> None:
    """Check the name of a section.

    Raises:
        ConfigError: the name is malformed, or the name of another section or setting.
    """
    _expect_name(section, f"the section {section!a}")
    for name, field in taken.items():
        # Fields of opgraft without a section, such as "strict", take a name, too.
        if name.partition(".")[0] == section:
            owner = field.provider or "opgraft"
            raise ConfigError(
                f"{owner} has the name {section!r} already: give the entry point another name"
            )


def _expect_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} is no name: use small letters, digits and '_', with a letter first"
        )


def _field(name: str, table: Any, provider: str) -> Field:
    """Return the setting of one declaration.

    Raises:
        ConfigError: a key is unknown or missing, or a value is wrong.
    """
    _expect_keys(name, table)
    kind = table.get("type")
    if kind not in _TYPES:
        raise ConfigError(f"{name}.type is {kind!r:.80}: use one of {'; '.join(_TYPES)}")
    help = _text_of_key(name, table, "help")
    if not help:
        raise ConfigError(f"{name} has no help: describe the effect in one line")
    bounds = _bounds(name, table, kind)
    default = table.get("default")
    unset = _text_of_key(name, table, "unset")
    variable = f"OPGRAFT_{name.replace('.', '_').upper()}"
    field = Field(name, KINDS[kind], bounds, default, unset, help, variable, provider)
    # The field itself checks the default, by the rules for values of users.
    return field._replace(default=_default(field))


def _expect_keys(name: str, table: Any) -> None:
    """Check the form of a declaration.

    Raises:
        ConfigError: the declaration is no table, or has an unknown key.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{name} is {table!r:.80}: write a table with the keys type, help and default"
        )
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{name} has the key {key!r}: {close_matches(key, _KEYS)}")


def _text_of_key(name: str, table: Mapping[str, Any], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{name}.{key} is {value!r:.80}: write a string")
    # The text of a stranger goes to terminals.
    return printable(value.strip())


def _bounds(name: str, table: Mapping[str, Any], kind: str) -> Bounds:
    """Return the bounds of a declaration.

    Raises:
        ConfigError: the type has no such bounds, or a bound is no number.
    """
    choices = table.get("choices", [])
    are_texts = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
    if not are_texts or (choices and kind != "str"):
        raise ConfigError(f"{name}.choices is {choices!r:.80}: write strings, for the type str")
    _expect_printable(f"{name}.choices", choices)
    limits = {key: _limit(name, table, key, kind) for key in _LIMITS}
    _expect_values_within(name, **limits)
    return Bounds(tuple(choices), **limits, instead={})


def _limit(name: str, table: Mapping[str, Any], key: str, kind: str) -> Any:
    """Return a limit of a number, or ``None``.

    Raises:
        ConfigError: the type has no limits, or the limit is no finite number of the type.
    """
    limit = table.get(key)
    if limit is None:
        return None
    # TOML has true and false, which Python counts as integers, and inf and nan.
    is_integer = isinstance(limit, int) and not isinstance(limit, bool)
    is_finite = is_integer or (isinstance(limit, float) and math.isfinite(limit))
    fits = {"int": is_integer, "float": is_finite}
    # Other types have no order, so limits would do nothing.
    if fits.get(kind, False):
        return limit
    raise ConfigError(
        f"{name}.{key} is {limit!r:.80}: write an integer for the type int, or a finite number for "
        "the type float"
    )


def _expect_values_within(name: str, minimum: Any, above: Any, maximum: Any) -> None:
    """Check that limits leave a value.

    Raises:
        ConfigError: no number is within the limits.
    """
    if maximum is None:
        return
    if minimum is not None and minimum > maximum:
        raise ConfigError(
            f"{name}.minimum is {minimum}, above the maximum of {maximum}: exchange them"
        )
    if above is not None and above >= maximum:
        raise ConfigError(
            f"{name}.above is {above}, and the maximum is {maximum}: no number is between them"
        )


def _expect_printable(what: str, value: Any) -> None:
    """Check the texts in a value. Help, messages and completion print them as they are.

    Raises:
        ConfigError: a text has characters that a terminal obeys.
    """
    for text in _texts_in(value):
        if printable(text) != text:
            raise ConfigError(f"{what} has the text {text!a:.80}: take out the control characters")


def _texts_in(value: Any) -> Iterator[str]:
    """Yield each text in a value of TOML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in([*value, *value.values()])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts_in(each)


def _default(field: Field) -> Any:
    """Return the default in the kept form.

    Raises:
        ConfigError: the default is not allowed, or there is neither a default nor ``unset``.
    """
    if field.default is not None:
        _expect_printable(f"{field.name}.default", field.default)
        return field.check(field.default)
    if not field.unset:
        raise ConfigError(
            f"{field.name} has no default: give one, or say in unset what the plugin does without"
        )
    return None
