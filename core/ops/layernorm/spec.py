"""Specs of the norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.ops import layernorm as ops
from opgraft.ops.activation.spec import silu
from opgraft.ops.layernorm import functional
from opgraft.ops.spec import (
    HALF_NORM,
    Arguments,
    Draw,
    OpSpec,
    Outside,
    of_transformers,
    with_parameters,
)
from torch import Tensor, nn
from torch.nn import functional as F

Module = tuple[nn.Module, tuple[Any, ...]]


def _weighted(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, size), "weight": draw(size)}


def _residual(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, size), "residual": draw(*lead, size), "weight": draw(size)}


def _gated_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, size), "weight": draw(size), "z": draw(*lead, size)}


def _affine(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {
        "x": draw(*lead, size),
        "normalized_shape": [size],
        "weight": draw(size),
        "bias": draw(size),
    }


def _root_mean_square(x: Tensor, eps: float, size: int | None = None) -> Tensor:
    """Return the root ``[..., 1]`` over the first ``size`` elements of each row, or all."""
    x = x[..., :size]
    mean = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return torch.sqrt(mean + eps)


def _rms(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, variance_size: int | None = None
) -> Tensor:
    normed = x / _root_mean_square(x, eps, variance_size)
    return normed if weight is None else normed * weight


def _gemma(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    normed = x / _root_mean_square(x, eps)
    return normed + normed * weight


def _after_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the reference of a norm that is fused with a sum."""

    def reference(x: Tensor, residual: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        summed = x + residual
        return norm(summed, **others), summed

    return reference


def _rms_gated(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> Tensor:
    if z is None:
        gate = torch.ones_like(x)
    elif activation == "sigmoid":
        gate = 1 / (1 + torch.exp(-z))
    else:
        gate = silu(z)

    y = x if norm_before_gate else x * gate
    groups = y.reshape(-1, group_size or y.shape[-1])
    normed = (groups / _root_mean_square(groups, eps)).reshape(x.shape) * weight
    return normed * gate if norm_before_gate else normed


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    lead = x.shape[: x.dim() - len(normalized_shape)]
    flat = x.reshape(*lead, math.prod(normalized_shape))

    mean = flat.sum(-1, keepdim=True) / flat.shape[-1]
    centred = flat - mean
    y = (centred / _root_mean_square(centred, eps)).reshape(x.shape)

    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y


def _rms_op(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    variance_size: int | None = None,
) -> Module:
    op = ops.RMSNorm(x.shape[-1], eps, variance_size, has_weight=weight is not None)
    inputs = (x,) if residual is None else (x, residual)
    return with_parameters(op, weight=weight), inputs


def _gemma_op(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, eps: float = 1e-6
) -> Module:
    op = with_parameters(ops.GemmaRMSNorm(x.shape[-1], eps), weight=weight)
    return op, (x,) if residual is None else (x, residual)


def _gated_op(x: Tensor, weight: Tensor, z: Tensor | None = None, **settings: Any) -> Module:
    op = ops.RMSNormGated(x.shape[-1], **settings)
    return with_parameters(op, weight=weight), (x, z)


def _layer_norm_op(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Module:
    op = ops.LayerNorm(
        normalized_shape, elementwise_affine=weight is not None, bias=bias is not None
    )
    return with_parameters(op, weight=weight, bias=bias), (x,)


def _torch_rms(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, variance_size: int | None = None
) -> Any:
    # torch's norm takes whole rows only.
    if variance_size:
        return None
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _gated_by_transformers(
    norm: Any,
    x: Tensor,
    weight: Tensor,
    z: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> Any:
    # Qwen's class gates after the norm, and the others before. None has a sigmoid.
    gates_last = norm.__name__.startswith("Qwen")
    if norm_before_gate is not gates_last or activation == "sigmoid":
        return None
    theirs = norm(x.shape[-1], group_size=group_size or x.shape[-1], eps=eps)
    return torch.func.functional_call(theirs, {"weight": weight}, (x, z))


def _norm_flops(x: Tensor, **others: Any) -> int:
    return 5 * x.numel()


RMS: dict[str, Arguments] = {
    "": {},
    "eps": {"eps": 1e-2},
    "no weight": {"weight": None},
    "part of a row": {"variance_size": 1},
}
GROUPED: dict[str, Arguments] = {
    "": {},
    "no gate": {"z": None},
    "groups": {"group_size": 1},
    "before the gate": {"norm_before_gate": True, "activation": "silu"},
    "sigmoid": {"activation": "sigmoid", "eps": 1e-2},
}
LAYER: dict[str, Arguments] = {
    "": {},
    "no bias": {"bias": None},
    "no weight": {"weight": None, "bias": None},
}
NORM: dict[str, Any] = {"flops": _norm_flops, "tolerances": HALF_NORM}
TORCH_RMS = Outside("torch.nn.functional.rms_norm", _torch_rms)

SPECS = (
    OpSpec(
        functional.rms_norm,
        _weighted,
        _rms,
        module=_rms_op,
        variants=RMS,
        outside=(TORCH_RMS,),
        # Rows beside and at a power of two, and many short rows: kernels tile each of them
        # differently.
        large=(((83,), 5125), ((7,), 8192), ((4096,), 8)),
        **NORM,
    ),
    OpSpec(
        functional.fused_add_rms_norm,
        _residual,
        _after_sum(_rms),
        module=_rms_op,
        variants=RMS,
        **NORM,
    ),
    OpSpec(functional.fused_add_rms_norm_, _residual, _after_sum(_rms), variants=RMS, **NORM),
    OpSpec(
        functional.gemma_rms_norm,
        _weighted,
        _gemma,
        module=_gemma_op,
        variants={"": {}, "eps": {"eps": 1e-2}},
        outside=(
            Outside(
                "torch.nn.functional.rms_norm",
                lambda x, weight, eps=1e-6: _torch_rms(x, 1 + weight, eps),
            ),
        ),
        **NORM,
    ),
    OpSpec(
        functional.fused_add_gemma_rms_norm, _residual, _after_sum(_gemma), module=_gemma_op, **NORM
    ),
    OpSpec(functional.fused_add_gemma_rms_norm_, _residual, _after_sum(_gemma), **NORM),
    OpSpec(
        functional.rms_norm_gated,
        _gated_inputs,
        _rms_gated,
        module=_gated_op,
        variants=GROUPED,
        outside=(
            of_transformers(
                "models.mamba2.modeling_mamba2.MambaRMSNormGated", _gated_by_transformers
            ),
            of_transformers(
                "models.qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated",
                _gated_by_transformers,
            ),
        ),
        **NORM,
    ),
    OpSpec(
        functional.layer_norm,
        _affine,
        _layer_norm,
        module=_layer_norm_op,
        variants=LAYER,
        outside=(
            Outside(
                "torch.nn.functional.layer_norm",
                lambda x, **others: F.layer_norm(input=x, **others),
            ),
        ),
        **NORM,
    ),
)
