"""Convolutions over two and three dimensions, which in neural networks are cross-correlations (LeCun et al., 1998).

``y[b, o, p] = bias[o] + Σ over i, k of x[b, i, p · stride + k · dilation - padding] · weight[o, i, k]``, with positions
``p`` and ``k`` in two or three dimensions. Where kernels lie side by side, as in patch embeddings, that is one matrix
product (Dosovitskiy et al., arXiv:2010.11929).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_choice, expect_floating, expect_same_device, expect_same_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = ["conv2d", "conv3d"]

DIMENSIONS = {"conv2d": 2, "conv3d": 3}
"""Over how many dimensions an op's kernel moves."""

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class ConvSettings:
    """The way in which a kernel moves over an input.

    Attributes:
        op: the op, for errors.
        kernel_size: elements per dimension.
        stride: one number per dimension.
        padding: one number per dimension, or two, before and after it.
        dilation: one number per dimension.
        groups: into which channels are divided.
        padding_mode: one of ``PADDING_MODES``.

    Raises:
        ValueError: a setting is out of its range.
    """

    op: str
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    padding_mode: str = "zeros"

    def __post_init__(self) -> None:
        dims = DIMENSIONS[self.op]
        expect_choice(self.op, "padding_mode", self.padding_mode, PADDING_MODES)
        for name, least, counts in (
            ("kernel_size", 1, (dims,)),
            ("stride", 1, (dims,)),
            ("padding", 0, (dims, 2 * dims)),
            ("dilation", 1, (dims,)),
        ):
            values = getattr(self, name)
            if len(values) not in counts or any(value < least for value in values):
                raise ValueError(
                    f"{self.op}: {name} is {values}, expected {dims} numbers of at least {least}"
                )
        if self.groups < 1:
            raise ValueError(f"{self.op}: groups is {self.groups}, expected a positive number")

    @property
    def is_projection(self) -> bool:
        """Tell whether every element is read at most once and by all output channels: one matrix product."""
        side_by_side = self.kernel_size == self.stride and all(step == 1 for step in self.dilation)
        return side_by_side and not any(self.padding) and self.groups == 1

    @property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Padding before and after each dimension."""
        if len(self.padding) == len(self.kernel_size):
            return self.padding, self.padding
        return self.padding[::2], self.padding[1::2]

    def sizes(self, x: Tensor) -> list[int]:
        """Return the sizes of the result for an input ``[B, C, *sizes]``."""
        rows = zip(
            x.shape[2:], *self.ends, self.kernel_size, self.stride, self.dilation, strict=True
        )
        return [
            (size + before + after - step * (kernel - 1) - 1) // stride + 1
            for size, before, after, kernel, stride, step in rows
        ]


def same_padding(kernel_size: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Return the padding around each dimension that keeps sizes at stride 1; an odd one is longer after."""
    totals = [step * (size - 1) for size, step in zip(kernel_size, dilation, strict=True)]
    return tuple(part for total in totals for part in (total // 2, total - total // 2))


def project_patches(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the convolution whose stride is its kernel size, without padding, as one matrix product.

    ``x`` is ``[B, C, *sizes]``, ``weight`` ``[O, C, *kernel_size]``; what is left of ``x`` behind the last whole patch
    is not read. The result, ``[B, O, *counts]``, has its channels last in memory.
    """
    kernel_size, dims = weight.shape[2:], weight.dim() - 2
    patches = x
    for dim, size in enumerate(kernel_size, start=2):
        patches = patches.unfold(dim, size, size)
    counts = patches.shape[2 : 2 + dims]
    patches = patches.movedim(1, 1 + dims).reshape(
        x.shape[0] * math.prod(counts), weight[0].numel()
    )
    y = F.linear(patches, weight.reshape(weight.shape[0], -1), bias)
    return y.reshape(x.shape[0], *counts, weight.shape[0]).movedim(-1, 1)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvSettings) -> Tensor:
    """Compute the convolution by torch's function, in as many dimensions as the kernel has."""
    run = F.conv2d if len(settings.kernel_size) == 2 else F.conv3d
    before, after = settings.ends
    if settings.padding_mode == "zeros" and before == after:
        return run(x, weight, bias, settings.stride, before, settings.dilation, settings.groups)
    if any(settings.padding):
        last_first = [
            size for pair in reversed(list(zip(before, after, strict=True))) for size in pair
        ]
        x = F.pad(
            x, last_first, "constant" if settings.padding_mode == "zeros" else settings.padding_mode
        )
    return run(x, weight, bias, settings.stride, 0, settings.dilation, settings.groups)


def expect_convolvable(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvSettings
) -> None:
    """Raise ``ValueError`` unless the tensors fit each other and the kernel finds room."""
    op, shape = settings.op, tuple(x.shape)
    expect_floating(op, "x", x)
    channels = weight.shape[1] * settings.groups
    if x.dim() != weight.dim() or shape[1] != channels:
        sizes = "height, width" if weight.dim() == 4 else "time, height, width"
        raise ValueError(
            f"{op}: x has shape {shape}, expected [batch, channels={channels}, {sizes}]"
        )
    if weight.shape[0] % settings.groups:
        raise ValueError(
            f"{op}: groups is {settings.groups}, expected a divisor of {weight.shape[0]} output channels"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            expect_same_device(op, name, value, "x", x)
            expect_same_dtype(op, name, value, "x", x)
    _expect_room(x, settings)


def _expect_room(x: Tensor, settings: ConvSettings) -> None:
    op, shape = settings.op, tuple(x.shape)
    if any(size < 1 for size in settings.sizes(x)):
        raise ValueError(
            f"{op}: x has shape {shape}, expected room for a kernel of {settings.kernel_size}"
        )
    spare = {"reflect": 1, "circular": 0}.get(settings.padding_mode)
    for size, before, after in zip(shape[2:], *settings.ends, strict=True):
        if spare is not None and max(before, after) > size - spare:
            raise ValueError(
                f"{op}: padding is {settings.padding}, expected at most {size - spare} for x of shape {shape} with "
                f"padding_mode {settings.padding_mode!r}"
            )


def _settings_over(
    op: str,
    weight: Tensor,
    stride: Sequence[int] | None,
    padding: Sequence[int] | None,
    dilation: Sequence[int] | None,
    groups: int,
    padding_mode: str,
) -> ConvSettings:
    dims = DIMENSIONS[op]
    if weight.dim() != dims + 2:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected {dims + 2} dimensions"
        )
    ones = (1,) * dims
    return ConvSettings(
        op,
        tuple(weight.shape[2:]),
        ones if stride is None else tuple(stride),
        (0,) * dims if padding is None else tuple(padding),
        ones if dilation is None else tuple(dilation),
        groups,
        padding_mode,
    )


def _defined(x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvSettings) -> Tensor:
    expect_convolvable(x, weight, bias, settings)
    return (
        project_patches(x, weight, bias)
        if settings.is_projection
        else convolve(x, weight, bias, settings)
    )


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """Make ``[B, O, *sizes]``, contiguous; a fake rule."""
    op = "conv2d" if weight.dim() == 4 else "conv3d"
    settings = _settings_over(op, weight, stride, padding, dilation, groups, padding_mode)
    return x.new_empty((x.shape[0], weight.shape[0], *settings.sizes(x)))


@register_functional("conv2d", _convolved)
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """Cross-correlate over height and width (LeCun et al., 1998, doi:10.1109/5.726791).

    Args:
        x: ``[B, C, H, W]`` in any floating-point dtype.
        weight: ``[O, C / groups, kernel height, kernel width]``, of the same dtype.
        bias: ``[O]``.
        stride: one number per dimension, 1 if not given.
        padding: one number per dimension, or two, before and after it; 0 if not given.
        dilation: distance of the elements that a kernel reads, per dimension; 1 if not given.
        groups: output channels of a group see the input channels of that group only; divides ``C`` and ``O``.
        padding_mode: what is padded with, ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.

    Returns:
        ``[B, O, H', W']`` with ``H' = (H + padding of both ends - dilation · (kernel height - 1) - 1) // stride + 1``.

    Raises:
        ValueError: shapes, dtypes, devices or settings that do not fit.
    """
    return _defined(
        x,
        weight,
        bias,
        _settings_over("conv2d", weight, stride, padding, dilation, groups, padding_mode),
    )


@register_functional("conv3d", _convolved)
def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """Cross-correlate over time, height and width (Tran et al., arXiv:1412.0767).

    ``x`` is ``[B, C, T, H, W]``, ``weight`` ``[O, C / groups, *kernel_size]``; the rest is as of ``conv2d``.

    Raises:
        ValueError: shapes, dtypes, devices or settings that do not fit.
    """
    return _defined(
        x,
        weight,
        bias,
        _settings_over("conv3d", weight, stride, padding, dilation, groups, padding_mode),
    )
