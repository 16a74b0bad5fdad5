"""Linear layers with quantized weights, as modules that hold them in buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_choice
from opgraft.ops.linear.quantized.storage import packed_size
from torch import Tensor, nn

Device = torch.device | str | int | None


class _Layer(CustomOp):
    """Common ground of these layers: sizes, and a bias that is zero until one is loaded."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.bias = nn.Parameter(zeros, requires_grad=False) if zeros is not None else None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@CustomOp.register("quantized_linear")
class QuantizedLinear(_Layer):
    """``x · Wᵀ + bias`` with weights of 4 or 8 bits, ``W = code · scale + offset`` by group of inputs, as in GPTQ
    (Frantar et al., arXiv:2210.17323) and AWQ (Lin et al., arXiv:2306.00978).

    ``opgraft.ops.linear.quantized.quantizers`` makes codes and scales from a plain weight.

    Args:
        bits: 4 or 8.
        group_size: inputs that share a scale; -1 for all.
        offsets: whether groups have an offset.
        dtype: of bias, scales and offsets.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``. ``weight`` is ``int8`` ``[out_features, in_features]``, or
        ``uint8`` ``[out_features, 64 · ceil(in_features / 128)]``; ``scales`` and ``offsets`` are
        ``[out_features, in_features / group_size]``.

    Raises:
        ValueError: other bits, or a group size that does not divide ``in_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        bits: int = 4,
        group_size: int = -1,
        offsets: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        expect_choice("quantized_linear", "bits", bits, (4, 8))
        size = in_features if group_size == -1 else group_size
        if size < 1 or in_features % size:
            raise ValueError(
                f"quantized_linear: group_size is {group_size}, expected -1 or a divisor of in_features, {in_features}"
            )
        self.bits, self.group_size = bits, group_size
        width, kind = (
            (in_features, torch.int8) if bits == 8 else (packed_size(in_features), torch.uint8)
        )
        groups = (out_features, in_features // size)
        self.register_buffer("weight", torch.zeros(out_features, width, dtype=kind, device=device))
        self.register_buffer("scales", torch.ones(groups, device=device, dtype=dtype))
        self.register_buffer(
            "offsets", torch.zeros(groups, device=device, dtype=dtype) if offsets else None
        )

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Map ``x``; raise ``ValueError`` where something does not fit."""
        return functional.quantized_linear(x, self.weight, self.scales, self.offsets, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}, group_size={self.group_size}"


@CustomOp.register("int8_dynamic_linear")
class Int8DynamicLinear(_Layer):
    """``x · Wᵀ + bias`` on 8-bit integers, with ``x`` quantized row by row (Dettmers et al., arXiv:2208.07339).

    Args:
        dtype: of the bias; scales are float32.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``. ``weight`` is ``int8`` ``[out_features, in_features]``,
        ``scales`` is ``[out_features, 1]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.register_buffer(
            "weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        )
        self.register_buffer("scales", torch.ones(out_features, 1, device=device))

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Map ``x``; raise ``ValueError`` where something does not fit."""
        return functional.int8_dynamic_linear(x, self.weight, self.scales, self.bias)


@CustomOp.register("fp8_linear")
class FP8Linear(_Layer):
    """``x · Wᵀ + bias`` with weights in 8-bit floating point and ``x`` quantized to the same (Micikevicius et al.,
    arXiv:2209.05433).

    Args:
        static: whether ``x`` is divided by ``input_scale``, in place of scales that are computed by row or, with
            blocks, by part of a row.
        block_shape: rows and columns of the weight that share a scale; a row has one if not given.
        dtype: of the bias; scales are float32.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``. ``weight`` is ``float8_e4m3fn``
        ``[out_features, in_features]``; ``weight_scale`` is ``[out_features, 1]`` or a number for each block;
        ``input_scale`` is ``[1]``.

    Raises:
        ValueError: static together with blocks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        static: bool = False,
        block_shape: Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if static and block_shape is not None:
            raise ValueError(
                "fp8_linear: static is given with block_shape, expected one of them at most"
            )
        self.block_shape = None if block_shape is None else tuple(block_shape)
        height, width = self.block_shape or (1, max(in_features, 1))
        scales = (-(-out_features // height), -(-in_features // width))
        weight = torch.zeros(out_features, in_features, device=device).to(torch.float8_e4m3fn)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", torch.ones(scales, device=device))
        self.register_buffer("input_scale", torch.ones(1, device=device) if static else None)

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Map ``x``; raise ``ValueError`` where something does not fit."""
        return functional.fp8_linear(
            x, self.weight, self.weight_scale, self.input_scale, self.bias, self.block_shape
        )
