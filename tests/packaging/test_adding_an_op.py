"""An op is added in the folder of its family, a family by its folder, and lists and pages follow."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import op_lists
import opgraft
import pytest

REPOSITORY = Path(__file__).parents[2]
FAMILY = "opgraft/ops/activation"

FUNCTIONAL = '''

@register_functional("softsign", like)
def softsign(x: Tensor) -> Tensor:
    """``x / (1 + |x|)``, elementwise."""
    return x / (1 + x.abs())
'''

MODULE = '''

@CustomOp.register("softsign")
class Softsign(CustomOp):
    """``x / (1 + |x|)``, elementwise."""

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        return functional.softsign(x)
'''

SPEC = """
SPECS = (
    *SPECS,
    OpSpec(
        functional.softsign,
        reference=lambda x: torch.where(x < 0, x / (1 - x), x / (1 + x)),
        module=_activation_op(ops.Softsign),
        outside=(Outside("torch.nn.functional.softsign", lambda x: F.softsign(x)),),
        **PLAIN,
    ),
)
"""

NEW_FAMILY = {
    "functional.py": '''
"""Powers."""

from opgraft.binding.functional import register_functional
from opgraft.ops.fakes import like
from torch import Tensor

__all__ = ["cube"]


@register_functional("cube", like)
def cube(x: Tensor) -> Tensor:
    """``x³``, elementwise."""
    return x * x * x
''',
    "modules.py": '''
"""Powers."""

from typing import Any

from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from torch import Tensor

__all__ = ["Cube"]


@CustomOp.register("cube")
class Cube(CustomOp):
    """``x³``, elementwise."""

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        return functional.cube(x)
''',
    "spec.py": '''
"""Specs of the powers."""

from opgraft.ops.activation.spec import PLAIN
from opgraft.ops import powers
from opgraft.ops.powers import functional
from opgraft.ops.spec import OpSpec

SPECS = (
    OpSpec(
        functional.cube,
        reference=lambda x: x**3,
        module=lambda x: (powers.Cube(), (x,)),
        **PLAIN,
    ),
)
''',
    "__init__.py": '''
"""Powers."""

from opgraft.ops.powers.modules import *
''',
}
"""The files of a family, by name."""

USE = """
import torch
import opgraft
from opgraft import functional, ops
from opgraft.testing.catalogue import SPECS
from opgraft.testing.proof import prove

assert opgraft.__file__ == str(Path("opgraft/__init__.py").absolute()), opgraft.__file__
x = torch.randn(3, 5)
assert torch.equal(ops.Softsign()(x), functional.softsign(x))
assert torch.equal(torch.ops.opgraft.softsign(x), functional.softsign(x))
assert torch.equal(ops.Cube()(x), functional.cube(x))
prove(SPECS["cube"], "opgraft.ops.powers.spec")
record = prove(SPECS["softsign"], "opgraft.ops.activation.spec")
assert record.outside == ("torch.nn.functional.softsign",), record
"""

CHECKS = (
    "tests/docs/test_reference.py::test_every_op_is_a_row_with_its_class",
    "tests/docs/test_reference.py::test_every_exported_class_of_ops_is_mentioned",
    "tests/docs/test_port_from_vllm.py::test_every_class_is_in_the_table",
    "tests/plugins/test_every_op.py::test_every_row_is_of_an_op",
    "tests/plugins/test_every_op.py::test_a_plugin_replaces[softsign]",
    "tests/plugins/test_every_op.py::test_a_plugin_replaces[cube]",
)
"""What would ask an author to write the op's name anywhere else."""

MARK = "\n--\n"

ASK = f"""
import runpy
import sys
from pathlib import Path
import pytest
from opgraft.cli import cli

{USE.strip()}
sys.path.insert(0, "tools")  # where tools find each other
runpy.run_path("tools/op_pages.py", run_name="__main__")
status = pytest.main(sys.argv[1:])
for question in ("list",), ("explain", "softsign"):
    print(end={MARK!r})
    cli(("ops", *question), standalone_mode=False)
sys.exit(status)
"""
"""Uses the op, writes the pages, runs the checks, and shows what commands say of it, in one process.

To begin takes longer than any of these.
"""


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def insert(path: Path, mark: str, text: str) -> None:
    source = path.read_text(encoding="utf-8")
    assert mark in source
    path.write_text(source.replace(mark, mark + text, 1), encoding="utf-8")


def run(package: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package)}
    child = subprocess.run(
        command, cwd=package, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


def changed_files(copy: Path) -> set[str]:
    """Return the source files of the package that a copy has new or changed."""
    installed = Path(opgraft.__file__).parents[1]
    sources = {str(path.relative_to(copy)) for path in (copy / "opgraft").rglob("*.py")}
    unchanged, *_ = filecmp.cmpfiles(installed, copy, sources, shallow=False)
    return sources - set(unchanged)


def test_the_lists_of_families_are_current() -> None:
    """``make op-pages`` writes these lists, so that nobody else has to."""
    for path, text in op_lists.all_lists(REPOSITORY / "core").items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run make op-pages"


@pytest.mark.source
def test_an_op_is_added_in_the_folder_of_its_family(tmp_path: Path) -> None:
    """Functions, modules, proof, commands, pages and their tests know a new op and a new family of ops."""
    shutil.copytree(
        Path(opgraft.__file__).parent, tmp_path / "opgraft"
    )  # with the bytecode of what stays as it is
    for place in (
        "docs",
        "tools",
        "tests/conftest.py",
        "tests/docs",
        "tests/plugins",
        "mkdocs.yml",
    ):
        copied = shutil.copytree if (REPOSITORY / place).is_dir() else shutil.copyfile
        (tmp_path / place).parent.mkdir(exist_ok=True)
        copied(REPOSITORY / place, tmp_path / place)
    family = tmp_path / FAMILY
    append(family / "functional.py", FUNCTIONAL)
    insert(family / "functional.py", "__all__ = [", '"softsign", ')
    append(family / "modules.py", MODULE)
    insert(family / "modules.py", "__all__ = [", '"Softsign", ')
    append(family / "spec.py", SPEC)
    new_family = tmp_path / "opgraft/ops/powers"
    new_family.mkdir()
    for name, source in NEW_FAMILY.items():
        (new_family / name).write_text(source.lstrip(), encoding="utf-8")
    by_hand = {f"{FAMILY}/{name}" for name in ("functional.py", "modules.py", "spec.py")}
    by_hand |= {f"opgraft/ops/powers/{name}" for name in NEW_FAMILY}
    assert changed_files(tmp_path) == by_hand
    run(tmp_path, sys.executable, "tools/op_lists.py", "opgraft")
    assert changed_files(tmp_path) == by_hand | {"opgraft/functional.py", "opgraft/ops/__init__.py"}
    options = [
        "-q",
        "--import-mode=importlib",
        "-o",
        f"pythonpath={REPOSITORY / 'tests'}",
        "-o",
        "markers=slow",  # which tests/conftest.py sets
        "-c",
        os.devnull,
    ]
    options += ["--rootdir", str(tmp_path)]
    # opcheck of torch 2.15 reads the gradient of what it copies.
    strict = ("-W", "error", "-W", "ignore:The .grad attribute of a Tensor that is not a leaf")
    command = (sys.executable, *strict, "-c", ASK, *options, *CHECKS)
    _, listed, explained = run(tmp_path, *command).split(MARK)
    page = (tmp_path / "docs/reference/ops/softsign.md").read_text(encoding="utf-8")
    assert "opgraft.functional.softsign" in page
    assert (tmp_path / "docs/reference/ops/cube.md").is_file()
    assert "softsign" in listed
    assert "softsign" in explained
