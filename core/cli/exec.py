"""``opgraft exec``: run a Python program, and graft the models that it builds."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from opgraft.base.text import printable
from opgraft.errors import InputError
from opgraft.hosts import report_file


@click.command(
    "exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is the name of a module.")
@click.argument("program")
@click.argument("arguments", metavar="[ARG]...", nargs=-1, type=click.UNPROCESSED)
def command(is_module: bool, program: str, arguments: tuple[str, ...]) -> None:
    """Run the Python program PROGRAM, and graft the models that it builds.

    PROGRAM is a file, or a command that pip has installed. Models of transformers,
    sentence-transformers, diffusers, timm and PEFT are grafted as these libraries build them. The
    report goes to stderr at the end, and to the file OPGRAFT_REPORT.
    """
    file = "" if is_module else _file_of(program)
    # Imports torch, and --help needs no torch.
    from opgraft.grafting.building import Grafting

    grafting = Grafting()
    sys.argv = [file or program, *arguments]
    sys.path.insert(0, "" if is_module else str(Path(file).parent))
    try:
        with grafting.installed():
            if is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(file, run_name="__main__")
    except Exception:
        # As Python itself does, and not as an error of opgraft.
        traceback.print_exc()
        sys.exit(1)
    finally:
        _tell(grafting)


def _file_of(program: str) -> str:
    """Return the file of a program.

    Raises:
        InputError: there is no such file or command, or the command is no Python program.
    """
    if Path(program).is_file():
        return program
    found = shutil.which(program)
    if found is None:
        raise InputError(f"there is no file and no command {program!r}: give the path of a file")
    with open(found, "rb") as opened:
        first = opened.readline(256)
    if not (first.startswith(b"#!") and b"python" in first):
        raise InputError(f"{found} is no Python program: give one, or a module with -m")
    return found


def _tell(grafting: Any) -> None:
    """Print the report, and write it to the file that the environment names."""
    lines = [f"opgraft exec: {len(grafting.models)} models"]
    lines += [f"patched: {name}" for name in grafting.patches]
    lines += [str(model) for model in grafting.models]
    click.echo("\n".join(printable(line) for text in lines for line in text.split("\n")), err=True)
    path = report_file()
    if path is None:
        return
    models = [
        {
            "class": model.name,
            "builder": model.builder,
            "reason": model.reason,
            "counts": [asdict(row) for row in model.report.counts()] if model.report else [],
        }
        for model in grafting.models
    ]
    told = {"schema": 1, "patches": grafting.patches, "models": models}
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
