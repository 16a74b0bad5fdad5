"""The prompts of a request: one or several."""

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
        HTTPError: there is no prompt.
    """
    if not given:
        message = f"{field} is empty: give some text"
        raise HTTPError(400, message, field=field, code="invalid_value")
    # A list of numbers is one prompt of token ids.
    is_list_of_prompts = isinstance(given, list) and not isinstance(given[0], int)
    return given if is_list_of_prompts else [given]
