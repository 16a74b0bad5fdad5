"""Attestations of wheels: who has signed what is installed, with a root of trust of the test."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from opgraft.cli import cli
from opgraft.errors import InputError
from opgraft.plugins.locking import read_rows
from support.locks import reason
from support.wheels import pip, plugin_and_dependency

pytest.importorskip("pypi_attestations")


@pytest.fixture(scope="module")
def root() -> Any:
    return importlib.import_module("support.signing").Root()


@pytest.fixture
def wheels(root, tmp_path: Path, monkeypatch) -> Path:
    """A folder with the signed wheel of a plugin that is installed, and the root of trust."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    found = plugin_and_dependency(folder)
    root.write(tmp_path / "root.json")
    root.attest(found[0], "acme/probe")
    site = pip("--target", "FOLDER")(tmp_path / "site", found)
    found[1].unlink()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    return folder


def lock(*options: str) -> Result:
    given = ["plugins", "lock", "--identity", "wheels", "--trust-root", "root.json", *options]
    return CliRunner().invoke(cli, given)


def test_who_has_signed_is_kept_and_told(wheels: Path, monkeypatch) -> None:
    """The row has signer and attestation, and 'show' the signer; a start reads neither library nor folder."""
    told = lock()
    assert told.exit_code == 0, told.output
    assert "signed by https://github.com/acme/probe (https://github.com/acme/probe/" in told.output
    assert "without an attestation: wheels has no wheel of it" in told.output
    acme, runtime = read_rows("opgraft.lock")
    assert acme.identity is not None
    assert acme.identity["issuer"] == "https://token.actions.githubusercontent.com"
    assert runtime.identity is None
    kept = json.loads(acme.identity["attestation"])
    assert kept == json.loads((wheels / f"{acme.identity['wheel']}.provenance").read_text())
    shutil.rmtree(wheels)
    for name in [each for each in sys.modules if each.partition(".")[0] == "sigstore"]:
        monkeypatch.delitem(sys.modules, name)
    assert reason(Path("opgraft.lock")) is None
    shown = CliRunner().invoke(cli, ["plugins", "show", "acme", "--lockfile", "opgraft.lock"])
    assert "signed by: https://github.com/acme/probe" in shown.output
    assert "sigstore" not in sys.modules


def test_a_new_signer_is_a_difference(root, wheels: Path) -> None:
    """'plugins lock --check' names both."""
    assert lock().exit_code == 0
    assert lock("--check").exit_code == 0
    (wheel,) = wheels.glob("*.whl")
    root.attest(wheel, "mallory/probe")
    told = lock("--check")
    assert told.exit_code == 1
    assert (
        "its wheel was signed by https://github.com/acme/probe, and now is by "
        "https://github.com/mallory/probe" in told.output
    )


def test_an_attestation_that_does_not_hold_is_refused(root, wheels: Path) -> None:
    """Of another root, another wheel, changed, none at all, or of a wheel that is not the installed one."""
    (wheel,) = wheels.glob("*.whl")
    path = root.attest(wheel, "acme/probe")
    good = path.read_text()
    other = type(root)()
    signed: Any = json.loads(good)
    entry = signed["attestation_bundles"][0]["attestations"][0]
    entry["envelope"]["statement"] = entry["envelope"]["signature"]

    def expect(words: str) -> None:
        told = lock()
        assert told.exit_code == 1, told.output
        assert words in told.output
        assert read_rows("opgraft.lock") == []

    other.attest(wheel, "acme/probe")
    expect("does not hold: CertValidationError")
    root.attest(wheel, "acme/probe", digest="0" * 64)
    expect(f"not {wheel.name} with the SHA-256")
    path.write_text(json.dumps(signed))
    expect("does not hold: ")
    path.write_text('{"version": 1, "attestation_bundles": []}')
    expect("are not of one signer")
    path.unlink()
    expect("does not hold: FileNotFoundError")
    path.write_text(good)
    assert lock().exit_code == 0
    wheel.write_bytes(b"PK")
    expect(f"its files are not those of wheels/{wheel.name}")


def test_a_root_of_trust_that_cannot_be_used(wheels: Path) -> None:
    """It is an error of an input, and nothing is written."""
    Path("root.json").write_text("{}")
    told = lock()
    assert isinstance(told.exception, InputError)
    assert told.exception.exit_code == 2
    assert "the root of trust root.json cannot be used" in str(told.exception)
    assert not Path("opgraft.lock").exists()
