"""Groups of commands. Each command has a module of its own, imported when it is called."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click
from opgraft.errors import close_matches

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LazyGroup(click.Group):
    """A group that imports a command when it is called. Help and completion import no command.

    Attributes:
        table: for each command, the module with the attribute ``command``, and a summary.
    """

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        command: click.Command = _module(self.table[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # click would say the same without close matches. A shell that completes wants no error.
        if name not in self.table and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}: {close_matches(name, self.table)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.table.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # Click itself imports this module for completion only.
        from click.shell_completion import CompletionItem

        items = []
        for name, (_, summary) in self.table.items():
            if name.startswith(incomplete):
                items.append(CompletionItem(name, help=summary))
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*items, *options]


def _module(name: str) -> ModuleType:
    """Import a module with the garbage collector off, and exempt its objects from collection.

    The objects stay to the end of the process. Looking for garbage among them would take a quarter
    of the time of a short command.
    """
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
