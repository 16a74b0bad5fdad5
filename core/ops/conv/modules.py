"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.conv import functional
from opgraft.ops.conv.functional import ConvSettings
from torch import Tensor, nn

Sizes = int | Sequence[int]


class _ConvLayer(CustomOp):
    """The base of the convolutions: settings that are checked once, and the two ways of computing them."""

    _helpers: ClassVar[tuple[str, ...]] = ("_forward_conv", "_forward_mulmat")
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        op: str,
        channels: tuple[int, int],
        kernel_size: Sizes,
        stride: Sizes,
        padding: Sizes | str,
        dilation: Sizes,
        groups: int,
        padding_mode: str,
        **others: Any,
    ) -> None:
        settings = _expanded(op, kernel_size, stride, padding, dilation, groups, padding_mode)
        for name, count in zip(("in_channels", "out_channels"), channels, strict=True):
            if count < 1 or count % groups:
                raise ValueError(
                    f"{op}: {name} is {count}, expected a positive multiple of groups={groups}"
                )
        ends = padding if isinstance(padding, str) else settings.padding
        super().__init__(
            *channels,
            settings.kernel_size,
            settings.stride,
            ends,
            settings.dilation,
            groups,
            padding_mode=padding_mode,
            **others,
        )
        self._settings = settings
        self.input_size = channels[0] * math.prod(settings.kernel_size)
        self.enable_linear = settings.is_projection

    def _forward_conv(self, x: Tensor) -> Tensor:
        """Compute the convolution by torch's function."""
        functional.expect_convolvable(x, self.weight, self.bias, self._settings)
        return functional.convolve(x, self.weight, self.bias, self._settings)

    def _forward_mulmat(self, x: Tensor) -> Tensor:
        """Compute the convolution as one matrix product; right only where ``enable_linear`` is true."""
        functional.expect_convolvable(x, self.weight, self.bias, self._settings)
        return functional.project_patches(x, self.weight, self.bias)

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Raise ``ValueError`` unless ``x`` has the dimensions, channels, dtype and device, and room for a kernel."""
        # The two methods have their settings ready, and a replacement may override either.
        if functional is NATIVE or self._overrides_helpers:
            return self._forward_mulmat(x) if self.enable_linear else self._forward_conv(x)
        settings = self._settings
        convolve = getattr(functional, settings.op)
        convolved: Tensor = convolve(
            x,
            self.weight,
            self.bias,
            settings.stride,
            settings.padding,
            settings.dilation,
            settings.groups,
            settings.padding_mode,
        )
        return convolved


@CustomOp.register("conv2d")
class Conv2dLayer(_ConvLayer, nn.Conv2d):
    """Cross-correlation over height and width (LeCun et al., 1998; as a patch embedding arXiv:2010.11929).

    A ``torch.nn.Conv2d`` by state and initial values. Where kernels lie side by side and see all channels, which
    ``enable_linear`` tells, it is computed as one matrix product. Unlike vLLM's it applies ``padding_mode``, raises for
    ``"same"`` with a stride, pads ``"same"`` by the dilated kernel, and takes no matrix product with a dilation.

    Args:
        in_channels: ``C``.
        out_channels: ``O``.
        kernel_size: one number, or height and width; likewise ``stride``, ``padding`` and ``dilation``.
        stride: how far the kernel moves.
        padding: at both ends; ``"valid"`` is none, ``"same"`` keeps the size.
        dilation: distance of the elements that a kernel reads.
        groups: into which channels are divided.
        bias: whether there is one.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        params_dtype: dtype of weight and bias; the default dtype if not given.

    Shapes:
        ``x`` is ``[B, C, H, W]`` in the dtype of the weight, the result ``[B, O, H', W']``.

    Raises:
        ValueError: a setting out of its range, ``"same"`` with a stride, or groups that do not divide the channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        channels = (in_channels, out_channels)
        moves = (kernel_size, stride, padding, dilation, groups, padding_mode)
        super().__init__("conv2d", channels, *moves, bias=bias, dtype=params_dtype)


@CustomOp.register("conv3d")
class Conv3dLayer(_ConvLayer, nn.Conv3d):
    """Cross-correlation over time, height and width (Tran et al., arXiv:1412.0767).

    A ``torch.nn.Conv3d`` by state and initial values; arguments and differences from vLLM's are those of
    ``Conv2dLayer``, with three numbers in place of two.

    Shapes:
        ``x`` is ``[B, C, T, H, W]`` in the dtype of the weight, the result ``[B, O, T', H', W']``.

    Raises:
        ValueError: as ``Conv2dLayer``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        channels = (in_channels, out_channels)
        moves = (kernel_size, stride, padding, dilation, groups, padding_mode)
        super().__init__("conv3d", channels, *moves, bias=bias, dtype=params_dtype)


def _expanded(
    op: str,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
    padding_mode: str,
) -> ConvSettings:
    """Return the settings with one number per dimension, of which torch's modules need only be told one, or a word."""
    dims = functional.DIMENSIONS[op]
    kernel, moves, steps = (
        _per_dimension(value, dims) for value in (kernel_size, stride, dilation)
    )
    if len(kernel) != dims or len(steps) != dims:
        raise ValueError(
            f"{op}: kernel_size is {kernel}, dilation {steps}, expected {dims} numbers each"
        )
    if padding == "same":
        if any(move != 1 for move in moves):
            raise ValueError(f"{op}: stride is {moves}, expected 1 with padding 'same'")
        ends = functional.same_padding(kernel, steps)
    elif isinstance(padding, str):
        if padding != "valid":
            raise ValueError(f"{op}: padding is {padding!r}, expected 'same', 'valid' or numbers")
        ends = (0,) * dims
    else:
        ends = _per_dimension(padding, dims)
        if len(ends) != dims:
            raise ValueError(f"{op}: padding is {ends}, expected {dims} numbers of at least 0")
    return ConvSettings(op, kernel, moves, ends, steps, groups, padding_mode)


def _per_dimension(value: Sizes, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value)
