"""The plugin's hooks. Nothing of Intel's extension is imported before it is known to fit."""

from __future__ import annotations

import importlib

import opgraft
from packaging.version import Version

platforms = ("cpu", "xpu")
EXTENSION = "intel-extension-for-pytorch"


@opgraft.hookimpl
def opgraft_veto(platform: opgraft.Platform) -> str | None:
    """Say why the extension cannot be used here. Importing one that was built for another torch ends in an error."""
    machine = opgraft.Machine()
    installed, build = machine.version_of(EXTENSION), machine.torch_build()
    if installed is None:
        return f"{EXTENSION} is not installed"
    extension, torch = Version(installed), Version(build.version if build else "0")
    if extension.release[:2] != torch.release[:2]:
        return f"{EXTENSION} {installed} works with torch {extension.major}.{extension.minor} only, this is {torch}"
    if platform.name == "xpu" and "xpu" not in (extension.local or ""):
        return f"{EXTENSION} {installed} is the build for CPUs: it has no kernels for XPUs"
    return None


@opgraft.hookimpl
def opgraft_register_ops() -> None:
    """Import the replacements, which registers them; the extension is imported with them."""
    importlib.import_module("opgraft_ipex.ops")
