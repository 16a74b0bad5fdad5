"""Several versions of one plugin in one folder, as an upgrade that did not end leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opgraft.plugins.discovery import scan

PLUGIN = """
from opgraft.ops import GELU

platforms = "any"


@GELU.register_oot
class Acme(GELU):
    def forward_oot(self, x):
        return super().forward_native(x)
"""
POINTS = "[opgraft.plugins]\nacme = {module}\n"


def of_module(module: str) -> str:
    return POINTS.format(module=module)


def install(site: Any, version: str, module: str = "acme", name: str = "acme-kit") -> None:
    """Install a version, whose module replaces that of an earlier one if both have one name."""
    text = f"VERSION = {version!r}\n{PLUGIN}"
    site.install(name, {f"{module}.py": text}, of_module(module), version=version)


def counted() -> tuple[list[str], list[Any]]:
    """Return the versions and modules of the plugins that count, and the problems."""
    found = scan()
    offers = [offer for offer in found.offers if not offer.built_in]
    return [f"{offer.provider.version} {offer.module}" for offer in offers], found.problems


def folder_of(site: Any, version: str) -> Path:
    return Path(site.folder / f"acme_kit-{version}.dist-info")


def test_the_version_whose_files_are_there_counts(site: Any) -> None:
    """A module that is gone makes the metadata of its version the left one, whichever is later."""
    install(site, "1.0", "acme_old")
    install(site, "2.0", "acme_new")
    (site.folder / "acme_old.py").unlink()
    offers, problems = counted()
    assert offers == ["2.0 acme_new"]
    (problem,) = problems
    assert str(problem.provider) == "acme-kit 1.0"
    assert "left beside that of acme-kit 2.0" in problem.reason
    assert "its files are there as its RECORD lists them" in problem.reason
    assert str(folder_of(site, "1.0")) in problem.reason
    assert problem.location == f"{folder_of(site, '1.0') / 'METADATA'}:3"


def test_a_downgrade_counts_if_its_files_are_there(site: Any) -> None:
    """Files of one name and size are told apart by their hashes, so an older version may count."""
    install(site, "2.0")
    install(site, "1.0")
    offers, (problem,) = counted()
    assert offers == ["1.0 acme"]
    assert str(problem.provider) == "acme-kit 2.0"


@pytest.mark.parametrize(("first", "later"), [("1.9", "1.10"), ("2.0rc1", "2.0"), ("9!", "0.1")])
def test_the_later_version_counts_if_both_are_there(site: Any, first: str, later: str) -> None:
    """Versions are compared as installers compare them, and no version is better than a broken one."""
    install(site, first, "acme_one")
    install(site, later, "acme_two")
    offers, (problem,) = counted()
    assert offers == [f"{later} acme_two"]
    assert "it is the latest version" in problem.reason


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (4, "its files are there as its RECORD lists them"),
        (3, "most of its files, 75 %, are there as its RECORD lists them"),
        (2, "50 % of the files in its RECORD are there; the other copies have fewer"),
        (1, "25 % of the files in its RECORD are there; the other copies have fewer"),
    ],
)
def test_the_share_of_files_is_told(site: Any, kept: int, words: str) -> None:
    """The reason is true of the files: it does not say most if half of them, or fewer, are there."""
    for version, count in (("1.0", kept), ("2.0", 0)):
        files = {f"acme{version[0]}/part{number}.py": PLUGIN for number in range(4)}
        site.install("acme-kit", files, of_module(f"acme{version[0]}"), version=version)
        for number in range(count, 4):
            (site.folder / f"acme{version[0]}/part{number}.py").unlink()
    _, (problem,) = counted()
    assert str(problem.provider) == "acme-kit 2.0"
    assert words in problem.reason


def test_hashes_may_be_missing(site: Any) -> None:
    """A RECORD without hashes and sizes still tells which files are there."""
    install(site, "1.0", "acme_old")
    install(site, "2.0", "acme_new")
    (site.folder / "acme_new.py").unlink()
    for version, module in (("1.0", "acme_old"), ("2.0", "acme_new")):
        (folder_of(site, version) / "RECORD").write_text(f"{module}.py,,\n")
    assert counted()[0] == ["1.0 acme_old"]


@pytest.mark.parametrize("record", [None, "", "a,b\n", '"'])
def test_a_record_that_cannot_be_read(site: Any, record: str | None) -> None:
    """Metadata without a list of its files gives way to that of another version with one."""
    install(site, "1.0", "acme_old")
    install(site, "2.0", "acme_new")
    file = folder_of(site, "2.0") / "RECORD"
    if record is None:
        file.unlink()
    else:
        file.write_text(record)
    assert counted()[0] == ["1.0 acme_old"]


def test_a_folder_that_pip_has_renamed(site: Any) -> None:
    """pip renames what it removes by a tilde first, and an upgrade that ends there leaves it."""
    install(site, "1.0", "acme_old")
    (folder_of(site, "1.0")).rename(site.folder / "~cme_kit-1.0.dist-info")
    (site.folder / "acme_old.py").unlink()
    install(site, "2.0", "acme_new")
    offers, (problem,) = counted()
    assert offers == ["2.0 acme_new"]
    assert "~cme_kit-1.0.dist-info" in problem.reason


@pytest.mark.parametrize("again", ["{folder}", "{folder}/."])
def test_a_folder_that_is_on_the_path_twice(
    site: Any, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outdated metadata does not count if a second entry of sys.path finds it again."""
    install(site, "1.0", "acme_old")
    install(site, "2.0", "acme_new")
    monkeypatch.syspath_prepend(again.format(folder=site.folder))
    offers, problems = counted()
    assert offers == ["2.0 acme_new"]
    assert {str(problem.provider) for problem in problems} == {"acme-kit 1.0"}


def test_three_versions(site: Any) -> None:
    """Each version that does not count is a problem of its own."""
    for version in ("1.0", "3.0", "2.0"):
        install(site, version, f"acme_{version[0]}")
    offers, problems = counted()
    assert offers == ["3.0 acme_3"]
    assert sorted(str(problem.provider) for problem in problems) == ["acme-kit 1.0", "acme-kit 2.0"]


def test_doctor_names_file_and_line(site: Any, cli: Any) -> None:
    """The finding has the version, the folder that is left, and the line of its metadata."""
    install(site, "1.0", "acme_old")
    (site.folder / "acme_old.py").unlink()
    install(site, "2.0", "acme_new")
    done = cli("plugins", "doctor", "--json")
    assert done.returncode != 0
    findings = json.loads(done.stdout)["findings"]
    (finding,) = [each for each in findings if each["provider"]["version"] == "1.0"]
    assert "left beside that of acme-kit 2.0" in finding["message"]
    assert finding["location"] == f"{folder_of(site, '1.0') / 'METADATA'}:3"
