"""How ops come by the Triton kernels, and what is said where they cannot."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from opgraft import ops
from opgraft.binding.derivation import is_derived
from opgraft.binding.kernels import choose_kernel
from opgraft.errors import MissingKernelError
from opgraft.ops import on_triton
from opgraft.ops.on_triton import triton_kernels, triton_missing
from opgraft.testing.catalogue import SPECS

GPU_CHAINS = {
    "forward_cuda": ("oot", "hip", "cuda", "native"),
    "forward_xpu": ("oot", "xpu", "native"),
}


def test_every_declared_module_exists_and_names_its_kernels() -> None:
    """Each family's kernels are those that its Triton module names, and each is a functional form of an op."""
    for module in chain.from_iterable(on_triton._BY_MODULES):
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
        names = next(
            ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and _is_all(n)
        )
        defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} | {
            target.id
            for n in tree.body
            if isinstance(n, ast.Assign)
            for target in n.targets
            if isinstance(target, ast.Name)
        }
        assert set(names) <= defined & set(SPECS)


def _is_all(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"


@pytest.mark.parametrize(
    "op",
    [
        ops.SiluAndMul,
        ops.RMSNorm,
        ops.LayerNorm,
        ops.RotaryEmbedding,
        ops.QuantFP8,
        ops.ScaledDotProductAttention,
    ],
)
def test_methods_are_derived_from_the_declared_kernels(op: type) -> None:
    """Where a class declares kernels for GPUs of a vendor it has the method for their key."""
    holder = next(base for base in op.__mro__ if "functional_cuda" in vars(base))
    assert vars(holder)["functional_cuda"] is vars(holder)["functional_xpu"]
    assert is_derived(vars(holder)["forward_cuda"])
    assert is_derived(vars(holder)["forward_xpu"])


def test_importing_the_table_leaves_triton_alone() -> None:
    """Importing ops imports neither Triton nor the modules that need it."""
    ours = "m.endswith('.triton') and m.startswith('opgraft.ops.')"
    source = f"import sys, opgraft.ops; print([m for m in sys.modules if m.split('.')[0] == 'triton' or {ours}])"
    printed = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True
    ).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize("method", GPU_CHAINS)
def test_without_triton_the_native_definition_is_chosen(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Triton is not installed the decision names the kernel that was passed over, and why."""
    # The module's own name alone: discovery, which asks importlib too, would find no platform.
    absent = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(on_triton, "importlib", absent)
    choice = choose_kernel(ops.RMSNorm, GPU_CHAINS[method], True, "for this test")
    assert str(choice.winner) == "RMSNorm.forward_native"
    passed_over = {c.name: c.reason for c in choice.decision.candidates if not c.accepted}
    assert "needs Triton, which is not installed" in passed_over[f"RMSNorm.{method}"]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None, reason="Triton is installed here"
)
def test_a_kernel_that_is_called_by_name_says_what_is_missing() -> None:
    """A replacement that falls back on ``self.forward_cuda`` learns that Triton is not installed."""
    acme = type("Acme", (ops.SiluAndMul,), {"forward_oot": lambda self, x: self.forward_cuda(x)})
    with pytest.raises(
        MissingKernelError, match="needs Triton, which is not installed: pip install triton"
    ):
        acme().forward_oot(torch.ones(1, 4))


def test_a_broken_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where importing Triton fails, the reason is the error's."""

    found = SimpleNamespace(find_spec=lambda name: name)
    broken = SimpleNamespace(util=found, import_module=_refuse_to_import)
    monkeypatch.setattr(on_triton, "importlib", broken)
    assert (
        triton_missing() == "needs Triton, whose import failed: its library is for another system"
    )


def _refuse_to_import(module: str) -> None:
    raise ImportError("its library is for another system")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed here"
)
@pytest.mark.parametrize("method", GPU_CHAINS)
def test_with_triton_the_kernel_is_chosen(method: str) -> None:
    """With Triton the kernel comes first on GPUs of each vendor, with the functions of its forms."""
    winner = choose_kernel(ops.RMSNorm, GPU_CHAINS[method], True, "for this test").winner
    assert str(winner) == f"RMSNorm.{method}"
    assert winner.inference_only
    assert winner.functional("fused_add_rms_norm") is triton_kernels()["fused_add_rms_norm"]
