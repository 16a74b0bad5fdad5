"""The wheel: complete, and working where nothing but the wheel of opgraft is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import opgraft
import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = {"core": "opgraft", "platforms": "opgraft/platforms", "plugins": "opgraft/plugins"}


def run(*command: str | Path, folder: Path) -> str:
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"
    return child.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build folder left in the source tree would put deleted modules into the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in FOLDERS:
        shutil.copytree(
            REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        folder,
        folder=source,
    )
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of a fresh environment that holds the wheel, and reaches the dependencies of this one.

    They are reached by a .pth file, whose folder's own .pth files Python does not read: an editable opgraft in this
    environment stays out of sight.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    scripts = folder / "bin"
    site_packages = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    (site_packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", wheel, folder=folder)
    return scripts


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    """The wheel holds every module of the three folders and the data that they read, and no other file."""
    expected = {
        f"{package}/{path.relative_to(REPOSITORY / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (REPOSITORY / folder).rglob("*.py")
    }
    template = [path for path in (REPOSITORY / "core/template").rglob("*") if path.is_file()]
    data = [
        *(REPOSITORY / "core").rglob("proof.json"),
        *(REPOSITORY / "core").glob("*.pyi"),
        *template,
        *(REPOSITORY / "core/serving/server/vendored").iterdir(),
        *(REPOSITORY / "core/testing/model_shapes").glob("*.json"),
        REPOSITORY / "core/registry/recorded_calls.json",
        REPOSITORY / "core/serving/tokenizer_classes.json",
    ]
    others = {
        f"opgraft/{path.relative_to(REPOSITORY).as_posix().removeprefix('core/')}" for path in data
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    pages = {"opgraft/cli/report.html", "opgraft/serving/server/page.html"}
    assert names == {*expected, *others, *pages, "opgraft/py.typed"}


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    """The licence text travels with the wheel."""
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith("/licenses/LICENSE")] != []


def metadata_of(source: Path, **variables: str) -> Message:
    """The metadata that a build of these sources writes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
        subprocess.run(command, cwd=source, env={**os.environ, **variables}, check=True)
        (found,) = Path(folder).glob("*.egg-info/PKG-INFO")
        return message_from_string(found.read_text(encoding="utf-8"))


def links_of(markdown: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)|(?:src|srcset|href)=\"([^\"]+)", markdown)


@pytest.mark.parametrize("repository", ["", "https://git.example/team/opgraft/"])
def test_the_metadata_leads_somewhere(repository: str) -> None:
    """There are authors, keywords and addresses, and each link of the long description works on an index."""
    metadata = metadata_of(REPOSITORY, DOCS_REPOSITORY_URL=repository)
    assert metadata["Author"]
    assert metadata["Keywords"]
    addresses = [line.split(", ")[1] for line in metadata.get_all("Project-URL", [])]
    assert len(addresses) == (4 if repository else 0)
    assert all(address.startswith(repository.rstrip("/")) for address in addresses)
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "# opgraft" in text
    links = ["".join(link) for link in links_of(text)]
    assert [link for link in links if not link.startswith(("https://", "http://"))] == []
    own = [link for link in links if link.startswith("https://git.example")]
    assert bool(own) == bool(repository)
    for link in own:
        file = link.partition("/blob/main/")[2].partition("#")[0]
        assert (REPOSITORY / file).exists(), link


def test_the_installed_wheel_is_what_runs(installed: Path, tmp_path: Path) -> None:
    """In the fresh environment opgraft is imported from the wheel, not from the source tree."""
    origin = run(
        installed / "python", "-c", "import opgraft; print(opgraft.__file__)", folder=tmp_path
    )
    assert Path(origin.strip()).is_relative_to(installed.parent)


@pytest.mark.parametrize("arguments", [["opgraft"], ["python", "-m", "opgraft"]], ids=" ".join)
def test_the_command_tells_its_version(
    arguments: list[str], installed: Path, tmp_path: Path
) -> None:
    """The console script and the module both answer --version with the version of the package."""
    program, *rest = arguments
    assert (
        run(installed / program, *rest, "--version", folder=tmp_path).split()[-1]
        == opgraft.__version__
    )


def test_the_proofs_are_about_what_is_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Proofs and sources travel together: 'opgraft ops list' finds the forms unchanged since they were checked."""
    answer = json.loads(run(installed / "opgraft", "ops", "list", "--json", folder=tmp_path))
    forms = {name: row["state"] for op in answer["ops"] for name, row in op["proofs"].items()}
    assert forms["rms_norm"] == forms["silu_and_mul"] == "current"
    assert set(forms.values()) == {"current"}


def test_the_built_in_platform_is_found(installed: Path, tmp_path: Path) -> None:
    """The entry points of the wheel work: 'opgraft detect' offers the CPU, from this version of opgraft."""
    answer = json.loads(run(installed / "opgraft", "detect", "--json", folder=tmp_path))
    cpu = next(
        candidate for candidate in answer["decision"]["candidates"] if candidate["name"] == "cpu"
    )
    assert cpu["provider"] == {"name": "opgraft", "version": opgraft.__version__}
    assert cpu["location"] == "opgraft.platforms.cpu:SPEC"
