"""The form of structured outputs, checked without the library that compiles grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from opgraft.errors import InputError, close_matches

KINDS = MappingProxyType(
    {
        "json": "JSON schema",
        "regex": "regular expression",
        "choice": "list of choices",
        "grammar": "grammar",
    }
)
"""Keys of a structured output, and words for the value of each."""


def expect_form(spec: Any) -> tuple[str, Any]:
    """Return the kind of a structured output, and its value.

    For example, ``{"choice": ["yes", "no"]}`` gives ``"choice"`` and the list.

    Args:
        spec: a mapping with one key of ``KINDS``. The value is a JSON schema as mapping or text, a
            list of texts for ``choice``, or a text.

    Raises:
        InputError: the spec has another form.
    """
    if not isinstance(spec, Mapping) or len(spec) != 1:
        keys = ", ".join(KINDS)
        raise InputError(
            f"structured output: {spec!r:.200} is no mapping with one of the keys {keys}"
        )
    [(kind, value)] = spec.items()
    if kind not in KINDS:
        raise InputError(
            f"structured output: unknown kind {kind!r:.80}: {close_matches(str(kind), KINDS)}"
        )
    expected = _mismatch(kind, value)
    if expected:
        raise InputError(
            f"structured output: {kind} is {value!r:.80}, which is no {KINDS[kind]}: "
            f"give {expected}"
        )
    return kind, value


def _mismatch(kind: str, value: Any) -> str:
    """Return words for the expected value of a kind; empty if the value is of this kind."""
    if kind == "choice":
        return "" if _is_choice(value) else "a list of at least one text, none of them empty"
    if _is_text(value):
        return ""
    if kind == "json":
        return "" if isinstance(value, Mapping) else "an object, or its text"
    return "a text that is not empty"


def _is_choice(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return bool(value) and all(map(_is_text, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
