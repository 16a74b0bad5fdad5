"""Linear layers with quantized weights in buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_choice
from opgraft.ops.linear.quantized.storage import packed_size
from torch import Tensor, nn

__all__ = ["FP8Linear", "Int8DynamicLinear", "QuantizedLinear"]

Device = torch.device | str | int | None


class _QuantizedLayer(CustomOp):
    """The base of these layers: sizes, and a bias of zeros until loaded."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias = None
        if bias:
            zeros = torch.zeros(out_features, device=device, dtype=dtype)
            self.bias = nn.Parameter(zeros, requires_grad=False)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"


@CustomOp.register("quantized_linear")
class QuantizedLinear(_QuantizedLayer):
    """``x · Wᵀ + bias`` with ``W = code · scale + offset`` per group of inputs, in 4 or 8 bits.

    Checkpoints of GPTQ (Frantar et al., arXiv:2210.17323) and AWQ (Lin et al., arXiv:2306.00978)
    hold such weights. ``opgraft.ops.linear.quantized.quantizers`` makes codes and scales from a
    plain weight.

    Args:
        bits: 4 or 8.
        group_size: inputs of a scale; -1 for all.
        offsets: groups have an offset.
        dtype: of bias, scales and offsets.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``. ``weight`` is ``int8``
        ``[out_features, in_features]``, or ``uint8``
        ``[out_features, 64 · ceil(in_features / 128)]``. ``scales`` and ``offsets`` are
        ``[out_features, in_features / group_size]``.

    Raises:
        ValueError: ``bits`` has another value, or ``group_size`` does not divide ``in_features``.
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
                f"quantized_linear: group_size is {group_size}, expected -1 or a divisor of "
                f"in_features, {in_features}"
            )

        self.bits = bits
        self.group_size = group_size
        width = in_features if bits == 8 else packed_size(in_features)
        kind = torch.int8 if bits == 8 else torch.uint8

        weight = torch.zeros(out_features, width, dtype=kind, device=device)
        shape = (out_features, in_features // size)
        zeros = torch.zeros(shape, device=device, dtype=dtype) if offsets else None

        self.register_buffer("weight", weight)
        self.register_buffer("scales", torch.ones(shape, device=device, dtype=dtype))
        self.register_buffer("offsets", zeros)

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return ``quantized_linear`` of ``x``.

        Raises:
            ValueError: a tensor does not fit.
        """
        return functional.quantized_linear(x, self.weight, self.scales, self.offsets, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}, group_size={self.group_size}"


@CustomOp.register("int8_dynamic_linear")
class Int8DynamicLinear(_QuantizedLayer):
    """``x · Wᵀ + bias`` on 8-bit integers, with ``x`` quantized row by row.

    The method is from Dettmers et al. (arXiv:2208.07339).

    Args:
        dtype: of the bias; scales are float32.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``. ``weight`` is ``int8``
        ``[out_features, in_features]``, ``scales`` is ``[out_features, 1]``.
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
        weight = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        self.register_buffer("weight", weight)
        self.register_buffer("scales", torch.ones(out_features, 1, device=device))

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return ``int8_dynamic_linear`` of ``x``.

        Raises:
            ValueError: a tensor does not fit.
        """
        return functional.int8_dynamic_linear(x, self.weight, self.scales, self.bias)


@CustomOp.register("fp8_linear")
class FP8Linear(_QuantizedLayer):
    """``x · Wᵀ + bias`` with ``W`` in 8-bit floating point, and ``x`` quantized likewise.

    The method is from Micikevicius et al. (arXiv:2209.05433).

    Args:
        static: divide ``x`` by ``input_scale``. Otherwise a scale is computed for each row, or for
            each block of a row.
        block_shape: rows and columns of a scale of the weight; one row if not given.
        dtype: of the bias; scales are float32.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``. ``weight`` is ``float8_e4m3fn``
        ``[out_features, in_features]``. ``weight_scale`` is ``[out_features, 1]``, or a number for
        each block. ``input_scale`` is ``[1]``.

    Raises:
        ValueError: both ``static`` and ``block_shape`` are given.
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
        # A width of zero cannot divide.
        height, width = self.block_shape or (1, max(in_features, 1))
        blocks = (-(-out_features // height), -(-in_features // width))

        weight = torch.zeros(out_features, in_features, device=device).to(torch.float8_e4m3fn)
        input_scale = torch.ones(1, device=device) if static else None

        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", torch.ones(blocks, device=device))
        self.register_buffer("input_scale", input_scale)

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return ``fp8_linear`` of ``x``.

        Raises:
            ValueError: a tensor does not fit.
        """
        return functional.fp8_linear(
            x, self.weight, self.weight_scale, self.input_scale, self.bias, self.block_shape
        )
