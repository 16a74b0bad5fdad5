"""The library of kernels: whether it is there, why not, and which of its paths is in force."""

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


@functools.cache
def missing() -> str | None:
    """Say why the kernels cannot run here, or return ``None``; load them when called first."""
    try:
        record = json.loads((_FOLDER / "_build.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"the library was not built: {_again()}"
    if record["missing"]:
        return f"the library was not built: {record['missing']}; then {_again()}"
    if record["torch"] != torch.__version__:
        return f"the library was built for torch {record['torch']}, this is {torch.__version__}: {_again()}"
    try:
        torch.ops.load_library(_FOLDER / "_kernels.so")  # type: ignore[no-untyped-call]  # torch leaves it so
        asked_for = os.environ.get(VARIABLE)
        if asked_for:
            torch.ops.opgraft_cpu_kernels._set_path(asked_for)
    except OSError as error:
        return f"the library cannot be loaded: {error}"
    except ValueError as error:
        return f"{VARIABLE}: {error}"
    fakes.register()
    _note_path()
    return None


def _again() -> str:
    """Return the command that builds the library again."""
    source = source_of(_DISTRIBUTION)
    command = "pip install --force-reinstall --no-cache-dir --no-deps"
    if source == _DISTRIBUTION:
        # The wheel of an index has the library that it was built with.
        return f"build it again by {command} --no-binary {_DISTRIBUTION} {_DISTRIBUTION}"
    if urlsplit(source).path.endswith(".whl"):
        return (
            f"the wheel {source} has no other library: build it from the plugin's source, by "
            f"{command} with the source's folder or URL"
        )
    return f"build it again by {command} {shlex.quote(source)}"


_in_force = ""


def _note_path() -> None:
    global _in_force  # asking torch each time would take longer than a small layer does
    _in_force = torch.ops.opgraft_cpu_kernels.path()


def _loaded() -> None:
    reason = missing()
    if reason:
        raise RuntimeError(f"opgraft-cpu-kernels: {reason}")


def path() -> str:
    """Return the path in force.

    Raises:
        RuntimeError: the library is missing.
    """
    _loaded()
    return _in_force


def path_or_none() -> str:
    """Return the path in force, an empty name where the library is missing."""
    return _in_force


def paths() -> list[str]:
    """Return the paths that this CPU has, the fastest first.

    Raises:
        RuntimeError: the library is missing.
    """
    _loaded()
    names: list[str] = torch.ops.opgraft_cpu_kernels.paths()
    return names


def set_path(name: str) -> None:
    """Let all kernels of this process take one of ``paths()`` from now on.

    Raises:
        ValueError: this CPU does not have it.
        RuntimeError: the library is missing.
    """
    _loaded()
    torch.ops.opgraft_cpu_kernels._set_path(name)
    _note_path()
