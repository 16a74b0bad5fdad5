"""The plugin's hooks. Nothing of zentorch is imported before it is known to fit."""

from __future__ import annotations

import importlib
import logging
import warnings

import opgraft
import torch
from packaging.version import Version

platforms = ("cpu",)
LIBRARY = "zentorch"
NEEDED = "avx512f"


@opgraft.hookimpl
def opgraft_veto(platform: opgraft.Platform) -> str | None:
    """Return the reason why zentorch cannot be used here, or ``None``."""
    installed = opgraft.Machine().version_of(LIBRARY)
    if installed is None:
        return f"{LIBRARY} is not installed"
    library = Version(installed)
    present = Version(torch.__version__)
    # The import for another torch loads a part of the operators, with a warning, or fails.
    if library.release[:2] != present.release[:2]:
        built_for = f"{library.major}.{library.minor}"
        return f"{LIBRARY} {installed} works with torch {built_for} only, this is {present}"
    return _missing(platform.capability().features)


def _missing(features: tuple[str, ...]) -> str | None:
    """Return the reason why a processor with these instruction sets cannot run zentorch."""
    if NEEDED in features:
        return None
    found = ", ".join(features) or "none of these sets"
    return f"{LIBRARY} needs a processor with AVX-512 ({NEEDED}), this one has {found}"


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Register the replacements, and remove the log handler that the import of zentorch adds.

    The import of zentorch calls ``logging.basicConfig``, which belongs to the program.
    """
    handlers = [*logging.root.handlers]
    try:
        with warnings.catch_warnings():
            # zentorch imports Inductor, which warns of torch's own TorchScript.
            warnings.simplefilter("ignore", DeprecationWarning)
            ops = importlib.import_module("opgraft_zentorch.ops")
    finally:
        logging.root.handlers[:] = handlers
    for replacement in ops.REPLACEMENTS:
        # The class of the catalogue is the only base.
        (target,) = replacement.__bases__
        opgraft.CustomOp.register_oot(replacement, name=target)
