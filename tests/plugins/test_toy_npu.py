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
import torch
from opgraft import OpgraftConfig, current_platform, set_config
from opgraft.ops import GELU, LayerNorm, RMSNorm, SiluAndMul

TOY_NPU = Path(__file__).parents[2] / "reference_plugins/opgraft-toy-npu"

OPS = {
    "ToyRMSNorm": lambda: (RMSNorm(33), 33),
    "ToyLayerNorm": lambda: (LayerNorm(33), 33),
    "ToyGELU": lambda: (GELU(), 33),
    "ToyGELU tanh": lambda: (GELU("tanh"), 33),
    "ToySiluAndMul": lambda: (SiluAndMul(), 34),
}
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 1.6e-2), torch.float16: (1e-3, 2e-3)}


def native(op: torch.nn.Module, *args: torch.Tensor) -> torch.Tensor:
    return op.forward_native(*args)


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


@pytest.mark.parametrize("content", ["", "{", '{"model": 1}', "[]", '{"model": "x", "memory_mib": "many"}'])
def test_a_damaged_device_file_is_no_device(toy_npu, tmp_path, monkeypatch, content: str) -> None:
    """The probe never raises: a file that is not what it should be is evidence of no device."""
    (tmp_path / "device.json").write_text(content)
    monkeypatch.setenv("TOY_NPU_DEVICE", str(tmp_path / "device.json"))
    assert current_platform().name == "cpu"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_the_kernels_agree_with_the_native_definitions(toy_npu, kind: str, dtype: torch.dtype) -> None:
    """Each kernel is the one bound, and computes what the op's native definition computes, empty input included."""
    op, width = OPS[kind]()
    op = op.to(dtype)
    for parameter in op.parameters():
        torch.nn.init.normal_(parameter)
    assert op.op_class.__name__ == kind.split()[0]
    absolute, relative = TOLERANCES[dtype]
    with torch.no_grad():
        for shape in [(5, width), (2, 3, width), (0, width)]:
            x = torch.randn(shape, dtype=dtype)
            before = x.clone()
            torch.testing.assert_close(op(x), native(op, x), atol=absolute, rtol=relative)
            torch.testing.assert_close(x, before, atol=0, rtol=0)


def test_the_fused_residual_form(toy_npu) -> None:
    """The norm with a residual returns the sum and its norm, and leaves its inputs alone."""
    op = RMSNorm(16)
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(op(x, residual), native(op, x, residual))


@pytest.mark.parametrize("kind", OPS)
def test_gradients_are_right(toy_npu, kind: str) -> None:
    """In float64 numerical and analytical gradients agree, whether the kernel is differentiable or steps aside."""
    op, width = OPS[kind]()
    assert torch.autograd.gradcheck(op.double(), torch.randn(2, width, dtype=torch.float64, requires_grad=True))


def test_switching_one_op_off(toy_npu) -> None:
    """-rms_norm runs the native definition of a replaced RMSNorm."""
    with set_config(OpgraftConfig(compilation_config=opgraft.CompilationConfig(custom_ops=["all", "-rms_norm"]))):
        assert RMSNorm(8).decision.chosen == "RMSNorm.forward_native"
        assert LayerNorm(8).decision.chosen == "ToyLayerNorm.forward_oot"


@pytest.fixture
def environment(tmp_path) -> Path:
    """A virtual environment that sees the packages of this one; pip can install into it and uninstall from it."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    outer = [f"import site; site.addsitedir({entry!r})" for entry in sys.path if "site-packages" in entry]
    (packages / "outer.pth").write_text("\n".join(outer))
    return folder / "bin" / "python"


def test_removing_the_plugin_with_pip_leaves_no_trace(environment: Path, tmp_path, monkeypatch) -> None:
    """pip uninstall takes the platform, its candidates and its entry points out of detect."""
    monkeypatch.setenv("TOY_NPU_DEVICE", str(TOY_NPU / "device.json"))

    def run(*arguments: str) -> str:
        return subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    pip = [sys.executable, "-m", "pip", "--python", str(environment)]
    detect = [str(environment), "-m", "opgraft", "detect", "--json"]
    source = shutil.copytree(TOY_NPU, tmp_path / "source")
    run(*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", str(source))
    assert json.loads(run(*detect))["decision"]["chosen"] == "toy_npu"
    run(*pip, "uninstall", "--yes", "opgraft-toy-npu")
    report = run(*detect)
    assert json.loads(report)["decision"]["chosen"] == "cpu"
    assert "toy" not in report
