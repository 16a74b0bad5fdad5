"""Experts of a mixture whose weights are quantized, to what ``opgraft.ops.moe.quantized.storage`` describes."""

from __future__ import annotations

from itertools import pairwise

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    expect_choice,
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
    """Make a tensor of the shape and dtype of ``x``; a fake rule."""
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
    """Compute ``fused_experts`` with weights of 4 or 8 bits, of which those of chosen experts only become plain.

    Dtypes tell the format. An expert's weight is computed in float32 (float64 for float64 input), rounded to the dtype
    of ``x``, and let go before the next one's; a kernel need not round it. Where values cannot be looked at, as in
    compiled code, all experts compute all tokens. Inputs are not quantized. No gradients.

    Args:
        x: ``[tokens, hidden_size]``.
        w13: codes ``[experts, 2 · intermediate_size, …]``: rows of the gate, then those of up; for ``"swigluoai"`` in
            turn. The last dimension is ``hidden_size`` for ``int8`` and 8-bit floating point,
            ``64 · ceil(hidden_size / 128)`` for 4 bits in ``uint8``, and ``16 · ceil(hidden_size / 32)`` for MXFP4.
        w13_scales: ``[experts, 2 · intermediate_size, groups]`` in a floating-point dtype, where ``groups`` divides
            ``hidden_size``; of MXFP4 in ``float8_e8m0fnu``, one for each 32 inputs.
        w2: codes ``[experts, hidden_size, …]`` for ``intermediate_size`` inputs, and ``w2_scales``, likewise.
        topk_weights: ``[tokens, topk]`` in any floating-point dtype; ``topk_ids`` in int32 or int64, -1 for none.
        activation: ``"silu"``, ``"gelu"`` (exact), or ``"swigluoai"``, that of gpt-oss.
        w13_offsets: as ``w13_scales``, of integers; and ``w2_offsets``. Without, 4 bits are ``(code - 8) · scale``.
        w13_bias: ``[experts, 2 · intermediate_size]``; and ``w2_bias``, ``[experts, hidden_size]``.

    Returns:
        ``[tokens, hidden_size]`` in the dtype of ``x``.

    Raises:
        ValueError: a shape, a dtype, a device or the activation does not fit, or an id names no expert.
    """
    gate_up, down = (w13, w13_scales, w13_offsets), (w2, w2_scales, w2_offsets)
    intermediate = _expect_inputs(x, gate_up, down, topk_weights, topk_ids, activation)
    _expect_bias("w13_bias", w13_bias, w13, x)
    _expect_bias("w2_bias", w2_bias, w2, x)
    if not values_are_known(topk_ids) or not values_are_known(x):
        weights = (
            _all_plain(gate_up, x.shape[1], x.dtype),
            _all_plain(down, intermediate, x.dtype),
        )
        outputs = plain.fused_experts.native(
            x, *weights, topk_weights, topk_ids, activation, w13_bias, w2_bias
        )
        return outputs.detach()
    rows, order, bounds = plain.sorted_by_expert(x, topk_ids, w13.shape[0])
    made = _grouped(rows, bounds, gate_up, down, activation, w13_bias, w2_bias)
    return plain.combined(made, order, bounds, topk_weights).detach()


Quantized = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and offsets of all experts."""


def _grouped(
    rows: Tensor,
    bounds: list[int],
    gate_up: Quantized,
    down: Quantized,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> Tensor:
    """Let each expert compute its rows, as ``grouped_experts`` does, with one expert's weights in plain at a time."""
    made = [rows.new_zeros(bounds[0], rows.shape[1])]
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            first = _plain_weight(gate_up, expert, rows.shape[1], rows.dtype)
            hidden = F.linear(
                rows[begin:end], first, None if w13_bias is None else w13_bias[expert]
            )
            hidden = plain.ACTIVATIONS[activation](hidden)
            second = _plain_weight(down, expert, hidden.shape[1], rows.dtype)
            made.append(F.linear(hidden, second, None if w2_bias is None else w2_bias[expert]))
    return torch.cat(made)


def _plain_weight(weights: Quantized, expert: int, in_features: int, dtype: torch.dtype) -> Tensor:
    codes, scales, offsets = (None if tensor is None else tensor[expert] for tensor in weights)
    return dequantize_expert(codes, scales, offsets, in_features, compute_dtype(dtype)).to(dtype)  # type: ignore[arg-type]  # codes and scales are there


def _all_plain(weights: Quantized, in_features: int, dtype: torch.dtype) -> Tensor:
    return torch.stack(
        [_plain_weight(weights, expert, in_features, dtype) for expert in range(len(weights[0]))]
    )


def _expect_inputs(
    x: Tensor,
    gate_up: Quantized,
    down: Quantized,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
) -> int:
    """Raise ``ValueError`` unless the arguments fit each other; return the intermediate size."""
    op = "quantized_experts"
    expect_choice(op, "activation", activation, tuple(plain.ACTIVATIONS))
    expect_floating(op, "x", x)
    dimensions = {
        "x": (x, 2),
        "w13": (gate_up[0], 3),
        "w2": (down[0], 3),
        "topk_ids": (topk_ids, 2),
    }
    for name, (tensor, count) in dimensions.items():
        if tensor.dim() != count:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected {count} dimensions"
            )
    experts, rows = gate_up[0].shape[:2]
    if rows % 2:
        raise ValueError(
            f"{op}: w13 has shape {tuple(gate_up[0].shape)}, expected as many rows of gate as of up"
        )
    _expect_storage("w13", gate_up, (experts, rows), x.shape[1], x)
    _expect_storage("w2", down, (experts, x.shape[1]), rows // 2, x)
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if tensor.shape != (x.shape[0], topk_ids.shape[1]):
            expected = (x.shape[0], topk_ids.shape[1])
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {expected}")
        expect_same_device(op, name, tensor, "x", x)
    expect_floating(op, "topk_weights", topk_weights)
    expect_integers(op, "topk_ids", topk_ids)
    plain.expect_ids(op, topk_ids, experts)
    return int(rows // 2)


def _expect_storage(
    name: str, weights: Quantized, lead: tuple[int, int], in_features: int, x: Tensor
) -> None:
    """Raise ``ValueError`` unless codes, scales and offsets hold weights of so many inputs."""
    op, (codes, scales, offsets) = "quantized_experts", weights
    if codes.dtype not in (torch.int8, torch.uint8, *FP8):
        raise ValueError(
            f"{op}: {name} is {codes.dtype}, expected torch.int8, torch.uint8 or one of {FP8}"
        )
    width, groups = storage_shapes(codes, scales, in_features)
    if tuple(codes.shape) != (*lead, width):
        raise ValueError(
            f"{op}: {name} has shape {tuple(codes.shape)}, expected {(*lead, width)} for {in_features} inputs in "
            f"{codes.dtype} with scales in {scales.dtype}"
        )
    if not is_mxfp4(scales):
        expect_floating(op, f"{name}_scales", scales)
    fits = scales.dim() == 3 and tuple(scales.shape[:2]) == lead and scales.shape[2] > 0
    if not fits or (in_features % scales.shape[2] if groups is None else scales.shape[2] != groups):
        raise ValueError(
            f"{op}: {name}_scales have shape {tuple(scales.shape)}, expected {lead} and "
            f"{'a divisor of ' + str(in_features) if groups is None else groups} groups"
        )
    if offsets is not None and (codes.dtype in FP8 or is_mxfp4(scales)):
        raise ValueError(f"{op}: {name}_offsets are given, and only integers have offsets")
    if offsets is not None and (offsets.shape != scales.shape or offsets.dtype != scales.dtype):
        raise ValueError(
            f"{op}: {name}_offsets have shape {tuple(offsets.shape)} and dtype {offsets.dtype}, expected those of "
            "scales"
        )
    for what, tensor in ((name, codes), (f"{name}_scales", scales), (f"{name}_offsets", offsets)):
        if tensor is not None:
            expect_same_device(op, what, tensor, "x", x)


def _expect_bias(name: str, bias: Tensor | None, weight: Tensor, x: Tensor) -> None:
    if bias is not None and (
        bias.shape != weight.shape[:2] or bias.dtype != x.dtype or bias.device != x.device
    ):
        raise ValueError(
            f"quantized_experts: {name} is {bias.dtype} {tuple(bias.shape)} on {bias.device}, expected {x.dtype} "
            f"{tuple(weight.shape[:2])} on {x.device}"
        )
