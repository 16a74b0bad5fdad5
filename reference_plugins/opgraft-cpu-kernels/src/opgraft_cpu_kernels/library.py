"""The compiled library: load it, say why it is missing, and choose one of its paths."""

from __future__ import annotations

import functools
import json
import os
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import torch
from opgraft.kernels import source_of

from opgraft_cpu_kernels import fakes

VARIABLE = "CPU_KERNELS_PATH"
_FOLDER = Path(__file__).parent
_DISTRIBUTION = "opgraft-cpu-kernels"

# Asking torch for the path each time would take longer than a small layer.
_path_in_force = ""


@functools.cache
def missing() -> str | None:
    """Return the reason why the kernels cannot run here, or None. The first call loads them."""
    try:
        record = json.loads((_FOLDER / "_build.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"the library was not built: {_how_to_build()}"
    if record["missing"]:
        return f"the library was not built: {record['missing']}; then {_how_to_build()}"
    built_for = record["torch"]
    if built_for != torch.__version__:
        here = torch.__version__
        return f"the library was built for torch {built_for}, this is {here}: {_how_to_build()}"
    try:
        _load()
    except OSError as error:
        return f"the library cannot be loaded: {error}"
    except ValueError as error:
        return f"{VARIABLE}: {error}"
    fakes.register()
    _note_path()
    return None


def _load() -> None:
    """Load the library and put the path of the environment in force.

    Raises:
        OSError: the library cannot be loaded.
        ValueError: this CPU does not have the path.
    """
    library = _FOLDER / "_kernels.so"
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    wanted = os.environ.get(VARIABLE)
    if wanted:
        torch.ops.opgraft_cpu_kernels._set_path(wanted)


def _how_to_build() -> str:
    """Return the command that builds the library again, as the end of a message."""
    source = source_of(_DISTRIBUTION)
    command = "pip install --force-reinstall --no-cache-dir --no-deps"
    if source == _DISTRIBUTION:
        # A wheel from an index has the library that it was built with.
        return f"build it again by {command} --no-binary {_DISTRIBUTION} {_DISTRIBUTION}"
    if urlsplit(source).path.endswith(".whl"):
        return (
            f"the wheel {source} has no other library: build it from the plugin's source, by "
            f"{command} with the source's folder or URL"
        )
    return f"build it again by {command} {shlex.quote(source)}"


def _note_path() -> None:
    global _path_in_force
    _path_in_force = torch.ops.opgraft_cpu_kernels.path()


def _require_library() -> None:
    reason = missing()
    if reason:
        raise RuntimeError(f"opgraft-cpu-kernels: {reason}")


def path() -> str:
    """Return the path in force.

    Raises:
        RuntimeError: the library is missing.
    """
    _require_library()
    return _path_in_force


def path_or_none() -> str:
    """Return the path in force, or an empty string if the library is missing."""
    return _path_in_force


def paths() -> list[str]:
    """Return the paths that this CPU has, the fastest first.

    Raises:
        RuntimeError: the library is missing.
    """
    _require_library()
    names: list[str] = torch.ops.opgraft_cpu_kernels.paths()
    return names


def set_path(name: str) -> None:
    """Put one of ``paths()`` in force, for all kernels of this process.

    Raises:
        ValueError: this CPU does not have the path.
        RuntimeError: the library is missing.
    """
    _require_library()
    torch.ops.opgraft_cpu_kernels._set_path(name)
    _note_path()
