"""The dtypes and devices that an op takes together, for those who ask before it runs: compiled code, which cannot catch
what an op raises, and the rules by which ops are traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from opgraft.kernels import LARGEST_CODES
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)
LIKE_THE_FIRST = ("out", "residual", "z", "key", "value", "B", "C")
STATES = ("state", "initial_states")
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
"""The ops whose definitions round to the dtype of the weight, or take few, where the kernels compute in float32."""


CONVOLUTIONS = ("causal_conv1d", "causal_conv1d_update")
"""The ops whose weights and states have the dtype of their inputs."""

CODES = {"quantized_linear": (torch.int8, torch.uint8), "int8_dynamic_linear": (torch.int8,)}
"""Op → the dtypes of its weight, where that holds codes."""


def named(
    parameters: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by the names of the parameters."""
    given = parameters[: len(args)]  # Dynamo of torch 2.8 takes no zip that leaves names out
    return {**dict(zip(given, args, strict=True)), **kwargs}


def refusal(op: str, arguments: Mapping[str, object]) -> str | None:
    """Return what the op says to dtypes and devices that it refuses, ``None`` where it takes them."""
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
    """Return the dtypes that an argument may have, ``None`` for any."""
    if name in LIKE_THE_FIRST or (
        op in CONVOLUTIONS and name in ("weight", "bias", "initial_states", "conv_state")
    ):
        return (x.dtype,)
    if name in STATES:
        return (torch.float32,)
    if name == "cache":
        return (x.dtype,) if op == "mla_paged_attention" else (x.dtype, *LARGEST_CODES)
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
    return (weight.dtype,) if name == "bias" and weight is not None else (x.dtype, torch.float32)
