"""The command line. Each command lives in a module of its own, imported when it is called."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import sys
from typing import NoReturn

import click
from opgraft.errors import OpgraftError
from opgraft.version import __version__

_COMMANDS = {
    "detect": ("opgraft.cli.detect", "Which platform this machine gets, and why."),
    "env": ("opgraft.cli.env", "Versions, hardware, plugins and settings, for a bug report."),
    "ops": ("opgraft.cli.ops", "The op catalogue, and which kernel an op gets."),
    "plugins": ("opgraft.cli.plugins", "Installed plugins and what became of them."),
    "run": ("opgraft.cli.run", "Graft a model and run it on text."),
}


class _LazyGroup(click.Group):
    """A group that imports a command when it is called; help is listed without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        gc.disable()  # what an import makes stays to the end; looking for garbage in it would be 5 % of a short command
        try:
            command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        finally:
            gc.enable()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="opgraft")
def cli() -> None:
    """A plugin host that grafts device kernels onto PyTorch models.

    Exit codes: 0 fine, 1 findings, 2 usage, 3 no platform, 4 plugin failure.
    """


def main() -> NoReturn:
    """Entry point of the console script: errors of opgraft become one message on stderr and their exit code."""
    faulthandler.enable()  # a plugin that crashes the process is named by its file
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal of another encoding must not end a command
    try:
        cli(prog_name="opgraft")
    except OpgraftError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    sys.exit(0)
