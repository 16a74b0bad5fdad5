"""``opgraft env``: what is pasted into a bug report tells no secrets and stays a table."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from opgraft.cli import cli as command_line
from opgraft.cli import env
from opgraft.machine.evidence import Evidence, Fact
from opgraft.registry.decision import Candidate, Decision

ID = "7f524f0a-4d1c-4f6e-9a2b-3c5d7e9f0a1b"


def report(*arguments: str, **variables: str) -> str:
    result = CliRunner().invoke(command_line, ["env", *arguments], env=variables)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def telling_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision whose evidence holds what must not be pasted."""
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-host-17")
    monkeypatch.setenv("HOME", "/home/secret-user")
    facts = (
        Fact("CUDA_VISIBLE_DEVICES", f"GPU-{ID},GPU-7f524f0a"),
        Fact("serial", "SN1324099876"),
        Fact("log", "/home/secret-user/log of secret-host-17"),
        Fact("split", "a|b\nc\\d"),
    )
    candidate = Candidate("cpu", True, "fine", evidence=Evidence(True, "fine", facts=facts))
    decision = Decision("platform", "cpu", "because", (candidate,))
    monkeypatch.setattr(env, "decide_without_torch", lambda *arguments: (decision, ""))


@pytest.mark.parametrize("arguments", [(), ("--json",)])
@pytest.mark.usefixtures("telling_evidence")
def test_what_identifies_a_machine_is_left_out(arguments: tuple[str, ...]) -> None:
    """Ids of devices, serial numbers, host name and home folder are replaced, the same id by the same other."""
    text = report(*arguments, OMP_NUM_THREADS="GPU-7f524f0a")
    for secret in ("7f524f0a", "SN1324099876", "secret"):
        assert secret not in text, secret
    assert "GPU-11111111-1111-1111-1111-111111111111,GPU-11111111" in text
    assert "~/log of host" in text
    if arguments:
        assert json.loads(text)["sections"]["Environment"]["OMP_NUM_THREADS"] == "GPU-11111111"


@pytest.mark.usefixtures("telling_evidence")
def test_values_stay_in_their_cells() -> None:
    """A bar, a newline or a backslash in a value does not break the table."""
    assert r"split: a\|b\\nc\\d" in report()
    lines = [
        line
        for line in report(OMP_NUM_THREADS="1\n| x | y |").splitlines()
        if "OMP_NUM_THREADS" in line
    ]
    assert lines == [r"| OMP_NUM_THREADS | 1\\n\| x \| y \| |"]


def test_a_home_that_is_the_root_folder() -> None:
    """With HOME=/ no path is garbled."""
    assert "| OMP_NUM_THREADS | /a/b |" in report(HOME="/", OMP_NUM_THREADS="/a/b")


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder gets a report."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    assert "### Platform" in report()


def test_a_section_without_rows_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no variable concerns opgraft, the report says so instead of showing the head of a table."""
    monkeypatch.setattr(env, "known_variables", dict)
    monkeypatch.setattr(env, "_FURTHER_VARIABLES", ("ACME_THREADS",))
    assert report().rstrip().endswith("### Environment\n\n(none)")
    assert (
        report(ACME_THREADS="2")
        .rstrip()
        .endswith("### Environment\n\n| | |\n|---|---|\n| ACME_THREADS | 2 |")
    )


def test_changes_since_a_report_in_words(cli, site, tmp_path: Path) -> None:
    """Each row that differs has a line, with both values. A report without changes ends with 0."""
    site.plugin("acme", "platforms = 'any'\n")
    (tmp_path / "env.json").write_text(cli("env", "--json", OMP_NUM_THREADS="1").stdout)
    same = cli("env", "--diff", "env.json", OMP_NUM_THREADS="1")
    assert (same.returncode, same.stdout) == (0, "nothing differs from env.json\n")
    site.plugin("brix", "platforms = 'any'\n")
    others = {"OMP_NUM_THREADS": "2\x1b[31m", "OPGRAFT_PLUGINS_DISABLE": "acme"}
    told = cli("env", "--diff", "env.json", **others)
    assert told.returncode == 1
    assert told.stdout.splitlines() == [
        "Plugins: plugin acme: acme 1.0 (acme): selected -> acme 1.0 (acme): rejected: on the deny "
        "list plugins_disable (OPGRAFT_PLUGINS_DISABLE)",
        "Plugins: plugin brix: (none) -> brix 1.0 (brix): selected",
        'Settings: plugins_disable: [] (default) -> ["acme"] (OPGRAFT_PLUGINS_DISABLE)',
        "Environment: OMP_NUM_THREADS: 1 -> 2\\x1b[31m",
        "Environment: OPGRAFT_PLUGINS_DISABLE: (none) -> acme",
    ]
