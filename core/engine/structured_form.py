"""The form of structured outputs, as far as it can be checked without the library that compiles them."""

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
"""Keys of a structured output, and words for what stands there."""


def expect_form(spec: Any) -> tuple[str, Any]:
    """Return the kind of a structured output, and what stands there.

    Args:
        spec: a mapping with one key of ``KINDS``: a JSON schema as mapping or text, a list of texts
            for ``choice``, or a text.

    Raises:
        InputError: it has another form.
    """
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise InputError(
            f"structured output: {spec!r:.200} is no mapping with one of the keys {', '.join(KINDS)}"
        )
    ((kind, value),) = spec.items()
    if kind not in KINDS:
        raise InputError(
            f"structured output: unknown kind {kind!r:.80}: {close_matches(str(kind), KINDS)}"
        )
    expected = _mismatch(kind, value)
    if expected:
        raise InputError(
            f"structured output: {kind} is {value!r:.80}, which is no {KINDS[kind]}: give {expected}"
        )
    return kind, value


def _mismatch(kind: str, value: Any) -> str:
    """Return what is expected of a kind where the value is something else."""
    if kind == "choice":
        texts = (
            isinstance(value, Sequence)
            and not isinstance(value, str | bytes)
            and all(map(_is_text, value))
        )
        return "" if texts and value else "a list of at least one text, none of them empty"
    if kind == "json":
        return "" if _is_text(value) or isinstance(value, Mapping) else "an object, or its text"
    return "" if _is_text(value) else "a text that is not empty"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
