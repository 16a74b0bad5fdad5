"""The linear layer on CPUs by oneDNN, over the weight as it is or over one that oneDNN has packed.

A packed weight is kept beside one that was declared frozen; any other is read as it is, at each call. Where neither
pays, or something needs to see through it, torch's own linear runs: see ``linear``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from opgraft.binding.marks import gradient_required
from opgraft.compat import packed_linear as onednn
from opgraft.compat import tracing
from opgraft.ops.linear.functional import expect_mappable, mapped
from opgraft.ops.linear.functional import linear as form
from opgraft.ops.linear.weight_cache import WeightCache, declaration, fits, requires_gradient
from opgraft.platform import Platform, cpu_features
from opgraft.plugins.selection import current_platform
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

UNLIMITED = sys.maxsize


class RowRange(NamedTuple):
    """For which numbers of rows a kernel pays, for weights of some size.

    Attributes:
        size: elements that the weight has at least.
        first: number of rows.
        last: number of rows.
        last_fused: number of rows where an activation is fused.
    """

    size: int
    first: int
    last: int = UNLIMITED
    last_fused: int = UNLIMITED


NEVER = RowRange(0, UNLIMITED)

_FAST_PLAIN = (
    RowRange(1 << 23, 4, 256, 256),
    RowRange(1 << 20, 4, 256),
    RowRange(1 << 18, 16, 256),
)
_SLOW_PLAIN = (RowRange(1 << 19, 1), RowRange(1 << 17, 16))
_ALWAYS = (RowRange(1 << 14, 1),)

Table = Mapping[str, Mapping[torch.dtype, Sequence[RowRange]]]

PACKED: Table = {
    "avx512_fp16": {torch.float32: _FAST_PLAIN, torch.bfloat16: _ALWAYS},
    "avx512_bf16": {torch.float32: _SLOW_PLAIN, torch.bfloat16: _ALWAYS},
    "avx2": {torch.float32: _FAST_PLAIN},
}
"""Instruction set → dtype → where a packed weight pays, large weights first; of either the first that applies counts.

Measured with torch 2.13 on 1 and 2 cores, widths 64 to 4,096 and 512 by 32,000, 1 to 2,048 rows, as ratios of torch's
linear to the packed one. CPUs with fp16 arithmetic are those for which torch's float32 linear is tuned: there it wins
for up to 3 rows (ratio 0.3 to 0.9), and for many rows of large weights (0.9); between, packing wins by 1.0 to 2.8, and
in bfloat16 by 1.0 to 2.5. On those with bfloat16 arithmetic only, packing wins by 1.1 to 4.1 (more on Zen 5 than on Zen
4), for one row from half a million weights on. Others were measured with both libraries held to AVX2: 1.0 to 1.4. CPUs
with none of these were not measured, and do not pack.
"""

DIRECT: Table = {"avx512_fp16": {}, "avx512_bf16": {torch.float32: _SLOW_PLAIN}}
"""The ranges in which oneDNN over the weight as it is pays, likewise.

Measured with torch 2.13 on two cores of Zen 4, widths 384 to 4,096 and 512 by 32,000, 1 to 1,024 rows: torch's linear
takes 1.4 to 3.3 times as long in float32. oneDNN over a packed weight takes 0.5 to 1.05 of the time of the direct one,
the least at 4 to 64 rows. In bfloat16 torch's linear is oneDNN's. Other CPUs were not measured.
"""

_PACKABLE = (torch.float32, torch.bfloat16)


class ElementRange(NamedTuple):
    """A ``RowRange`` for weights of one shape: how many elements the input has, at least and at most."""

    least: int
    most: int
    most_fused: int

    def has(self, elements: int, fused: str) -> bool:
        return self.least <= elements <= (self.most if fused == "none" else self.most_fused)


class Ranges(NamedTuple):
    """The ranges in which oneDNN pays for weights of one shape and dtype.

    Attributes:
        least: elements of the input below which it never does.
        packed: where it does over a packed weight.
        direct: where it does over the weight as it is.
    """

    least: int
    packed: ElementRange
    direct: ElementRange


_COPIES = WeightCache(after=12)
"""Packed weights. On one core of Zen 4, to pack one takes as long as the packed one saves in 8 to 20 calls."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the form ``linear``, by oneDNN where ``DIRECT`` or, for a frozen weight, ``PACKED`` says that it pays.

    By oneDNN, the result is rounded once, at its end; with both an activation and a residual, after each of the two.

    That is for weights that are contiguous, and float32 or bfloat16. Where a gradient is required, or under autocast,
    ``torch.func``, a tracer or a dispatch mode, torch's own linear runs. Compilers see one opaque operator, which
    decides when it runs. ``opgraft.freeze`` declares weights frozen.
    """
    if is_dynamo_compiling():
        return _compiled(x, weight, bias, activation, residual)
    if type(x) is Tensor and x.numel() < ranges_for(weight.dtype, weight.shape).least:
        # The one path on which a microsecond counts: a single row in a small layer.
        if activation == "none" and residual is None:
            expect_mappable(x, weight, bias)
            return F.linear(x, weight, bias)
        return form.native(x, weight, bias, activation, residual)
    return _run(x, weight, bias, activation, residual)


def compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the form ``linear`` in compiled code, by the definition where oneDNN pays for no rows that may come."""
    if x.is_cpu and weight.is_cpu and x.dtype == weight.dtype and _may_pay(x, weight, activation):
        result: Tensor = torch.ops.opgraft.packed_linear(x, weight, bias, activation, residual)
        return result
    return form.native(x, weight, bias, activation, residual)


def _may_pay(x: Tensor, weight: Tensor, activation: str) -> bool:
    elements: object = x.numel()
    if any(type(size) is not int for size in weight.shape):
        return True
    ranges = ranges_for(weight.dtype, weight.shape)
    if not isinstance(elements, int):  # of any number of rows
        return ranges.least < UNLIMITED
    return ranges.packed.has(elements, activation) or ranges.direct.has(elements, activation)


def missing() -> str | None:
    """Say why oneDNN computes nothing on this machine, or return ``None``."""
    absent = onednn.missing()
    platform = current_platform()
    if absent is None and not _rows(PACKED, platform):
        stated = ", ".join(cpu_features(platform)) or "none"
        absent = (
            f"it was measured with the instruction sets {', '.join(PACKED)} only, and Platform.capability().features "
            f"of {platform.name}, which is what is asked for them, states {stated}"
        )
    return f"packed linear unavailable: {absent}" if absent else None


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    operand = None
    fused = "none" if activation == "relu" else activation
    if type(x) is Tensor and fused in onednn.POST_OPS:
        operand = _operand(x, weight, bias, fused, residual)
    if operand is None:
        return form.native(x, weight, bias, activation, residual)
    return by_onednn(x, operand, bias, activation, residual)


def by_onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """Compute the form ``linear`` over a weight, packed or not. Unchecked: for what ``fits`` it, and is not watched."""
    if residual is not None and activation == "none":
        return onednn.linear_add(x, weight, bias, residual)
    fused = "none" if activation == "relu" else activation
    y = onednn.linear(x, weight, bias, fused)
    if fused != activation:
        y.relu_()
    return y if residual is None else y.add_(residual)


def _operand(
    x: Tensor, weight: Tensor, bias: Tensor | None, fused: str, residual: Tensor | None
) -> Tensor | None:
    """Return the weight, packed where it is frozen, as oneDNN is to read it; ``None`` for torch's own linear."""
    if type(weight) is not nn.Parameter and type(weight) is not Tensor:
        return None
    if (
        weight.layout is not torch.strided
        or not weight.is_cpu
        or not weight.is_contiguous()
        or weight.dim() != 2
    ):
        return None
    ranges, elements = ranges_for(weight.dtype, weight.shape), x.numel()
    packed = ranges.packed.has(elements, fused) and declaration(weight) > 0
    direct = ranges.direct.has(elements, fused)
    if not (packed or direct):
        return None
    if (
        not fits(x, weight, bias, residual)
        or requires_gradient(x, weight, bias, residual)
        or onednn.watched()
    ):
        return None
    copy = _COPIES.copy_of(weight, onednn.pack) if packed else None
    return weight if copy is None and direct else copy


@functools.lru_cache(maxsize=4096)  # every eager call of a linear layer asks
def ranges_for(dtype: torch.dtype, shape: torch.Size) -> Ranges:
    """Return the ranges in which oneDNN pays on this machine for weights of a dtype and shape."""
    platform, columns = current_platform(), shape[-1] if shape else 0
    packable = len(shape) == 2 and columns > 0 and onednn.missing(dtype) is None
    packed, direct = (
        rows_for(_rows(table, platform), dtype, shape.numel()) if packable else NEVER
        for table in (PACKED, DIRECT)
    )
    found = [
        ElementRange(*(rows * max(columns, 1) for rows in each[1:])) for each in (packed, direct)
    ]
    return Ranges(min(each.least for each in found), *found)


def pays_packed(weight: Tensor) -> bool:
    """Tell whether a packed weight of that size and dtype pays on this machine, for any number of rows."""
    rows = _rows(PACKED, current_platform())
    return rows_for(rows, weight.dtype, weight.numel()) is not NEVER


def rows_for(
    rows: Mapping[torch.dtype, Sequence[RowRange]], dtype: torch.dtype, size: int
) -> RowRange:
    """Return the row of a table that applies to weights of a dtype and size; maybe ``NEVER``."""
    return next((row for row in rows.get(dtype, ()) if size >= row.size), NEVER)


def _rows(table: Table, platform: Platform) -> Mapping[torch.dtype, Sequence[RowRange]]:
    features = cpu_features(platform)
    return next((rows for feature, rows in table.items() if feature in features), {})


def _compiled(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    """Give a compiler the packed linear as one operator where it may run, else the definition."""
    plain = x.dtype not in _PACKABLE or weight.dtype != x.dtype or not (x.is_cpu and weight.is_cpu)
    if (
        plain
        or torch.is_autocast_enabled("cpu")
        or gradient_required((x, weight, bias, residual), {})
    ):
        return form.native(x, weight, bias, activation, residual)
    if tracing.exporting():  # what is exported must run without opgraft
        return form.native(x, weight, bias, activation, residual)
    result: Tensor = torch.ops.opgraft.packed_linear(x, weight, bias, activation, residual)
    return result


torch.library.define(
    "opgraft::packed_linear",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? residual) -> Tensor",
)
torch.library.impl("opgraft::packed_linear", "cpu", _run)
torch.library.register_fake("opgraft::packed_linear", mapped)
