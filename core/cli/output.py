"""What all commands share: settings as options, JSON, and text that fits a terminal."""

from __future__ import annotations

import functools
import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from opgraft.config import FIELDS, config_from_fields, parse_text, set_config
from opgraft.text import WIDTH, printable, table

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON of a versioned schema instead of text.")


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one option per setting, such as ``--compilation_config.custom_ops``, and run it under them."""

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        given = {name: options.pop(_parameter(name)) for name in FIELDS}
        values = {name: parse_text(name, text) for name, text in given.items() if text is not None}
        with set_config(config_from_fields(values), origin="the command line"):
            return command(**options)

    for name in reversed(list(FIELDS)):
        run = click.option(f"--{name}", _parameter(name), metavar="VALUE", help=f"The setting {name}.")(run)
    return run


def print_json(schema: str, data: dict[str, Any]) -> None:
    """One JSON object on stdout; ``schema`` names its form and version, such as ``opgraft.detect/1``."""
    click.echo(json.dumps({"schema": schema, **data}, indent=2))


def print_wrapped(text: str | Iterable[str], indent: str = "") -> None:
    """One line, or several, wrapped to the terminal or to 80 columns. A break inside of a line is shown escaped."""
    width = min(_width(), 100)
    for line in map(printable, [text] if isinstance(text, str) else text):
        hanging = indent + " " * (len(line) - len(line.lstrip()) + 2)
        lines = textwrap.wrap(
            line,
            width,
            initial_indent=indent,
            subsequent_indent=hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
        click.echo("\n".join(lines))


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns that fit the terminal, or 80 columns where there is none."""
    click.echo("\n".join(table([header, *rows], _width())))


def _width() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns


def _parameter(field: str) -> str:
    return field.replace(".", "__")
