"""Each op as one torch op, ``torch.ops.opgraft.jax_<name>``.

torch's compilers do not look into such an op. A fake rule gives them the shapes of its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opgraft import direct_register_custom_op
from torch import Tensor

from opgraft_jax import pallas, programs
from opgraft_jax.crossing import call, device


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm, computed in Pallas."""
    (out,) = call(pallas.rms_norm, x, None, weight, eps=eps, interpret=_interpreted())
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of a sum, and the sum, computed in Pallas."""
    out, total = call(pallas.rms_norm, x, residual, weight, eps=eps, interpret=_interpreted())
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    """Return SiLU of the first half, times the second half, computed in Pallas."""
    (out,) = call(pallas.silu_and_mul, x, interpret=_interpreted())
    return out


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return Gemma's norm."""
    (out,) = call(programs.gemma_rms_norm, x, None, weight, eps=eps)
    return out


def fused_add_gemma_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return Gemma's norm of a sum, and the sum."""
    out, total = call(programs.gemma_rms_norm, x, residual, weight, eps=eps)
    return out, total


def layer_norm(
    x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return the layer norm over the last ``dims`` dimensions."""
    (out,) = call(programs.layer_norm, x, weight, bias, dims=dims, eps=eps)
    return out


def gelu(x: Tensor, approximate: str) -> Tensor:
    """Return GELU. ``approximate`` is "none" or "tanh"."""
    (out,) = call(programs.gelu, x, approximate=approximate == "tanh")
    return out


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """Return GELU of the first half, times the second half."""
    (out,) = call(programs.gelu_and_mul, x, approximate=approximate == "tanh")
    return out


def _interpreted() -> bool:
    """Return True on the CPU, which has no compiler for Pallas."""
    return bool(device().platform == "cpu")


def _like(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _pair_like(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def _half_of(x: Tensor, *others: Any) -> Tensor:
    *leading, width = x.shape
    return x.new_empty((*leading, width // 2))


FAKES: dict[Callable[..., Any], Callable[..., Any]] = {
    rms_norm: _like,
    fused_add_rms_norm: _pair_like,
    silu_and_mul: _half_of,
    gemma_rms_norm: _like,
    fused_add_gemma_rms_norm: _pair_like,
    layer_norm: _like,
    gelu: _like,
    gelu_and_mul: _half_of,
}
"""Op → its fake rule."""

for function, fake in FAKES.items():
    direct_register_custom_op(f"jax_{function.__name__}", function, fake_impl=fake)
