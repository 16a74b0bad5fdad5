"""``opgraft exec``: run a Python program, and graft the models that it builds."""

from __future__ import annotations

import builtins
import importlib.util
import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import click
from opgraft.base.text import described, printable
from opgraft.cli.patching import Grafting
from opgraft.errors import InputError
from opgraft.plugins.bridges import report_file
from opgraft.registry.watching import leave_watchdog

SCHEMA = "opgraft.exec/1"
"""The name of the report's format, in the file of ``OPGRAFT_REPORT``."""

_INTERRUPTED = 130


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
    code, grafting, report = run_program(program, arguments, is_module=is_module)
    _tell(grafting, report)
    # The end of a normal command would cut off the threads and functions that the program leaves.
    sys.exit(code)


def run_program(
    program: str, arguments: Sequence[str], *, is_module: bool
) -> tuple[Any, Grafting, Path | None]:
    """Run a program, and graft the models that it builds.

    Returns:
        The exit code, the grafted models, and the file for the report.

    Raises:
        InputError: there is no such program.
    """
    file = "" if is_module else _file_of(program)
    # The program may change the folder.
    report = report_file()
    report = report and report.absolute()
    # As Python itself does for a file, and for a module.
    sys.argv = [file or program, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(file)) if file else os.getcwd()
    grafting = Grafting()
    grafting.install()
    # The program may use the watchdog itself.
    leave_watchdog()
    code = _run_module(program) if is_module else _run_file(file)
    return code, grafting, report


def _run_file(file: str) -> Any:
    """Run a file as ``__main__``, and return its exit code."""
    path = os.path.abspath(file)
    main = _new_main(path)
    # Tracebacks and inspect find the source through the loader.
    main.__loader__ = SourceFileLoader("__main__", path)
    with io.open_code(path) as opened:
        source = opened.read()
    return _run(source, main)


def _run_module(name: str) -> Any:
    """Run a module or a package's ``__main__`` as ``__main__``, and return the exit code.

    Raises:
        InputError: there is no such module, or it has no code.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise InputError(f"the module {name!r} cannot be found: {described(error)}") from error
    loader: Any = spec and spec.loader
    # A module of C has no code.
    code = loader.get_code(spec.name) if spec and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise InputError(f"there is no module {name!r} of Python that can run: check the name")
    main = _new_main(str(spec.origin))
    # Relative imports of the module need these.
    main.__loader__ = loader
    main.__spec__ = spec
    main.__package__ = spec.parent
    sys.argv[0] = str(spec.origin)
    return _run(code, main)


def _new_main(file: str) -> ModuleType:
    """Return a module that stays ``__main__`` until the process ends.

    Threads and functions at exit, and those who unpickle, look up names there.
    """
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __file__=file, __cached__=None)
    sys.modules["__main__"] = main
    return main


def _run(source: bytes | CodeType, main: ModuleType) -> Any:
    """Run code as Python itself does, and return the exit code."""
    try:
        code = compile(source, str(main.__file__), "exec") if isinstance(source, bytes) else source
        exec(code, vars(main))  # noqa: S102  # the program of the user
    except SystemExit as error:
        return error.code
    except BaseException as error:
        trace = error.__traceback__
        # The frame of this function is none of the program's.
        trace = trace and trace.tb_next
        # The program may have set a hook of its own.
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


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
    # pip writes scripts with the path of the interpreter in the first line.
    if not (first.startswith(b"#!") and b"python" in first):
        raise InputError(f"{found} is no Python program: give one, or a module with -m")
    return found


def _tell(grafting: Grafting, path: Path | None) -> None:
    """Print the report, and write it to the file that the environment names."""
    lines = [f"opgraft exec: {len(grafting.models)} models"]
    lines += [f"patched: {name}" for name in grafting.patches]
    lines += [f"not patched, as this version lacks it: {name}" for name in grafting.missing]
    lines += [str(model) for model in grafting.models]
    click.echo("\n".join(printable(line) for text in lines for line in text.split("\n")), err=True)
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
    told = {
        "schema": SCHEMA,
        "patches": grafting.patches,
        "missing": grafting.missing,
        "models": models,
    }
    try:
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        click.echo(f"opgraft exec: the report was not written: {described(error)}", err=True)
