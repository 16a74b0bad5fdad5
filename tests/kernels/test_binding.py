"""How ops come by the Triton kernels, and what is said where they cannot."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from opgraft import ops
from opgraft.binding.functional import FORMS
from opgraft.binding.kernels import choose_kernel
from opgraft.binding.specialisation import bind
from opgraft.ops import on_triton
from opgraft.ops.on_triton import TRITON, triton_missing

GPU_CHAINS = {"forward_cuda": ("oot", "hip", "cuda", "native"), "forward_xpu": ("oot", "xpu", "native")}


def test_every_kernel_serves_a_form_of_an_op() -> None:
    """Each name in the table is a form, whose op class has the table and the methods."""
    for name in TRITON:
        op_class = bind(ops.CustomOp.op_registry.get(FORMS[name].op) or getattr(ops, FORMS[name].op)).kernel.cls
        holder = next(base for base in op_class.__mro__ if "functional_cuda" in vars(base))
        assert vars(holder)["functional_cuda"] is vars(holder)["functional_xpu"] is TRITON
        assert {"forward_cuda", "forward_xpu"} <= set(vars(holder))


def test_importing_the_table_leaves_triton_alone() -> None:
    """Importing ops imports neither Triton nor the modules that need it."""
    ours = "m.endswith('.triton') and m.startswith('opgraft.ops.')"
    source = f"import sys, opgraft.ops; print([m for m in sys.modules if m.split('.')[0] == 'triton' or {ours}])"
    printed = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize("method", GPU_CHAINS)
def test_without_triton_the_native_definition_is_chosen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is not installed the decision names the kernel that was passed over, and why."""
    monkeypatch.setattr(on_triton.importlib.util, "find_spec", lambda name: None)
    choice = choose_kernel(ops.RMSNorm, GPU_CHAINS[method], True, "for this test")
    assert str(choice.winner) == "RMSNorm.forward_native"
    passed_over = {c.name: c.reason for c in choice.decision.candidates if not c.accepted}
    assert "needs Triton, which is not installed" in passed_over[f"RMSNorm.{method}"]


def test_a_broken_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where importing Triton fails, the reason is the error's."""

    class Broken(dict[str, object]):
        def __getitem__(self, form: str) -> object:
            raise ImportError("its library is for another system")

    monkeypatch.setattr(on_triton, "TRITON", Broken(rms_norm=None))
    monkeypatch.setattr(on_triton.importlib.util, "find_spec", lambda name: name)
    assert triton_missing() == "needs Triton, whose import failed: its library is for another system"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.parametrize("method", GPU_CHAINS)
def test_with_triton_the_kernel_is_chosen(method: str) -> None:
    """With Triton the kernel comes first on GPUs of each vendor, with the functions of its forms."""
    winner = choose_kernel(ops.RMSNorm, GPU_CHAINS[method], True, "for this test").winner
    assert str(winner) == f"RMSNorm.{method}"
    assert winner.inference_only
    assert winner.functional("fused_add_rms_norm") is TRITON["fused_add_rms_norm"]
