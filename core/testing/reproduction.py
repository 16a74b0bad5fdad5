"""A departure as files: the module with its inputs, and a script that makes the call again."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from opgraft.base.files import replace_file
from opgraft.base.text import described, printable
from opgraft.config import plugin_fields
from opgraft.errors import InputError
from opgraft.registry.state import host_state
from opgraft.testing.verification import Departure

_DECIDING = ("compilation_config.custom_ops", "compilation_config.tuning_file")
"""Settings within sections that choose kernels."""

CASE, SCRIPT = "case.pt", "reproduce.py"

_SCRIPT = '''"""Make one call of an op again, and compare the result, which was wrong in {model}.

{path}: {told}
Exit code 1: the result is still beyond the tolerance. The file {case} is a pickle: never load one
from somebody else.
"""

import sys
from pathlib import Path

import opgraft
import torch
from opgraft.binding.comparison import description_of
from opgraft.config import config_from_fields, parse_text, set_config
from opgraft.testing.verification import RepeatableCall

SETTINGS = {settings}

sys.path[:0] = {paths}
settings = config_from_fields({{name: parse_text(name, text) for name, text in SETTINGS.items()}})
with set_config(settings):
    opgraft.load_plugins()
    call = RepeatableCall(**torch.load(Path(__file__).with_name("{case}"), weights_only=False))
    print(call.module)
    for value in (*call.args, *call.kwargs.values()):
        print("called with", description_of(value))
    with torch.no_grad():
        found = call.differences()
if found.reasons:
    print(found.reasons[0])
    sys.exit(1)
print(f"within its tolerance: {{found.error:.3g}} of what is allowed")
'''


def write_case(departure: Departure, folder: Path, model: str, paths: list[str]) -> Path:
    """Write a departure into a folder, made if missing; return the script.

    Args:
        departure: to write.
        folder: files of an earlier departure are replaced.
        model: the name of the model.
        paths: folders that the script imports from, beside installed packages.

    Raises:
        InputError: the module cannot be pickled, or the files cannot be written.
    """
    place = departure.place
    packed = io.BytesIO()
    try:
        torch.save(vars(departure.call), packed)
    except Exception as error:  # anything that a class of somebody else raises when pickled
        raise InputError(
            f"{place.path} cannot be saved, so there is no script: {described(error)}. "
            "Its class must be one of a module that can be imported"
        ) from error
    # A fused module may hold several ops.
    told = [f"{each.op} by {each.kernel} of {each.provider}" for each in place.served]
    script = _SCRIPT.format(
        model=_quoted(model),
        path=_quoted(place.path or "the model"),
        told=_quoted("; ".join(told)),
        settings=_settings(),
        paths=paths,
        case=CASE,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Whoever has opened an earlier case keeps that one.
        replace_file(folder / CASE, packed.getvalue(), 0o644)
        replace_file(folder / SCRIPT, script, 0o644)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written to: {error.strerror}. Name another folder by --save"
        ) from error
    return folder / SCRIPT


def _settings() -> Mapping[str, Any]:
    """Return the settings that choose kernels, as text by name."""
    chosen = {}
    of_plugins = plugin_fields()
    for name, text, _ in host_state().settings().rows():
        # A plugin's own setting may choose kernels, too.
        decides = "." not in name or name in _DECIDING or name in of_plugins
        if text and decides:
            chosen[name] = text
    return chosen


def _quoted(text: str) -> str:
    """Return foreign text that may stand in a docstring."""
    return printable(text).replace("\\", "\\\\").replace('"', "'")
