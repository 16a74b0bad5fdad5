"""How commands print: whole lines into pipes, lines that fit a terminal, errors as JSON, help and completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest
from opgraft.cli import cli as root
from opgraft.config.environment import VARIABLES

EVERY_COMMAND = [
    "detect",
    "env",
    "ops",
    "ops list",
    "ops explain",
    "plugins",
    "plugins list",
    "plugins show",
]
EVERY_COMMAND += ["plugins doctor", "plugins lock", "run", "chat"]


def find(path: str) -> tuple[click.Command, click.Context]:
    """A command by the words that call it."""
    command, context = root, click.Context(root)
    for name in path.split():
        found = command.get_command(context, name)
        assert found is not None, path
        command, context = found, click.Context(found, parent=context)
    return command, context


@pytest.mark.parametrize("path", EVERY_COMMAND)
def test_short_help_is_a_whole_sentence_and_that_of_the_command(path: str) -> None:
    """The summary that a group lists is the first sentence of the command's own help, whole."""
    *above, name = path.split()
    group, _ = find(" ".join(above))
    command, _ = find(path)
    summary = group.table[name][1]
    assert summary == command.get_short_help_str(1000)
    assert summary.endswith(".")
    assert summary[0].isupper()
    assert "..." not in summary


@pytest.mark.parametrize(
    ("path", "shown", "hidden"),
    [
        ("detect", {"--platform"}, {"--server.port", "--model.seed"}),
        ("run", {"--platform", "--model.seed"}, {"--server.port"}),
        ("serve", {"--platform", "--model.seed", "--server.port"}, set()),
    ],
)
def test_help_lists_the_settings_that_matter_to_a_command(
    path: str, shown: set[str], hidden: set[str]
) -> None:
    """Other settings are options too, which the help says instead of listing them."""
    command, context = find(path)
    words = set(command.get_help(context).replace(",", " ").split())
    assert shown <= words
    assert not hidden & words
    assert (
        "All other settings are options, too" in " ".join(command.get_help(context).split())
    ) is bool(hidden)
    assert {option for parameter in command.params for option in parameter.opts} >= shown | hidden


def test_pipes_are_never_wrapped(cli) -> None:
    """Into a pipe every candidate, with place and reason, is one line, however narrow the terminal is said to be."""
    lines = cli("detect", "--all", COLUMNS="40").stdout.splitlines()
    assert any(
        line.startswith("  - cuda [opgraft") and line.endswith("no NVIDIA GPU") for line in lines
    )
    header, *rows, _ = cli("plugins", "list", COLUMNS="20").stdout.splitlines()
    assert header.split() == ["kind", "name", "provider", "status", "reason"]
    assert len(rows) == 5


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize(
    "arguments", [("detect", "--all"), ("ops", "list", "--details"), ("plugins", "list")]
)
def test_terminals_are_never_overrun(terminal, arguments: tuple[str, ...], columns: int) -> None:
    """In a terminal no line is longer than it is wide, save for words without a place to break, such as paths."""
    lines = terminal(*arguments, columns=columns)
    assert lines
    assert [line for line in lines if len(line) > columns and len(line.split()) > 1] == []


def test_ops_list_is_one_line_per_op_and_variant_on_100_columns(terminal, cli) -> None:
    """Each op is a line, its variants are lines below it, and nothing else is there but the platform and the header."""
    answer = json.loads(cli("ops", "list", "--json").stdout)
    expected = [op["op"] for op in answer["ops"] for _ in (op, *op["variants"])]
    platform, header, *rows = terminal("ops", "list", columns=100)
    assert platform == "platform: cpu"
    assert header.split() == ["op", "class", "kernel", "provider"]
    assert [row.split()[0] for row in rows] == expected
    assert max(map(len, rows)) <= 100
    assert (
        [row.startswith("  ") for row in rows].count(True)
        == sum(len(op["variants"]) for op in answer["ops"])
        > 0
    )


@pytest.mark.parametrize("arguments", [("ops", "list"), ("detect", "--help"), ("env", "--json")])
def test_a_reader_that_leaves_is_no_error(warm_python: str, arguments: tuple[str, ...]) -> None:
    """Behind '| head -1' a command ends with 0 and says nothing on stderr."""
    command = f"{warm_python} -m opgraft {' '.join(arguments)} | head -1 >/dev/null; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["detect", "--platform", "nope"], 3, "PlatformError"),
        (["detect", "--strict", "maybe"], 2, "ConfigError"),
        (["ops", "explain", "rms_nrm"], 2, "InputError"),
        (["plugins", "show", "nothing"], 2, "InputError"),
        (["detect", "--nonsense"], 2, "NoSuchOption"),
        (["ops", "explain"], 2, "MissingParameter"),
        (["detct"], 2, "UsageError"),
    ],
)
def test_errors_are_json_where_json_is_asked_for(
    cli, arguments: list[str], code: int, kind: str
) -> None:
    """With --json stdout holds one object with the error, stderr the same message after 'error: '."""
    result = cli(*arguments, "--json")
    fault = json.loads(result.stdout)
    assert result.returncode == code
    assert fault["schema"] == "opgraft.error/1"
    assert (fault["error"]["type"], fault["error"]["exit_code"]) == (kind, code)
    assert fault["error"]["message"].split(":")[0] in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.lower().startswith("error:")]
    assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["detct"], "did you mean 'detect'?"),
        (["plugins", "docter"], "'doctor'"),
        (["zzz"], "known: cache, chat"),
    ],
)
def test_misspelt_commands_get_suggestions(cli, arguments: list[str], hint: str) -> None:
    """Near names are suggested, all are listed where none is near."""
    result = cli(*arguments)
    assert result.returncode == 2
    assert hint in result.stderr


def test_two_platforms_end_with_3(cli, site) -> None:
    """Two devices that both could be used are a question of the platform: exit code 3, of detect and doctor alike."""
    for name in ("acme", "brix"):
        site.platform(name, probe="return Evidence(True, 'here')")
    for arguments in (["detect"], ["plugins", "doctor"], ["ops", "list"]):
        assert cli(*arguments).returncode == 3, arguments


def complete(python: str, site, words: str) -> list[str]:
    """What bash would offer for the last of ``words``."""
    name = "_OPGRAFT_COMPLETE"
    variables = {
        name: "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    environ = {**os.environ, "PYTHONPATH": str(site.folder), **variables}
    code = "import sys; sys.argv[0] = 'opgraft'; from opgraft.cli import main; main()"
    result = subprocess.run(
        [python, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    return [line.partition(",")[2] for line in result.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("opgraft plu", ["plugins"]),
        ("opgraft plugins ", ["list", "show", "lock", "diff", "check", "trial", "doctor"]),
        ("opgraft plugins show ac", ["acme"]),
        ("opgraft detect --platform cu", ["cuda"]),
        ("opgraft detect --plugins_disable ", ["acme"]),
        ("opgraft detect --strict t", ["true"]),
        ("opgraft ops explain rms_norm_g", ["rms_norm_gated"]),
        ("opgraft ops explain GemmaR", ["GemmaRMSNorm"]),
    ],
)
def test_shells_complete_commands_ops_and_plugins(
    warm_python: str, site, words: str, expected: list[str]
) -> None:
    """Commands, names of ops, plugins and platforms, and spellings of flags are completed, without a word on stderr."""
    site.plugin("acme", "platforms = 'any'")
    assert complete(warm_python, site, words) == expected


def test_completion_of_a_broken_installation_is_silent(warm_python: str, site) -> None:
    """A variable that would be an error for a command completes to nothing, or as if it were not there."""
    site.install("broken-dist", {}, "[opgraft.plugins]\nbroken = not a module")
    assert complete(warm_python, site, "opgraft plugins show zzz") == []


def test_completing_a_command_imports_no_torch(site) -> None:
    """The names of commands, also of those that need torch, are there at once."""
    code = (
        "import sys, os\n"
        "os.environ.update(_OPGRAFT_COMPLETE='bash_complete', COMP_WORDS='opgraft ops ', COMP_CWORD='2')\n"
        "from opgraft.cli import cli\n"
        "try:\n    cli(prog_name='opgraft')\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


def test_every_variable_is_validated(cli) -> None:
    """A value that a variable does not take ends with 2 and names the variable."""
    wrong = {"OPGRAFT_PROVIDERS": "rms_norm", "OPGRAFT_LOG": "loud", "OPGRAFT_STRICT": "perhaps"}
    assert set(wrong) <= set(VARIABLES)
    for name, value in wrong.items():
        result = cli("detect", **{name: value})
        assert result.returncode == 2, name
        assert f"error: {name}" in result.stderr
