"""Libraries that define the formats of checkpoints, imported where one is opened."""

from __future__ import annotations

import importlib
from typing import Any

from opgraft.errors import InputError


def import_extra(name: str, extra: str = "demo") -> Any:
    """Import a library of an extra, or a module of one.

    Raises:
        InputError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{name} cannot be imported ({error}): pip install 'opgraft[{extra}]'"
        ) from error
