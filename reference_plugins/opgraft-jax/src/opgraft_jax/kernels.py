"""The ops as functions with the signatures of opgraft's forms.

Each function takes float32, bfloat16 and float16 tensors in the host's memory. Otherwise the
native definition runs: it computes the result, or raises the error that users of opgraft know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft import functional
from torch import Tensor

from opgraft_jax import operators  # noqa: F401  # registers what is called below
from opgraft_jax.crossing import DTYPES


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, variance_size: int | None = None
) -> Tensor:
    """Compute ``opgraft.functional.rms_norm``."""
    if variance_size is not None or not _taken(x) or not _kernel_takes(x.shape[-1:], weight):
        return functional.rms_norm.native(x, weight, eps, variance_size)
    out: Tensor = torch.ops.opgraft.jax_rms_norm(x, weight, eps)
    return out


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``opgraft.functional.fused_add_rms_norm``."""
    taken = _taken(x) and _alike(x, residual) and _kernel_takes(x.shape[-1:], weight)
    if variance_size is not None or not taken:
        return functional.fused_add_rms_norm.native(x, residual, weight, eps, variance_size)
    out, total = torch.ops.opgraft.jax_fused_add_rms_norm(x, residual, weight, eps)
    return out, total


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute ``opgraft.functional.gemma_rms_norm``."""
    if not _taken(x) or not _kernel_takes(x.shape[-1:], weight):
        return functional.gemma_rms_norm.native(x, weight, eps)
    out: Tensor = torch.ops.opgraft.jax_gemma_rms_norm(x, weight, eps)
    return out


def fused_add_gemma_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Compute ``opgraft.functional.fused_add_gemma_rms_norm``."""
    if not _taken(x) or not _alike(x, residual) or not _kernel_takes(x.shape[-1:], weight):
        return functional.fused_add_gemma_rms_norm.native(x, residual, weight, eps)
    out, total = torch.ops.opgraft.jax_fused_add_gemma_rms_norm(x, residual, weight, eps)
    return out, total


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute ``opgraft.functional.layer_norm``."""
    sizes = tuple(normalized_shape)
    taken = sizes and _taken(x) and x.shape[-len(sizes) :] == sizes
    if not taken or not _kernel_takes(sizes, weight) or not _kernel_takes(sizes, bias):
        return functional.layer_norm.native(x, normalized_shape, weight, bias, eps)
    out: Tensor = torch.ops.opgraft.jax_layer_norm(x, len(sizes), weight, bias, eps)
    return out


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``opgraft.functional.gelu``."""
    if approximate not in ("none", "tanh") or not _taken(x):
        return functional.gelu.native(x, approximate)
    out: Tensor = torch.ops.opgraft.jax_gelu(x, approximate)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``opgraft.functional.gelu_and_mul``."""
    if approximate not in ("none", "tanh") or not _taken(x) or x.shape[-1] % 2:
        return functional.gelu_and_mul.native(x, approximate)
    out: Tensor = torch.ops.opgraft.jax_gelu_and_mul(x, approximate)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute ``opgraft.functional.silu_and_mul``."""
    if not _taken(x) or x.shape[-1] % 2:
        return functional.silu_and_mul.native(x)
    out: Tensor = torch.ops.opgraft.jax_silu_and_mul(x)
    return out


def _taken(x: Tensor) -> bool:
    """Return True if JAX can take a tensor. DLPack cannot describe nested and sparse tensors."""
    if x.dtype not in DTYPES or not x.is_cpu or x.dim() == 0:
        return False
    return not x.is_nested and x.layout is torch.strided


def _alike(x: Tensor, residual: Tensor) -> bool:
    return _taken(residual) and residual.shape == x.shape and residual.dtype == x.dtype


def _kernel_takes(sizes: Sequence[int], weight: Tensor | None) -> bool:
    """Return True if there is no weight, or JAX can take the weight, and it has these sizes."""
    if weight is None:
        return True
    return _taken(weight) and tuple(weight.shape) == tuple(sizes)
