"""Checkpoints and input that are wrong: exit code 2 and one message, from each command that reads them."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import opgraft
import pytest
from opgraft.base.text import printable
from opgraft.cli import chat, plan, run, verify
from opgraft.errors import OpgraftError
from support.faults.model_rows import (
    CHAT,
    CONFIGS,
    CONTENTS,
    EMBEDS,
    ENCODERS,
    INPUTS,
    NAMES,
    PAST_A_SERVER,
    PLAN,
    RUN,
    SERVE,
    SETTINGS,
    VERIFY,
)
from support.faults.planting import in_time
from support.small_words import word_llama

COMMANDS = {
    "chat": chat.command,
    "plan": plan.command,
    "run": run.command,
    "verify": verify.command,
}
BLOCKS = ("--cache.num_blocks", "300")
LONGEST = 4000  # characters of a message that anybody reads


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random decoder that chats."""
    return word_llama(tmp_path_factory.mktemp("llama"), chats=True)


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def expect_refused(capfd, command: Sequence[str], words: str) -> None:
    """The command ends with exit code 2 and one line, and shows neither an answer nor a warning."""
    opgraft.reset()
    capfd.readouterr()
    with in_time(), pytest.raises((OpgraftError, click.ClickException)) as refused:
        COMMANDS[command[0]].main(command[1:], standalone_mode=False)
    error = refused.value
    said = error.format_message() if isinstance(error, click.ClickException) else str(error)
    assert error.exit_code == 2, said
    assert words in said
    assert (printable(said), said[:LONGEST]) == (said, said)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert [
        line for line in printed.err.splitlines() if not line.startswith("the cache holds")
    ] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(capfd, llama: Path, tmp_path: Path, name: str) -> None:
    """No command that reads a model goes on with such a config."""
    harm, words = CONFIGS[name]
    folder = copied(llama, tmp_path)
    harm(folder)
    for command in (RUN, PLAN, CHAT, VERIFY):
        expect_refused(capfd, [part.format(model=folder) for part in command], words)


@pytest.mark.parametrize("setting", SETTINGS, ids=" ".join)
def test_settings(capfd, llama: Path, setting: tuple[str, ...]) -> None:
    """Nothing is answered by settings out of range."""
    for command in (RUN, CHAT):
        expect_refused(
            capfd, [*(part.format(model=llama) for part in command), *setting], SETTINGS[setting]
        )


IN_A_SERVER = {
    name: row for name, row in {**CONFIGS, **CONTENTS}.items() if name not in PAST_A_SERVER
}


@pytest.mark.faults
@pytest.mark.parametrize("name", IN_A_SERVER)
def test_a_server(cli, llama: Path, tmp_path: Path, name: str) -> None:
    """Nor does a server begin, which is a process of its own, as what it logs is for its own log."""
    harm, words = IN_A_SERVER[name]
    folder = copied(llama, tmp_path)
    harm(folder)
    served = cli(*(part.format(model=folder) for part in SERVE))
    assert (served.returncode, served.stdout) == (2, "")
    assert words in served.stderr
    assert len(served.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", CONTENTS)
def test_contents(capfd, llama: Path, tmp_path: Path, name: str) -> None:
    """Nothing is answered from weights, tokenizers and settings that are not those of the model."""
    harm, words = CONTENTS[name]
    folder = copied(llama, tmp_path)
    harm(folder)
    expect_refused(capfd, [*(part.format(model=folder) for part in RUN), *BLOCKS], words)


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names(capfd, name: str) -> None:
    """A name that no file system takes is no model, for any command; nobody is shown all of it."""
    for command in (RUN, PLAN, CHAT, *([VERIFY] if ":" not in name else [])):
        expect_refused(capfd, [part.format(model=name) for part in command], NAMES[name])


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(capfd, encoder: Path, tmp_path: Path, name: str) -> None:
    """Nor is anything embedded."""
    harm, words = ENCODERS[name]
    folder = copied(encoder, tmp_path)
    harm(folder)
    expect_refused(capfd, [part.format(model=folder) for part in EMBEDS], words)


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(capfd, llama: Path, tmp_path: Path, name: str) -> None:
    """A file of prompts that is none is named; nobody waits for one that never ends, or never begins."""
    harm, words = INPUTS[name]
    harm(tmp_path / "input")
    expect_refused(capfd, ["run", str(llama), "--input", str(tmp_path / "input"), *BLOCKS], words)


def test_a_line_without_end_in_a_chat(capfd, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before memory is full of it."""
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        expect_refused(
            capfd,
            ["chat", str(llama), *BLOCKS],
            "a line of stdin has more than 4,194,304 characters",
        )


def test_what_is_in_order(
    capfd, llama: Path, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same models answer where nothing is wrong."""
    (tmp_path / "input").write_text("the cat\na dog\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    for command in (
        ["run", str(llama), "--input", str(tmp_path / "input"), *BLOCKS],
        ["chat", str(llama), *BLOCKS],
        ["run", str(encoder), "the cat", "a dog"],
        ["plan", str(llama), "--devices", "2", "--device", "h100"],
    ):
        opgraft.reset()
        capfd.readouterr()
        assert not COMMANDS[command[0]].main(command[1:], standalone_mode=False)
        assert capfd.readouterr().out
