"""Ways around a lockfile: code of others that an import would run in the place of what was locked."""

from __future__ import annotations

import importlib.util
import py_compile
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import opgraft
import pytest
from conftest import Site
from opgraft import OpgraftConfig, load_plugins, set_config
from opgraft.machine.machine import Machine
from opgraft.plugins.discovery import PLATFORM_GROUP, PLUGIN_GROUP, discover
from opgraft.plugins.probing import ProbeFailed, ask
from opgraft.registry.state import PluginStatus, host_state
from support.locks import PLUGIN, lock, reason

PARTS = {
    "acme.py": f"import acme_parts.helper, vendor.helper\n{PLUGIN}",
    "acme_parts/__init__.py": "",
    "acme_parts/helper.py": "",
    "vendor/helper.py": "",
}
Patch = pytest.MonkeyPatch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "opgraft.lock"


class Elsewhere:
    """A finder as editable installs of some tools have it, which comes before the folders of ``sys.path``."""

    def __init__(self, name: str, make: Callable[[str], ModuleSpec | None]) -> None:
        self.name = name
        self.make = make

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return self.make(name) if name == self.name else None


def planted(folder: Path, file: str) -> Path:
    """Write a module that says where it was imported."""
    place = folder / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("raise SystemExit('it was imported')\n")
    return place


def finder_of_the_top(site: Site, tmp: Path, patch: Patch) -> str:
    file = planted(tmp, "source/acme.py")
    found = Elsewhere("acme", lambda name: importlib.util.spec_from_file_location(name, file))
    patch.setattr(sys, "meta_path", [found, *sys.meta_path])
    return (
        f"its module acme would be imported from {file}, which its RECORD does not list: remove the "
        "finder on sys.meta_path, or the imported module, that leads there"
    )


def finder_of_no_file(site: Site, tmp: Path, patch: Patch) -> str:
    found = Elsewhere("acme_parts", lambda name: ModuleSpec(name, found, is_package=True))  # type: ignore[arg-type]
    patch.setattr(sys, "meta_path", [found, *sys.meta_path])
    return "its module acme_parts would be imported from Elsewhere, which is no file, which its RECORD does not list"


def finder_that_raises(site: Site, tmp: Path, patch: Patch) -> str:
    found = Elsewhere("acme", lambda name: [][0])
    patch.setattr(sys, "meta_path", [found, *sys.meta_path])
    return (
        "Elsewhere on sys.meta_path raised IndexError: list index out of range when asked for acme"
    )


def imported_before(site: Site, tmp: Path, patch: Patch) -> str:
    file = planted(tmp, "here/acme_parts/__init__.py")
    module = ModuleType("acme_parts")
    module.__spec__ = importlib.util.spec_from_file_location("acme_parts", file)
    patch.setitem(sys.modules, "acme_parts", module)
    return f"its module acme_parts would be imported from {file}"


def part_of_a_namespace(site: Site, tmp: Path, patch: Patch) -> str:
    file = planted(tmp, "earlier/vendor/helper.py")
    patch.syspath_prepend(str(tmp / "earlier"))
    return (
        f"its module vendor.helper would be imported from {file}, which its RECORD does not list: "
        f"take {tmp / 'earlier'} off sys.path (see PYTHONPATH), or remove the file"
    )


def in_the_working_folder(site: Site, tmp: Path, patch: Patch) -> str:
    file = planted(tmp, "here/acme.py")
    patch.chdir(file.parent)
    patch.syspath_prepend("")
    return (
        f"its module acme would be imported from {file}, which its RECORD does not list: start in "
        f"another folder than {file.parent}, or remove the file"
    )


def left_metadata(site: Site, tmp: Path, patch: Patch) -> str:
    left = planted(tmp, "source/acme.egg-info/PKG-INFO").parent
    (left / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (left / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\nacme = acme\n")
    patch.syspath_prepend(str(left.parent))
    return (
        f"remove {left}, which hides the installation in {site.folder}, or take {left.parent} off "
        "sys.path (see PYTHONPATH)"
    )


def archive(site: Site, tmp: Path, patch: Patch) -> str:
    with zipfile.ZipFile(tmp / "brix.egg", "w") as egg:
        egg.writestr("acme.py", "")
    patch.syspath_prepend(str(tmp / "brix.egg"))
    return (
        f"its module acme would be imported from {tmp / 'brix.egg'}/acme.py, which its RECORD does "
        f"not list: take {tmp / 'brix.egg'} off sys.path"
    )


def library_beside(site: Site, tmp: Path, patch: Patch) -> str:
    file = planted(site.folder, "acme.abi3.so")
    return f"would be imported from {file}, which its RECORD does not list: remove it"


def another_ones_library(site: Site, tmp: Path, patch: Patch) -> str:
    site.install("brix", {"vendor/helper.abi3.so": ""}, {})
    return (
        f"its module vendor.helper would be imported from {site.folder / 'vendor/helper.abi3.so'}, "
        "which its RECORD does not list: brix has brought it: uninstall one of the two"
    )


def another_ones_package(site: Site, tmp: Path, patch: Patch) -> str:
    site.install("brix", {"acme_parts/helper/__init__.py": ""}, {})
    return f"{site.folder / 'acme_parts/helper/__init__.py'} lies in a package of its own"


def library_of_the_system(site: Site, tmp: Path, patch: Patch) -> str:
    return f"{planted(site.folder, 'acme_parts/libm.so.6')} lies in a package of its own"


WAYS = {
    each.__name__: each
    for each in (
        finder_of_the_top,
        finder_of_no_file,
        finder_that_raises,
        in_the_working_folder,
        left_metadata,
        imported_before,
        part_of_a_namespace,
        archive,
        library_beside,
        another_ones_library,
        another_ones_package,
        library_of_the_system,
    )
}


@pytest.mark.parametrize("way", WAYS)
def test_what_comes_before_a_locked_module(
    site, path: Path, tmp_path: Path, way: str, monkeypatch
) -> None:
    """The plugin is not imported, and the reason names what would have been."""
    site.install("acme", PARTS, {PLUGIN_GROUP: ["acme = acme"]})
    assert lock(path) == []
    assert reason(path) is None
    words = WAYS[way](site, tmp_path, monkeypatch)
    assert words in (reason(path) or "")
    opgraft.reset()
    with set_config(OpgraftConfig(lockfile=str(path))):
        load_plugins()
    assert host_state().plugins["acme"].status is PluginStatus.REJECTED


def test_an_entry_point_that_names_a_module_of_another_distribution(site, path: Path) -> None:
    """It cannot be locked, nor can what lies in an archive, which no RECORD can be compared with."""
    site.plugin("acme", PLUGIN)
    site.install("brix", {}, {PLUGIN_GROUP: ["brix = acme"]})
    (left_out,) = lock(path)
    assert (
        f"its module acme would be imported from {site.folder / 'acme.py'}, which its RECORD does not"
        in left_out
    )


def test_a_wheel_on_the_path(site, path: Path, tmp_path: Path, monkeypatch) -> None:
    """Its files cannot be compared with its RECORD, so that it cannot be locked."""
    site.plugin("acme", PLUGIN)
    with zipfile.ZipFile(tmp_path / "acme-1.0-py3-none-any.whl", "w") as wheel:
        for file in site.folder.rglob("*"):
            if file.is_file():
                wheel.write(file, file.relative_to(site.folder))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "acme-1.0-py3-none-any.whl"), *sys.path[1:]])
    (left_out,) = lock(path)
    assert "cannot be read: NotADirectoryError" in left_out


def test_bytecode_of_others_where_it_is_kept_elsewhere(
    site, path: Path, tmp_path: Path, monkeypatch
) -> None:
    """Bytecode that fits a source's time and size is run; not so, here and in children, with a folder of one's own."""
    site.platform("acme", probe="return Evidence(True, 'found')", plugin=PLUGIN)
    assert lock(path) == []
    for name in ("acme_device", "acme_plugin"):
        source = site.folder / f"{name}.py"
        compiled = Path(importlib.util.cache_from_source(str(source)))
        written, state = source.read_bytes(), source.stat()
        source.write_bytes(b"raise OSError('planted')".ljust(len(written)))
        py_compile.compile(str(source), str(compiled))
        source.write_bytes(written)
        header = compiled.read_bytes()
        time = int(source.stat().st_mtime).to_bytes(4, "little")
        compiled.write_bytes(header[:8] + time + header[12:])
        assert source.stat().st_size == state.st_size
    opgraft.reset()
    (offer,) = (each for each in discover().of_group(PLATFORM_GROUP) if each.name == "acme")
    with pytest.raises(ProbeFailed, match="planted"):
        ask(offer, Machine())
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    assert ask(offer, Machine()).available
    with set_config(OpgraftConfig(lockfile=str(path))):
        load_plugins()
    assert host_state().plugins["acme"].status is PluginStatus.ACTIVATED


def test_an_entry_of_the_path_that_imports_pass_over(site, tmp_path: Path, monkeypatch) -> None:
    """A child that asks a probe does not look there, either."""
    site.platform("acme", probe="return Evidence(True, 'found')")
    planted(tmp_path, "acme_device.py")
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    (offer,) = (each for each in discover().of_group(PLATFORM_GROUP) if each.name == "acme")
    assert ask(offer, Machine()).available


def test_a_bridge_that_is_not_as_it_was_locked(site, path: Path) -> None:
    """Neither it nor what stands behind it is imported, and that says so."""
    site.install("acme", {"acme.py": PLUGIN}, {"other.plugins": ["acme = acme"]})
    bridge = (
        "import importlib\ndef make(offer):\n    return importlib.import_module(offer.module)\n"
    )
    site.install(
        "bridge", {"bridge.py": bridge}, {"opgraft.plugin_bridges": ["other.plugins = bridge:make"]}
    )
    assert lock(path) == []
    assert reason(path) is None
    planted(site.folder, "bridge.py")
    told = reason(path) or ""
    assert "bridge.py is not the file that RECORD lists" in told
    assert told.endswith("(its bridge, bridge 1.0)")
    with set_config(OpgraftConfig(lockfile=str(path))):
        load_plugins()
    assert host_state().plugins["acme"].status is PluginStatus.REJECTED
