"""Write what is generated of the reference beside the pages of ops: tables, and a page of docstrings per public module.

Tables come from the registries: settings, hooks, platforms, errors, and the commands with their options. Where a page
says more of a row than its registry does, that is the author's and stays; a new row says what the registry does.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import http_fields
from docstrings import documentation, fenced, marked, parameters_of
from opgraft import errors
from opgraft.cli import cli
from opgraft.config import FIELDS, text_of
from opgraft.plugins import hookspecs
from opgraft.plugins.discovery import PLATFORM_GROUP, discover
from opgraft.registry.contracts import CONTRACTS
from opgraft.testing import inventory

REFERENCE = Path(__file__).parents[1] / "docs/reference"
MODULES = (
    "opgraft",
    "opgraft.distributed",
    "opgraft.plugins.bridges",
    "opgraft.kernels",
    "opgraft.kernels.engine",
    "opgraft.models",
    "opgraft.testing",
    "opgraft.testing.checks",
    "opgraft.testing.contracts",
    "opgraft.testing.part_contracts",
)
"""Public modules whose docstrings have a page."""

HTTP_FIELDS = "| path | field | OpenAI, Anthropic | vLLM | llama.cpp | opgraft |"

Row = Sequence[str]
Known = Mapping[str, Row]
"""The rows that a table has, by the first word in code of each."""


def main() -> None:
    pages = all_pages()
    for path in set((REFERENCE / "python").glob("*.md")) - set(pages):
        path.unlink()
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(pages)} files are current")


def all_pages() -> dict[Path, str]:
    """Return every file that this script writes, with its text."""
    pages = {REFERENCE / f"python/{name}.md": docstrings_of(name) for name in MODULES}
    for name, header, rows in TABLES:
        path = REFERENCE / f"{name}.md"
        text = pages.get(path) or path.read_text(encoding="utf-8")
        pages[path] = with_table(text, header, rows)
    path = REFERENCE / "cli.md"
    pages[path] = with_options(path.read_text(encoding="utf-8"))
    return pages


def with_table(text: str, header: str, rows: Callable[[Known], Iterable[Row]]) -> str:
    """Return a text in which the table below a header has the rows that it must have."""
    table = re.compile(rf"(?<=^{re.escape(header)}\n)(\|[-|]+\|\n)((?:\|.*\n)*)", re.M)

    def renewed(found: re.Match[str]) -> str:
        lines = [
            # The spaces of a bar belong to two cells, so that an empty cell counts.
            [cell.strip() for cell in re.split(r"(?<= )\|(?= )", line.strip("|"))]
            for line in found[2].splitlines()
        ]
        known = {key_of(line[0]): line for line in lines}
        return found[1] + "".join(
            f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows(known)
        )

    return table.sub(renewed, text)


def key_of(cell: str) -> str:
    """Return the first word in code of a cell."""
    return re.split(r"[ (`]", cell.partition("`")[2])[0]


def settings(known: Known) -> Iterator[Row]:
    for field in FIELDS.values():
        default = field.unset if field.default is None else f"`{text_of(field.default)}`"
        names = f"`{field.name}`<br>`{field.variable}`"
        yield names, f"{field.help}<br>{field.words}; default: {default}"


def hooks(known: Known) -> Iterator[Row]:
    for name in hookspecs.RESULT_TYPES:
        hook = getattr(hookspecs, name)
        returned = " or ".join(
            f"`{part}`" for part in inspect.signature(hook).return_annotation.split(" | ")
        )
        yield (
            f"`{name}({', '.join(inspect.signature(hook).parameters)})`",
            returned,
            described(hook),
        )


def platforms(known: Known) -> Iterator[Row]:
    specs = {
        offer.name: offer.load() for offer in discover().of_group(PLATFORM_GROUP) if offer.built_in
    }
    chains = {platform.name: platform.chain for platform in inventory.built_in_platforms()}
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].priority):
        chain = ", ".join(f"`{key}`" for key in chains[name])
        available = known[name][2] if name in known else described(spec.probe)
        yield f"`{name}`", chain, available, str(spec.priority)


def error_rows(known: Known) -> Iterator[Row]:
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.OpgraftError):
            bases = [
                base for base in error.__bases__ if base not in (errors.OpgraftError, Exception)
            ]
            also = ", ".join(f"`{base.__name__}`" for base in bases)
            yield f"`{name}`", also, str(error.exit_code), described(error)


def contracts(known: Known) -> Iterator[Row]:
    for part, number in CONTRACTS.items():
        covered = known[part][2] if part in known else ""
        yield f"`{part}`", str(number), covered


TABLES: Sequence[tuple[str, str, Callable[[Known], Iterator[Row]]]] = (
    ("settings", "| setting and variable | meaning, value and default |", settings),
    ("hooks", "| hook | returns | |", hooks),
    ("platforms", "| platform | dispatch chain | available if | priority |", platforms),
    ("errors", "| error | also a | exit code | |", error_rows),
    ("kernels", "| part | number | the contract covers |", contracts),
    ("answers", "| compared over HTTP | version |", lambda known: http_fields.versions()),
    ("answers", HTTP_FIELDS, lambda known: http_fields.rows()),
)
"""The page, the header of a table on it, and the rows of the table."""


def described(thing: Any) -> str:
    """Return the first paragraph of a docstring as a cell."""
    return marked(" ".join(inspect.cleandoc(thing.__doc__ or "").partition("\n\n")[0].split()))


def with_options(text: str) -> str:
    """Return the page of commands with the options that each has."""
    for path, command in commands(cli, "opgraft"):
        section = re.search(
            rf"^## `{re.escape(path)}(?: [^`\n]*)?`\n.*?(?=^## |\Z)", text, re.M | re.S
        )
        if section:
            renewed = with_table(section[0], "| option | |", options(command))
            text = text[: section.start()] + renewed + text[section.end() :]
    return text


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command that does something, with the words that it is called by."""
    context = click.Context(command)
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        if below is not None:
            yield from commands(below, f"{path} {name}")


def options(command: click.Command) -> Callable[[Known], Iterable[Row]]:
    settings = {f"--{name}" for name in FIELDS}

    def rows(known: Known) -> list[Row]:
        found = {}
        for option in command.params:
            names = [name for name in option.opts if name not in settings]
            if isinstance(option, click.Option) and names and not is_shared(option):
                told = known.get(names[0]) or (
                    f"`{names[0]} {option.metavar or ''}`",
                    marked(option.help or ""),
                )
                found[names[0]] = [f"`{names[0]}`" if option.is_flag else told[0], told[1]]
        return [found[name] for name in dict.fromkeys([*known, *found]) if name in found]

    return rows


def is_shared(option: click.Option) -> bool:
    """Tell of an option that every command has, which the page tells of once."""
    everywhere = {"--help", "--config", "--enforce-eager", "--compilation-config"}
    if everywhere & {*option.opts}:
        return True
    return option.opts == ["--json"] and option.is_flag


def docstrings_of(name: str) -> str:
    """Return the page of a module: each public name with its signature, its docstring and its members."""
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or functions_of(module)
    parts = [
        f"# Docstrings of `{name}`",
        "Generated by `make reference-pages` from the code. [By subject](../api.md).",
    ]
    for each in sorted(public, key=str.lower):
        thing = getattr(module, each)
        if not inspect.ismodule(thing) and inspect.getdoc(thing) and not each.startswith("__"):
            parts += [f"## `{each}`", *entry(f"{name}.{each}", thing)]
    return "\n\n".join(parts) + "\n"


def functions_of(module: Any) -> list[str]:
    """List the functions that a module without ``__all__`` defines for others."""
    own = inspect.getmembers(
        module, lambda thing: inspect.isfunction(thing) and thing.__module__ == module.__name__
    )
    return [name for name, _ in own if not name.startswith("_")]


def entry(path: str, thing: Any) -> Iterator[str]:
    if inspect.isclass(thing) or inspect.isfunction(thing):
        yield fenced([f"{path}{signature(thing)}"])
    yield from documentation(inspect.getdoc(thing))
    if inspect.isclass(thing):
        for name, member in vars(thing).items():
            function = inspect.unwrap(
                getattr(member, "fget", None) or getattr(member, "__func__", member)
            )
            if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield fenced(
                    [name if isinstance(member, property) else f"{name}{signature(function)}"]
                )
                yield from documentation(function.__doc__)


def signature(thing: Any) -> str:
    try:
        return parameters_of(thing)
    except (TypeError, ValueError):  # of a class that says nothing of how it is made
        return ""


if __name__ == "__main__":
    main()
