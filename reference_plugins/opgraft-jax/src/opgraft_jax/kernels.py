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

APPROXIMATIONS = ("none", "tanh")
"""The values of ``approximate`` that torch's GELU takes."""


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, variance_size: int | None = None
) -> Tensor:
    """Compute ``opgraft.functional.rms_norm``."""
    if variance_size is not None or not _norm_taken(x, weight):
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
    taken = _norm_taken(x, weight) and _alike(x, residual)
    if variance_size is not None or not taken:
        return functional.fused_add_rms_norm.native(x, residual, weight, eps, variance_size)

    out, total = torch.ops.opgraft.jax_fused_add_rms_norm(x, residual, weight, eps)
    return out, total


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute ``opgraft.functional.gemma_rms_norm``."""
    if not _norm_taken(x, weight):
        return functional.gemma_rms_norm.native(x, weight, eps)

    out: Tensor = torch.ops.opgraft.jax_gemma_rms_norm(x, weight, eps)
    return out


def fused_add_gemma_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Compute ``opgraft.functional.fused_add_gemma_rms_norm``."""
    if not _norm_taken(x, weight) or not _alike(x, residual):
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
    if not _layer_norm_taken(x, sizes, weight, bias):
        return functional.layer_norm.native(x, normalized_shape, weight, bias, eps)

    dims = len(sizes)
    out: Tensor = torch.ops.opgraft.jax_layer_norm(x, dims, weight, bias, eps)
    return out


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``opgraft.functional.gelu``."""
    if approximate not in APPROXIMATIONS or not _taken(x):
        return functional.gelu.native(x, approximate)

    out: Tensor = torch.ops.opgraft.jax_gelu(x, approximate)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute ``opgraft.functional.gelu_and_mul``."""
    if approximate not in APPROXIMATIONS or not _halves_taken(x):
        return functional.gelu_and_mul.native(x, approximate)

    out: Tensor = torch.ops.opgraft.jax_gelu_and_mul(x, approximate)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """Compute ``opgraft.functional.silu_and_mul``."""
    if not _halves_taken(x):
        return functional.silu_and_mul.native(x)

    out: Tensor = torch.ops.opgraft.jax_silu_and_mul(x)
    return out


def _taken(x: Tensor) -> bool:
    """Return True if JAX can take a tensor."""
    if x.dtype not in DTYPES:
        return False
    if not x.is_cpu or x.dim() == 0:
        return False
    # DLPack cannot describe nested and sparse tensors.
    return not x.is_nested and x.layout is torch.strided


def _halves_taken(x: Tensor) -> bool:
    """Return True if JAX can take a tensor, and the last dimension has two halves."""
    return _taken(x) and x.shape[-1] % 2 == 0


def _alike(x: Tensor, residual: Tensor) -> bool:
    """Return True if JAX can take the residual, and it has the shape and dtype of ``x``."""
    if not _taken(residual):
        return False
    return residual.shape == x.shape and residual.dtype == x.dtype


def _norm_taken(x: Tensor, weight: Tensor | None) -> bool:
    """Return True if JAX can take the tensors of a norm over the last dimension."""
    return _taken(x) and _parameter_taken(weight, x.shape[-1:])


def _layer_norm_taken(
    x: Tensor, sizes: tuple[int, ...], weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Return True if JAX can take the tensors of a layer norm over dimensions of these sizes."""
    # Without sizes, the native definition raises the error that users know.
    if not sizes or not _taken(x):
        return False
    if x.shape[-len(sizes) :] != sizes:
        return False
    return _parameter_taken(weight, sizes) and _parameter_taken(bias, sizes)


def _parameter_taken(parameter: Tensor | None, sizes: Sequence[int]) -> bool:
    """Return True for None, and for a parameter of these sizes that JAX can take."""
    if parameter is None:
        return True
    return _taken(parameter) and tuple(parameter.shape) == tuple(sizes)
