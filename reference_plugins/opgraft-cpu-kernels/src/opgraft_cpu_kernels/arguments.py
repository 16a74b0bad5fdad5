"""The dtypes and devices that the ops take.

An op refuses wrong arguments with an error. Two callers ask beforehand: compiled code, which
cannot catch the error, and the fake rules, by which torch traces the ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from opgraft.kernels import LARGEST_CODES
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)

LIKE_THE_FIRST = ("out", "residual", "z", "key", "value", "B", "C")
"""Arguments with the dtype of the first tensor."""

STATES = ("state", "initial_states")
"""Arguments in float32."""

FACTORS = (
    "weight",
    "bias",
    "query_weight",
    "key_weight",
    "cos",
    "sin",
    "cos_sin_cache",
    "alpha_p",
    "alpha_n",
)
"""Arguments in any floating dtype, unless the op is in ROUNDED_TO_WEIGHT."""

ROUNDED_TO_WEIGHT = (
    "rms_norm",
    "rms_norm_out",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "rms_norm_quant_fp8_static",
    "rms_norm_quant_fp8_dynamic",
    "fused_add_rms_norm_quant_fp8_static",
    "fused_add_rms_norm_quant_fp8_dynamic",
    "layer_norm",
    "add_layer_norm",
)
"""Ops whose definitions round to the weight's dtype, or take few dtypes of weights.

The kernels compute in float32. So they take a weight in float32 or in the dtype of the input only.
"""

CONVOLUTIONS = ("causal_conv1d", "causal_conv1d_update")
LIKE_THE_INPUT = ("weight", "bias", "initial_states", "conv_state")
"""Arguments of convolutions with the dtype of the input."""

CODES = {
    "quantized_linear": (torch.int8, torch.uint8),
    "int8_dynamic_linear": (torch.int8,),
    "lossless_linear": (torch.uint8,),
}
"""Op → the dtypes of its weight, if the weight holds codes."""


def named(
    parameters: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by the names of the parameters."""
    # Dynamo of torch 2.8 takes a zip of equal lengths only.
    given = parameters[: len(args)]
    return {**dict(zip(given, args, strict=True)), **kwargs}


def refusal(op: str, arguments: Mapping[str, object]) -> str | None:
    """Return the op's message about a wrong dtype or device, or None if the op takes them all.

    Args:
        op: the name of the op.
        arguments: by name, with the first tensor as ``query`` or ``x``. Others than tensors are
            ignored.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    first = "query" if "query" in tensors else "x"
    x = tensors[first]
    for name, tensor in tensors.items():
        if tensor.device != x.device:
            return f"{op}: {name} is on {tensor.device}, expected {x.device} as {first}"
        taken = _taken(op, name, x, tensors.get("weight"))
        if taken is not None and tensor.dtype not in taken:
            return f"{op}: {name} has dtype {tensor.dtype}, expected one of {taken}"
    return None


def _taken(op: str, name: str, x: Tensor, weight: Tensor | None) -> tuple[torch.dtype, ...] | None:
    """Return the dtypes that an argument may have, or None if the op takes every dtype."""
    if name in LIKE_THE_FIRST:
        return (x.dtype,)
    if op in CONVOLUTIONS and name in LIKE_THE_INPUT:
        return (x.dtype,)
    if name in STATES:
        return (torch.float32,)
    if name == "cache" and op == "mla_paged_attention":
        return (x.dtype,)
    if name == "cache":
        return (x.dtype, *LARGEST_CODES)
    if name == "attn_mask":
        return (torch.bool, torch.float32, x.dtype)
    if name == "positions":
        return INTEGERS
    if op in CODES and name == "weight":
        return CODES[op]
    if op in CODES and name == "bias":
        return (x.dtype,)
    if name not in FACTORS:
        return None
    if op not in ROUNDED_TO_WEIGHT:
        return FLOATING
    if name == "bias" and weight is not None:
        return (weight.dtype,)
    return (x.dtype, torch.float32)
