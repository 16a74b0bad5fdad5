"""Loading everything for a command that tells what became of it."""

from __future__ import annotations

import importlib

from opgraft.base.text import described
from opgraft.errors import OpgraftError, PluginError


def load_all() -> OpgraftError | None:
    """Load the plugins with the whole catalogue known, and compare everything that they may change.

    Returns:
        The error, which is not raised.
    """
    # Here, so that commands can be described without pluggy.
    from opgraft.plugins.changes import thorough
    from opgraft.plugins.host import load_plugins

    try:
        importlib.import_module("opgraft.ops")
    except Exception as error:  # torch reads the metadata of every distribution when it is imported
        return PluginError(
            f"torch cannot be imported here: {described(error)}. If a device backend or malformed metadata is the "
            "cause, TORCH_DEVICE_BACKEND_AUTOLOAD=0 goes without backends that load themselves."
        )
    try:
        with thorough():
            load_plugins()
    except OpgraftError as error:
        return error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of a platform that prepares the process
        return PluginError(f"loading the plugins ended with {described(error)}")
    return None
