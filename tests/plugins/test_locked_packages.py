"""Packages of a distribution that is locked: what lies in them, where links lead, and what others may put there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("row", ["acme/new.py,sha256=x", "acme/new.py,sha256=x,0,more"])
def test_a_malformed_record_of_another_lists_nothing(site, path: Path, row: str) -> None:
    """Its files in a shared folder are of nobody, and the reason names one."""
    two(site, "a namespace of a vendor")
    assert lock(path) == []
    (site.folder / "acme/new.py").write_text("")
    record = site.folder / "acme_gpu-1.0.dist-info/RECORD"
    record.write_text(f"{record.read_text()}{row}\n")
    assert "py lies in a package of its own" in (reason(path, "npu") or "")


def test_a_package_of_a_plugin_is_its_own(site, path: Path) -> None:
    """Another distribution that puts a module there, and lists it, is not admitted to it."""
    site.install("brix", HELPED, {PLUGIN_GROUP: ["brix = brix"]})
    assert lock(path) == []
    site.install("acme", {"brix/helper/__init__.py": ""}, {PLUGIN_GROUP: ["acme = brix.helper"]})
    assert "brix/helper/__init__.py lies in a package of its own" in (reason(path, "brix") or "")


@pytest.mark.parametrize("row", ["zero.so,sha256=x,", "acme.py,sha256=x,"])
def test_a_file_of_no_size_is_not_read(site, path: Path, row: str) -> None:
    """A RECORD may name what is without end."""
    site.plugin("acme", PLUGIN)
    (site.folder / "zero.so").symlink_to("/dev/zero")
    record = site.folder / "acme-1.0.dist-info/RECORD"
    record.write_text(f"{row}\n{record.read_text()}")
    (left_out,) = lock(path)
    assert row.partition(",")[0] in left_out


NAMESPACES = {
    "one that says so": "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n",
    "an empty package": "# Licence: do with it what you like.\n",
}


@pytest.mark.parametrize("kind", NAMESPACES)
def test_dependencies_that_share_a_package_are_locked(site, path: Path, kind: str) -> None:
    """Each has a package of its own below, and there another distribution may add nothing."""
    shared = {"vendor/__init__.py": NAMESPACES[kind]}
    site.plugin("acme", PLUGIN, requires=["opgraft", "vendor-blas"])
    blas = {"vendor/blas/__init__.py": "", "vendor/blas/core.py": ""}
    site.install("vendor-blas", {**shared, **blas}, {})
    site.install("vendor-fft", {**shared, "vendor/fft/__init__.py": ""}, {})
    assert lock(path) == []
    assert reason(path) is None
    site.install("brix", {"vendor/blas/fast.py": ""}, {})
    assert "vendor/blas/fast.py lies in a package of its own" in (reason(path) or "")


def test_a_module_beside_an_empty_package_of_a_dependency(site, path: Path) -> None:
    """Modules beside it make the package that of one distribution."""
    site.plugin("acme", PLUGIN, requires=["opgraft", "runtime"])
    site.install("runtime", {"runtime/__init__.py": "", "runtime/core.py": ""}, {})
    assert lock(path) == []
    site.install("brix", {"runtime/__init__.py": "", "runtime/fast.py": ""}, {})
    assert "runtime/fast.py lies in a package of its own" in (reason(path) or "")


@pytest.mark.parametrize("name", ["uuid.py", "examples/__init__.py"])
def test_a_module_of_a_dependency_that_nobody_imports(
    site, path: Path, tmp_path: Path, name: str, monkeypatch
) -> None:
    """A back-port of Python's own module, and examples, may come second on the path."""
    site.plugin("acme", PLUGIN, requires=["opgraft", "runtime"])
    site.install("runtime", {name: ""}, {})
    first = tmp_path / "first"
    (first / name).parent.mkdir(parents=True)
    (first / name).write_text("")
    monkeypatch.syspath_prepend(str(first))
    assert lock(path) == []
    assert reason(path) is None


def left_by_a_build(site: Site, tmp: Path, patch: pytest.MonkeyPatch) -> None:
    (tmp / "runtime.egg-info").mkdir()
    (tmp / "runtime.egg-info/PKG-INFO").write_text("Name: runtime\nVersion: 9\n")
    patch.chdir(tmp)
    patch.setattr(sys, "path", ["", *sys.path])


def left_by_an_upgrade(site: Site, tmp: Path, patch: pytest.MonkeyPatch) -> None:
    # A folder lists its files in any order.
    for version in range(10):
        former = site.folder / f"runtime-0.{version}.dist-info"
        former.mkdir()
        (former / "METADATA").write_text(f"Name: runtime\nVersion: 0.{version}\n")
        (former / "RECORD").write_text("runtime.py,sha256=x,1\n")


class Failing:
    """A finder that cannot list distributions."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any) -> list[Any]:
        raise RuntimeError("no list")


def a_finder_that_raises(site: Site, tmp: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])


DISTURBANCES = (left_by_a_build, left_by_an_upgrade, a_finder_that_raises)


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda disturb: disturb.__name__)
def test_a_dependency_is_found_as_plugins_are(
    site, path: Path, tmp_path: Path, disturb, monkeypatch
) -> None:
    """Metadata of builds and of former versions, and finders that fail, are passed over."""
    site.plugin("acme", PLUGIN, requires=["opgraft", "runtime"])
    site.install("runtime", {"runtime.py": ""}, {})
    assert lock(path) == []
    disturb(site, tmp_path, monkeypatch)
    assert reason(path) is None


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
