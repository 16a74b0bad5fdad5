"""'opgraft new' makes a plugin that works before a line is changed. Its own tests run on the page of the tutorial."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from opgraft.base.installed import source_of
from opgraft.base.version import __version__
from packaging.requirements import Requirement


@pytest.mark.parametrize("name", ["acme", "acme-npu", "big_x2-kernels"])
def test_what_is_made_passes_its_own_linters(cli: Any, tmp_path: Path, name: str) -> None:
    """Whatever its name: no placeholder is left, and it asks for the opgraft that made it."""
    report = json.loads(cli("new", name, "--json", "--output", str(tmp_path / "made")).stdout)
    folder = Path(report["folder"])
    assert folder == tmp_path / "made" / f"opgraft-{name.replace('_', '-')}"
    files = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert sorted(files) == report["files"]
    assert ".github/workflows/ci.yml" in files
    for path, text in files.items():
        assert "{{" not in text.replace("${{ matrix.python }}", ""), path
        assert "raw %}" not in text, path
        assert "{%" not in text, path
        assert text.endswith("\n") or not text, path
    for command in (("check",), ("format", "--check")):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", str(folder)]
        checked = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout
    project = tomllib.loads(files["pyproject.toml"])["project"]
    module, platform = f"opgraft_{name.replace('-', '_')}", name.replace("-", "_")
    assert "ini_options" in tomllib.loads(files["pyproject.toml"])["tool"]["pytest"], (
        "pytest would look further up"
    )
    assert project["entry-points"]["opgraft.plugins"] == {platform: f"{module}.plugin"}
    assert f"src/{module}/plugin.py" in files
    assert "pip install -e '.[test]'" in ci_commands(files[".github/workflows/ci.yml"])
    (requirement,) = map(Requirement, project["dependencies"])
    assert requirement.specifier.contains(__version__, prereleases=True)


def ci_commands(workflow: str) -> list[str]:
    """What a workflow runs, of which all but the installations are run above or on the page of the tutorial."""
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-2:] == ["ruff check . && ruff format --check .", "pytest"]
    return commands


def made(cli: Any, folder: Path, *options: str) -> tuple[str, str, str]:
    """The source of opgraft in the CI of a new plugin, the first line of its README that installs, and the output."""
    told = cli("new", "acme", "--output", str(folder), *options)
    assert told.returncode == 0, told.stderr
    plugin = folder / "opgraft-acme"
    workflow = (plugin / ".github/workflows/ci.yml").read_text()
    assert ci_commands(workflow)[1] == 'pip install "$OPGRAFT"'
    readme = (plugin / "README.md").read_text()
    assert "pypi.org" not in readme
    installing = next(line for line in readme.splitlines() if "pip install" in line)
    return yaml.safe_load(workflow)["env"]["OPGRAFT"], installing, told.stdout


URL = "git+https://git.example/a b/opgraft.git@v1"


def test_opgraft_is_installed_from_where_the_author_says(cli: Any, tmp_path: Path) -> None:
    """CI and README install opgraft from the given URL or path. No index has opgraft yet."""
    for index, url in enumerate((URL.replace(" ", "%20"), "opgraft @ https://x.example/o.whl")):
        source, installing, told = made(cli, tmp_path / str(index), "--opgraft", url)
        assert source == url
        assert shlex.split(installing)[1:] == ["pip", "install", url]
        assert "its CI" not in told
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    (checkout / "pyproject.toml").write_text("")
    source, installing, told = made(cli, tmp_path, "--opgraft", "a checkout")
    assert source == str(checkout)
    assert shlex.split(installing)[1:] == ["pip", "install", str(checkout)]
    assert "which only this machine can read" in " ".join(told.split())
    for wrong in ("nowhere", str(tmp_path), URL):
        told = cli("new", "brix", "--opgraft", wrong)
        assert (told.returncode, "neither a URL nor a folder" in told.stderr) == (2, True)


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, "opgraft-twin"),
        ({"url": "file:///home/a%20b/opgraft", "dir_info": {}}, "/home/a b/opgraft"),
        ({"url": "https://x.example/o.whl", "archive_info": {}}, "https://x.example/o.whl"),
        (
            {"url": "https://x.example/o.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "git+https://x.example/o.git@abc",
        ),
        (
            {
                "url": "https://x.example/o.git",
                "vcs_info": {"vcs": "git", "commit_id": "abc"},
                "subdirectory": "a part",
            },
            "git+https://x.example/o.git@abc#subdirectory=a%20part",
        ),
        (
            {"url": "file:///o.tar.gz", "archive_info": {}, "subdirectory": "part"},
            "file:///o.tar.gz#subdirectory=part",
        ),
        ({"url": 7}, "opgraft-twin"),
        ({"url": 7, "vcs_info": {"vcs": "git", "commit_id": "abc"}}, "opgraft-twin"),
        ({"url": "file:///x", "vcs_info": "git"}, "opgraft-twin"),
        ({"url": "file:///x", "subdirectory": 7}, "opgraft-twin"),
        ({}, "opgraft-twin"),
        ([], "opgraft-twin"),
        (b"", "opgraft-twin"),
        (b"\xff", "opgraft-twin"),
        (b'{"url": "', "opgraft-twin"),
        (b"[" * 100_000, "opgraft-twin"),
    ],
)
def test_the_source_of_a_distribution(site: Any, origin: Any, source: str) -> None:
    """Without --opgraft the source is what the installer has recorded, or the name if that is broken."""
    site.install("opgraft-twin", {}, {})
    if origin is not None:
        [info] = site.folder.glob("*.dist-info")
        content = origin if isinstance(origin, bytes) else json.dumps(origin).encode()
        (info / "direct_url.json").write_bytes(content)
    assert source_of("opgraft-twin") == source


@pytest.mark.parametrize(
    "name", ["Acme", "2acme", "acme--npu", "acme/npu", "../acme", "acme npu", "a" * 41, "\x1b[31m"]
)
def test_names_that_cannot_be(cli: Any, tmp_path: Path, name: str) -> None:
    """Nothing is written, and the message says which names can be."""
    told = cli("new", name, "--output", str(tmp_path / "made"))
    assert told.returncode == 2
    assert "cannot be the name of a plugin: use up to 40 lower-case letters" in told.stderr
    assert "\x1b" not in told.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["native", "opgraft", "any"])
def test_names_with_a_meaning_of_their_own(cli: Any, tmp_path: Path, name: str) -> None:
    """No plugin of such a name would be found."""
    told = cli("new", name, "--output", str(tmp_path / "made"))
    assert told.returncode == 2
    assert f"'{name}' has a meaning of its own in settings" in " ".join(told.stderr.split())
    assert not (tmp_path / "made").exists()


def test_nothing_is_overwritten(cli: Any, site: Any, tmp_path: Path) -> None:
    """Neither a folder that is there nor the name of an installed platform or plugin is taken; a file is no folder."""
    (tmp_path / "opgraft-acme").mkdir()
    told = cli("new", "acme", "--output", str(tmp_path))
    assert (told.returncode, "is there already" in told.stderr) == (2, True)
    site.platform("brix", probe="return Evidence(True, 'found')")
    site.plugin("dune-x1", "raise OSError('imported')")
    for name in ("brix", "dune-x1"):
        told = cli("new", name, "--output", str(tmp_path))
        taken = f"an installed platform or plugin is called '{name.replace('-', '_')}'"
        assert (told.returncode, taken in told.stderr) == (2, True)
    (tmp_path / "file").write_text("")
    assert cli("new", "cedar", "--output", str(tmp_path / "file")).returncode == 2
    assert {path.name for path in tmp_path.iterdir()} >= {"opgraft-acme", "file"}
    assert not list((tmp_path / "opgraft-acme").iterdir())


def test_without_copier_the_extra_is_named(cli: Any, site: Any, tmp_path: Path) -> None:
    """The library is optional, as operators need none."""
    (site.folder / "copier.py").write_text("raise ImportError('no module named copier')")
    told = cli("new", "acme", "--output", str(tmp_path / "made"))
    assert (told.returncode, "pip install 'opgraft[new]'" in told.stderr) == (2, True)
