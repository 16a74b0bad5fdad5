"""Spec of the additions of adapters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from opgraft.ops.linear import lora as ops
from opgraft.ops.linear.lora import functional
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, with_parameters
from torch import Tensor, nn

ADAPTERS = 3
RANK = 2
SIZES = (3, 2)


def _inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    """Draw rows of no adapter, of adapter 0 and of adapter 2. Adapter 1 has none."""
    rows = math.prod(lead)
    first, second = draw.integers(0, rows + 1, (2,)).sort().values
    bounds = torch.stack([first, second, second, torch.tensor(rows)]).to(torch.int32)
    return {
        "y": draw(rows, sum(SIZES)),
        "x": draw(rows, size),
        "a": draw(ADAPTERS, len(SIZES) * RANK, size) / size**0.5,
        "b": draw(ADAPTERS, sum(SIZES), RANK) / RANK**0.5,
        "bounds": bounds,
        "sizes": list(SIZES),
    }


def _ids(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw the ids of an embedding."""
    return draw.integers(0, size, (math.prod(lead),))


def _whole(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw the matrices ``a`` of a layer with one part."""
    return draw(ADAPTERS, RANK, size) / size**0.5


def _reference(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Return the sums, with the product of both matrices of each part computed first."""
    result = y.clone()
    spans = pairwise(bounds.tolist())
    for rows, narrow, wide in zip(spans, a, b, strict=True):
        of_parts = zip(narrow.split(RANK), wide.split(list(sizes)), strict=True)
        products = [torch.einsum("or,ri->oi", after, before) for before, after in of_parts]
        weight = torch.cat(products)
        start, end = rows
        if x.dim() == 1:
            result[start:end] += weight.t()[x[start:end]]
        else:
            result[start:end] += torch.einsum("ti,oi->to", x[start:end], weight)
    return result


def _op(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: Sequence[int]
) -> tuple[nn.Module, tuple[Any, ...]]:
    inputs = a.shape[2]
    rank = b.shape[2]
    op = ops.LoRA(inputs, sizes, len(a), rank)
    arguments = y, x, bounds
    return with_parameters(op, a=a, b=b), arguments


def _flops(x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, **others: Any) -> int:
    without_adapter = int(bounds[0])
    rows = len(x) - without_adapter
    numbers_of_adapter = a[0].numel() + b[0].numel()
    return 2 * rows * numbers_of_adapter


SPECS = (
    OpSpec(
        functional.add_lora_,
        _inputs,
        _reference,
        _flops,
        module=_op,
        variants={
            "": {},
            "one part": {"a": _whole, "sizes": [sum(SIZES)]},
            "an embedding": {"x": _ids, "a": _whole, "sizes": [sum(SIZES)]},
        },
        tolerances=HALF_NORM,
        differentiable=False,
    ),
)
