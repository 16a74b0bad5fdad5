"""Stdout holds the answer of a command alone, whatever plugins print."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from conftest import Cli, Site
from opgraft.cli import cli as commands
from opgraft.cli.output import SettingsCommand

PRINTS = """
import atexit, ctypes, os, subprocess, sys
def say():
    print("noise of Python")
    sys.__stdout__.write("noise of another name")
    os.write(1, b"noise of a descriptor\\n")
    ctypes.CDLL(None).printf(b"noise of C, which keeps it until it is flushed")
    subprocess.run(["echo", "noise of a process"])
say()
"""

PLATFORM = (
    PRINTS
    + """
from opgraft.platforms.cpu.platform import CpuPlatform
class Device(CpuPlatform):
    name = "acme"
    def prepare(self, config):
        say()
    def default_config(self):
        say()
        return super().default_config()
"""
)

PLUGIN = (
    PRINTS
    + """
import opgraft
from opgraft.ops import RMSNorm
atexit.register(say)

def when(platform):
    say()
    return True

@RMSNorm.register_oot(when=when)
class Norm(RMSNorm):
    @opgraft.needs(say)
    def forward_oot(self, x, residual=None):
        return self.forward_native(x, residual)

@opgraft.hookimpl
def opgraft_register_ops():
    say()
"""
)

COMMANDS = [
    ("ops", "list"),
    ("ops", "explain", "rms_norm"),
    ("plugins", "list"),
    ("plugins", "show", "acme", "--load"),
    ("plugins", "doctor"),
    ("detect",),
    ("env",),
]


@pytest.fixture
def noisy(site: Site) -> Site:
    """A platform and a plugin that print at every step."""
    probe = "import os; print('noise'); os.write(1, b'noise'); return Evidence(True, 'here')"
    site.platform("acme", probe=probe, platform=PLATFORM, plugin=PLUGIN)
    return site


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_json_is_the_whole_of_stdout(noisy: Site, cli: Cli, command: tuple[str, ...]) -> None:
    """The noise of plugins goes to stderr, that of the end of the process too."""
    done = cli(*command, "--json")
    assert json.loads(done.stdout)["schema"], done.stderr
    if command[0] == "ops":
        assert "noise of C" in done.stderr


def test_an_error_is_the_whole_of_stdout(noisy: Site, cli: Cli) -> None:
    """So it is if the command ends with an error, after plugins were loaded."""
    done = cli("ops", "explain", "rms_nrom", "--json")
    assert json.loads(done.stdout)["error"]["exit_code"] == done.returncode == 2


CLOSES = {
    "stdout": "sys.stdout.close()",
    "both": "sys.stdout.close(); sys.stderr.close()",
    "the descriptors": "os.close(1); os.close(2)",
    "by other streams": "sys.stdout = sys.stderr = None",
}
AROUND = """
import os, sys
from opgraft.cli.answers import answers, answers_apart
with answers_apart():
    {how}
    answers().write("answer. ")
sys.stdout.write("out")
sys.stderr.write("err")
"""


def test_an_error_after_a_plugin_closed_the_descriptors(site: Site, cli: Cli) -> None:
    """The error is told on both streams, as JSON and as text, without a traceback."""
    site.plugin("acme", f"import os\nplatforms = 'any'\n{CLOSES['the descriptors']}\n")
    done = cli("ops", "explain", "rms_nrom", "--json")
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["error"]["exit_code"] == 2
    assert done.stderr.count("rms_nrom") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", CLOSES)
def test_streams_that_a_plugin_closed_are_open_again(how: str) -> None:
    """After the answer both streams of a command are what they were."""
    code = AROUND.format(how=CLOSES[how])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("answer. out", "err")


def test_text_has_no_noise(noisy: Site, cli: Cli) -> None:
    """Text for people has none of it either, and help still goes to stdout."""
    assert "noise of" not in cli("ops", "explain", "rms_norm").stdout
    assert "Usage: opgraft ops explain" in cli("ops", "explain", "--help").stdout


def test_stdout_that_is_no_file(noisy: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that collects stdout in memory gets the answer alone, and its stdout back."""
    runner = CliRunner()
    done = runner.invoke(commands, ["ops", "explain", "rms_norm", "--json"])
    assert json.loads(done.stdout)["schema"]
    collected = io.StringIO()
    monkeypatch.setattr("sys.stdout", collected)
    with pytest.raises(SystemExit):
        commands.main(["detect", "--json"])
    assert sys.stdout is collected
    assert json.loads(collected.getvalue())["schema"]


def test_commands_that_load_plugins_keep_stdout_apart() -> None:
    """All do but those that load no plugin, and those whose output is that of another program."""
    others = []

    def walk(group: object, path: str) -> None:
        for name in group.list_commands(None):
            command = group.get_command(None, name)
            if hasattr(command, "list_commands"):
                walk(command, f"{path} {name}")
            elif not isinstance(command, SettingsCommand):
                others.append(f"{path} {name}".strip())

    walk(commands, "")
    assert others == ["exec", "new", "trace-shapes"]
