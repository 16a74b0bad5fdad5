"""Quantisation ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_choice
from opgraft.ops.on_triton import on_triton
from opgraft.ops.quantization.functional import (
    FP8_MAX,
    GroupShape,
    expect_dynamic_group_shape,
    expect_group_shape,
    expect_scale_ub,
)
from opgraft.plugins.selection import current_platform
from torch import Tensor
from torch.nn import functional as F

__all__ = ["GroupShape", "QuantFP4", "QuantFP8"]

TMA_BYTES = 16
"""The divisor of a column's stride in bytes, for units for copies by descriptor (TMA)."""

TRITON = on_triton("opgraft.ops.quantization.triton")


@CustomOp.register("quant_fp8")
class QuantFP8(CustomOp):
    """Quantises to 8-bit floating point with given or computed scales (arXiv:2209.05433).

    A computed scale is ``max(amax / FP8_MAX, 1 / (512 · FP8_MAX))`` of the group. The quotient
    ``x / scale`` is clipped to ``±FP8_MAX`` and rounded to the nearest, ties to even. ``FP8_MAX``
    is 448, for e4m3fnuz 224.

    Unlike vLLM's definition, ``use_ue8m0`` rounds all computed scales to powers of two, after the
    lower bound. Scales are computed per channel, too. Quotients are divided, never multiplied by a
    reciprocal.

    Args:
        static: calls give the scale.
        group_shape: rows and columns of a scale. Computed: ``GroupShape.PER_TENSOR``,
            ``PER_TOKEN``, ``PER_CHANNEL`` or ``GroupShape(1, G)``. Given: these and blocks.
        num_token_padding: append rows of zeros to the quantised ``[tokens, hidden]`` up to this
            number.
        column_major_scales: store the scales of ``GroupShape(1, G)`` by column, so that scales of
            neighbouring tokens are adjacent.
        tma_aligned_scales: with ``column_major_scales``, start each column of scales at a multiple
            of 16 bytes.
        use_ue8m0: round computed scales up to powers of two; ``None`` means no.
        compile_native: ignored, for callers of vLLM's class. The native definition compiles with
            the caller.
        dtype: an fp8 dtype; the platform's if not given, or e4m3fn if the platform has none.

    Shapes:
        ``x`` is ``[..., hidden]`` in float32, bfloat16, float16 or float64, the first result
        likewise in fp8. Scales are float32: ``[1]`` per tensor, ``[..., 1]`` per token,
        ``[1, hidden]`` per channel and ``[..., ceil(hidden / G)]`` per group. Given scales are
        returned unchanged.

    Raises:
        ValueError: a group shape, padding or dtype is not supported (vLLM has assertions).
    """

    def __init__(
        self,
        static: bool,
        group_shape: Sequence[int],
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        use_ue8m0: bool | None = None,
        compile_native: bool = True,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_group_shape = expect_group_shape if static else expect_dynamic_group_shape
        check_group_shape("quant_fp8", group_shape)
        if num_token_padding is not None and num_token_padding < 0:
            raise ValueError(
                f"quant_fp8: num_token_padding is {num_token_padding}, expected 0 or more"
            )

        if dtype is None:
            dtype = current_platform().capability().fp8_dtype or torch.float8_e4m3fn
        expect_choice("quant_fp8", "dtype", dtype, tuple(FP8_MAX))

        self.static = static
        self.group_shape = GroupShape(*group_shape)
        self.num_token_padding = num_token_padding
        self.column_major_scales = column_major_scales
        self.tma_aligned_scales = tma_aligned_scales
        self.use_ue8m0 = bool(use_ue8m0)
        self.dtype = dtype

        # Kernels of plugins read both attributes, by vLLM's names.
        self.is_group_quant = self.group_shape.is_per_group()
        self.use_per_token_if_dynamic = self.group_shape.is_per_token()

    @calls_functional
    def forward_native(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        scale_ub: Tensor | None = None,
        use_triton: bool = False,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor]:
        """Return the quantised ``x`` and the scale.

        Args:
            x: ``[..., hidden]``.
            scale: the scale for ``static=True``.
            scale_ub: an upper bound of the largest magnitude, one number, for computed scales per
                token.
            use_triton: for kernels in several languages; not read here.

        Raises:
            ValueError: a scale is missing, not wanted or does not fit, ``scale_ub`` is given for
                other scales, or ``x`` has not two dimensions for padding.
        """
        if (scale is not None) != self.static:
            got = "is given, expected none" if scale is not None else "is None, expected a tensor"
            raise ValueError(f"quant_fp8: scale {got} with static={self.static}")
        if scale is not None:
            expect_scale_ub("quant_fp8", scale_ub, (-1, -1))
            quantised = functional.quant_fp8_static(x, scale, self.group_shape, self.dtype)
            return self.pad_tokens(quantised), scale

        quantised, computed = functional.quant_fp8_dynamic(
            x, self.group_shape, scale_ub, self.use_ue8m0, self.dtype
        )
        return self.pad_tokens(quantised), self.lay_out_scales(computed)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def pad_tokens(self, quantised: Tensor) -> Tensor:
        """Return ``[tokens, hidden]`` with rows of zeros up to ``num_token_padding``.

        Kernels of plugins call this method too.

        Raises:
            ValueError: there is padding, and ``quantised`` has not two dimensions.
        """
        if self.num_token_padding is None:
            return quantised
        if quantised.dim() != 2:
            raise ValueError(
                f"quant_fp8: x has shape {tuple(quantised.shape)}, expected [tokens, hidden] with "
                "num_token_padding"
            )

        tokens, hidden = quantised.shape
        missing = max(self.num_token_padding - tokens, 0)
        return torch.cat([quantised, quantised.new_zeros(missing, hidden)])

    def lay_out_scales(self, scale: Tensor) -> Tensor:
        """Return scales of groups in the memory layout of ``column_major_scales``, if set.

        Kernels of plugins call this method too.
        """
        if not (self.column_major_scales and self.is_group_quant and scale.dim() > 1):
            return scale

        columns = scale.mT
        tokens = scale.shape[-2]
        if self.tma_aligned_scales:
            scales_per_unit = TMA_BYTES // scale.element_size()
            columns = F.pad(columns, (0, -tokens % scales_per_unit))
        # The view leaves out the padding; the strides keep it.
        return columns.contiguous().mT[..., :tokens, :]

    def extra_repr(self) -> str:
        return f"static={self.static}, group_shape={tuple(self.group_shape)}, dtype={self.dtype}"


@CustomOp.register("quant_fp4")
class QuantFP4(CustomOp):
    """Quantises to 4-bit floating point: NVFP4 with a scale of the whole tensor, else MXFP4.

    NVFP4 is from arXiv:2509.25149, MXFP4 from arXiv:2310.10537. ``x / (group scale · scale)`` is
    rounded to the nearest of ±0, ½, 1, 1½, 2, 3, 4 and 6, ties to the even code. In NVFP4 the scale
    of 16 elements is ``amax / (6 · scale)`` in e4m3. In MXFP4 the scale of 32 elements is
    ``2 ** (floor(log2(amax)) - 2)``.

    Unlike vLLM's NVFP4, ``scale`` is the factor of numbers, not the reciprocal. Quotients are
    divided. Scales of groups lie in rows, not in the tiles of tensor cores.

    Shapes:
        ``x`` is ``[..., hidden]`` in float32, bfloat16, float16 or float64. The results are
        ``[..., hidden / 2]`` in ``uint8``, two numbers to a byte, the first in the lower bits; and
        the scales of groups, ``[..., hidden / 16]`` in ``float8_e4m3fn`` or ``[..., hidden / 32]``
        in ``float8_e8m0fnu``.
    """

    @calls_functional
    def forward_native(
        self, x: Tensor, scale: Tensor | None = None, *, functional: Any = NATIVE
    ) -> tuple[Tensor, Tensor]:
        """Return the packed numbers of ``x``, and the scales of groups.

        Args:
            x: ``[..., hidden]``.
            scale: one positive number for NVFP4, as ``amax(x) / 2688``; ``None`` for MXFP4.

        Raises:
            ValueError: groups do not divide ``hidden``, or the scale is several numbers.
        """
        quantised: tuple[Tensor, Tensor] = functional.quant_fp4(x, scale)
        return quantised
