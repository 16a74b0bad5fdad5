"""A departure as files: the module and its inputs, and a script that makes the call again, alone."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from opgraft.base.files import replace_file
from opgraft.base.text import described, printable
from opgraft.errors import InputError
from opgraft.registry.state import host_state
from opgraft.testing.verification import Departure

_DECIDING = ("compilation_config.custom_ops", "compilation_config.tuning_file")
"""Settings in sections that decide which kernels run."""

CASE, SCRIPT = "case.pt", "reproduce.py"

_SCRIPT = '''"""Makes one call of an op again, whose result left its tolerance in {model}, and compares it.

{path}: {told}
Exit code 1: it still leaves its tolerance. What stands in {case} is a pickle: load it only where you made it.
"""

import sys
from pathlib import Path

import opgraft
import torch
from opgraft.binding.comparison import description_of
from opgraft.config import config_from_fields, parse_text, set_config
from opgraft.testing.differences import outcome_of

SETTINGS = {settings}

sys.path[:0] = {paths}
with set_config(config_from_fields({{name: parse_text(name, text) for name, text in SETTINGS.items()}})):
    opgraft.load_plugins()
    case = torch.load(Path(__file__).with_name("{case}"), weights_only=False)
    print(case["module"])
    for value in (*case["args"], *case["kwargs"].values()):
        print("called with", description_of(value))
    with torch.no_grad():
        error, reason = outcome_of(**case)
print(reason or f"within its tolerance: {{error:.3g}} of what is allowed")
sys.exit(1 if reason else 0)
'''


def write_case(departure: Departure, folder: Path, model: str, paths: list[str]) -> Path:
    """Write a departure into a folder, which is made where it is missing; returns the script.

    Args:
        departure: to write.
        folder: files of an earlier one there are replaced.
        model: what to call the model.
        paths: folders that the script imports from, beside what is installed.

    Raises:
        InputError: the module cannot be pickled, or the files cannot be written.
    """
    names = ("module", "args", "kwargs", "batch", "expected", "allowed")
    packed = io.BytesIO()
    try:
        torch.save({name: getattr(departure, name) for name in names}, packed)
    except Exception as error:  # whatever a class of somebody else's says when it is pickled
        raise InputError(
            f"{departure.place.path} cannot be saved, so there is no script: {described(error)}. Its class must be one "
            "of a module that can be imported"
        ) from error
    script = _SCRIPT.format(
        model=_quoted(model),
        path=_quoted(departure.place.path or "the model"),
        told=_quoted(
            "; ".join(f"{s.op} by {s.kernel} of {s.provider}" for s in departure.place.served)
        ),
        settings=_settings(),
        paths=paths,
        case=CASE,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / CASE, packed.getvalue(), 0o644)
        replace_file(folder / SCRIPT, script, 0o644)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written to: {error.strerror}. Name another folder by --save"
        ) from error
    return folder / SCRIPT


def _settings() -> Mapping[str, Any]:
    """Return the settings that decide which kernels run, as text by name."""
    rows = host_state().settings().rows()
    return {name: text for name, text, _ in rows if text and ("." not in name or name in _DECIDING)}


def _quoted(text: str) -> str:
    """Return foreign text as it may stand in a docstring."""
    return printable(text).replace("\\", "\\\\").replace('"', "'")
