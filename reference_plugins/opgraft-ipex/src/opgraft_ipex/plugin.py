"""The plugin's hooks. Intel's extension is imported only if it fits the installed torch."""

from __future__ import annotations

import importlib
import logging

import opgraft
import torch
from packaging.version import Version

platforms = ("cpu", "xpu")
EXTENSION = "intel-extension-for-pytorch"
CHANGED = ((torch, "embedding_bag"), (torch.Tensor, "__format__"), (torch.Tensor, "numpy"))
"""Functions of torch that the extension replaces when it is imported. No kernel here needs that."""


@opgraft.hookimpl
def opgraft_veto(platform: opgraft.Platform) -> str | None:
    """Return the reason why the extension cannot be used here, or ``None``.

    The import of an extension that was built for another torch ends in an error.
    """
    machine = opgraft.Machine()
    installed = machine.version_of(EXTENSION)
    if installed is None:
        return f"{EXTENSION} is not installed"

    build = machine.torch_build()
    extension = Version(installed)
    present = Version(build.version if build else "0")
    if extension.release[:2] != present.release[:2]:
        built_for = f"{extension.major}.{extension.minor}"
        return f"{EXTENSION} {installed} works with torch {built_for} only, this is {present}"

    if platform.name == "xpu" and "xpu" not in (extension.local or ""):
        return f"{EXTENSION} {installed} is the build for CPUs: it has no kernels for XPUs"
    return None


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Register the replacements by their import, and set back what the extension changes."""
    former = [vars(owner).get(name) for owner, name in CHANGED]
    handlers = [*logging.root.handlers]
    loggers = logging.getLoggerClass()
    try:
        importlib.import_module("opgraft_ipex.ops")
    finally:
        # An import that fails has changed a part of this.
        logging.setLoggerClass(loggers)
        logging.root.handlers[:] = handlers
        for (owner, name), function in zip(CHANGED, former, strict=True):
            if function is not None:
                setattr(owner, name, function)
            elif name in vars(owner):
                delattr(owner, name)
