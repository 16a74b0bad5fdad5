"""Specs of the convolutions. The reference finds the inputs of each output by index arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from opgraft.ops import conv as ops
from opgraft.ops.conv import functional
from opgraft.ops.spec import Arguments, Draw, OpSpec, Outside, with_parameters
from torch import Tensor, nn

OTHER_MODES = ("reflect", "replicate", "circular")


def _reads(count: int, size: int, stride: int, offset: int, mode: str) -> tuple[Tensor, Tensor]:
    """Return the input position of each output position, and False for positions in zeros."""
    at = torch.arange(count) * stride + offset
    last = size - 1
    everywhere = torch.ones(count, dtype=torch.bool)

    if mode == "circular":
        return at % size, everywhere
    if mode == "replicate":
        return at.clamp(0, last), everywhere
    if mode == "reflect":
        at = at.abs()
        return torch.where(at > last, 2 * last - at, at), everywhere
    return at.clamp(0, last), (at >= 0) & (at <= last)


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    kernel = weight.shape[2:]
    dims = len(kernel)
    ones = [1] * dims
    moves = stride or ones
    steps = dilation or ones

    before, after = _ends(padding or [0] * dims, dims)
    padded = [sum(row) for row in zip(x.shape[2:], before, after, strict=True)]
    counts = _counts(padded, kernel, moves, steps)

    outputs, inputs = weight.shape[:2]
    result = torch.zeros(x.shape[0], groups, outputs // groups, *counts, dtype=x.dtype)

    # One product per element of the kernel, over the inputs that this element meets.
    for number, tap in enumerate(itertools.product(*map(range, kernel))):
        offsets = _offsets(tap, steps, before)
        part = _inputs_at(x, counts, moves, offsets, padding_mode)
        part = part.reshape(x.shape[0], groups, inputs, *counts)
        of_groups = weight.flatten(2)[..., number].reshape(groups, -1, inputs)
        result += torch.einsum("bgc...,goc->bgo...", part, of_groups)

    result = result.reshape(x.shape[0], outputs, *counts)
    if bias is None:
        return result
    return result + bias.reshape(-1, *ones)


def _offsets(tap: Sequence[int], steps: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return the place of an element of the kernel, relative to the first input of a result."""
    dimensions = zip(tap, steps, before, strict=True)
    return [place * step - padding for place, step, padding in dimensions]


def _counts(
    padded: Sequence[int], kernel: Sequence[int], moves: Sequence[int], steps: Sequence[int]
) -> list[int]:
    """Return the sizes of the result for sizes of the input with padding."""
    counts = []
    for size, taps, move, step in zip(padded, kernel, moves, steps, strict=True):
        reach = step * (taps - 1)
        counts.append(math.ceil((size - reach) / move))
    return counts


def _inputs_at(
    x: Tensor, counts: Sequence[int], moves: Sequence[int], offsets: Sequence[int], mode: str
) -> Tensor:
    """Return the inputs ``[B, C, *counts]`` at ``position · move + offset`` of each dimension."""
    dims = len(counts)
    for d in range(dims):
        at, exists = _reads(counts[d], x.shape[d + 2], moves[d], offsets[d], mode)
        behind = [1] * (dims - 1 - d)
        x = x.index_select(d + 2, at) * exists.reshape(-1, *behind)
    return x


def _ends(padding: Sequence[int], dims: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the padding before and after each dimension."""
    if len(padding) == dims:
        return padding, padding
    return padding[::2], padding[1::2]


def _inputs_2d(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {
        "x": draw(math.prod(lead), 4, size + 5, size + 6),
        "weight": draw(6, 4, 3, 2),
        "bias": draw(6),
    }


def _inputs_3d(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    # Small: gradients are differences by each element.
    x = draw(math.prod(lead), 4, size + 4, size + 3, size + 1)
    return {"x": x, "weight": draw(6, 4, 3, 2, 1), "bias": draw(6)}


def _weight(*shape: int) -> Any:
    return lambda draw, lead, size: draw(*shape)


def _conv_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    padding: Sequence[int] | None = None,
    **settings: Any,
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Build a module with these settings; different padding at the ends becomes ``"same"``."""
    dims = weight.dim() - 2
    inputs = weight.shape[1] * settings.get("groups", 1)
    padded: Any = 0
    if padding is not None:
        padded = tuple(padding) if len(padding) == dims else "same"

    cls: Any = ops.Conv2dLayer if dims == 2 else ops.Conv3dLayer
    op = cls(
        inputs,
        weight.shape[0],
        weight.shape[2:],
        padding=padded,
        bias=bias is not None,
        **settings,
    )
    return with_parameters(op, weight=weight, bias=bias), (x,)


def _torch(x: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: Any) -> Any:
    padding = settings.pop("padding", None)
    dims = weight.dim() - 2
    if padding is not None and len(padding) != dims:
        # torch takes such padding for "same" only, with a warning.
        return None

    cls: Any = nn.Conv2d if dims == 2 else nn.Conv3d
    module = cls(
        weight.shape[1] * settings.get("groups", 1),
        weight.shape[0],
        tuple(weight.shape[2:]),
        padding=padding or 0,
        bias=bias is not None,
        **settings,
    )
    parameters = {"weight": weight}
    if bias is not None:
        parameters["bias"] = bias
    return torch.func.functional_call(module, parameters, (x,))


def _conv_flops(x: Tensor, weight: Tensor, *others: Any, **settings: Any) -> int:
    form = functional.conv2d if weight.dim() == 4 else functional.conv3d
    results = int(form.fake(x, weight, *others, **settings).numel())
    return 2 * results * weight[0].numel()


TWO: dict[str, Arguments] = {
    "": {},
    "no bias": {"bias": None},
    "stride and padding": {"stride": [2, 3], "padding": [1, 2]},
    "dilation": {"dilation": [2, 3], "padding": [2, 0]},
    "groups": {"groups": 2, "weight": _weight(6, 2, 3, 2)},
    "same": {"padding": [1, 1, 0, 1]},
    "patches": {"stride": [3, 2]},
    "patches with dilation": {"stride": [3, 2], "dilation": [1, 2]},
    **{mode: {"padding": [2, 1], "padding_mode": mode} for mode in OTHER_MODES},
}
THREE: dict[str, Arguments] = {
    "": {},
    "stride and padding": {"stride": [2, 1, 3], "padding": [1, 2, 0]},
    "dilation": {"dilation": [2, 3, 1]},
    "groups": {"groups": 2, "weight": _weight(6, 2, 3, 2, 1)},
    "same": {"padding": [1, 1, 0, 1, 0, 0]},
    "patches": {"stride": [3, 2, 1]},
    **{mode: {"padding": [2, 1, 1], "padding_mode": mode} for mode in OTHER_MODES},
}
CONV: dict[str, Any] = {
    "reference": _conv,
    "flops": _conv_flops,
    "module": _conv_op,
    "sizes": (1, 3, 8),
    # Fewer than 16 images, as torch compiles once more from 16 on. No other size is equal to the
    # number of images, as torch would take equal sizes for one symbol.
    "leads": ((1,), (5,), (2, 3), (0,), (2, 0)),
    # Sums of many products: in half types some results are small beside their terms.
    "tolerances": {
        torch.float32: (1e-5, 1e-5),
        torch.float16: (1e-2, 1e-3),
        torch.bfloat16: (5e-2, 1.6e-2),
    },
}

SPECS = (
    OpSpec(
        functional.conv2d,
        _inputs_2d,
        variants=TWO,
        large=(((2,), 59),),
        outside=(Outside("torch.nn.Conv2d", _torch),),
        **CONV,
    ),
    OpSpec(
        functional.conv3d,
        _inputs_3d,
        variants=THREE,
        large=(((2,), 19),),
        outside=(Outside("torch.nn.Conv3d", _torch),),
        **CONV,
    ),
)
