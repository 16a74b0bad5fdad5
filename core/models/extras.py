"""Import libraries of extras, such as those that define the formats of checkpoints."""

from __future__ import annotations

import importlib
from typing import Any

from opgraft.errors import InputError


def import_extra(name: str, extra: str = "demo") -> Any:
    """Import a library of an extra, or a module of such a library.

    Raises:
        InputError: the library is not installed.
    """
    try:
        return importlib.import_module(name)
    # A library may be there and lack one of its own: the message of the error tells.
    except ImportError as error:
        raise InputError(
            f"{name} cannot be imported ({error}): pip install 'opgraft[{extra}]'"
        ) from error
