"""One lockfile for every installer: no honest installation is refused, and every planted change is."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.locks import lock, reason
from support.wheels import INSTALLERS, pip, plugin_and_dependency, row_of, uv_program

INFO = "acme_probe-1.0.dist-info"
EDITABLE = '{"url": "file:///source", "dir_info": {"editable": true}}'


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> list[Path]:
    return plugin_and_dependency(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory) -> Path:
    """Both wheels, installed by pip into a folder that no test changes."""
    return pip("--target", "FOLDER")(tmp_path_factory.mktemp("site"), wheels)


@pytest.fixture
def copy(installed: Path, tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A copy of it on ``sys.path``, for one test."""
    folder = tmp_path / "site"
    shutil.copytree(installed, folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_lockfile_holds_for_every_installer(wheels, installed, tmp_path, monkeypatch) -> None:
    """A lockfile made of what pip put into a folder admits what pip and uv install elsewhere."""
    path = tmp_path / "opgraft.lock"
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(installed))
        assert lock(path) == []
    told = {}
    for name, install in INSTALLERS.items():
        if name.startswith("uv") and uv_program() is None:
            continue
        site = install(tmp_path / name.replace(" ", "-"), wheels)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(site))
            told[name] = reason(path)
            # And the other way round.
            assert lock(tmp_path / "other.lock") == []
            assert (tmp_path / "other.lock").read_bytes() == path.read_bytes(), name
    assert set(told.values()) == {None}, told


def rewrite(folder: Path, file: str, content: str, *, listed: bool = True) -> None:
    """Change or add a file; ``listed``: its row in RECORD, too."""
    place = folder / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(content)
    if listed:
        of_runtime = file.startswith("acme_runtime")
        info = INFO.replace("probe", "runtime") if of_runtime else INFO
        rows = (folder / info / "RECORD").read_text().splitlines(keepends=True)
        others = [row for row in rows if not row.startswith(f"{file},")]
        (folder / info / "RECORD").write_text("".join(others) + row_of(file, content.encode()))


def in_record(folder: Path, change: Callable[[str], str]) -> None:
    record = folder / INFO / "RECORD"
    record.write_text(change(record.read_text()))


def without_row(folder: Path, file: str) -> None:
    in_record(
        folder,
        lambda text: "".join(
            row for row in text.splitlines(keepends=True) if not row.startswith(f"{file},")
        ),
    )


def remove_with_row(folder: Path, file: str) -> None:
    (folder / file).unlink()
    without_row(folder, file)


def swap(folder: Path) -> None:
    one, other = ((folder / f"acme_probe/{name}.py").read_text() for name in ("helper", "other"))
    rewrite(folder, "acme_probe/helper.py", other)
    rewrite(folder, "acme_probe/other.py", one)


def link(folder: Path) -> None:
    (folder / "acme_probe/helper.py").unlink()
    (folder / "elsewhere.py").write_text("HELP = 3\n")
    (folder / "acme_probe/helper.py").symlink_to(folder / "elsewhere.py")


def link_to_a_folder(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "acme_probe/more").symlink_to(folder / "elsewhere")


def package_in_front(folder: Path) -> None:
    rewrite(folder, "acme_top/__init__.py", "", listed=False)


def first_on_the_path(folder: Path) -> None:
    """Another distribution of the same name in a folder that comes first."""
    shutil.copytree(folder, folder / "copy")
    rewrite(folder / "copy", "acme_probe/helper.py", "HELP = 3\n")
    sys.path.insert(0, str(folder / "copy"))


def dependency_in_front(folder: Path) -> None:
    rewrite(folder / "copy", "acme_runtime/__init__.py", "", listed=False)
    sys.path.insert(0, str(folder / "copy"))


def another_dependency(folder: Path) -> None:
    (folder / "acme_fast-1.0.dist-info").mkdir()
    (folder / "acme_fast-1.0.dist-info/METADATA").write_text("Name: acme-fast\nVersion: 1.0\n")


def without_dependency(folder: Path) -> None:
    shutil.rmtree(folder / INFO.replace("probe", "runtime"))


def newer_dependency(folder: Path) -> None:
    metadata = folder / INFO.replace("probe", "runtime") / "METADATA"
    text = metadata.read_text().replace("Version: 1.0", "Version: 1.1")
    rewrite(folder, f"{metadata.parent.name}/METADATA", text)


def rename(folder: Path, name: str, before: str, after: str) -> None:
    """Change the beginning of paths in RECORD."""
    record = folder / f"acme_{name}-1.0.dist-info/RECORD"
    text = record.read_text()
    changed = re.sub(f"^{re.escape(before)}", after, text, flags=re.MULTILINE)
    assert changed != text
    record.write_text(changed)


def listed_as(folder: Path, file: str, path: str) -> None:
    """Add a module, and a row with another spelling of its path."""
    rewrite(folder, file, "raise SystemExit\n", listed=False)
    in_record(folder, lambda text: text + row_of(path, b"raise SystemExit\n"))


def through_a_scheme(folder: Path) -> None:
    (folder / "x.data/scripts").mkdir(parents=True)
    file = "acme_probe/__init__.abi3.so"
    listed_as(folder, file, f"x.data/scripts/../../{file}")


def moved_away(folder: Path, file: str, place: str) -> None:
    """List a module elsewhere, and change what an import finds."""
    rename(folder, "probe", f"{file},", f"{place},")
    rewrite(folder, file, "import os\n", listed=False)


def dependency_in_a_scheme(folder: Path) -> None:
    shutil.copytree(folder / "acme_runtime", folder / "x.data/purelib/acme_runtime")
    rename(folder, "runtime", "acme_runtime/", "x.data/purelib/acme_runtime/")
    rewrite(folder, "acme_runtime/core.py", "VALUE = 2\n", listed=False)


def of_another(folder: Path, *files: str) -> None:
    """Install another distribution, which lists these files as they are, or adds them."""
    for file in files:
        if not (folder / file).exists():
            rewrite(folder, file, "", listed=False)
    info = folder / "brix-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: brix\nVersion: 1.0\n")
    rows = (row_of(file, (folder / file).read_bytes()) for file in files)
    (info / "RECORD").write_text("".join(rows))


NEEDS_MORE = "Metadata-Version: 2.1\nName: acme-probe\nVersion: 1.0\nRequires-Dist: evil\n"
MORE_POINTS = "[opgraft.plugins]\nacme = acme_probe\nmore = acme_probe.helper\n"

TAMPERINGS: dict[str, Callable[[Path], object]] = {
    "a longer module": lambda at: rewrite(at, "acme_probe/helper.py", "HELP = 10\n", listed=False),
    "a module of equal length": lambda at: rewrite(
        at, "acme_probe/helper.py", "HELP = 7\n", listed=False
    ),
    "a listed module": lambda at: rewrite(at, "acme_probe/helper.py", "HELP = 7\n"),
    "a listed top module": lambda at: rewrite(at, "acme_top.py", "import os\n"),
    "a listed module of another scheme": lambda at: rewrite(at, "acme_extra.py", "import os\n"),
    "a new module": lambda at: rewrite(at, "acme_probe/new.py", "", listed=False),
    "a new listed module": lambda at: rewrite(at, "acme_probe/new.py", ""),
    "a new listed top module": lambda at: rewrite(at, "acme_new.py", ""),
    "a new listed .pth file": lambda at: rewrite(at, "acme.pth", "import acme_probe\n"),
    "a new module, listed through a scheme": through_a_scheme,
    "a new module, listed by an absolute path": lambda at: listed_as(
        at, "acme_probe/bin/new.py", f"{at}/acme_probe/bin/new.py"
    ),
    "a new module, listed by a way out and back": lambda at: listed_as(
        at, "acme_probe/new.py", f"../{at.name}/acme_probe/new.py"
    ),
    "a new module, listed by a way in and back": lambda at: listed_as(
        at, "acme_probe/new.py", "share/../acme_probe/new.py"
    ),
    "a top module, listed outside": lambda at: moved_away(at, "acme_top.py", "../acme_top.py"),
    "a top module, listed among data": lambda at: moved_away(
        at, "acme_top.py", "share/acme_top.py"
    ),
    "a module among data": lambda at: rewrite(
        at, "share/acme/example.py", "import os\n", listed=False
    ),
    "a module of a data folder in front": lambda at: rewrite(
        at, "share/acme/example.abi3.so", "", listed=False
    ),
    "a listed module in a folder of programs": lambda at: rewrite(
        at, "Scripts/acme_part.py", "import os\n"
    ),
    "a missing module": lambda at: (at / "acme_probe/helper.py").unlink(),
    "a missing module without its row": lambda at: remove_with_row(at, "acme_probe/helper.py"),
    "a row less": lambda at: without_row(at, "acme_probe/helper.py"),
    "a row without a hash": lambda at: in_record(
        at,
        lambda text: text.replace(
            "acme_probe/helper.py,sha256", "acme_probe/helper.py,,\nx,sha256"
        ),
    ),
    "a hash of another kind": lambda at: in_record(at, lambda text: text.replace("sha256", "md5")),
    "two modules swapped": swap,
    "a link to a module": link,
    "a link to a folder": link_to_a_folder,
    "a package in front of a module": package_in_front,
    "a library in front of a module": lambda at: rewrite(at, "acme_top.abi3.so", "", listed=False),
    "a listed native library": lambda at: rewrite(at, "acme_probe/_native.so", "other code!!"),
    "a new native library": lambda at: rewrite(at, "acme_probe/libc.so.6", "", listed=False),
    "listed data": lambda at: rewrite(at, "acme_probe/table.json", "[]"),
    "listed requirements": lambda at: rewrite(at, f"{INFO}/METADATA", NEEDS_MORE),
    "another version": lambda at: rewrite(at, f"{INFO}/METADATA", NEEDS_MORE.replace("1.0", "1.1")),
    "an entry point": lambda at: rewrite(at, f"{INFO}/entry_points.txt", MORE_POINTS, listed=False),
    "a listed entry point": lambda at: rewrite(at, f"{INFO}/entry_points.txt", MORE_POINTS),
    "a listed WHEEL": lambda at: rewrite(at, f"{INFO}/WHEEL", "Wheel-Version: 1.0\n"),
    "a listed licence": lambda at: rewrite(at, f"{INFO}/licenses/LICENSE", "Ask me.\n"),
    "an editable install": lambda at: rewrite(at, f"{INFO}/direct_url.json", EDITABLE),
    "no RECORD": lambda at: (at / INFO / "RECORD").unlink(),
    "a copy first on the path": first_on_the_path,
    "a module of a dependency": lambda at: rewrite(
        at, "acme_runtime/core.py", "VALUE = 2\n", listed=False
    ),
    "a listed module of a dependency": lambda at: rewrite(
        at, "acme_runtime/core.py", "VALUE = 2\n"
    ),
    "a new module of a dependency": lambda at: rewrite(at, "acme_runtime/new.py", "", listed=False),
    "a dependency, listed through a scheme": dependency_in_a_scheme,
    "a module of another distribution in a dependency": lambda at: of_another(
        at, "acme_runtime/_fast.so"
    ),
    "a module of another distribution that shares a dependency": lambda at: of_another(
        at, "acme_runtime/__init__.py", "acme_runtime/_fast.so"
    ),
    "a dependency in front": dependency_in_front,
    "a newer dependency": newer_dependency,
    "a dependency that is gone": without_dependency,
    "a dependency that was missing": another_dependency,
}


@pytest.mark.parametrize("kind", TAMPERINGS)
def test_a_planted_change_is_refused(copy: Path, tmp_path: Path, kind: str, monkeypatch) -> None:
    """The plugin is not admitted. Before the change it is."""
    path = tmp_path / "opgraft.lock"
    assert lock(path) == []
    assert reason(path) is None
    monkeypatch.setattr(sys, "path", [*sys.path])
    TAMPERINGS[kind](copy)
    assert (reason(path) or "").startswith("locked out by lockfile"), kind


HONEST: dict[str, Callable[[Path], object]] = {
    "times": lambda at: [os.utime(file, (1, 1)) for file in at.rglob("*")],
    "bytecode": lambda at: rewrite(
        at, "acme_probe/__pycache__/other.cpython-311.pyc", "", listed=False
    ),
    "another installer": lambda at: rewrite(at, f"{INFO}/INSTALLER", "conda\n"),
    "no REQUESTED": lambda at: without_row(at, f"{INFO}/REQUESTED"),
    "a remark of an installer": lambda at: rewrite(at, f"{INFO}/uv_cache.json", "{}"),
    "an origin": lambda at: rewrite(at, f"{INFO}/direct_url.json", '{"url": "file:///acme.whl"}'),
    "no programs": lambda at: shutil.rmtree(at / "bin"),
    "its own distribution": lambda at: rewrite(at, "brix.py", "", listed=False),
}


@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_change_is_admitted(copy: Path, tmp_path: Path, kind: str) -> None:
    """What installers and Python add or leave out does not count."""
    path = tmp_path / "opgraft.lock"
    assert lock(path) == []
    HONEST[kind](copy)
    assert reason(path) is None
