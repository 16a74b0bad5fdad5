"""The command line. Each command lives in a module of its own, imported when it is called."""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click
from opgraft.base.text import described
from opgraft.base.version import __version__
from opgraft.base.watchdog import WATCHDOG
from opgraft.cli.group import LazyGroup
from opgraft.errors import OpgraftError, PluginError

_COMMANDS = {
    "tune": ("opgraft.cli.tune", "Measure which kernel of each op is fastest on this machine."),
    "cache": (
        "opgraft.cli.cache",
        "Look at the cache of compiled code, carry it to other machines, or empty it.",
    ),
    "chat": ("opgraft.cli.chat", "Chat with MODEL in the terminal, or over the lines of stdin."),
    "conformance": (
        "opgraft.cli.conformance",
        "Run every check of the conformance kit on PLUGIN.",
    ),
    "detect": ("opgraft.cli.detect", "Show which platform this machine gets, and why."),
    "env": ("opgraft.cli.env", "Print versions, hardware, plugins and settings for a bug report."),
    "exec": (
        "opgraft.cli.exec",
        "Run the Python program PROGRAM, and graft the models that it builds.",
    ),
    "new": ("opgraft.cli.new", "Make a plugin to begin with."),
    "ops": ("opgraft.cli.ops", "Show the op catalogue, and which kernel an op gets."),
    "plan": (
        "opgraft.cli.plan",
        "Say how MODEL may be split over devices, and how fast it is at best.",
    ),
    "plugins": ("opgraft.cli.plugins", "Show installed plugins, and check that they work."),
    "run": (
        "opgraft.cli.run",
        "Answer every PROMPT with MODEL, or embed it if MODEL is an encoder.",
    ),
    "serve": ("opgraft.cli.serve", "Serve MODEL over HTTP, with OpenAI's interface."),
    "trace": ("opgraft.cli.trace", "Record steps of MODEL for Perfetto."),
    "trace-shapes": (
        "opgraft.cli.trace_shapes",
        "Record the ops, shapes and counts of a run of MODEL or of a program.",
    ),
    "top": ("opgraft.cli.top", "Show the load of the server at URL: requests, cache, tokens, ops."),
    "verify": (
        "opgraft.cli.verify",
        "Compare each op of MODEL with native definitions, and name the first that departs.",
    ),
}


_TRACEBACK = "--traceback"
_JSON = "--json"
_PROGRAMS = frozenset({"exec", "trace-shapes"})
"""The commands whose arguments may belong to a program."""
_WORD = "error: "
_CLICKS_WORD = "Error: "
_SEARCH = ("<frozen importlib._bootstrap>", "_find_spec")
"""The file and the function of Python that ask each finder."""


@click.group(
    cls=LazyGroup, table=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="opgraft")
@click.option(
    _TRACEBACK,
    is_flag=True,
    expose_value=False,
    help="Of an error, show the calls that led to it; it may stand behind COMMAND, too.",
)
def cli() -> None:
    """Host plugins that graft device kernels onto PyTorch models.

    Exit codes: 0 fine, 1 findings, 2 usage, 3 no platform, 4 plugin failure, 5 engine stopped.
    """


def main() -> NoReturn:
    """Run the console script. An error becomes one message on stderr, and an exit code."""
    _open_standard_streams()
    # Prints the file of a plugin that crashes the process, or keeps Python's lock.
    WATCHDOG.take()
    # A warning of torch. Nobody here needs NumPy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal of another encoding must not end a command.
            stream.reconfigure(errors="backslashreplace")
    code = _run(sys.argv[1:])
    # Code of plugins may have run, and may print at exit.
    if "opgraft.plugins.loading" in sys.modules:
        importlib.import_module("opgraft.cli.answers").divert(sys.stdout)
        importlib.import_module("opgraft.cli.ending").end_in_time(code)
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open the null device in place of each standard stream that was closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The new descriptor is the lowest free number, so this one.
            os.open(os.devnull, os.O_RDWR)
            mode = "r" if number == 0 else "w"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  # it stays
            setattr(sys, name, stream)


def _run(arguments: Sequence[str]) -> int:
    """Run a command line, and return the exit code.

    With ``--json`` an error is an object on stdout, too.
    """
    words, others = _split(arguments)
    shows_all = _TRACEBACK in words
    # Taken out here, since click knows the option in front of COMMAND only.
    words = [each for each in words if each != _TRACEBACK]
    try:
        code = _called([*words, *others])
    # Nobody reads the help any more, as after "| head".
    except BrokenPipeError:
        _output().discard_stdout()
        return 0
    except click.Abort:
        click.echo("aborted", err=True)
        return 1
    except Exception as raised:
        told = _error_already_told(raised)
        error = told or _of_finder(raised) or raised
        return _report(error, _JSON in words and told is None, shows_all)
    return code if isinstance(code, int) else 0


def _error_already_told(raised: Exception) -> Exception | None:
    """Return the error that a printed JSON object has already, or ``None``."""
    # Only if a command has imported it: an import may be what has failed.
    output = sys.modules.get("opgraft.cli.output")
    if output is None or not isinstance(raised, output.AlreadyTold):
        return None
    return raised.__cause__ if isinstance(raised.__cause__, Exception) else raised


def _report(error: Exception, as_json: bool, shows_all: bool) -> int:
    """Print an error, and return the exit code."""
    told = importlib.import_module("opgraft.binding.raised").provenance_of(error)
    failure = _failure(error, told)
    if as_json:
        _output().print_error(failure, told or getattr(error, "provenance", None))
    if isinstance(failure, click.ClickException):
        _show(failure)
        return failure.exit_code
    # An unexpected error is a fault of opgraft, and a report needs the traceback.
    if shows_all or not isinstance(failure, OpgraftError):
        _output().print_traceback(error)
    if isinstance(failure, OpgraftError):
        click.echo(f"{_WORD}{failure}", err=True)
    # The sentence of a PluginError names the plugin already.
    if told is not None and failure is error:
        click.echo(str(told), err=True)
    return failure.exit_code if isinstance(failure, OpgraftError) else 1


def _called(arguments: Sequence[str]) -> object:
    """Call the command, and return the result.

    Raises:
        PluginError: the code of a plugin raised ``SystemExit``.
    """
    try:
        return cli.main(arguments, prog_name="opgraft", standalone_mode=False)
    except SystemExit as error:
        own = _of_finder(error)
        own = own or importlib.import_module("opgraft.binding.raised").exit_of_plugin(error)
        if own is None:
            raise
        raise own from error


def _show(error: click.ClickException) -> None:
    """Print an error of the command line as click does, but with the word of opgraft's errors."""
    printed = io.StringIO()
    error.show(printed)
    lines = printed.getvalue().splitlines()
    for number, line in enumerate(lines):
        if line.startswith(_CLICKS_WORD):
            lines[number] = line.replace(_CLICKS_WORD, _WORD, 1)
            break
    click.echo("\n".join(lines), err=True)


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words with options of opgraft, and the words for a program or behind ``--``."""
    command = next((each for each in arguments if not each.startswith("-")), "")
    ends = {"--", command} if command in _PROGRAMS else {"--"}
    for place, word in enumerate(arguments):
        if word in ends:
            return arguments[:place], arguments[place:]
    return arguments, []


def _failure(error: Exception, told: Any) -> Exception:
    """Return an error of a plugin's code as a ``PluginError`` of one sentence."""
    if isinstance(error, click.ClickException) or told is None or not told.of_plugin:
        return error
    words = described(error)
    if isinstance(error, OpgraftError):
        # A further exit code says more than that a plugin has failed.
        if error.exit_code != OpgraftError.exit_code:
            return error
        words = str(error)
    return PluginError(f"{words}, {told}. {_TRACEBACK} shows the calls that led there.")


def _of_finder(error: BaseException) -> PluginError | None:
    """Return an error about a finder on ``sys.meta_path`` that raised an error at an import.

    The finder is removed, because the code for the message must be imported, too. Returns ``None``
    if no finder raised the error.
    """
    trace = error.__traceback__
    while trace is not None and not isinstance(error, OpgraftError):
        frame, trace = trace.tb_frame, trace.tb_next
        is_search = (frame.f_code.co_filename, frame.f_code.co_name) == _SEARCH
        if trace is None or not is_search:
            continue
        finder: Any = frame.f_locals.get("finder")
        # Python's own finders call hooks of others, and must stay.
        is_own = getattr(finder, "__module__", "").startswith("_frozen_importlib")
        if is_own or not any(finder is each for each in sys.meta_path):
            continue
        sys.meta_path[:] = [each for each in sys.meta_path if each is not finder]
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        fault = _finder_error(finder, error, place)
        fault.__cause__ = error
        return fault
    return None


def _finder_error(finder: Any, error: BaseException, place: str) -> PluginError:
    kind = finder if isinstance(finder, type) else type(finder)
    return PluginError(
        f"the finder {kind.__module__}.{kind.__qualname__} on sys.meta_path raised "
        f"{described(error)} at an import ({place}): uninstall the package that puts it there, or "
        "mend it"
    )


def _output() -> Any:
    """Import the functions for printing."""
    # Only here: a command without an error has imported them with the garbage collector off.
    return importlib.import_module("opgraft.cli.output")
