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

TMA_BYTES = 16
"""The divisor of the stride of a column of scales, for units that copy blocks of memory by descriptor."""

TRITON = on_triton("opgraft.ops.quantization.triton")


@CustomOp.register("quant_fp8")
class QuantFP8(CustomOp):
    """Quantises to 8-bit floating point, with scales that are given or computed (arXiv:2209.05433).

    Computed scales are ``max(amax / FP8_MAX, 1 / (512 · FP8_MAX))`` per group, the quotient ``x / scale`` is clipped to
    ``±FP8_MAX`` and rounded to the nearest, ties to even. ``FP8_MAX`` is 448, and 224 for e4m3fnuz.

    Where vLLM's definition differs: ``use_ue8m0`` holds for all computed scales and gives powers of two always, the
    lower bound being applied first; scales are computed per channel too; quotients are divided, never multiplied by a
    reciprocal.

    Args:
        static: whether calls give the scale.
        group_shape: rows and columns that share a scale. Computed: ``GroupShape.PER_TENSOR``, ``PER_TOKEN``,
            ``PER_CHANNEL`` or ``GroupShape(1, G)``; given: these and blocks.
        num_token_padding: append rows of zeros to the quantised ``[tokens, hidden]`` up to that many.
        column_major_scales: lay the scales of ``GroupShape(1, G)`` out so that those of neighbouring tokens adjoin.
        tma_aligned_scales: with ``column_major_scales``, let each column of scales start at a multiple of 16 bytes.
        use_ue8m0: round computed scales up to powers of two; ``None`` means no.
        compile_native: taken so that classes which pass it construct; the native definition compiles with its caller.
        dtype: an fp8 dtype; that of the platform if not given, and e4m3fn where it has none.

    Shapes:
        ``x`` is ``[..., hidden]`` in float32, bfloat16, float16 or float64, the first result likewise in fp8. Scales
        are float32: ``[1]`` per tensor, ``[..., 1]`` per token, ``[1, hidden]`` per channel and
        ``[..., ceil(hidden / G)]`` per group; given ones come back as they are.

    Raises:
        ValueError: a group shape, padding or dtype that is not supported (vLLM asserts it).
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
        """Quantise ``x``; return it and its scale.

        Args:
            x: ``[..., hidden]``.
            scale: what an op with ``static=True`` quantises by.
            scale_ub: one number that the largest magnitude of a token is at most, for computed scales per token.
            use_triton: for kernels that come in several languages; not read here.

        Raises:
            ValueError: a scale is missing, not asked for or does not fit; ``scale_ub`` where it has no meaning; padding
                for ``x`` of other than two dimensions.
        """
        if (scale is not None) != self.static:
            got = "is given, expected none" if scale is not None else "is None, expected a tensor"
            raise ValueError(f"quant_fp8: scale {got} with static={self.static}")
        if scale is not None:
            expect_scale_ub("quant_fp8", scale_ub, (-1, -1))
            quantised = functional.quant_fp8_static(x, scale, self.group_shape, self.dtype)
            return self.pad_tokens(quantised), scale
        settings = (self.group_shape, scale_ub, self.use_ue8m0, self.dtype)
        quantised, computed = functional.quant_fp8_dynamic(x, *settings)
        return self.pad_tokens(quantised), self.lay_out_scales(computed)

    functional_cuda = functional_xpu = TRITON  # makes forward_cuda, forward_xpu

    def pad_tokens(self, quantised: Tensor) -> Tensor:
        """Pad ``[tokens, hidden]`` with rows of zeros up to ``num_token_padding``; for kernels too.

        Raises:
            ValueError: other than two dimensions where there is padding.
        """
        if self.num_token_padding is None:
            return quantised
        if quantised.dim() != 2:
            raise ValueError(
                f"quant_fp8: x has shape {tuple(quantised.shape)}, expected [tokens, hidden] with num_token_padding"
            )
        missing = max(self.num_token_padding - quantised.shape[0], 0)
        return torch.cat([quantised, quantised.new_zeros(missing, quantised.shape[1])])

    def lay_out_scales(self, scale: Tensor) -> Tensor:
        """Put scales of groups in the memory layout that the constructor was asked for; for kernels too."""
        if not (self.column_major_scales and self.is_group_quant and scale.dim() > 1):
            return scale
        columns, tokens = scale.mT, scale.shape[-2]
        if self.tma_aligned_scales:
            columns = F.pad(columns, (0, -tokens % (TMA_BYTES // scale.element_size())))
        return columns.contiguous().mT[..., :tokens, :]

    def extra_repr(self) -> str:
        return f"static={self.static}, group_shape={tuple(self.group_shape)}, dtype={self.dtype}"


@CustomOp.register("quant_fp4")
class QuantFP4(CustomOp):
    """Quantises to 4-bit floating point: NVFP4 (arXiv:2509.25149) by a scale of the whole tensor, MXFP4
    (arXiv:2310.10537) without one.

    ``x / (group scale · scale)`` is rounded to the nearest of ±0, ½, 1, 1½, 2, 3, 4 and 6, ties to the even code. The
    scale of 16 elements in NVFP4 is ``amax / (6 · scale)`` in e4m3, that of 32 in MXFP4
    ``2 ** (floor(log2(amax)) - 2)``.

    Where vLLM's NVFP4 differs: ``scale`` is what numbers are multiplied with, not its reciprocal, quotients are
    divided, and scales of groups lie in rows, not in the tiles that tensor cores read.

    Shapes:
        ``x`` is ``[..., hidden]`` in float32, bfloat16, float16 or float64. Returned are ``[..., hidden / 2]`` in
        ``uint8``, two numbers to a byte, the first in the lower bits; and the scales of groups, ``[..., hidden / 16]``
        in ``float8_e4m3fn`` or ``[..., hidden / 32]`` in ``float8_e8m0fnu``.
    """

    @calls_functional
    def forward_native(
        self, x: Tensor, scale: Tensor | None = None, *, functional: Any = NATIVE
    ) -> tuple[Tensor, Tensor]:
        """Quantise ``x``; return packed numbers and the scales of groups.

        Args:
            x: ``[..., hidden]``.
            scale: one positive number for NVFP4, as ``amax(x) / 2688``; ``None`` for MXFP4.

        Raises:
            ValueError: groups do not divide ``hidden``, or the scale is not one number.
        """
        quantised: tuple[Tensor, Tensor] = functional.quant_fp4(x, scale)
        return quantised
