"""Modules under the names that they were documented by before they moved."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from opgraft.moved import MOVED


@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_gives_the_module_that_took_its_place(
    former: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing it warns, names what to import instead, and loads nothing a second time."""
    monkeypatch.delitem(sys.modules, former, raising=False)
    present = importlib.import_module(MOVED[former])
    with pytest.warns(DeprecationWarning, match=rf"{former} is now {MOVED[former]}: import that"):
        found = importlib.import_module(former)
    assert found is present
    assert found.__name__ == MOVED[former]


def test_what_was_no_documented_module_is_not_found() -> None:
    """Other modules of the former packages are gone, and are not loaded again from the folders of the present ones."""
    with pytest.raises(ModuleNotFoundError, match=r"opgraft\.kernels\.packed"):
        importlib.import_module("opgraft.kernels.packed")


def test_names_come_from_a_former_module(tmp_path: Path) -> None:
    """The import lines that documentation showed still work, in a process that has imported nothing else."""
    source = (
        "from opgraft.specs import checks\nfrom opgraft.specs.spec import Draw, OpSpec, Outside\n"
        "from opgraft.specs.catalogue import SPECS\nfrom opgraft.specs.proof import prove\n"
        "from opgraft.kernels.weight_cache import WeightCache\nfrom opgraft.definitions.form import form\n"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source], cwd=tmp_path, check=True
    )


def test_opgraft_itself_uses_present_names() -> None:
    """Nothing in the package imports a former name."""
    folder = Path(str(importlib.util.find_spec("opgraft").origin)).parent  # type: ignore[union-attr]
    sources = {
        path: path.read_text(encoding="utf-8")
        for path in folder.rglob("*.py")
        if path.name != "moved.py"
    }
    assert [
        str(path) for path, text in sources.items() for name in MOVED if f"from {name} " in text
    ] == []
