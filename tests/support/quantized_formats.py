"""Formats of quantized checkpoints, written number by number as their tools write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
GROUP = 64
Written = tuple[dict[str, Tensor], Tensor]
"""What a checkpoint has for a layer, by the ends of the names, and the weight that it stands for, in float64."""


def words(numbers: Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last dimension into int32, the first of ``order`` into the lowest bits."""
    count = 32 // bits
    grouped = numbers.long().reshape(*numbers.shape[:-1], -1, count)
    word = sum(
        grouped[..., which] << bits * place for place, which in enumerate(order or range(count))
    )
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).contiguous()


def rounded(
    weight: Tensor, bits: int, size: int, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, zeros and scales of groups, and what they stand for."""
    groups, top = weight.double().reshape(weight.shape[0], -1, size), 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(-1) * 2 / top).half().double()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((groups.amax(-1) - groups.amin(-1)) / top).half().double()
        zeros = (-groups.amin(-1) / scales).round().clamp(1, top)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, top)
    plain = (codes - zeros[..., None]) * scales[..., None]
    return codes.flatten(1), zeros, scales, plain.flatten(1)


def awq(weight: Tensor) -> Written:
    codes, zeros, scales, plain = rounded(weight, 4, GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(codes.T, 4, order),
        "qzeros": words(zeros.T, 4, order),
        "scales": scales.T.half(),
    }
    return tensors, plain


def gptq(
    weight: Tensor, bits: int = 4, first: int = 1, symmetric: bool = False, shuffled: bool = False
) -> Written:
    inputs = weight.shape[1]
    generator = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=generator) if shuffled else torch.arange(inputs)
    codes, zeros, scales, sorted_plain = rounded(weight[:, order], bits, GROUP, symmetric)
    groups, numbers, plain = (
        torch.empty(inputs, dtype=torch.int32),
        torch.empty_like(codes),
        torch.empty_like(codes),
    )
    for place, which in enumerate(order.tolist()):
        groups[which] = place // GROUP
        numbers[:, which], plain[:, which] = codes[:, place], sorted_plain[:, place]
    tensors = {"qweight": words(numbers, bits).T, "qzeros": words(zeros.T - first, bits)}
    return {**tensors, "scales": scales.T.half(), "g_idx": groups}, plain


def packed(weight: Tensor, bits: int = 4, symmetric: bool = True, size: int = GROUP) -> Written:
    codes, zeros, scales, plain = rounded(weight, bits, size, symmetric)
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scales.half()}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    return tensors if symmetric else {**tensors, "weight_zero_point": words(zeros.T, bits).T}, plain


def integers(weight: Tensor, size: int | None) -> Written:
    groups = weight.double().reshape(weight.shape[0], -1, size or weight.shape[1])
    scales = (groups.abs().amax(-1) / 127).bfloat16()
    codes = (groups / scales[..., None].double()).round().clamp(-127, 127)
    plain = codes * scales[..., None].double()
    return {"weight": codes.flatten(1).to(torch.int8), "weight_scale": scales}, plain.flatten(1)


def fp8(
    weight: Tensor, block: tuple[int, int] | None, static: bool = False, name: str = "weight_scale"
) -> Written:
    height, width = block or weight.shape
    height, width = min(height, weight.shape[0]), width if width > 0 else weight.shape[1]
    blocks = weight.double().reshape(
        weight.shape[0] // height, height, weight.shape[1] // width, width
    )
    scales = (blocks.abs().amax((1, 3)) / 448).float()
    codes = (blocks / scales[:, None, :, None].double()).to(FP8)
    plain = (codes.double() * scales[:, None, :, None].double()).reshape(weight.shape)
    tensors = {"weight": codes.reshape(weight.shape), name: scales if block else scales.reshape(())}
    if static:
        tensors["input_scale"] = torch.tensor(0.01 + weight.abs().max().item() / 100)
    return tensors, plain


def fp8_powers(weight: Tensor, dtype: torch.dtype) -> Written:
    """Blocks with powers of two for scales, as ``scale_fmt`` ``ue8m0`` says, in a dtype."""
    blocks = weight.double().reshape(weight.shape[0] // 64, 64, weight.shape[1] // 64, 64)
    scales = torch.exp2((blocks.abs().amax((1, 3)) / 448).log2().ceil())
    codes = (blocks / scales[:, None, :, None]).to(FP8)
    plain = (codes.double() * scales[:, None, :, None]).reshape(weight.shape)
    tensors = {"weight": codes.reshape(weight.shape), "weight_scale_inv": scales.float().to(dtype)}
    return tensors, plain


def compressed(
    layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {"format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", **settings}


TOKEN8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
TOKEN_FP8 = {**TOKEN8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
UE8M0 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [64, 64],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}

FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        awq,
    ),
    "gptq": (GPTQ, gptq),
    "gptq symmetric": (GPTQ, lambda weight: gptq(weight, symmetric=True)),
    "gptq v2, 8 bits": (
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, 8, 0),
    ),
    "gptq by activation": ({**GPTQ, "desc_act": True}, lambda weight: gptq(weight, shuffled=True)),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda weight: fp8(weight, None),
    ),
    "fp8 static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda weight: fp8(weight, None, True),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
        lambda weight: fp8(weight, (64, 64), name="weight_scale_inv"),
    ),
    "fp8 blocks, powers of two": (
        UE8M0,
        lambda weight: fp8_powers(weight, torch.float8_e8m0fnu),
    ),
    "fp8 blocks, powers of two in float32": (
        UE8M0,
        lambda weight: fp8_powers(weight, torch.float32),
    ),
    "fp8 large blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda weight: fp8(weight, (128, 128), name="weight_scale_inv"),
    ),
    "packed": (compressed("pack-quantized", INT4), packed),
    "packed, zeros": (
        compressed("pack-quantized", {**INT4, "symmetric": False}),
        lambda weight: packed(weight, symmetric=False),
    ),
    "packed, 8 bits": (
        compressed(
            "pack-quantized", {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}
        ),
        lambda weight: packed(weight, 8, size=weight.shape[1]),
    ),
    "integers": (
        compressed("int-quantized", {**INT4, "num_bits": 8, "strategy": "channel"}, TOKEN8),
        lambda weight: integers(weight, None),
    ),
    "integers, groups": (
        compressed("int-quantized", {**INT4, "num_bits": 8}),
        lambda weight: integers(weight, GROUP),
    ),
    "floats": (
        compressed("float-quantized", {**FLOAT8, "strategy": "channel"}, TOKEN_FP8),
        lambda weight: fp8(weight, (1, -1)),
    ),
    "floats, static": (
        compressed(
            "float-quantized",
            {**FLOAT8, "strategy": "tensor"},
            {**FLOAT8, "strategy": "tensor", "dynamic": False},
        ),
        lambda weight: fp8(weight, None, True),
    ),
    "floats, blocks": (
        compressed(
            "float-quantized",
            {**FLOAT8, "strategy": "block", "block_structure": [64, 64]},
            TOKEN_FP8,
        ),
        lambda weight: fp8(weight, (64, 64)),
    ),
}
