"""Attestations of wheels: who has signed what is installed, with a root of trust of the test."""

from __future__ import annotations

import importlib
import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import opgraft
import pytest
from click.testing import CliRunner, Result
from opgraft.cli import cli
from opgraft.errors import InputError
from opgraft.plugins.locking import LockedPackage, read_rows
from support.locks import reason
from support.wheels import pip, plugin_and_dependency

pytest.importorskip("pypi_attestations")


@pytest.fixture(scope="module")
def root() -> Any:
    return importlib.import_module("support.signing").Root()


@pytest.fixture(scope="module")
def signed(root, tmp_path_factory) -> Path:
    """A folder with the root of trust, the signed wheel of a plugin, and what pip has installed, for copies."""
    folder = tmp_path_factory.mktemp("signed")
    wheels = folder / "wheels"
    wheels.mkdir()
    found = plugin_and_dependency(wheels)
    root.write(folder / "root.json")
    root.attest(found[0], "acme/probe")
    pip("--target", "FOLDER")(folder / "site", found)
    found[1].unlink()
    return folder


@pytest.fixture
def wheels(signed: Path, tmp_path: Path, monkeypatch) -> Path:
    """A folder with the signed wheel of a plugin that is installed, and the root of trust."""
    shutil.copytree(signed, tmp_path, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "wheels"


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
    Path("site/acme_top.py").write_text("changed = 1")
    opgraft.reset()
    shown = CliRunner().invoke(cli, ["plugins", "show", "acme", "--lockfile", "opgraft.lock"])
    assert "acme_top.py is not the file" in shown.output
    assert "signed by" not in shown.output


SIGNERS: dict[str, tuple[str, dict[str, str], str]] = {
    "another repository": (
        "mallory/probe",
        {},
        "https://github.com/mallory/probe (https://github.com/mallory/probe/.github/workflows/"
        "release.yml@refs/tags/), says https://token.actions.githubusercontent.com",
    ),
    "another workflow": (
        "acme/probe",
        {"workflow": "evil.yml@refs/tags/v1"},
        "evil.yml@refs/tags/",
    ),
    "a branch": (
        "acme/probe",
        {"workflow": "release.yml@refs/heads/x"},
        "release.yml@refs/heads/x",
    ),
    "a person": (
        "",
        {"person": "mallory@example.com"},
        "mallory@example.com (mallory@example.com), says https://accounts.google.com",
    ),
}


@pytest.mark.parametrize("kind", SIGNERS)
def test_a_new_signer_is_a_difference(root, wheels: Path, kind: str) -> None:
    """'plugins lock --check' names both. A release has another tag, which is no difference."""
    repository, signed, words = SIGNERS[kind]
    assert lock().exit_code == 0
    (wheel,) = wheels.glob("*.whl")
    root.attest(wheel, "acme/probe", workflow="release.yml@refs/tags/v2")
    told = lock("--check")
    assert (told.exit_code, told.output) == (0, "nothing differs from opgraft.lock\n")
    root.attest(wheel, repository, **signed)
    told = lock("--check")
    assert told.exit_code == 1
    output = " ".join(told.output.split())
    assert "its wheel was signed by https://github.com/acme/probe (https://" in output
    assert f"and now is by {words}" in output or words in output.partition("and now is by")[2]


def test_two_persons_are_two_signers(root, wheels: Path) -> None:
    """Their certificates name no repository."""
    (wheel,) = wheels.glob("*.whl")
    root.attest(wheel, "", person="alice@example.com")
    assert "signed by alice@example.com (alice@example.com)" in lock().output
    root.attest(wheel, "", person="mallory@example.com")
    told = lock("--check")
    assert told.exit_code == 1
    assert "and now is by mallory@example.com" in " ".join(told.output.split())


def test_a_lost_signer_is_a_difference(wheels: Path) -> None:
    """The command without --check would drop the signer. 'plugins diff' looks at no signers."""
    assert lock().exit_code == 0
    for given in (["--check"], ["--check", "--identity", "wheels", "--trust-root", "root.json"]):
        told = CliRunner().invoke(cli, ["plugins", "lock", *given])
        wanted = int("--identity" not in given)
        assert told.exit_code == wanted, told.output
    (wheel,) = wheels.glob("*.whl")
    wheel.unlink()
    told = lock("--check")
    assert told.exit_code == 1
    assert "and now is by nobody known" in " ".join(told.output.split())
    assert CliRunner().invoke(cli, ["plugins", "diff", "opgraft.lock"]).exit_code == 0


def test_a_wheel_with_another_spelling_of_the_version(root, wheels: Path) -> None:
    """Its name may say 1.0.0, and the metadata 1.0."""
    (wheel,) = wheels.glob("*.whl")
    renamed = wheel.rename(wheel.with_name(wheel.name.replace("-1.0-", "-1.0.0-")))
    root.attest(renamed, "acme/probe")
    assert "signed by https://github.com/acme/probe" in lock().output


def with_claims(archive: bytes, flags: int, method: int) -> bytes:
    """An archive whose entries claim flags and a method of compression."""
    for begin, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        first, *entries = archive.split(begin)
        claims = struct.pack("<HH", flags, method)
        changed = [entry[: place - 4] + claims + entry[place:] for entry in entries]
        archive = begin.join([first, *changed])
    return archive


@pytest.mark.parametrize(("flags", "method"), [(1, 0), (0, 8), (0, 99)])
def test_a_wheel_that_cannot_be_unpacked(wheels: Path, flags: int, method: int) -> None:
    """Encrypted, damaged or compressed in an unknown way, it has not the installed files."""
    (wheel,) = wheels.glob("*.whl")
    wheel.write_bytes(with_claims(wheel.read_bytes(), flags, method))
    told = lock()
    assert told.exit_code == 1
    assert f"its files are not those of wheels/{wheel.name}" in told.output


def test_a_root_of_trust_without_a_folder_is_refused(wheels: Path) -> None:
    """Nothing would be checked by it."""
    told = CliRunner().invoke(cli, ["plugins", "lock", "--trust-root", "root.json"])
    assert told.exit_code == 2
    assert "--trust-root needs --identity DIR" in told.output
    assert not Path("opgraft.lock").exists()


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
        assert read_rows("opgraft.lock") == kept

    kept: list[LockedPackage] = []

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
    # A lockfile that would lose a plugin is not replaced.
    kept = read_rows("opgraft.lock")
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
