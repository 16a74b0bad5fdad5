"""Specs of the convolutions, told element by element: which input each output reads, by arithmetic on indices."""

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
    """Return the input position that each output position reads, and whether it reads at all."""
    at = torch.arange(count) * stride + offset
    if mode == "circular":
        return at % size, at == at
    if mode == "replicate":
        return at.clamp(0, size - 1), at == at
    if mode == "reflect":
        at = torch.where(at < 0, -at, at)
        return torch.where(at >= size, 2 * (size - 1) - at, at), at == at
    return at.clamp(0, size - 1), (at >= 0) & (at < size)


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
    moves, steps = (value or [1] * dims for value in (stride, dilation))
    ends = list(padding or [0] * dims)
    before, after = (ends, ends) if len(ends) == dims else (ends[::2], ends[1::2])
    rows = zip(x.shape[2:], before, after, steps, kernel, strict=True)
    reaches = [size + first + last - step * (taps - 1) for size, first, last, step, taps in rows]
    counts = [math.ceil(reach / move) for reach, move in zip(reaches, moves, strict=True)]
    result = torch.zeros(x.shape[0], groups, weight.shape[0] // groups, *counts, dtype=x.dtype)
    for number, tap in enumerate(itertools.product(*map(range, kernel))):
        part = x
        for d in range(dims):
            offset = tap[d] * steps[d] - before[d]
            at, there = _reads(counts[d], x.shape[d + 2], moves[d], offset, padding_mode)
            part = part.index_select(d + 2, at) * there.reshape(-1, *[1] * (dims - 1 - d))
        part = part.reshape(x.shape[0], groups, weight.shape[1], *counts)
        of_groups = weight.flatten(2)[..., number].reshape(groups, -1, weight.shape[1])
        result += torch.einsum("bgc...,goc->bgo...", part, of_groups)
    result = result.reshape(x.shape[0], weight.shape[0], *counts)
    return result if bias is None else result + bias.reshape(-1, *[1] * dims)


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
    """Build a module of these settings; where padding differs between the ends, that of ``"same"``."""
    dims = weight.dim() - 2
    channels = weight.shape[1] * settings.get("groups", 1), weight.shape[0]
    padded: Any = 0 if padding is None else tuple(padding) if len(padding) == dims else "same"
    cls: Any = ops.Conv2dLayer if dims == 2 else ops.Conv3dLayer
    op = cls(*channels, weight.shape[2:], padding=padded, bias=bias is not None, **settings)
    return with_parameters(op, weight=weight, bias=bias), (x,)


def _torch(x: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: Any) -> Any:
    padding = settings.pop("padding", None)
    dims = weight.dim() - 2
    if padding is not None and len(padding) != dims:
        return None  # torch pads so for "same", with a warning
    cls: Any = nn.Conv2d if dims == 2 else nn.Conv3d
    channels = weight.shape[1] * settings.get("groups", 1), weight.shape[0]
    theirs = cls(
        *channels, tuple(weight.shape[2:]), padding=padding or 0, bias=bias is not None, **settings
    )
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return torch.func.functional_call(theirs, given, (x,))


def _conv_flops(x: Tensor, weight: Tensor, *others: Any, **settings: Any) -> int:
    form = functional.conv2d if weight.dim() == 4 else functional.conv3d
    return 2 * int(form.fake(x, weight, *others, **settings).numel()) * weight[0].numel()


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
    # Few images, as torch compiles once more for 16 and above; as many as no other size, or it expects that they agree.
    "leads": ((1,), (5,), (2, 3), (0,), (2, 0)),
    # Sums of many products: in half types some results are small beside what was added.
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
