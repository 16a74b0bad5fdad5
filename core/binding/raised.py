"""Find the origin of an exception without importing ops: in a process without ops, none has run."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from opgraft.errors import PluginError

_OPS = "opgraft.binding.functional"


def provenance_of(error: BaseException) -> Any:
    """Return the answer of ``opgraft.explain_exception``; ``None`` if no op was ever imported."""
    if _OPS not in sys.modules:
        return None
    return importlib.import_module("opgraft.binding.provenance").explain_exception(error)


def exit_of_plugin(error: SystemExit) -> PluginError | None:
    """Return an error about a plugin that raised an exit; None for other code and for signals."""
    if _OPS not in sys.modules:
        return None
    provenance = importlib.import_module("opgraft.binding.provenance")
    own: PluginError | None = provenance.exit_of_plugin(error)
    return own
