"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.conv import functional as forms
from opgraft.ops.conv.functional import ConvSettings, same_padding
from torch import Tensor, nn

__all__ = ["Conv2dLayer", "Conv3dLayer"]

Sizes = int | Sequence[int]


class _ConvLayer(CustomOp):
    """The base of the convolutions: settings, checked once, and two ways to compute."""

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
        settings = _settings_of(op, kernel_size, stride, padding, dilation, groups, padding_mode)
        for name, count in zip(("in_channels", "out_channels"), channels, strict=True):
            if count < 1 or count % groups:
                raise ValueError(
                    f"{op}: {name} is {count}, expected a positive multiple of groups={groups}"
                )

        # torch's module keeps a word as a word.
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

        # Checked once here, and read by every call.
        self._settings = settings
        self.input_size = channels[0] * math.prod(settings.kernel_size)
        self.enable_linear = settings.is_projection

    def _forward_conv(self, x: Tensor) -> Tensor:
        """Compute the convolution by torch's function."""
        forms.expect_convolvable(x, self.weight, self.bias, self._settings)
        return forms.convolve(x, self.weight, self.bias, self._settings)

    def _forward_mulmat(self, x: Tensor) -> Tensor:
        """Compute the convolution as one matrix product, which needs ``enable_linear``."""
        forms.expect_convolvable(x, self.weight, self.bias, self._settings)
        return forms.project_patches(x, self.weight, self.bias)

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Convolve ``x``.

        Raises:
            ValueError: the dimensions, channels, dtype or device of ``x`` do not fit, or ``x`` has
                no room for a kernel.
        """
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
    """Cross-correlation over height and width (LeCun et al., 1998; patches: arXiv:2010.11929).

    The state and the initial values are those of ``torch.nn.Conv2d``. If kernels lie side by side
    and read all channels, ``enable_linear`` is true, and the result is one matrix product. Unlike
    vLLM's class this class applies ``padding_mode``, refuses ``"same"`` with a stride, pads
    ``"same"`` by the dilated kernel, and takes no matrix product with a dilation.

    Args:
        in_channels: ``C``.
        out_channels: ``O``.
        kernel_size: height and width, or one number for both. ``stride``, ``padding`` and
            ``dilation`` likewise.
        stride: steps of the kernel.
        padding: padding of both ends; ``"valid"`` is none, ``"same"`` keeps the size.
        dilation: distance of the elements that a kernel reads.
        groups: groups of channels.
        bias: True adds a bias.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        params_dtype: dtype of weight and bias; the default dtype if not given.

    Shapes:
        ``x`` is ``[B, C, H, W]`` in the dtype of the weight. The result is ``[B, O, H', W']``.

    Raises:
        ValueError: a setting is out of its range, a stride goes with ``"same"``, or the groups do
            not divide the channels.
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

    The state and the initial values are those of ``torch.nn.Conv3d``. Arguments, errors and
    differences from vLLM's class are those of ``Conv2dLayer``, with three numbers instead of two.

    Shapes:
        ``x`` is ``[B, C, T, H, W]`` in the dtype of the weight. The result is ``[B, O, T', H',
        W']``.
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


def _settings_of(
    op: str,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
    padding_mode: str,
) -> ConvSettings:
    """Return the settings with one number per dimension, from the arguments of torch's modules."""
    dims = forms.DIMENSIONS[op]
    kernel = _per_dimension(kernel_size, dims)
    moves = _per_dimension(stride, dims)
    steps = _per_dimension(dilation, dims)

    # ConvSettings checks the lengths too, but the padding of "same" needs both before.
    if len(kernel) != dims or len(steps) != dims:
        raise ValueError(
            f"{op}: kernel_size is {kernel}, dilation {steps}, expected {dims} numbers each"
        )
    if padding == "same" and any(move != 1 for move in moves):
        raise ValueError(f"{op}: stride is {moves}, expected 1 with padding 'same'")

    if padding == "same":
        ends = same_padding(kernel, steps)
    elif padding == "valid":
        ends = (0,) * dims
    elif isinstance(padding, str):
        raise ValueError(f"{op}: padding is {padding!r}, expected 'same', 'valid' or numbers")
    else:
        ends = _per_dimension(padding, dims)
        # ConvSettings would take two numbers per dimension, which torch's modules do not.
        if len(ends) != dims:
            raise ValueError(f"{op}: padding is {ends}, expected {dims} numbers of at least 0")
    return ConvSettings(op, kernel, moves, ends, steps, groups, padding_mode)


def _per_dimension(value: Sizes, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value)
