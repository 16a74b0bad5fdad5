"""Packages of a distribution that is locked: what lies in them, where links lead, and what others may put there."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Site
from opgraft.config import parse_text
from opgraft.config.environment import read_environment
from opgraft.errors import ConfigError
from opgraft.plugins.admission import check_admission
from opgraft.plugins.discovery import PLUGIN_GROUP
from support.locks import PLUGIN, lock, reason, settings_of

HELPED = {"brix/__init__.py": PLUGIN, "brix/helper.py": "", "brix/inner/__init__.py": ""}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "opgraft.lock"


@pytest.mark.parametrize("name", ["helper", "other", "inner/more"])
def test_a_link_to_a_folder_is_not_followed_and_not_admitted(
    site, path: Path, tmp_path: Path, name: str
) -> None:
    """An import would go there, whatever RECORD lists."""
    site.install("brix", HELPED, {PLUGIN_GROUP: ["brix = brix"]})
    assert lock(path) == []
    assert reason(path, "brix") is None
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/__init__.py").write_text("")
    (site.folder / "brix" / name).symlink_to(tmp_path / "outside")
    assert f"{site.folder / 'brix' / name} lies in a package of its own" in (
        reason(path, "brix") or ""
    )


def test_a_module_in_the_way_of_one_that_is_no_entry_point(
    site, path: Path, tmp_path: Path, monkeypatch
) -> None:
    """The class of a platform is named by its specification."""
    site.install("brix", {"brix.py": PLUGIN, "brix_parts.py": ""}, {PLUGIN_GROUP: ["brix = brix"]})
    assert lock(path) == []
    (tmp_path / "here").mkdir()
    (tmp_path / "here/brix_parts.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    assert f"its module brix_parts would be imported from {tmp_path / 'here/brix_parts.py'}" in str(
        reason(path, "brix")
    )


SHARED = {
    "a namespace of a vendor": ("acme/{}.py", "acme.{}"),
    "tests beside the modules": ("tests/__init__.py", "{}"),
}


def two(site: Site, kind: str) -> None:
    """Install two distributions that share a folder."""
    shared, module = SHARED[kind]
    for name in ("npu", "gpu"):
        files = {f"{module.format(name).replace('.', '/')}.py": PLUGIN, shared.format(name): PLUGIN}
        files |= {f"tests/of_{name}.py": ""} if kind.startswith("tests") else {}
        site.install(f"acme-{name}", files, {PLUGIN_GROUP: [f"{name} = {module.format(name)}"]})


@pytest.mark.parametrize("kind", SHARED)
def test_distributions_that_share_a_folder_are_locked(site, path: Path, kind: str) -> None:
    """What lies there is listed by one of them."""
    two(site, kind)
    assert lock(path) == []
    assert (reason(path, "npu"), reason(path, "gpu")) == (None, None)


@pytest.mark.parametrize("kind", SHARED)
def test_what_nobody_lists_there_is_not_admitted(site, path: Path, kind: str) -> None:
    """Nor what has changed since the other one was installed."""
    two(site, kind)
    assert lock(path) == []
    folder = site.folder / SHARED[kind][0].partition("/")[0]
    (folder / "new.py").write_text("")
    assert "new.py lies in a package of its own" in (reason(path, "npu") or "")
    (folder / "new.py").unlink()
    others = folder / ("gpu.py" if kind.startswith("a name") else "of_gpu.py")
    others.write_text("changed = 1")
    assert f"{others.name} lies in a package of its own" in (reason(path, "npu") or "")


def test_a_package_of_a_plugin_is_its_own(site, path: Path) -> None:
    """Another distribution that puts a module there, and lists it, is not admitted to it."""
    site.install("brix", HELPED, {PLUGIN_GROUP: ["brix = brix"]})
    assert lock(path) == []
    site.install("acme", {"brix/helper/__init__.py": ""}, {PLUGIN_GROUP: ["acme = brix.helper"]})
    assert "brix/helper/__init__.py lies in a package of its own" in (reason(path, "brix") or "")


@pytest.mark.parametrize("row", ["/dev/zero,sha256=x,", "acme.py,sha256=x,"])
def test_a_file_of_no_size_is_not_read(site, path: Path, row: str) -> None:
    """A RECORD may name what is without end."""
    site.plugin("acme", PLUGIN)
    record = site.folder / "acme-1.0.dist-info/RECORD"
    record.write_text(f"{row}\n{record.read_text()}")
    (left_out,) = lock(path)
    assert row.partition(",")[0] in left_out


def test_a_large_file_elsewhere_is_not_read(site, path: Path, tmp_path: Path) -> None:
    """A script has kilobytes."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    site.plugin("acme", PLUGIN)
    record = site.folder / "acme-1.0.dist-info/RECORD"
    record.write_text(f"{tmp_path / 'sparse'},sha256=x,{1 << 40}\n{record.read_text()}")
    (left_out,) = lock(path)
    assert "which lies elsewhere, has more than 16,777,216 bytes" in left_out


def test_a_lockfile_with_a_key_twice(path: Path) -> None:
    """Who reads it sees the first, and programs would take the last."""
    path.write_text('{"schema": "opgraft.lock/2", "distributions": [], "distributions": []}')
    with pytest.raises(ConfigError, match="'distributions' stands in one object twice"):
        check_admission(settings_of(path))


def test_an_empty_variable_is_no_lockfile() -> None:
    """It is an error, as what was to be pinned would not be; another setting is unset by it."""
    with pytest.raises(ConfigError, match="OPGRAFT_LOCKFILE is empty, which pins nothing"):
        read_environment({"OPGRAFT_LOCKFILE": ""})
    assert read_environment({"OPGRAFT_PLATFORM": ""}).layers == ()
    assert parse_text("lockfile", "a.lock") == "a.lock"
