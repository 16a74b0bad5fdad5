"""Convolutions over two and three dimensions: cross-correlations, as usual (LeCun et al., 1998).

``y[b, o, p] = bias[o] + Σ over i, k of x[b, i, p · stride + k · dilation - padding] · weight[o, i,
k]``, with positions ``p`` and ``k`` in two or three dimensions. If kernels lie side by side, as in
patch embeddings, the convolution is one matrix product (Dosovitskiy et al., arXiv:2010.11929).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_choice, expect_floating, expect_same_device, expect_same_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = ["conv2d", "conv3d"]

# Traced code reads the dictionary: Dynamo refuses a proxy after a change of any dictionary.
_DIMENSIONS = {"conv2d": 2, "conv3d": 3}

DIMENSIONS = MappingProxyType(_DIMENSIONS)
"""Dimensions that the kernel of an op moves over."""

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class ConvSettings:
    """The movement of a kernel over an input.

    Attributes:
        op: the op, for errors.
        kernel_size: elements per dimension.
        stride: one number per dimension.
        padding: one number per dimension, or two: before and after the dimension.
        dilation: one number per dimension.
        groups: groups of channels.
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
        dims = _DIMENSIONS[self.op]
        expect_choice(self.op, "padding_mode", self.padding_mode, PADDING_MODES)
        self._expect_numbers("kernel_size", self.kernel_size, 1, (dims,))
        self._expect_numbers("stride", self.stride, 1, (dims,))
        self._expect_numbers("padding", self.padding, 0, (dims, 2 * dims))
        self._expect_numbers("dilation", self.dilation, 1, (dims,))

        if self.groups < 1:
            raise ValueError(f"{self.op}: groups is {self.groups}, expected a positive number")

    def _expect_numbers(
        self, name: str, values: tuple[int, ...], least: int, counts: tuple[int, ...]
    ) -> None:
        if len(values) in counts and all(value >= least for value in values):
            return
        raise ValueError(
            f"{self.op}: {name} is {values}, expected {counts[0]} numbers of at least {least}"
        )

    @property
    def is_projection(self) -> bool:
        """Return True if the convolution is one matrix product.

        Then a kernel reads all channels, and no two kernels read the same element.
        """
        if any(self.padding) or self.groups != 1:
            return False
        return self.kernel_size == self.stride and all(step == 1 for step in self.dilation)

    @property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the padding before each dimension, and the padding after."""
        if len(self.padding) == len(self.kernel_size):
            return self.padding, self.padding
        return self.padding[::2], self.padding[1::2]

    def sizes(self, x: Tensor) -> list[int]:
        """Return the sizes of the result for an input ``[B, C, *sizes]``."""
        rows = zip(
            x.shape[2:], *self.ends, self.kernel_size, self.stride, self.dilation, strict=True
        )
        sizes = []
        for size, before, after, kernel, stride, step in rows:
            room = size + before + after - step * (kernel - 1) - 1
            sizes.append(room // stride + 1)
        return sizes


def same_padding(kernel_size: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Return the padding before and after each dimension that keeps sizes at stride 1.

    Example: kernel sizes ``(3, 2)`` give ``(1, 1, 0, 1)``. An odd padding is longer after, as in
    torch.
    """
    padding: list[int] = []
    for size, step in zip(kernel_size, dilation, strict=True):
        # A kernel reaches over size - 1 steps, and each end takes half.
        total = step * (size - 1)
        before = total // 2
        padding += (before, total - before)
    return tuple(padding)


def project_patches(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a convolution with the kernel size as stride, without padding, as one matrix product.

    Elements behind the last whole patch are ignored.

    Args:
        x: ``[B, C, *sizes]``.
        weight: ``[O, C, *kernel_size]``.
        bias: ``[O]``.

    Returns:
        ``[B, O, *counts]``, with channels last in memory.
    """
    kernel_size = weight.shape[2:]
    dims = len(kernel_size)
    patches = x
    for dim, size in enumerate(kernel_size, start=2):
        patches = patches.unfold(dim, size, size)
    counts = patches.shape[2 : 2 + dims]

    # The product needs the channels of a patch beside its elements: [B, *counts, C, *kernel_size].
    patches = patches.movedim(1, 1 + dims)
    rows = patches.reshape(x.shape[0] * math.prod(counts), weight[0].numel())
    y = F.linear(rows, weight.reshape(weight.shape[0], -1), bias)
    return y.reshape(x.shape[0], *counts, weight.shape[0]).movedim(-1, 1)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvSettings) -> Tensor:
    """Compute the convolution by torch's function for two or three dimensions."""
    run = F.conv2d if len(settings.kernel_size) == 2 else F.conv3d
    before, after = settings.ends
    mode = settings.padding_mode
    if mode == "zeros" and before == after:
        return run(x, weight, bias, settings.stride, before, settings.dilation, settings.groups)

    if any(settings.padding):
        # F.pad takes the last dimension first.
        last_first: list[int] = []
        for dim in reversed(range(len(before))):
            last_first += (before[dim], after[dim])
        x = F.pad(x, last_first, "constant" if mode == "zeros" else mode)
    return run(x, weight, bias, settings.stride, 0, settings.dilation, settings.groups)


def expect_convolvable(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvSettings
) -> None:
    """Raise ``ValueError`` unless the tensors fit each other, and ``x`` has room for a kernel."""
    op = settings.op
    shape = tuple(x.shape)
    outputs = weight.shape[0]

    expect_floating(op, "x", x)
    channels = weight.shape[1] * settings.groups
    if x.dim() != weight.dim() or shape[1] != channels:
        sizes = "height, width" if weight.dim() == 4 else "time, height, width"
        raise ValueError(
            f"{op}: x has shape {shape}, expected [batch, channels={channels}, {sizes}]"
        )

    if outputs % settings.groups:
        raise ValueError(
            f"{op}: groups is {settings.groups}, expected a divisor of {outputs} output channels"
        )

    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias has shape {tuple(bias.shape)}, expected {(outputs,)}")

    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            expect_same_device(op, name, value, "x", x)
            expect_same_dtype(op, name, value, "x", x)
    _expect_room(x, settings)


def _expect_room(x: Tensor, settings: ConvSettings) -> None:
    op = settings.op
    shape = tuple(x.shape)
    # torch's message for such an input names neither the op nor the argument.
    if any(size < 1 for size in settings.sizes(x)):
        raise ValueError(
            f"{op}: x has shape {shape}, expected room for a kernel of {settings.kernel_size}"
        )

    # A reflection leaves out the element at the end. Zeros and replicated elements pad by any
    # number.
    spare = {"reflect": 1, "circular": 0}.get(settings.padding_mode)
    if spare is None:
        return

    for size, before, after in zip(shape[2:], *settings.ends, strict=True):
        most = size - spare
        if max(before, after) > most:
            raise ValueError(
                f"{op}: padding is {settings.padding}, expected at most {most} for x of shape "
                f"{shape} with padding_mode {settings.padding_mode!r}"
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
    dims = _DIMENSIONS[op]
    if weight.dim() != dims + 2:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected {dims + 2} dimensions"
        )

    ones = (1,) * dims
    return ConvSettings(
        op,
        kernel_size=tuple(weight.shape[2:]),
        stride=ones if stride is None else tuple(stride),
        padding=(0,) * dims if padding is None else tuple(padding),
        dilation=ones if dilation is None else tuple(dilation),
        groups=groups,
        padding_mode=padding_mode,
    )


def _convolve_or_project(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvSettings
) -> Tensor:
    expect_convolvable(x, weight, bias, settings)
    if settings.is_projection:
        return project_patches(x, weight, bias)
    return convolve(x, weight, bias, settings)


def _empty_result(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """Make a contiguous ``[B, O, *sizes]``, as a fake rule."""
    # Both ops share the rule, and a fake rule is not told the op.
    op = "conv2d" if weight.dim() == 4 else "conv3d"
    settings = _settings_over(op, weight, stride, padding, dilation, groups, padding_mode)
    return x.new_empty((x.shape[0], weight.shape[0], *settings.sizes(x)))


@register_functional("conv2d", _empty_result)
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
        padding: one number per dimension, or two: before and after the dimension; 0 if not given.
        dilation: distance of the elements that a kernel reads, per dimension; 1 if not given.
        groups: output channels of a group read the input channels of that group only; a divisor of
            ``C`` and ``O``.
        padding_mode: the values of the padding, ``"zeros"``, ``"reflect"``, ``"replicate"`` or
            ``"circular"``.

    Returns:
        ``[B, O, H', W']`` with ``H' = (H + padding of both ends - dilation · (kernel height - 1) -
        1) // stride + 1``.

    Raises:
        ValueError: a shape, a dtype, a device or a setting does not fit.
    """
    settings = _settings_over("conv2d", weight, stride, padding, dilation, groups, padding_mode)
    return _convolve_or_project(x, weight, bias, settings)


@register_functional("conv3d", _empty_result)
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

    ``x`` is ``[B, C, T, H, W]``, and ``weight`` is ``[O, C / groups, *kernel_size]``. The other
    arguments are those of ``conv2d``.

    Raises:
        ValueError: a shape, a dtype, a device or a setting does not fit.
    """
    settings = _settings_over("conv3d", weight, stride, padding, dilation, groups, padding_mode)
    return _convolve_or_project(x, weight, bias, settings)
