"""Common code of all commands: settings as options, JSON, and text that fits a terminal."""

from __future__ import annotations

import functools
import json
import os
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import Any

import click
from opgraft.base.log import silent
from opgraft.base.text import WIDTH, printable, table
from opgraft.cli.answers import answers, answers_apart
from opgraft.config import (
    FIELDS,
    Field,
    config_from_fields,
    known_fields,
    parse_text,
    plugin_fields,
    read_file,
    set_config,
    text_of,
)
from opgraft.config.engine_arguments import (
    advice_about_option,
    compilation_settings,
    level_of_eager,
)
from opgraft.config.environment import CONFIG, VARIABLES
from opgraft.config.whole import check_known, settings_beside
from opgraft.errors import ConfigError, OpgraftError
from opgraft.registry.state import host_state

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON of a versioned schema instead of text."
)


class GivenPath(click.Path):
    """A path on the command line, not empty.

    A shell makes an empty path of an unset variable.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Raises:
            BadParameter: the path is empty.
        """
        if not os.fspath(value):
            message = "the path is empty: name a file or a folder, or leave the option out"
            self.fail(message, param, ctx)
        return super().convert(value, param, ctx)


COMMAND_LINE = "the command line"
"""The origin of settings from options."""

_EAGER = "--enforce-eager"
_COMPILATION = "--compilation-config"
"""Options with vLLM's spelling."""

_OF_PLUGINS = "opgraft.cli.options_of_plugins"
"""The key of the options of plugins in the context of a command."""

_FILE = "config_file"
"""The parameter of the option ``--config``."""

_TEXT_WIDTH = 100
"""Columns of a sentence at most, even on a wider terminal."""

_GROUPS = {
    "server": "Server",
    "model": "Model",
    "load": "Loading",
    "quantization": "Quantization",
    "cache": "Cache",
    "scheduler": "Scheduler",
    "parallel": "Parallelism",
    "compilation_config": "Compilation",
}
"""Headings of the help, by section of the settings."""

_OF_MODELS = frozenset(_GROUPS) - {"compilation_config"}
"""Sections without meaning for commands without a model."""


class SettingsCommand(click.Command):
    """A command of ``with_settings``. Its help has the settings by section."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with stdout for its answer alone."""
        with answers_apart():
            return super().invoke(ctx)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters of the command, and an option for each setting of a plugin."""
        return [*super().get_params(ctx), *_options_of_plugins(ctx)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ConfigError: an option is no setting of the plugin that the option begins with.
            UsageError: an option belongs to vLLM. The message names the option of opgraft.
        """
        # click empties the list.
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # click reads "-t" of "-tp".
            spelled = [each for each in given if each.startswith(error.option_name)]
            option = spelled[0] if spelled else error.option_name
            name = option.partition("=")[0]
            # A name in the section of a plugin: the error names this plugin and close matches.
            if settings_beside(name.removeprefix("--")):
                check_known(name.removeprefix("--"))
            advice = advice_about_option(option)
            if advice is None:
                raise
            raise click.UsageError(f"{name} is an option of vLLM: {advice}", ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, with a heading for each section."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        headings = ["Options", *_GROUPS.values(), "Host"]
        headings += [_heading(field) for field in plugin_fields().values()]
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in headings}
        for option in options:
            record = option.get_help_record(ctx)
            if record is not None:
                rows[_heading_of(option)].append(record)
        for heading, found in rows.items():
            if found:
                with formatter.section(heading):
                    formatter.write_dl(found)
        if any(option.hidden for option in options):
            formatter.write_paragraph()
            formatter.write_text(
                "All other settings are options, too: 'opgraft serve --help' lists them."
            )


def _heading_of(option: click.Option) -> str:
    """Return the heading of the help that an option stands below."""
    if {_EAGER, _COMPILATION} & {*option.opts}:
        return _GROUPS["compilation_config"]
    for field in known_fields().values():
        if _parameter(field.name) == option.name:
            return _heading(field)
    return "Options"


def _heading(field: Field) -> str:
    """Return the heading of the help that a setting stands below."""
    if field.provider:
        return f"Settings of {field.provider}"
    return _GROUPS.get(field.name.partition(".")[0], "Host")


def _options_of_plugins(ctx: click.Context) -> Sequence[click.Option]:
    """Return an option for each setting of a plugin, made once for each call of a command."""
    made: list[click.Option] | None = ctx.meta.get(_OF_PLUGINS)
    if made is None:
        # A shell that completes has no place for a warning. Finders and plugins may print.
        with silent() if ctx.resilient_parsing else nullcontext(), answers_apart():
            made = _made_for_plugins()
        ctx.meta[_OF_PLUGINS] = made
    return made


def _made_for_plugins() -> list[click.Option]:
    # OPGRAFT_LOG counts from the first warning on. Wrong variables are told later.
    with suppress(ConfigError):
        host_state().known_environment()
    return [_option(field) for field in plugin_fields().values()]


def _option(field: Field) -> click.Option:
    """Return the option of a plugin's setting."""
    return click.Option(
        [f"--{field.name}", _parameter(field.name)],
        metavar=field.metavar,
        help=_help(field),
        shell_complete=functools.partial(_complete, field.name),
    )


def with_settings(
    command: Callable[..., Any],
    short: Mapping[str, str] = MappingProxyType({}),
    hidden: Collection[str] = _OF_MODELS,
) -> Callable[..., Any]:
    """Give a command an option for each setting, such as ``--parallel.tensor``, and ``--config``.

    The command runs under the settings of these options.

    Args:
        command: function of the command.
        short: further spellings of options, by the names of their settings.
        hidden: sections to leave out of the help.
    """

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        path = options.pop(_FILE)
        file = read_file(path) if path is not None else None
        # The rest of the options are the command's own.
        layer = config_from_fields(_take_settings(options))
        with set_config(layer, origin=COMMAND_LINE, file=file):
            return command(**options)

    with_options = _with_options(run, short, hidden)
    help = f"{VARIABLES[CONFIG]} (instead of {CONFIG})."
    config = click.option("--config", _FILE, metavar="FILE", help=help, type=GivenPath())
    return config(with_options)


def _take_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Take the settings out of the options, and return the given ones by dotted name."""
    values = {}
    for name in known_fields():
        # A program that calls the function itself gives no options of plugins.
        text = options.pop(_parameter(name), None)
        if text is not None:
            values[name] = parse_text(name, text)
    for option in (_EAGER, _COMPILATION):
        _add_option(values, option, options.pop(_parameter_of(option)))
    return values


def _with_options(
    run: Callable[..., Any], short: Mapping[str, str], hidden: Collection[str]
) -> Callable[..., Any]:
    """Give a command an option for each setting, and the options with vLLM's spelling."""
    # The last option that is added comes first in the help.
    for name, field in reversed(list(FIELDS.items())):
        complete = functools.partial(_complete, name)
        spellings = [f"--{name}"]
        if name in short:
            spellings.insert(0, short[name])
        option = click.option(
            *spellings,
            _parameter(name),
            metavar=field.metavar,
            help=_help(field),
            hidden=name.partition(".")[0] in hidden,
            shell_complete=complete,
        )
        run = option(run)
    run = click.option(
        _COMPILATION,
        metavar="JSON",
        help="settings of compilation as one object, by their names after compilation_config",
    )(run)
    return click.option(_EAGER, is_flag=True, help="compile nothing: -O 0")(run)


def _add_option(values: dict[str, Any], option: str, given: Any) -> None:
    """Add the settings of an option with vLLM's spelling.

    Raises:
        UsageError: another option has one of these settings.
        ConfigError: the text is no JSON, or a key is no setting.
    """
    if not given:
        return
    found = level_of_eager(given) if option == _EAGER else _of_compilation(given)
    twice = sorted(values.keys() & found.keys())
    if twice:
        raise click.UsageError(f"{option} and --{twice[0]} both set {twice[0]}: leave one out")
    values.update(found)


def _of_compilation(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{_COMPILATION} {text!r:.80} is no JSON: {error}") from error
    return compilation_settings(given)


SHORT_OF_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "model.dtype": "--dtype",
        "compilation_config.level": "-O",
        "compilation_config.dump_graphs": "--dump-graphs",
    }
)
"""Further spellings of options, for commands that run a model."""

with_model_settings = functools.partial(with_settings, short=SHORT_OF_MODELS, hidden=("server",))
"""As ``with_settings``, for commands that run a model."""


def _help(field: Field) -> str:
    """Return the help of a setting: purpose, values and default."""
    default = field.unset if field.default is None else text_of(field.default)
    bounds = f"; {field.bounds}" if str(field.bounds) else ""
    return f"{field.help}{bounds} [default: {default}]"


def _complete(
    name: str, context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[Any]:
    """Complete the value of a setting for a shell."""
    # Only completion needs this module.
    from opgraft.cli.completion import completion_of

    complete = completion_of(name)
    return complete(context, parameter, incomplete) if complete else []


def echo(text: str = "") -> None:
    """Write a line to stdout. Without a reader, as after ``| head``, the line is dropped.

    Raises:
        OpgraftError: the line cannot be written, for example because the disk is full.
    """
    try:
        click.echo(text, file=answers())
    except BrokenPipeError:
        discard_stdout()
    except OSError as error:
        discard_stdout()
        raise OpgraftError(f"the answer cannot be written to stdout: {error.strerror}") from error


def discard_stdout() -> None:
    """Drop all further output to stdout without an error, also at the end of the process."""
    # Python flushes stdout at exit, and would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), answers().fileno())


def print_traceback(error: BaseException) -> None:
    """Print the traceback of a foreign error on stderr. Its text cannot forge or hide a line."""
    for part in traceback.format_exception(error):
        for line in part.splitlines():
            click.echo(printable(line), err=True)


def print_json(schema: str, data: dict[str, Any]) -> None:
    """Print a JSON object. ``schema`` names the form and version, such as ``opgraft.detect/2``."""
    echo(json.dumps({"schema": schema, **data}, indent=2))


class AlreadyTold(Exception):  # noqa: N818  # its cause is the error
    """Raised from an error that a printed JSON object has already."""


def print_error(error: Exception, told: Any) -> None:
    """Print an error as JSON, with its ``Provenance`` or ``None``."""
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    fault = {
        "type": type(error).__name__,
        "message": message,
        "exit_code": getattr(error, "exit_code", 1),
    }
    fault["provenance"] = told and told.to_dict()
    print_json("opgraft.error/1", {"error": fault})


def print_wrapped(text: str | Iterable[str], indent: str = "") -> None:
    """Print one line, or several, wrapped to the terminal. Without a terminal, print whole lines.

    A line break within a line is escaped.
    """
    columns = width()
    given = [text] if isinstance(text, str) else text
    for line in map(printable, given):
        if columns is None:
            echo(f"{indent}{line}" if line.strip() else "")
            continue
        own_indent = len(line) - len(line.lstrip())
        hanging = indent + " " * (own_indent + 2)
        lines = textwrap.wrap(
            line,
            min(columns, _TEXT_WIDTH),
            initial_indent=indent,
            subsequent_indent=hanging,
            # A path or a command stays whole, to be copied.
            break_long_words=False,
            break_on_hyphens=False,
        )
        echo("\n".join(lines))


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns that fit the terminal. Without a terminal, print whole cells."""
    echo("\n".join(table([header, *rows], width())))


def width() -> int | None:
    """Return the columns of the terminal; ``None`` for a pipe or a file."""
    if not answers().isatty():
        return None
    # Costs 2 ms, and no pipe needs this.
    import shutil

    return shutil.get_terminal_size((WIDTH, 24)).columns


def _parameter(field: str) -> str:
    return field.replace(".", "__")


def _parameter_of(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
