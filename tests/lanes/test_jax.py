"""The plugin opgraft-jax on JAX for the CPU, and what JAX makes of its kernels for a TPU. Run by ``make test-jax``."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import current_platform, load_plugins, ops, reset
from opgraft.registry.state import PluginStatus, host_state

jax = pytest.importorskip("jax", reason="JAX is not installed here; make test-jax runs these tests")

VARIABLE = "JAX_RUNTIME_DEVICE"


@pytest.fixture(autouse=True)
def jax_plugin(
    fresh_host: None, plugin: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin, installed by pip, and JAX's CPU asked for."""
    plugin("opgraft-jax")
    monkeypatch.setenv(VARIABLE, "cpu")


@pytest.fixture
def crossing() -> Any:
    return importlib.import_module("opgraft_jax.crossing")


def test_the_whole_kit(whole_kit: Callable[[str], str]) -> None:
    """The plugin's own test file passes: every check of the kit, in each dtype."""
    assert re.search(r"\d{3} passed", whole_kit("opgraft-jax"))


def test_the_platform_is_there_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With JAX installed the CPU platform stays what is chosen, until the variable asks for JAX."""
    load_plugins()
    assert current_platform().name == "jax"
    assert host_state().plugins["jax"].status is PluginStatus.ACTIVATED
    assert ops.RMSNorm(8).decision.chosen == "JaxRMSNorm.forward_oot"
    reset()
    monkeypatch.delenv(VARIABLE)
    load_plugins()
    assert current_platform().name == "cpu"
    assert ops.RMSNorm(8).decision.chosen == "RMSNorm.forward_native"


def torch_memory(array: Any) -> int:
    pointer: int = array.unsafe_buffer_pointer()
    return pointer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_crosses_without_a_copy(crossing: Any, dtype: torch.dtype) -> None:
    """An allocation of torch, whole or from a multiple of 64 bytes on, and what JAX has computed."""
    x = torch.randn(96, 64).to(dtype)
    for tensor in (x, x[32:], x.reshape(-1), torch.nn.Parameter(x)):
        assert torch_memory(crossing.to_jax(tensor)) == tensor.data_ptr()
    array = crossing.to_jax(x) + 1
    back = crossing.to_torch(array)
    assert back.data_ptr() == torch_memory(array)
    torch.testing.assert_close(back, x + 1)


def test_what_is_copied(crossing: Any) -> None:
    """Views with gaps, turned ones, and what begins between multiples of 64 bytes arrive with their values."""
    x = torch.randn(64, 65)
    for tensor in (x[:, :64], x.T, x.flatten()[1:], x[:, ::2], x[:1].expand(64, 65)):
        array = crossing.to_jax(tensor)
        assert torch_memory(array) != tensor.data_ptr()
        torch.testing.assert_close(crossing.to_torch(array + 0), tensor.contiguous())


def test_dtypes_that_do_not_cross() -> None:
    """JAX narrows float64, so that it is left to the native definition, which keeps every digit."""
    norm = ops.RMSNorm(64, dtype=torch.float64)
    x = torch.randn(4, 64, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(norm(x), norm.forward_native(x))


def test_an_input_may_be_written_to_after_the_call() -> None:
    """JAX computes in threads of its own: an op returns once they have read all that they were given."""
    op = ops.GELU()
    for _ in range(20):
        x = torch.randn(1000, 1000)
        expected = op.forward_native(x.clone())
        with torch.no_grad():
            out = op(x)
        x.fill_(float("nan"))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


KERNELS: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {
    "rms_norm": lambda pallas, w: lambda x: pallas.rms_norm(x, None, w, eps=1e-6, interpret=False),
    "rms_norm with residual": lambda pallas, w: (
        lambda x: pallas.rms_norm(x, x, w, eps=1e-6, interpret=False)
    ),
    "rms_norm without weight": lambda pallas, w: (
        lambda x: pallas.rms_norm(x, None, None, eps=1e-6, interpret=False)
    ),
    "silu_and_mul": lambda pallas, w: functools.partial(pallas.silu_and_mul, interpret=False),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 256), (3, 5, 4096), (1000, 8192), (7, 200)], ids=str)
def test_the_kernels_lower_for_a_tpu(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """JAX makes a program for a TPU of each, with the kernel in it; nobody has run one there."""
    pallas = importlib.import_module("opgraft_jax.pallas")
    x = jax.ShapeDtypeStruct(shape, dtype)
    function = KERNELS[name](pallas, jax.numpy.ones(shape[-1], dtype))
    exported = jax.export.export(jax.jit(function), platforms=["tpu"])(x)
    assert "tpu_custom_call" in exported.mlir_module()
