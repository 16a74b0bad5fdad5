"""Prompts of a request, of which it has one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opgraft.errors import HTTPError
from opgraft.serving.prompts import Prompt


def several(given: Any, field: str) -> Sequence[Prompt]:
    """Return the prompts of a field as a list.

    Args:
        given: a text, token ids, or a list of either.
        field: for errors.

    Raises:
        HTTPError: there is none.
    """
    if not given:
        raise HTTPError(400, f"{field} is empty: give some text", field=field, code="invalid_value")
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]
