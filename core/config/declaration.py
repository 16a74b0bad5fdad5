"""The declaration of settings. Each setting is a field of a section, with default, bounds and help.

Names, environment variables, options of the command line, files and the reference page all come
from these fields.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

from opgraft.errors import ConfigError, close_matches

FLAG_WORDS = MappingProxyType(
    {
        **dict.fromkeys(("1", "true", "yes", "on"), True),
        **dict.fromkeys(("0", "false", "no", "off"), False),
    }
)
"""The spellings of a flag."""

_DECLARED = "opgraft_setting"
_S = TypeVar("_S", bound="Section")
_NOTHING: Mapping[str, str] = MappingProxyType({})


def setting(
    help: str,
    *,
    default: Any = None,
    unset: str = "",
    choices: tuple[str, ...] = (),
    instead: Mapping[str, str] = _NOTHING,
    minimum: int | None = None,
    above: float | None = None,
    maximum: float | None = None,
    variable: str = "",
) -> Any:
    """Declare a setting in a subclass of ``Section``. The annotation of the field is the type.

    Args:
        help: the effect in one line, for the command line and the reference.
        default: the built-in default; ``None`` if the reading code decides.
        unset: the decision of the reading code, in words.
        choices: the allowed values.
        instead: values of other programs → the value to use here, and why.
        minimum, above, maximum: the bounds of a number.
        variable: the environment variable, if the name does not follow the rule.
    """
    bounds = Bounds(choices, minimum, above, maximum, instead)
    # None means "not set in this layer". The built-in default is merged in below all layers.
    return dataclasses.field(
        default=None, metadata={_DECLARED: (help, default, unset, bounds, variable)}
    )


class Bounds(NamedTuple):
    """The allowed values of a setting within the type."""

    choices: tuple[str, ...]
    minimum: int | None
    above: float | None
    maximum: float | None
    instead: Mapping[str, str]

    def hold(self, value: Any) -> bool:
        """Return True if a value is one of the choices and within the limits. NaN never is."""
        if self.choices and value not in self.choices:
            return False
        # Each test is negated, as every comparison with NaN is false.
        if self.minimum is not None and not value >= self.minimum:
            return False
        if self.above is not None and not value > self.above:
            return False
        return self.maximum is None or value <= self.maximum

    def __str__(self) -> str:
        limits = {"at least": self.minimum, "above": self.above, "at most": self.maximum}
        words = [f"{word} {limit}" for word, limit in limits.items() if limit is not None]
        return " and ".join(words)


class SettingType(NamedTuple):
    """A type of settings.

    Attributes:
        metavar: the value in the help of the command line.
        words: the value in messages and in the reference.
        accepts: returns True for a value of the type.
        parse: turns text of the command line or environment into a value. The second argument
            names the source.
        prepare: turns other spellings in Python into the type.
    """

    metavar: str
    words: str
    accepts: Callable[[Any], bool]
    parse: Callable[[str, str], Any]
    prepare: Callable[[Any], Any] = lambda value: value


class Field(NamedTuple):
    """A declared setting.

    Attributes:
        name: the dotted name, such as ``parallel.tensor``.
        kind, bounds: the allowed values.
        default: the built-in default; ``None`` if the reading code decides, as ``unset`` tells.
        help: the effect.
        variable: the environment variable.
        provider: the distribution that declares the setting; empty for opgraft.
    """

    name: str
    kind: SettingType
    bounds: Bounds
    default: Any
    unset: str
    help: str
    variable: str
    provider: str = ""

    @property
    def owned_name(self) -> str:
        """The name for messages: with the distribution, unless opgraft declares the setting."""
        return f"{self.name} of {self.provider}" if self.provider else self.name

    @property
    def words(self) -> str:
        """The allowed values in words."""
        if self.bounds.choices:
            return f"one of {', '.join(self.bounds.choices)}"
        return " ".join(filter(None, (self.kind.words, str(self.bounds))))

    @property
    def metavar(self) -> str:
        """The value in the help of the command line, such as ``NAME``."""
        return "|".join(self.bounds.choices) or self.kind.metavar

    def check(self, value: Any) -> Any:
        """Return the value in the kept form.

        Raises:
            ConfigError: the value has another type, or is outside of the bounds.
        """
        kept = self.kind.prepare(value)
        # The type comes first: bounds compare, and a text has no order among numbers.
        if self.kind.accepts(kept) and self.bounds.hold(kept):
            return kept
        advice = self.words
        # Other values may have no hash, so they cannot be looked up.
        if isinstance(value, str):
            advice = self.bounds.instead.get(value, advice)
        raise ConfigError(f"{self.owned_name} is {value!r}: use {advice}")

    def parse(self, text: str, source: str) -> Any:
        """Parse text of a ``source``, such as an option or environment variable, for ``check``.

        Raises:
            ConfigError: the text has another form.
        """
        try:
            return self.kind.parse(text, source)
        except ConfigError as error:
            if not self.provider:
                raise
            # The user may not know this setting: name the plugin and the allowed values.
            words = f"{error}: {self.owned_name} takes {self.words}"
            raise ConfigError(words) from error


class Section:
    """Base of the frozen dataclasses with settings. The constructor checks the values.

    A subclass may add settings. Readers of the section see these, too.

    Attributes:
        section: the first part of the names of all fields, empty for the whole.
    """

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for attribute, field in own_fields(type(self)).items():
            value = getattr(self, attribute)
            if value is not None:
                # The dataclass is frozen, and the kept form may differ from the given one.
                object.__setattr__(self, attribute, field.check(value))
        for attribute, kind in subsections(type(self)).items():
            value = getattr(self, attribute)
            if not isinstance(value, kind):
                raise ConfigError(f"{attribute} is {value!r}: use a {kind.__name__}")


# Kept for good: every config that is made walks its fields, and a class does not change.
_FIELDS: dict[type, dict[str, Field]] = {}
_SUBSECTIONS: dict[type, dict[str, type[Section]]] = {}


def own_fields(cls: type[Section]) -> Mapping[str, Field]:
    """Return the settings of a section by attribute, without inner sections."""
    if cls not in _FIELDS:
        # Every subclass of Section is a dataclass, which the type cannot say.
        attributes = dataclasses.fields(cls)  # type: ignore[arg-type]
        # Inner sections and private fields are no settings.
        declared = [each for each in attributes if _DECLARED in each.metadata]
        _FIELDS[cls] = {each.name: _field(cls.section, each) for each in declared}
    return _FIELDS[cls]


def _field(section: str, attribute: dataclasses.Field[Any]) -> Field:
    help, default, unset, bounds, variable = attribute.metadata[_DECLARED]
    name = f"{section}.{attribute.name}" if section else attribute.name
    variable = variable or f"OPGRAFT_{name.replace('.', '_').upper()}"
    return Field(name, _kind(name, attribute.type), bounds, default, unset, help, variable)


def subsections(cls: type[Section]) -> Mapping[str, type[Section]]:
    """Return the classes of the sections within a section, by attribute."""
    if cls not in _SUBSECTIONS:
        sections = {}
        for attribute in dataclasses.fields(cls):  # type: ignore[arg-type]
            # The annotation is no help: it is a text in modules with postponed annotations.
            made: Any = attribute.default_factory
            if isinstance(made, type) and issubclass(made, Section):
                sections[attribute.name] = made
        _SUBSECTIONS[cls] = sections
    return _SUBSECTIONS[cls]


def all_fields(cls: type[Section]) -> dict[str, Field]:
    """Return the settings of a section and of inner sections, by dotted name."""
    fields = {field.name: field for field in own_fields(cls).values()}
    for inner in subsections(cls).values():
        fields |= all_fields(inner)
    return fields


def values_of(section: Section) -> Iterator[tuple[Field, Any]]:
    """Yield each setting of a section and of inner sections with the value; ``None``: not set."""
    cls = type(section)
    for attribute, field in own_fields(cls).items():
        yield field, getattr(section, attribute)
    for attribute in subsections(cls):
        yield from values_of(getattr(section, attribute))


def made_of(cls: type[_S], values: Mapping[str, Any], classes: Mapping[str, type[Section]]) -> _S:
    """Make a section of checked values by dotted name, with inner sections of some ``classes``."""
    attributes: dict[str, Any] = {}
    for attribute, field in own_fields(cls).items():
        attributes[attribute] = values.get(field.name)
    for attribute, kind in subsections(cls).items():
        inner = classes.get(attribute, kind)
        attributes[attribute] = made_of(inner, values, classes)
    # Without __init__: each layer has checked its values.
    section = cls.__new__(cls)
    vars(section).update(attributes)
    return section


def parse_flag(text: str, source: str) -> bool:
    try:
        return FLAG_WORDS[text.strip().lower()]
    except KeyError:
        raise ConfigError(
            f"{source}={text!r} is not a flag: use one of {', '.join(FLAG_WORDS)}"
        ) from None


def _parse_number(number: type, words: str, text: str, source: str) -> Any:
    try:
        return number(text)
    except ValueError:
        raise ConfigError(f"{source}={text!r} is not {words}") from None


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    # Deeply nested JSON exceeds the limit of Python's stack.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} {text!r} is not valid JSON: {error}") from error


def without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of pairs.

    Raises:
        ValueError: a key occurs twice.
    """
    content = dict(pairs)
    if len(content) == len(pairs):
        return content
    # json would keep the last value in silence.
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"{twice!r} stands in one object twice")


def _parse_list(text: str, source: str) -> Any:
    # JSON allows commas within an item.
    if text.lstrip().startswith("["):
        return _parse_json(text, source)
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_numbers(text: str, source: str) -> Any:
    numbers = []
    for part in _parse_list(text, source):
        # A list in JSON has numbers already. The check of types refuses other items.
        if isinstance(part, str):
            part = _parse_number(int, "an integer", part, source)
        numbers.append(part)
    return numbers


def _parse_pairs(text: str, source: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    try:
        return without_duplicates([(key.strip(), value.strip()) for key, _, value in pairs])
    except ValueError as error:
        raise ConfigError(f"{source} is {text!r}: {error}") from error


def _parse_flags(text: str, source: str) -> Any:
    if text.lstrip().startswith("{"):
        return _parse_json(text, source)
    return {key: parse_flag(value, source) for key, value in _parse_pairs(text, source).items()}


def _parse_mapping(text: str, source: str) -> Any:
    is_json = text.lstrip().startswith("{")
    found = _parse_json(text, source) if is_json else _parse_pairs(text, source)
    # An empty name or value is a typing error, such as "a=".
    if not all(isinstance(value, str) and key and value for key, value in found.items()):
        raise ConfigError(
            f"{source} is {text!r}: use key=value pairs separated by commas, or a JSON object of "
            "them"
        )
    return found


def _parse_choices(text: str, source: str) -> Any:
    """Parse names by key: ``key=name``, or ``key=first/second`` for a list."""
    # A list in JSON needs no separator of its own.
    if text.lstrip().startswith("{"):
        return _parse_json(text, source)
    choices = {}
    for key, names in _parse_mapping(text, source).items():
        listed = tuple(name.strip() for name in names.split("/"))
        choices[key] = _single(listed)
    return choices


def _as_choices(value: Any) -> Any:
    """Return names by key: a text for one name, a tuple for several."""
    if isinstance(value, str):
        value = _parse_choices(value, "a mapping")
    if not isinstance(value, Mapping):
        return value
    return {key: _single(_as_tuple(names)) for key, names in value.items()}


def _single(names: Any) -> Any:
    """Return the name in a tuple with one name: equal choices must be equal values."""
    is_single = isinstance(names, tuple) and len(names) == 1
    return names[0] if is_single else names


def _are_choices(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    are_keys = all(isinstance(key, str) and key for key in value)
    return are_keys and all(map(_are_names, value.values()))


def _are_names(names: Any) -> bool:
    """Return True for a name, or several different ones. An empty name is a typing error."""
    listed = names if isinstance(names, tuple) else (names,)
    are_texts = all(isinstance(name, str) and name for name in listed)
    return are_texts and 0 < len(listed) == len(set(listed))


def _as_tuple(value: Any) -> Any:
    # Texts are sequences of characters. The check of types refuses them.
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    return tuple(value)


def _as_mapping(value: Any) -> Any:
    # The spelling of the command line works in Python, too.
    if isinstance(value, str):
        return _parse_mapping(value, "a mapping")
    return dict(value) if isinstance(value, Mapping) else value


def _is(*types: type) -> Callable[[Any], bool]:
    """Return a test for values of the types. True and False are no numbers."""
    # Python counts True and False as integers.
    return lambda value: isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _is_number(value: Any) -> bool:
    """Return True for an integer or a float. NaN is no number."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return _is(int, float)(value) and not is_nan


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _are_texts_or_objects(value: Any) -> bool:
    """Return True for texts, classes and objects of classes that are no plain data."""
    # None of these can be a pass, so such an item is a mistake.
    plain = (int, float, bytes, tuple, list, dict, type(None))
    return isinstance(value, tuple) and not any(isinstance(item, plain) for item in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is(int), value))


def _maps_texts(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(isinstance(text, str) for text in (*value, *value.values()))


def _maps_flags(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    are_texts = all(isinstance(key, str) for key in value)
    return are_texts and all(isinstance(flag, bool) for flag in value.values())


KINDS: dict[str, SettingType] = {
    "str": SettingType("NAME", "a string", _is(str), lambda text, source: text),
    "bool": SettingType("FLAG", "true or false", _is(bool), parse_flag),
    "int": SettingType(
        "INTEGER", "an integer", _is(int), functools.partial(_parse_number, int, "an integer")
    ),
    "float": SettingType(
        "NUMBER", "a number", _is_number, functools.partial(_parse_number, float, "a number")
    ),
    "Sequence[str]": SettingType("LIST", "a list of strings", _are_texts, _parse_list, _as_tuple),
    "Sequence[Any]": SettingType(
        "LIST",
        "a list of strings, or in Python of classes and objects",
        _are_texts_or_objects,
        _parse_list,
        _as_tuple,
    ),
    "Sequence[int]": SettingType(
        "INTEGERS", "a list of integers", _are_numbers, _parse_numbers, _as_tuple
    ),
    "Mapping[str, str]": SettingType(
        "MAPPING", "a mapping of strings to strings", _maps_texts, _parse_mapping, _as_mapping
    ),
    "Mapping[str, str | Sequence[str]]": SettingType(
        "CHOICES",
        "a mapping of strings to a string, or to several different ones as a list or as a/b",
        _are_choices,
        _parse_choices,
        _as_choices,
    ),
    "Mapping[str, bool]": SettingType(
        "FLAGS", "a mapping of strings to true or false", _maps_flags, _parse_flags, _as_mapping
    ),
}
"""By annotation, without ``| None``."""


def _kind(name: str, annotation: Any) -> SettingType:
    # An annotation is a text under "from __future__ import annotations", else a type.
    is_plain = isinstance(annotation, type) and annotation in (str, bool, int, float)
    text = annotation.__name__ if is_plain else annotation
    # Modules may spell a type with or without a package, such as typing.Sequence.
    text = re.sub(r"\b[a-z]+(\.[a-z]+)*\.", "", str(text)).removesuffix(" | None")
    if text not in KINDS:
        raise ConfigError(
            f"the setting {name} is declared as {annotation}: {close_matches(text, KINDS)}"
        )
    return KINDS[text]
