"""Loading everything, for a command that reports the outcome."""

from __future__ import annotations

import importlib

from opgraft.base.text import described
from opgraft.errors import OpgraftError, PluginError


def load_all() -> OpgraftError | None:
    """Load the catalogue of ops and the plugins, and compare everything that plugins may change.

    Returns:
        The error, which is not raised.
    """
    # Imported here, because descriptions of commands need no pluggy.
    from opgraft.plugins.changes import thorough
    from opgraft.plugins.host import load_plugins

    try:
        importlib.import_module("opgraft.ops")
    # torch reads the metadata of every distribution, and imports device backends.
    except Exception as error:
        return PluginError(
            f"torch cannot be imported here: {described(error)}. If a device backend or malformed "
            "metadata is the cause, TORCH_DEVICE_BACKEND_AUTOLOAD=0 goes without backends that "
            "load themselves."
        )
    try:
        with thorough():
            load_plugins()
    except OpgraftError as error:
        return error
    except KeyboardInterrupt:
        raise
    # Raised by a platform that prepares the process.
    except BaseException as error:
        return PluginError(f"loading the plugins ended with {described(error)}")
    return None
