"""The page for contributors names what is there: folders, files, what stands in them, and targets of make."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
from support.makefile import COMMANDS

pytestmark = pytest.mark.source

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/explanation/code.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]


def blocks() -> Iterator[list[str]]:
    """The code spans of each row of a table, and of each paragraph with the list below it."""
    for paragraph in re.split(r"\n\n(?!- )", PAGE):
        for block in paragraph.splitlines() if paragraph.startswith("|") else [paragraph]:
            yield re.findall(r"`([^`]+)`", block)


def unknown(spans: list[str]) -> list[str]:
    """The spans that name what is not there: a path, a module, a target, or a name that none of these files has."""
    files = [path for span in spans if (path := REPOSITORY / span).is_file()]
    words = {
        word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    return [span for span in spans if not _is_there(span, words)]


def _is_there(span: str, words: set[str]) -> bool:
    if span.startswith("make "):
        return span == "make help" or span.split()[1] in COMMANDS
    if re.fullmatch(r"opgraft(\.\w+)*", span):
        return any(_path_of(span, ending).exists() for ending in ("/__init__.py", ".py"))
    name = re.fullmatch(r"(\w+)(\(.*\))?", span)
    return (
        name[1] in words
        if name
        else " " in span or span.startswith("--") or (REPOSITORY / span).exists()
    )


def _path_of(module: str, ending: str) -> Path:
    package = max(
        (name for name in PROJECT["package-dir"] if f"{module}.".startswith(f"{name}.")), key=len
    )
    inner = module.removeprefix(package).replace(".", "/")
    return REPOSITORY / f"{PROJECT['package-dir'][package]}{inner}{ending}"


def test_what_the_page_names_is_there() -> None:
    """Paths, modules and targets exist; a name stands in one of the files that its row or paragraph names."""
    assert sum(map(len, blocks())) > 100, "the search finds spans"
    assert [span for spans in blocks() for span in unknown(spans)] == []


@pytest.mark.parametrize(
    "span",
    [
        "core/nowhere.py",
        "nowhere/",
        "opgraft.nowhere",
        "make nothing",
        "no_such_name",
        "no_such_name(...)",
    ],
)
def test_what_is_not_there_is_found(span: str) -> None:
    """The search knows each kind of span, also beside a file that exists."""
    assert unknown(["core/base/text.py", span]) == [span]


def test_every_folder_is_a_row() -> None:
    """The table of folders has every folder of the repository that git does not ignore."""
    ignored = {
        line.strip("/")
        for line in (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()
    }
    folders = {
        path.name
        for path in REPOSITORY.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    }
    rows = re.findall(r"^\| `(\w+)/` \|", PAGE, re.M)
    assert sorted(rows) == sorted(
        name for name in folders - ignored if not name.endswith(".egg-info")
    )
