"""The reference plugin, installed by pip as the distribution that plugin authors copy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import opgraft
import pytest
from opgraft import current_platform
from opgraft.ops import RMSNorm

TOY_NPU = Path(__file__).parents[2] / "reference_plugins/opgraft-toy-npu"


def test_the_device_file_makes_the_platform_available(toy_npu, monkeypatch) -> None:
    """With the file the toy NPU is selected, with its capability; without it the CPU is."""
    platform = current_platform()
    assert platform.name == "toy_npu"
    assert platform.device_count() == 1
    assert platform.capability().name == "Toy NPU T1"
    assert platform.memory().total == 512 * 2**20
    platform.manual_seed(1)
    platform.synchronize()
    monkeypatch.delenv("TOY_NPU_DEVICE")
    opgraft.reset()
    assert current_platform().name == "cpu"
    assert RMSNorm(8).op_class is RMSNorm


@pytest.mark.parametrize(
    "content", ["", "{", '{"model": 1}', "[]", '{"model": "x", "memory_mib": "many"}']
)
def test_a_damaged_device_file_is_no_device(toy_npu, tmp_path, monkeypatch, content: str) -> None:
    """The probe never raises: a file that is not what it should be is evidence of no device."""
    (tmp_path / "device.json").write_text(content)
    monkeypatch.setenv("TOY_NPU_DEVICE", str(tmp_path / "device.json"))
    assert current_platform().name == "cpu"


@pytest.fixture
def environment(tmp_path) -> Path:
    """A virtual environment that sees the packages of this one; pip can install into it and uninstall from it."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    outer = [
        f"import site; site.addsitedir({entry!r})" for entry in sys.path if "site-packages" in entry
    ]
    (packages / "outer.pth").write_text("\n".join(outer))
    return folder / "bin" / "python"


def test_removing_the_plugin_with_pip_leaves_no_trace(
    environment: Path, tmp_path, monkeypatch
) -> None:
    """pip uninstall takes the platform, its candidates and its entry points out of detect."""
    monkeypatch.setenv("TOY_NPU_DEVICE", str(TOY_NPU / "device.json"))

    def run(*arguments: str) -> str:
        return subprocess.run(
            arguments, capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout

    pip = [sys.executable, "-m", "pip", "--python", str(environment)]
    detect = [str(environment), "-m", "opgraft", "detect", "--json"]
    source = shutil.copytree(TOY_NPU, tmp_path / "source")
    run(*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", str(source))
    assert json.loads(run(*detect))["decision"]["chosen"] == "toy_npu"
    run(*pip, "uninstall", "--yes", "opgraft-toy-npu")
    report = run(*detect)
    assert json.loads(report)["decision"]["chosen"] == "cpu"
    assert "toy" not in report
