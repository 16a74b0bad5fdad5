"""The lockfile of an installer, pylock.toml, with the section of opgraft."""

from __future__ import annotations

from pathlib import Path

import pytest
from opgraft.errors import ConfigError, InputError
from opgraft.plugins.locking import read_rows
from opgraft.plugins.making_locks import write_rows
from packaging.pylock import Pylock
from support.locks import PLUGIN, lock, reason

try:
    import tomllib
except ImportError:
    import tomli as tomllib

PYLOCK = """# Made by a test.
lock-version = "1.0"
created-by = "tests"

[[packages]]
name = "acme"
version = "1.0"
[[packages.wheels]]
name = "acme-1.0-py3-none-any.whl"
url = "https://example.com/acme-1.0-py3-none-any.whl"
hashes = { sha256 = "00" }

[tool.other]
text = '''
one line
'''
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "pylock.toml"
    place.write_text(PYLOCK)
    return place


def test_the_rows_stand_in_a_section_of_it(site, path: Path) -> None:
    """The rest of the file stays, a second time too, and installers read it as before."""
    site.plugin("acme", PLUGIN)
    site.plugin("brix", PLUGIN)
    assert lock(path) == []
    once = path.read_text()
    assert once.startswith(PYLOCK)
    assert lock(path) == []
    assert path.read_text() == once
    assert [row.name for row in read_rows(str(path))] == ["acme", "brix"]
    assert reason(path) is None
    tables = tomllib.loads(once)
    assert [package.name for package in Pylock.from_dict(tables).packages] == ["acme"]
    assert tables["tool"]["other"] == {"text": "one line\n"}
    (site.folder / "acme.py").write_text("")
    assert "acme.py is not the file" in (reason(path) or "")


def test_rows_and_packages_must_agree(site, path: Path) -> None:
    """Another version in the packages is an error of the command, and later of the setting."""
    site.plugin("acme", PLUGIN)
    assert lock(path) == []
    path.write_text(path.read_text().replace('version = "1.0"\n[[', 'version = "1.1"\n[['))
    path.write_text(path.read_text().replace("acme-1.0-", "acme-1.1-"))
    words = r"\[tool.opgraft\] has acme 1.0, its packages have 1.1"
    with pytest.raises(ConfigError, match=words):
        reason(path)
    with pytest.raises(InputError, match=words):
        lock(path)


def test_another_spelling_of_a_version_is_the_same(site, path: Path) -> None:
    """Metadata may say 1.0-rc1, and installers write 1.0rc1."""
    site.plugin("acme", PLUGIN, version="1.0-rc1")
    path.write_text(
        PYLOCK.replace('"1.0"\n[[', '"1.0rc1"\n[[').replace("acme-1.0-", "acme-1.0rc1-")
    )
    assert lock(path) == []
    assert reason(path) is None


def test_nothing_to_lock_is_a_section_without_rows(site, path: Path) -> None:
    """It can be read, and admits nothing."""
    assert lock(path) == []
    assert read_rows(str(path)) == []
    site.plugin("acme", PLUGIN)
    assert "it is not in" in (reason(path) or "")


def test_line_ends_of_windows_stay(site, path: Path) -> None:
    """A second time, too."""
    path.write_bytes(PYLOCK.replace("\n", "\r\n").encode())
    site.plugin("acme", PLUGIN)
    assert lock(path) == []
    once = path.read_bytes()
    assert lock(path) == []
    assert path.read_bytes() == once
    assert once.count(b"\n") == once.count(b"\r\n")
    assert reason(path) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PYLOCK, r"it has no section \[tool.opgraft\]"),
        ("", "it is no pylock.toml: Missing required value in 'lock-version'"),
        ("[", "cannot be used: "),
        (f"{PYLOCK}\n[tool.opgraft]\nschema = 'x'\n", "holds no object of the schema"),
    ],
)
def test_a_file_without_a_usable_section_admits_nothing(
    site, path: Path, text: str, words: str
) -> None:
    """The error names the file and the next step."""
    site.plugin("acme", PLUGIN)
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){words}.*opgraft plugins lock --output"):
        reason(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{PYLOCK}\n[tool.opgraft]\n\n[tool.more]\nx = 1\n", "it has something below"),
        (f"{PYLOCK}\n[tool.opgraft]\n\n[tool.opgraft.mine]\nx = 1\n", "it has something below"),
        (PYLOCK.replace("one line", "\n[tool.opgraft]\n"), "it has something below|TOML"),
        ("[", "TOMLDecodeError"),
        (None, "No such file"),
    ],
)
def test_a_file_that_would_lose_something_is_not_written(
    path: Path, text: str | None, words: str
) -> None:
    """It stays as it was."""
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=f"cannot be written: .*({words})"):
        write_rows(path, [])
    assert (path.read_text() if path.exists() else None) == text
