"""Mixtures of experts with quantized weights. ``storage`` describes the formats."""

from __future__ import annotations

from itertools import pairwise

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    expect_floating,
    expect_integers,
    expect_same_device,
    values_are_known,
)
from opgraft.ops.moe.fused import functional as plain
from opgraft.ops.moe.quantized.storage import FP8, dequantize_expert, is_mxfp4, storage_shapes
from opgraft.ops.precision import compute_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = ["quantized_experts"]


def _like_x(x: Tensor, *others: object, **settings: object) -> Tensor:
    """Return an empty tensor like ``x``; the fake rule of ``quantized_experts``."""
    return x.new_empty(x.shape)


@register_functional("quantized_fused_moe", _like_x, differentiable=False)
def quantized_experts(
    x: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_offsets: Tensor | None = None,
    w2_offsets: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """Compute ``fused_experts`` with weights of 4 or 8 bits.

    The dtypes of codes and scales decide the format. Only chosen experts become plain weights, one
    expert after another: computed in float32 (float64 for float64 input), then rounded to the dtype
    of ``x``. A kernel need not round. In compiled code the ids are unknown, so all experts compute
    all tokens. Inputs are not quantized. There are no gradients.

    Args:
        x: ``[tokens, hidden_size]``.
        w13: codes ``[experts, 2 · intermediate_size, …]``: the rows of the gate, then the rows of
            up; for ``"swigluoai"`` in turn. The last dimension is ``hidden_size`` for ``int8`` and
            8-bit floating point, ``64 · ceil(hidden_size / 128)`` for 4 bits in ``uint8``, and
            ``16 · ceil(hidden_size / 32)`` for MXFP4.
        w13_scales: ``[experts, 2 · intermediate_size, groups]`` in a floating-point dtype;
            ``groups`` divides ``hidden_size``. For MXFP4 in ``float8_e8m0fnu``, one for each 32
            inputs.
        w2: codes ``[experts, hidden_size, …]`` for ``intermediate_size`` inputs, as ``w13``.
        w2_scales: ``[experts, hidden_size, groups]``, as ``w13_scales``.
        topk_weights: ``[tokens, topk]`` in any floating-point dtype.
        topk_ids: ``[tokens, topk]``, int32 or int64; -1 for no expert.
        activation: ``"silu"``, ``"gelu"`` (exact), or ``"swigluoai"`` of gpt-oss.
        w13_offsets: like ``w13_scales``, for integers. Without offsets, 4 bits mean
            ``(code - 8) · scale``.
        w2_offsets: like ``w2_scales``, for integers.
        w13_bias: ``[experts, 2 · intermediate_size]``.
        w2_bias: ``[experts, hidden_size]``.

    Returns:
        ``[tokens, hidden_size]`` in the dtype of ``x``.

    Raises:
        ValueError: a shape, a dtype, a device or the activation does not fit, or an id names no
            expert.
    """
    gate_up = (w13, w13_scales, w13_offsets)
    down = (w2, w2_scales, w2_offsets)
    intermediate = _expect_inputs(x, gate_up, down, topk_weights, topk_ids, activation)
    _expect_bias("w13_bias", w13_bias, w13, x)
    _expect_bias("w2_bias", w2_bias, w2, x)

    # Without values, the host does not know where the rows of an expert end.
    if not values_are_known(topk_ids) or not values_are_known(x):
        plain_w13 = _plain_weights(gate_up, x.shape[1], x.dtype)
        plain_w2 = _plain_weights(down, intermediate, x.dtype)
        outputs = plain.fused_experts.native(
            x, plain_w13, plain_w2, topk_weights, topk_ids, activation, w13_bias, w2_bias
        )
        return outputs.detach()

    rows, order, bounds = plain.sorted_by_expert(x, topk_ids, w13.shape[0])
    outputs = _grouped_experts(rows, bounds, gate_up, down, activation, w13_bias, w2_bias)
    return plain.combined(outputs, order, bounds, topk_weights).detach()


Quantized = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and offsets of all experts."""


def _grouped_experts(
    rows: Tensor,
    bounds: list[int],
    gate_up: Quantized,
    down: Quantized,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> Tensor:
    """Return the outputs as ``grouped_experts``, with plain weights of one expert at a time."""
    # All plain weights together may exceed the memory.
    outputs = [rows.new_zeros(bounds[0], rows.shape[1])]
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        weight = _plain_weight(gate_up, expert, rows.shape[1], rows.dtype)
        gate_up_bias = None if w13_bias is None else w13_bias[expert]
        gate_up_rows = F.linear(rows[begin:end], weight, gate_up_bias)
        hidden = plain.ACTIVATIONS[activation](gate_up_rows)
        weight = _plain_weight(down, expert, hidden.shape[1], rows.dtype)
        down_bias = None if w2_bias is None else w2_bias[expert]
        outputs.append(F.linear(hidden, weight, down_bias))
    return torch.cat(outputs)


def _plain_weight(weights: Quantized, expert: int, in_features: int, dtype: torch.dtype) -> Tensor:
    codes, scales, offsets = weights
    weight = dequantize_expert(
        codes[expert],
        scales[expert],
        None if offsets is None else offsets[expert],
        in_features,
        compute_dtype(dtype),
    )
    return weight.to(dtype)


def _plain_weights(weights: Quantized, in_features: int, dtype: torch.dtype) -> Tensor:
    experts = range(len(weights[0]))
    return torch.stack([_plain_weight(weights, each, in_features, dtype) for each in experts])


def _expect_inputs(
    x: Tensor,
    gate_up: Quantized,
    down: Quantized,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
) -> int:
    """Return the intermediate size.

    Raises:
        ValueError: the arguments do not fit each other.
    """
    op = "quantized_experts"
    plain.expect_activation(op, activation)
    expect_floating(op, "x", x)
    w13 = gate_up[0]
    w2 = down[0]

    for name, tensor, count in (
        ("x", x, 2),
        ("w13", w13, 3),
        ("w2", w2, 3),
        ("topk_ids", topk_ids, 2),
    ):
        if tensor.dim() != count:
            shape = tuple(tensor.shape)
            raise ValueError(f"{op}: {name} has shape {shape}, expected {count} dimensions")

    tokens, hidden = x.shape
    experts, rows, _ = w13.shape
    if rows % 2:
        raise ValueError(
            f"{op}: w13 has shape {tuple(w13.shape)}, expected as many rows of gate as of up"
        )

    _expect_storage("w13", gate_up, (experts, rows), hidden, x)
    _expect_storage("w2", down, (experts, hidden), rows // 2, x)
    choices = (tokens, topk_ids.shape[1])
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if tensor.shape != choices:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {choices}")
        expect_same_device(op, name, tensor, "x", x)

    expect_floating(op, "topk_weights", topk_weights)
    expect_integers(op, "topk_ids", topk_ids)
    plain.expect_ids(op, topk_ids, experts)
    return int(rows // 2)


def _expect_storage(
    name: str, weights: Quantized, lead: tuple[int, int], in_features: int, x: Tensor
) -> None:
    """Raise ``ValueError`` unless codes, scales and offsets hold weights for ``in_features``.

    Args:
        name: of the codes.
        weights: codes, scales and offsets.
        lead: the number of experts and of rows.
        in_features: the inputs of each row.
        x: has the device.
    """
    op = "quantized_experts"
    codes, scales, offsets = weights
    if codes.dtype not in (torch.int8, torch.uint8, *FP8):
        raise ValueError(
            f"{op}: {name} is {codes.dtype}, expected torch.int8, torch.uint8 or one of {FP8}"
        )

    width, groups = storage_shapes(codes, scales, in_features)
    if tuple(codes.shape) != (*lead, width):
        raise ValueError(
            f"{op}: {name} has shape {tuple(codes.shape)}, expected {(*lead, width)} for "
            f"{in_features} inputs in {codes.dtype} with scales in {scales.dtype}"
        )

    if not is_mxfp4(scales):
        expect_floating(op, f"{name}_scales", scales)
    if not _fits_groups(scales, lead, in_features, groups):
        expected = f"a divisor of {in_features}" if groups is None else groups
        raise ValueError(
            f"{op}: {name}_scales have shape {tuple(scales.shape)}, expected {lead} and "
            f"{expected} groups"
        )

    expect_same_device(op, name, codes, "x", x)
    expect_same_device(op, f"{name}_scales", scales, "x", x)
    if offsets is not None:
        _expect_offsets(f"{name}_offsets", offsets, codes, scales, x)


def _expect_offsets(name: str, offsets: Tensor, codes: Tensor, scales: Tensor, x: Tensor) -> None:
    op = "quantized_experts"
    if codes.dtype in FP8 or is_mxfp4(scales):
        raise ValueError(f"{op}: {name} are given, and only integers have offsets")
    if offsets.shape != scales.shape or offsets.dtype != scales.dtype:
        raise ValueError(
            f"{op}: {name} have shape {tuple(offsets.shape)} and dtype {offsets.dtype}, expected "
            "those of scales"
        )
    expect_same_device(op, name, offsets, "x", x)


def _fits_groups(
    scales: Tensor, lead: tuple[int, int], in_features: int, groups: int | None
) -> bool:
    """Return True for scales ``[*lead, groups]``; without ``groups``, any divisor fits."""
    if scales.dim() != 3 or tuple(scales.shape[:2]) != lead:
        return False

    given = scales.shape[2]
    if given == 0:
        return False
    if groups is None:
        return in_features % given == 0
    return given == groups


def _expect_bias(name: str, bias: Tensor | None, weight: Tensor, x: Tensor) -> None:
    if bias is None:
        return

    rows = weight.shape[:2]
    if bias.shape != rows or bias.dtype != x.dtype or bias.device != x.device:
        raise ValueError(
            f"quantized_experts: {name} is {bias.dtype} {tuple(bias.shape)} on {bias.device}, "
            f"expected {x.dtype} {tuple(rows)} on {x.device}"
        )
